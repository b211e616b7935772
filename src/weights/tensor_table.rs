//! What a model does with each tensor of its checkpoint. Each model family in `models` declares a table of its tensors.
//!
//! From the table, `inventory` computes the memory of a model, and `division` computes the memory of each rank,
//! before any tensor is loaded. The `load` functions of the layers in `nn` must load the tensors as the table says.

/// The tensors of a model family, in several lists, because families share lists.
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorTable(pub &'static [&'static [TensorRow]]);

/// A row of a [`TensorTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRow {
    /// The name and the role of a tensor, or of a module such as a linear layer with its weight, bias and scales.
    /// The name is the end of the full name of the tensor or module, such as `self_attn.q_proj`: one or more of the
    /// parts between dots, without the layer index. The part `*` matches any number, such as the index of an expert.
    Tensor(&'static str, TensorRole),
    /// The name of a module that inferno never loads. The names of its tensors determine their groups.
    UnloadedModule(&'static str),
}

/// What a model does with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorRole {
    pub group: Group,
    pub form: Form,
    pub division: Division,
}

/// The groups in which `inferno show` counts tensors, in the order in which it displays them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    Embedding,
    Attention,
    /// Dense MLPs and MoE routers.
    Mlp,
    Experts,
    Norms,
    Head,
    Other,
}

/// How a checkpoint stores a tensor, and how inferno keeps it in memory. Vectors that are loaded are always F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A matrix `[out, in]`, or stacked matrices. A matrix that is quantized in the file stays quantized.
    /// In GGUF files, MXFP4 matrices and matrices built from tensors of different types are exceptions: they count as
    /// float matrices.
    /// Loading can quantize a float matrix, but quantizes an embedding only if it is also the output head.
    Matrix,
    /// Like `Matrix`, but safetensors files store it as `[in, out]`.
    /// Loading can quantize it only if it is a single matrix in a GGUF file.
    Transposed,
    /// Floats in the compute dtype, even if the file stores the tensor quantized.
    ComputeDtype,
    /// F32, regardless of the compute dtype.
    F32,
    /// Never loaded. Unlike other unused tensors of the layers, such a tensor does not indicate a wrong config.json.
    Unloaded,
}

/// How ranks divide a tensor. A bias has one value per row of its matrix, so it is divided only if the rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// Every rank holds the whole tensor.
    Whole,
    Rows(Dimension),
    Columns(Dimension),
}

/// A dimension of a model that is divided among ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dimension {
    /// The KV heads of a layer, each together with its query heads.
    Heads,
    /// The intermediate size of an MLP or of each expert.
    Intermediate,
    /// The rows of the output head.
    Vocabulary,
}

/// The suffixes of the tensors that belong to stacked experts: bias, scale, and the blocks and scales of MXFP4.
const EXPERT_SUFFIXES: [&str; 4] = ["_bias", "_scale", "_blocks", "_scales"];

/// Returns the row of a tensor or of a module (see [`TensorRow::Tensor`]).
pub const fn tensor(name: &'static str, group: Group, form: Form, division: Division) -> TensorRow {
    TensorRow::Tensor(name, TensorRole { group, form, division })
}

impl TensorTable {
    /// Returns the role of the tensor `name`.
    /// If no row matches, guesses the group from the name. The tensor then counts as a [`Form::Matrix`] that every rank
    /// holds whole, or, in the group [`Group::Head`], as one whose rows are divided.
    pub fn role(&self, name: &str) -> TensorRole {
        let unknown = || {
            let group = Group::guess(name);
            let division = if group == Group::Head { Division::Rows(Dimension::Vocabulary) } else { Division::Whole };
            TensorRole { group, form: Form::Matrix, division }
        };
        match self.row(name) {
            Some(TensorRow::Tensor(_, role)) => *role,
            Some(TensorRow::UnloadedModule(_)) => TensorRole { form: Form::Unloaded, ..unknown() },
            None => unknown(),
        }
    }

    /// Returns the first row that matches the tensor `name`.
    pub fn row(&self, name: &str) -> Option<&'static TensorRow> {
        let module = name.rsplit_once('.').map_or("", |(module, _)| module);
        let stack = EXPERT_SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        self.rows().find(|row| match row {
            TensorRow::Tensor(end, _) => [name, module, stack].iter().any(|path| ends_with(path, end)),
            TensorRow::UnloadedModule(module) => name.split('.').any(|part| part == *module),
        })
    }

    pub fn rows(&self) -> impl Iterator<Item = &'static TensorRow> + use<> {
        self.0.iter().copied().flatten()
    }
}

impl Division {
    /// Returns the dimension by which ranks divide the tensor, or `None` if they do not divide it.
    pub(super) fn dimension(self) -> Option<Dimension> {
        match self {
            Self::Whole => None,
            Self::Rows(dimension) | Self::Columns(dimension) => Some(dimension),
        }
    }
}

/// Returns whether the last dot-separated parts of `path` are those of `end`. The part `*` of `end` matches any number.
fn ends_with(path: &str, end: &str) -> bool {
    let mut parts = path.rsplit('.');
    end.rsplit('.').all(|expected| match parts.next() {
        Some(part) => part == expected || expected == "*" && part.bytes().all(|byte| byte.is_ascii_digit()),
        None => false,
    })
}

impl Group {
    pub const ALL: [Self; 7] =
        [Self::Embedding, Self::Attention, Self::Mlp, Self::Experts, Self::Norms, Self::Head, Self::Other];

    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::Experts => "experts",
            Self::Norms => "norms",
            Self::Head => "head",
            Self::Other => "other",
        }
    }

    /// Guesses the group of a tensor from words that are common in tensor names. Used for tensors without a group in
    /// the table, such as those of an unsupported architecture or of a [`TensorRow::UnloadedModule`].
    fn guess(name: &str) -> Self {
        let parts: Vec<&str> = name.split('.').collect();
        let any = |is: &dyn Fn(&str) -> bool| parts.iter().any(|part| is(part));
        if name.contains(".experts.") {
            Self::Experts
        } else if any(&|part| part.contains("norm") || part.starts_with("ln_") || part == "ln") {
            Self::Norms
        } else if any(&|part| part == "lm_head" || part == "embed_out") || name == "output.weight" {
            Self::Head
        } else if any(&|part| part.contains("embed") || part == "wte" || part == "wpe") {
            Self::Embedding
        } else if any(&|part| part.contains("attn") || part.contains("attention")) {
            Self::Attention
        } else if any(&|part| part == "mlp" || part.contains("feed_forward") || part.contains("moe")) {
            Self::Mlp
        } else {
            Self::Other
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_match_the_end_of_a_name() {
        const LINEAR: TensorRow = tensor("attn.q", Group::Attention, Form::Matrix, Division::Rows(Dimension::Heads));
        const EXPERT: TensorRow = tensor("experts.*.up", Group::Experts, Form::Matrix, Division::Whole);
        const STACK: TensorRow = tensor("experts.up", Group::Experts, Form::Transposed, Division::Whole);
        const TABLE: TensorTable = TensorTable(&[&[TensorRow::UnloadedModule("vision")], &[LINEAR, EXPERT, STACK]]);
        for (name, row) in [
            ("model.layers.0.attn.q.weight", Some(LINEAR)),
            ("attn.q.bias", Some(LINEAR)),
            ("h.0.attn.q.weight_scale", Some(LINEAR)),
            ("h.0.self_attn.q.weight", None),
            ("h.0.attn.q.a.b", None),
            ("h.0.attn.q_blocks", Some(LINEAR)),
            ("h.0.experts.17.up.weight", Some(EXPERT)),
            ("h.0.experts.x.up.weight", None),
            ("h.0.experts.up", Some(STACK)),
            ("h.0.experts.up_scales", Some(STACK)),
            ("h.0.experts.up_norm", None),
            ("model.vision.layers.0.attn.q.weight", Some(TensorRow::UnloadedModule("vision"))),
            ("", None),
        ] {
            assert_eq!(TABLE.row(name), row.as_ref(), "{name}");
        }
        let role = TABLE.role("model.vision.layers.0.attn.q.weight");
        assert_eq!((role.group, role.form, role.division), (Group::Attention, Form::Unloaded, Division::Whole));
    }

    #[test]
    fn groups_of_unknown_tensors_are_guessed() {
        for (name, group) in [
            ("transformer.wte.weight", "embedding"),
            ("transformer.h.0.attn.c_attn.weight", "attention"),
            ("transformer.h.0.ln_1.weight", "norms"),
            ("transformer.h.0.mlp.c_fc.weight", "mlp"),
            ("model.layers.0.block_sparse_moe.experts.3.w1.weight", "experts"),
            ("model.layers.0.block_sparse_moe.gate.weight", "mlp"),
            ("model.layers.0.post_attention_layernorm.weight", "norms"),
            ("lm_head.weight", "head"),
            ("backbone.layers.0.mixer.A_log", "other"),
        ] {
            assert_eq!(TensorTable::default().role(name).group.name(), group, "{name}");
        }
    }
}

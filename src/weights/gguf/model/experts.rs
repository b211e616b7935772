//! Maps the routed experts of a GGUF file to tensors of the model.
//!
//! The file must store gate_proj, up_proj and down_proj as separate tensors, with all experts stacked or one tensor per
//! expert. The model combines gate_proj and up_proj in one tensor.
//! The experts of gpt-oss stay packed if the file stores them as MXFP4.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use safetensors::tensor::Dtype;

use super::model_tensor::{ModelTensor, RowMapping, Transform, default_dtype};
use crate::weights::ggml::GgmlType;
use crate::weights::gguf::architectures::ArchitectureLayout;
use crate::weights::gguf::file::GgufCheckpoint;
use crate::weights::tensor_info::TensorInfo;

/// The routed experts of one layer.
pub struct Experts<'c> {
    pub file: &'c GgufCheckpoint,
    pub layout: &'static ArchitectureLayout,
    pub layer: usize,
}

impl Experts<'_> {
    /// Adds the expert tensors of the layer to `tensors`, if the layer has any.
    pub fn add(&self, tensors: &mut BTreeMap<String, ModelTensor>) -> Result<()> {
        let Some(ExpertSources { gate_up, down }) = self.sources()? else { return Ok(()) };
        let module = format!("{}.{}.mlp.experts", self.layout.outer.layers, self.layer);
        let matrices = [(format!("{module}.gate_up_proj"), gate_up), (format!("{module}.down_proj"), down)];
        for (name, sources) in matrices {
            if self.layout.model_type == "gpt_oss" {
                self.add_gpt_oss(name, &sources, tensors)?;
            } else {
                tensors.insert(name, self.stack(&sources, GateUpLayout::Concatenated)?);
            }
        }
        Ok(())
    }

    /// Returns the names of the expert matrices in the file, or `None` if the layer has no experts.
    /// Fails if the numbers of gate_proj, up_proj and down_proj tensors differ.
    fn sources(&self) -> Result<Option<ExpertSources>> {
        let stack = |matrix: &str| vec![format!("blk.{}.ffn_{matrix}_exps.weight", self.layer)];
        let mut sources = ["gate", "up", "down"].map(stack);
        if self.file.info(&sources[2][0]).is_none() {
            let one_per_expert = |matrix: &str| -> Vec<String> {
                let name = |expert: usize| format!("blk.{}.ffn_{matrix}.{expert}.weight", self.layer);
                (0..).map(name).take_while(|name| self.file.info(name).is_some()).collect()
            };
            sources = ["gate", "up", "down"].map(one_per_expert);
        }
        let [gate, up, down] = sources;
        if down.is_empty() {
            return Ok(None);
        }
        if gate.len() != up.len() || gate.len() != down.len() {
            bail!(
                "layer {}: expected equal numbers of expert tensors, found {} gate, {} up and {} down",
                self.layer,
                gate.len(),
                up.len(),
                down.len()
            );
        }
        if self.layout.model_type == "gpt_oss" && down.len() > 1 {
            // The code that interleaves the rows of gate_proj and up_proj supports only stacked experts.
            // No known converter writes gpt-oss files with one tensor per expert.
            bail!("layer {}: gpt-oss needs all experts in one tensor, found {} tensors", self.layer, down.len());
        }
        let gate_up = gate.into_iter().zip(up).flat_map(|(gate, up)| [gate, up]).collect();
        Ok(Some(ExpertSources { gate_up, down }))
    }

    /// Adds the matrices `name` of a gpt-oss layer and their biases to `tensors`.
    fn add_gpt_oss(&self, name: String, sources: &[String], tensors: &mut BTreeMap<String, ModelTensor>) -> Result<()> {
        let biases: Vec<String> = sources.iter().map(|source| source.replace(".weight", ".bias")).collect();
        let mut tensor = self.stack(sources, GateUpLayout::Interleaved)?;
        let bias = self.stack(&biases, GateUpLayout::Interleaved)?;
        tensors.insert(format!("{name}_bias"), bias);
        let is_mxfp4 = |name: &String| self.file.info(name).is_some_and(|info| info.ggml_type == GgmlType::Mxfp4);
        if sources.iter().all(is_mxfp4) {
            let Mxfp4Tensors { blocks, scales } = packed(tensor);
            tensors.insert(format!("{name}_blocks"), blocks);
            tensors.insert(format!("{name}_scales"), scales);
        } else {
            // Hugging Face checkpoints of gpt-oss without MXFP4 store the matrices as `[experts, in, out]`.
            tensor.info.shape.swap(1, 2);
            tensors.insert(name, ModelTensor { transform: Transform::Transposed, ..tensor });
        }
        Ok(())
    }

    /// Returns a tensor that stacks the matrices or the biases of all experts.
    /// `sources` contains either down_proj tensors only, or alternating gate_proj and up_proj tensors.
    /// The result has shape `[experts, rows, columns]`, or `[experts, rows]` for biases.
    fn stack(&self, sources: &[String], gate_up: GateUpLayout) -> Result<ModelTensor> {
        let infos = sources.iter().map(|name| self.file.required(name)).collect::<Result<Vec<_>>>()?;
        let (first, name) = (infos[0], &sources[0]);
        if let Some((other, info)) = sources.iter().zip(&infos).find(|(_, info)| info.shape != first.shape) {
            bail!("tensor {other}: expected shape {:?} as in {name}, found {:?}", first.shape, info.shape);
        }
        let (is_stacked, is_bias) = (name.contains("_exps"), name.ends_with(".bias"));
        let matrices = if name.contains("ffn_down") { 1 } else { 2 };
        if first.shape.len() != 1 + usize::from(is_stacked) + usize::from(!is_bias) {
            bail!("tensor {name}: shape {:?} is not valid for experts", first.shape);
        }
        let experts = if is_stacked { first.shape[0] } else { sources.len() / matrices };
        let expert_shape = &first.shape[usize::from(is_stacked)..];
        // The product of the dimensions may overflow, because an empty tensor can declare huge dimensions.
        let mut lengths = [experts, matrices].into_iter().chain(expert_shape.iter().copied());
        if lengths.try_fold(1usize, |product, length| product.checked_mul(length.max(1))).is_none() {
            bail!("tensor {name}: {experts} experts of shape {expert_shape:?} have too many elements");
        }
        let shape = [&[experts, matrices * expert_shape[0]], &expert_shape[1..]].concat();
        let rows = match (sources.len(), gate_up) {
            (1, _) => RowMapping::Identity,
            (_, GateUpLayout::Interleaved) => RowMapping::RoundRobin(1),
            (_, GateUpLayout::Concatenated) => RowMapping::RoundRobin(expert_shape[0].max(1)),
        };
        let transform = if is_bias && sources.len() > 1 { Transform::Vector } else { Transform::None };
        let bytes = infos.iter().map(|info| info.bytes).sum();
        let info = TensorInfo::new(default_dtype(first.ggml_type), shape, bytes);
        Ok(ModelTensor { info, sources: sources.into(), rows, transform })
    }
}

/// The names of the GGUF tensors with the expert matrices of a layer.
struct ExpertSources {
    /// The gate_proj and up_proj tensors, alternating: those of the first expert, then those of the second, and so on.
    /// If the experts are stacked, there are only two tensors.
    gate_up: Vec<String>,
    down: Vec<String>,
}

/// The row order of a tensor that combines gate_proj and up_proj.
#[derive(Clone, Copy)]
enum GateUpLayout {
    /// All gate_proj rows of an expert, followed by all up_proj rows of the same expert.
    Concatenated,
    /// The rows of gate_proj and up_proj alternate.
    Interleaved,
}

/// The two tensors of stacked MXFP4 matrices, as in safetensors files.
struct Mxfp4Tensors {
    /// The elements, two in each byte, with shape `[experts, rows, columns / 32, 16]`.
    blocks: ModelTensor,
    /// The scales, with shape `[experts, rows, columns / 32]`.
    scales: ModelTensor,
}

/// Splits a tensor of stacked MXFP4 matrices into a tensor of elements and a tensor of scales.
fn packed(tensor: ModelTensor) -> Mxfp4Tensors {
    let ModelTensor { info, sources, rows, .. } = tensor;
    let groups = info.elements() / GgmlType::Mxfp4.block_length();
    let mut shape = info.shape.clone();
    if let Some(columns) = shape.last_mut() {
        *columns /= GgmlType::Mxfp4.block_length();
    }
    let scales = TensorInfo::new(Dtype::U8, shape.clone(), groups);
    shape.push(16);
    let blocks = TensorInfo::new(Dtype::U8, shape, 16 * groups);
    Mxfp4Tensors {
        blocks: ModelTensor { info: blocks, sources: sources.clone(), rows, transform: Transform::Mxfp4Elements },
        scales: ModelTensor { info: scales, sources, rows, transform: Transform::Mxfp4Scales },
    }
}

//! Maps the tensors of a GGUF file to the tensors of the model.

use std::collections::{BTreeMap, HashSet};

use anyhow::{Context, Result, bail};

use super::experts::Experts;
use super::model_tensor::{ModelTensor, RowMapping, Transform, default_dtype};
use crate::text::{counted, excerpt};
use crate::weights::gguf::architectures::{self, ArchitectureLayout, GgufTensorKind};
use crate::weights::gguf::file::GgufCheckpoint;
use crate::weights::gguf::tensor_names::LayerTensorName;
use crate::weights::tensor_info::TensorInfo;

/// Returns the tensors of the model, keyed by Hugging Face name.
/// Fails if the architecture is not supported, or if the number of layers or heads is missing or invalid.
/// Also fails if a tensor is not part of the architecture or has an invalid layer number, or if the experts of a layer
/// are incomplete or differ in shape. The shapes of most other tensors are checked only when the tensors are loaded.
pub fn map_tensors(file: &GgufCheckpoint) -> Result<BTreeMap<String, ModelTensor>> {
    let layout = architectures::find(file.architecture()?)?;
    let layers = file.block_count()?;
    let mut tensors = BTreeMap::new();
    for (name, info) in file.tensors() {
        if let Some(LayerTensorName { layer, .. }) = LayerTensorName::parse(name)
            && layer >= layers
        {
            bail!("tensor {} belongs to layer {layer}, but {}.block_count is {layers}", excerpt(name), layout.name);
        }
        match layout.kind(name) {
            Some(GgufTensorKind::Tensor(hf_name)) => {
                let tensor = single(file, layout, name).with_context(|| format!("tensor {}", excerpt(name)))?;
                tensors.insert(hf_name, tensor);
            }
            Some(GgufTensorKind::Expert | GgufTensorKind::NotAWeight) => {}
            None => {
                bail!(
                    "tensor {} of shape {:?} is not part of the {} architecture",
                    excerpt(name),
                    info.shape,
                    layout.name
                )
            }
        }
    }
    for layer in 0..layers {
        let experts = Experts { file, layout, layer };
        experts.add(&mut tensors)?;
    }
    let used: HashSet<&str> = tensors.values().flat_map(|tensor| &tensor.sources).map(String::as_str).collect();
    let is_unused = |name: &&str| layout.kind(name) == Some(GgufTensorKind::Expert) && !used.contains(name);
    if let Some(name) = file.tensors().map(|(name, _)| name).find(is_unused) {
        bail!("unexpected expert tensor {} in a {} model", excerpt(name), layout.name);
    }
    Ok(tensors)
}

/// Returns the model tensor that is built from the single GGUF tensor `name`.
fn single(file: &GgufCheckpoint, layout: &ArchitectureLayout, name: &str) -> Result<ModelTensor> {
    let info = file.required(name)?;
    let module = LayerTensorName::parse(name).map(|name| name.module);
    let mut shape = info.shape.clone();
    let mut rows = RowMapping::Identity;
    let mut transform = Transform::None;
    if layout.is_permuted && matches!(module, Some("attn_q" | "attn_k")) {
        let heads = file.head_counts()?;
        let heads = if module == Some("attn_q") { heads.query } else { heads.kv };
        let length = shape.first().copied().unwrap_or(0);
        if heads == 0 || length == 0 || !length.is_multiple_of(2 * heads) {
            bail!(
                "cannot split {} into {} with an even number of rows each; check attention.head_count and \
                 attention.head_count_kv",
                counted(length, "row"),
                counted(heads, "head")
            );
        }
        rows = RowMapping::InterleavedHalves(length / heads);
        if shape.len() == 1 {
            transform = Transform::Vector;
        }
    } else if layout.has_norms_plus_one && name.ends_with("norm.weight") {
        transform = Transform::MinusOne;
    } else if layout.is_transposed && module.is_some() && shape.len() == 2 {
        transform = Transform::Transposed;
        shape.swap(0, 1);
    }
    Ok(ModelTensor {
        info: TensorInfo::new(default_dtype(info.ggml_type), shape, info.bytes),
        sources: vec![name.into()],
        rows,
        transform,
    })
}

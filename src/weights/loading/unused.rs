//! Finds tensors in a checkpoint that the model does not use.
//! Unused tensors suggest that config.json belongs to another model.

use std::collections::HashSet;
use std::ops::Range;

use anyhow::{Result, bail};

use super::weights::Weights;
use crate::text::excerpt;
use crate::weights::tensor_kind::is_never_loaded;
use crate::weights::tensor_table::{Form, TensorTable};

/// The name of a matrix that occurs only in layers for multi-token prediction (MTP), which follow the decoder layers.
/// inferno skips MTP layers, because they serve only to draft tokens for speculative decoding.
const MTP_MATRIX: &str = "eh_proj.weight";

impl Weights<'_> {
    /// Fails if the checkpoint has a tensor of a layer with index `layers` or higher, except in MTP layers.
    /// `self` must have the prefix of the layers, such as `model.layers`.
    pub fn check_layer_count(&self, layers: usize) -> Result<()> {
        let is_surplus = |&(_, layer): &(&str, usize)| layer >= layers && !self.at(layer).contains(MTP_MATRIX);
        match self.layer_tensors().find(is_surplus) {
            Some((name, layer)) => {
                bail!(
                    "tensor {} belongs to layer {layer}, but config.json sets the number of layers to {layers}",
                    excerpt(name)
                )
            }
            None => Ok(()),
        }
    }

    /// Fails if a tensor of this rank's layers, which have the indices `own`, was not loaded.
    /// Logs a warning if a tensor outside the model's layers, whose number is `layers`, was not loaded.
    /// Ignores tensors that no family loads as weights, and tensors of the decoder that `tensors` lists as unloaded.
    /// `self` must have the prefix of the layers, such as `model.layers`.
    pub fn check_all_loaded(&self, own: Range<usize>, layers: usize, tensors: TensorTable) -> Result<()> {
        // Do not ignore unloaded modules outside the decoder, such as a vision tower.
        // The warning then tells the user that the model ignores them.
        let decoder = self.prefix.rfind('.').map_or("", |dot| &self.prefix[..=dot]);
        let is_unloaded = |name: &str| name.starts_with(decoder) && tensors.role(name).form == Form::Unloaded;
        let is_unused = |name: &str| !self.progress.has_loaded(name) && !is_never_loaded(name) && !is_unloaded(name);
        let mut of_layers = self.layer_tensors().filter(|(_, layer)| own.contains(layer));
        if let Some((name, _)) = of_layers.find(|(name, _)| is_unused(name)) {
            bail!("the checkpoint has tensor {}, which a model with this config does not use", excerpt(name));
        }
        let of_layers: HashSet<&str> =
            self.layer_tensors().filter(|&(_, layer)| layer < layers).map(|(name, _)| name).collect();
        let is_other = |name: &&str| is_unused(name) && !of_layers.contains(name);
        let mut others = self.checkpoint.tensors().map(|(name, _)| name).filter(is_other);
        if let Some(first) = others.next() {
            tracing::warn!(first = excerpt(first), count = 1 + others.count(), "unused tensors");
        }
        Ok(())
    }

    /// Returns the names of all layer tensors, each with its layer index.
    fn layer_tensors(&self) -> impl Iterator<Item = (&str, usize)> {
        let prefix = self.full_name("");
        self.checkpoint.tensors().filter_map(move |(name, _)| {
            let (layer, _) = name.strip_prefix(&prefix)?.split_once('.')?;
            Some((name, layer.parse().ok()?))
        })
    }
}

//! Routed experts: a stack for each of gate, up and down in the file, gate and up as one tensor in the model; packed for
//! gpt-oss.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use safetensors::tensor::Dtype;

use super::GgufCheckpoint;
use super::model::{Change, Entry, Rows, dtype};
use super::names::Layout;
use crate::weights::TensorInfo;
use crate::weights::ggml::GgmlType;

/// The routed experts of one layer.
pub struct Experts<'c> {
    pub file: &'c GgufCheckpoint,
    pub layout: &'static Layout,
    pub layer: usize,
}

impl Experts<'_> {
    /// Adds them to the model's tensors; nothing if the layer has none.
    pub fn add(&self, entries: &mut BTreeMap<String, Entry>) -> Result<()> {
        let place = format!("{}.{}.mlp.experts", self.layout.outer.layers, self.layer);
        let stack = |matrix: &str| vec![format!("blk.{}.ffn_{matrix}_exps.weight", self.layer)];
        let mut sources = ["gate", "up", "down"].map(stack);
        if self.file.info(&sources[2][0]).is_none() {
            let each = |matrix: &str| -> Vec<String> {
                let name = |expert: usize| format!("blk.{}.ffn_{matrix}.{expert}.weight", self.layer);
                (0..).map(name).take_while(|name| self.file.info(name).is_some()).collect()
            };
            sources = ["gate", "up", "down"].map(each);
        }
        let [gate, up, down] = sources;
        if down.is_empty() {
            return Ok(());
        }
        if gate.len() != up.len() || gate.len() != down.len() {
            bail!(
                "layer {}: {} gates, {} ups and {} downs are no experts",
                self.layer,
                gate.len(),
                up.len(),
                down.len()
            );
        }
        let gate_up: Vec<String> = gate.into_iter().zip(up).flat_map(|(gate, up)| [gate, up]).collect();
        if self.layout.model_type == "gpt_oss" && down.len() > 1 {
            // Rows of gate and up alternate in the model, which is told for stacks only. No such file was ever made.
            bail!("layer {}: {} experts in tensors of their own, which gpt-oss keeps in one", self.layer, down.len());
        }
        if self.layout.model_type != "gpt_oss" {
            entries.insert(format!("{place}.gate_up_proj"), self.stack(&gate_up, Interleaved::Halves)?);
            entries.insert(format!("{place}.down_proj"), self.stack(&down, Interleaved::Halves)?);
            return Ok(());
        }
        for (name, sources) in [("gate_up_proj", gate_up), ("down_proj", down)] {
            let name = format!("{place}.{name}");
            let entry = self.stack(&sources, Interleaved::Rows)?;
            let types = sources.iter().map(|name| self.file.info(name).map(|info| info.ggml_type));
            if types.into_iter().all(|ggml_type| ggml_type == Some(GgmlType::Mxfp4)) {
                let (blocks, scales) = packed(entry);
                entries.insert(format!("{name}_blocks"), blocks);
                entries.insert(format!("{name}_scales"), scales);
            } else {
                // Unpacked checkpoints of gpt-oss have the input dimension first.
                let mut entry = entry;
                entry.info.shape.swap(1, 2);
                entries.insert(name.clone(), Entry { change: Change::Transposed, ..entry });
            }
            let bias = |source: &String| source.replace(".weight", ".bias");
            let biases: Vec<String> = sources.iter().map(bias).collect();
            let entry = self.stack(&biases, Interleaved::Rows)?;
            entries.insert(format!("{name}_bias"), entry);
        }
        Ok(())
    }

    /// All experts' matrices \[E, R, C\] or biases \[E, R\] of one tensor, or of a gate's and an up's.
    fn stack(&self, sources: &[String], interleaved: Interleaved) -> Result<Entry> {
        let infos = sources.iter().map(|name| self.file.required(name)).collect::<Result<Vec<_>>>()?;
        let (first, name) = (infos[0], &sources[0]);
        if let Some((other, info)) = sources.iter().zip(&infos).find(|(_, info)| info.shape != first.shape) {
            bail!("tensor {other}: found {:?} beside {name} {:?}", info.shape, first.shape);
        }
        let (in_stack, bias) = (name.contains("_exps"), name.ends_with(".bias"));
        let matrices = if name.contains("ffn_down") { 1 } else { 2 };
        if first.shape.len() != 1 + usize::from(in_stack) + usize::from(!bias) {
            bail!("tensor {name}: {:?} are no experts", first.shape);
        }
        let experts = if in_stack { first.shape[0] } else { sources.len() / matrices };
        let of_one = &first.shape[usize::from(in_stack)..];
        // Each source was checked alone; together they may be more, if each is empty.
        let mut lengths = [experts, matrices].into_iter().chain(of_one.iter().copied());
        if lengths.try_fold(1usize, |product, length| product.checked_mul(length.max(1))).is_none() {
            bail!("tensor {name}: {experts} experts of {of_one:?} have too many elements");
        }
        let shape = [&[experts, matrices * of_one[0]], &of_one[1..]].concat();
        let rows = match (sources.len(), interleaved) {
            (1, _) => Rows::Same,
            (_, Interleaved::Rows) => Rows::Turns(1),
            (_, Interleaved::Halves) => Rows::Turns(of_one[0].max(1)),
        };
        let change = if bias && sources.len() > 1 { Change::Vector } else { Change::Nothing };
        let bytes = infos.iter().map(|info| info.bytes).sum();
        Ok(Entry { info: TensorInfo::new(dtype(first.ggml_type), shape, bytes), sources: sources.into(), rows, change })
    }
}

/// How gate and up are one tensor.
#[derive(Clone, Copy)]
enum Interleaved {
    /// An expert's gate above its up.
    Halves,
    /// Row by row.
    Rows,
}

/// A stack of MXFP4 as its blocks [E, R, C/32, 16] and scales [E, R, C/32].
fn packed(entry: Entry) -> (Entry, Entry) {
    let Entry { info, sources, rows, .. } = entry;
    let groups = info.elements() / GgmlType::Mxfp4.block_length();
    let mut shape = info.shape.clone();
    if let Some(columns) = shape.last_mut() {
        *columns /= GgmlType::Mxfp4.block_length();
    }
    let scales = TensorInfo::new(Dtype::U8, shape.clone(), groups);
    shape.push(16);
    let blocks = TensorInfo::new(Dtype::U8, shape, 16 * groups);
    (
        Entry { info: blocks, sources: sources.clone(), rows, change: Change::Blocks },
        Entry { info: scales, sources, rows, change: Change::Scales },
    )
}

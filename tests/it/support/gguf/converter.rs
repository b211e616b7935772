//! Converts checkpoints to GGUF files, with the tensor names and layouts of llama.cpp's `convert_hf_to_gguf.py`.
//!
//! The converter uses none of inferno's GGUF code, so the same bug is unlikely in both.
//! `tests/golden/check_gguf.py` loads converted files with transformers, and compares the logits with golden values.

use std::path::Path;

use candle_core::{DType, Device};
use inferno::weights::{Checkpoint, LoadProgress, WeightsBuilder};
use serde_json::Value;

use super::writer::{F32, Writer, string};
use crate::support::values;

const MXFP4: u32 = 39;

/// A tensor of the checkpoint, converted to f32.
struct SourceTensor {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// Returns GGUF's `general.architecture` for the `model_type` in config.json.
fn architecture(config: &Value) -> &'static str {
    match config["model_type"].as_str().unwrap() {
        "llama" | "mistral" | "mixtral" => "llama",
        "qwen2" => "qwen2",
        "qwen3" => "qwen3",
        "qwen3_moe" => "qwen3moe",
        "phi3" => "phi3",
        "gemma2" => "gemma2",
        "gemma3_text" => "gemma3",
        "gpt2" => "gpt2",
        "gpt_oss" => "gpt-oss",
        other => panic!("{other}"),
    }
}

/// Converts a checkpoint to a GGUF file. MXFP4 tensors stay MXFP4, and all other tensors become F32.
pub fn convert(dir: &Path) -> Writer {
    convert_with(dir, stacked_experts)
}

/// Converts a Mixtral checkpoint to a GGUF file with one tensor per expert matrix, as llama.cpp did until spring 2024.
pub fn convert_with_separate_experts(dir: &Path) -> Writer {
    convert_with(dir, separate_experts)
}

fn convert_with(dir: &Path, write_experts: impl Fn(Writer, &Value, Vec<SourceTensor>) -> Writer) -> Writer {
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let progress = LoadProgress::silent();
    let weights = WeightsBuilder::new(&checkpoint, &Device::Cpu, DType::F32, &progress).build().unwrap();
    let mut writer = metadata(&config);
    let mut experts: Vec<SourceTensor> = Vec::new();
    for (name, info) in checkpoint.tensors() {
        if info.candle_dtype() == Some(DType::U8) {
            continue;
        }
        let values = values(&weights.float(name, &info.shape).unwrap());
        let source = SourceTensor { name: name.into(), shape: info.shape.clone(), values };
        if name.contains(".experts.") { experts.push(source) } else { writer = one(writer, &config, source) }
    }
    writer = match architecture(&config) {
        "gpt-oss" => packed_experts(writer, &checkpoint, experts),
        _ => write_experts(writer, &config, experts),
    };
    rope_factors(writer, &config)
}

fn size(config: &Value, name: &str) -> Option<u32> {
    config[name].as_u64().map(|value| value as u32)
}

fn metadata(config: &Value) -> Writer {
    let name = architecture(config);
    let key = |key: &str| format!("{name}.{key}");
    let first = |names: &[&str]| names.iter().find_map(|name| size(config, name));
    let (heads, hidden) =
        (first(&["num_attention_heads", "n_head"]).unwrap(), first(&["hidden_size", "n_embd"]).unwrap());
    let head_dim = size(config, "head_dim").unwrap_or(hidden / heads);
    let mut writer = Writer::new().string("general.architecture", name).u32("general.file_type", 0);
    let sizes = [
        ("context_length", first(&["max_position_embeddings", "n_positions"])),
        ("embedding_length", Some(hidden)),
        ("block_count", first(&["num_hidden_layers", "n_layer"])),
        ("feed_forward_length", first(&["intermediate_size", "n_inner"])),
        ("attention.head_count", Some(heads)),
        // Always write this key for `llama`. Without it, transformers does not restore the row order of q and k.
        ("attention.head_count_kv", size(config, "num_key_value_heads").or(Some(heads).filter(|_| name == "llama"))),
        ("attention.key_length", size(config, "head_dim")),
        ("attention.value_length", size(config, "head_dim")),
        ("attention.sliding_window", size(config, "sliding_window")),
        ("vocab_size", size(config, "vocab_size")),
        ("expert_count", first(&["num_local_experts", "num_experts"])),
        ("expert_used_count", size(config, "num_experts_per_tok")),
        ("expert_feed_forward_length", size(config, "moe_intermediate_size")),
    ];
    for (name, value) in sizes {
        if let Some(value) = value {
            writer = writer.u32(&key(name), value);
        }
    }
    let scaling = &config["rope_scaling"];
    let rotated = config["partial_rotary_factor"].as_f64().map_or(head_dim, |share| (share * head_dim as f64) as u32);
    let theta = config["rope_theta"].as_f64().or(config["rope_parameters"]["rope_theta"].as_f64());
    writer = writer.u32(&key("rope.dimension_count"), rotated);
    let floats = [
        ("attention.layer_norm_rms_epsilon", config["rms_norm_eps"].as_f64()),
        ("attention.layer_norm_epsilon", config["layer_norm_epsilon"].as_f64()),
        ("rope.freq_base", theta),
        ("rope.freq_base_swa", config["rope_local_base_freq"].as_f64()),
        ("attn_logit_softcapping", config["attn_logit_softcapping"].as_f64()),
        ("final_logit_softcapping", config["final_logit_softcapping"].as_f64()),
        ("attention.scale", config["query_pre_attn_scalar"].as_f64().map(|scalar| scalar.powf(-0.5))),
        ("rope.scaling.yarn_beta_fast", scaling["beta_fast"].as_f64()),
        ("rope.scaling.yarn_beta_slow", scaling["beta_slow"].as_f64()),
    ];
    for (name, value) in floats {
        if let Some(value) = value {
            writer = writer.f32(&key(name), value as f32);
        }
    }
    let original = scaling["original_max_position_embeddings"].as_u64().map(|value| value as u32);
    if let Some(original) = original.or(size(config, "original_max_position_embeddings")) {
        writer = writer.u32(&key("rope.scaling.original_context_length"), original);
    }
    if let Some(kind @ ("yarn" | "linear")) = scaling["rope_type"].as_str() {
        writer = writer
            .string(&key("rope.scaling.type"), kind)
            .f32(&key("rope.scaling.factor"), scaling["factor"].as_f64().unwrap() as f32);
    }
    if let Some(period) = size(config, "sliding_window_pattern") {
        writer = writer.u32(&key("attention.sliding_window_pattern"), period);
    }
    if let Some(dense) = size(config, "max_window_layers").filter(|_| config["use_sliding_window"] == true) {
        let slides = (0..size(config, "num_hidden_layers").unwrap()).map(|layer| u8::from(layer >= dense));
        let slides: Vec<u8> = slides.collect();
        writer =
            writer.array(&key("attention.sliding_window_pattern"), super::writer::BOOL, slides.len() as u64, slides);
    } else if let Some(types) = config["layer_types"].as_array().filter(|_| size(config, "sliding_window").is_some()) {
        let slides: Vec<u8> = types.iter().map(|kind| u8::from(kind == "sliding_attention")).collect();
        let key = key("attention.sliding_window_pattern");
        writer = writer.array(&key, super::writer::BOOL, slides.len() as u64, slides);
    }
    if name == "qwen3moe" {
        writer = writer.bool(&key("expert_weights_norm"), config["norm_topk_prob"] == true);
    }
    if name == "gpt-oss" {
        writer = writer.u32(&key("expert_feed_forward_length"), size(config, "intermediate_size").unwrap());
    }
    writer
}

/// Returns the GGUF name of a tensor.
fn renamed(name: &str, architecture: &str) -> String {
    let name = name.trim_start_matches("model.").trim_start_matches("transformer.");
    let (gemma, oss) = (architecture.starts_with("gemma"), architecture == "gpt-oss");
    if let Some(rest) = name.strip_prefix("layers.").or(name.strip_prefix("h.")) {
        let (layer, rest) = rest.split_once('.').unwrap();
        if rest == "self_attn.sinks" {
            return format!("blk.{layer}.attn_sinks.weight");
        }
        let (part, suffix) = rest.rsplit_once('.').unwrap();
        let part = match part {
            "input_layernorm" | "ln_1" => "attn_norm",
            "post_attention_layernorm" if gemma || oss => "post_attention_norm",
            "post_attention_layernorm" | "pre_feedforward_layernorm" | "ln_2" => "ffn_norm",
            "post_feedforward_layernorm" => "post_ffw_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" | "attn.c_proj" => "attn_output",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "self_attn.qkv_proj" | "attn.c_attn" => "attn_qkv",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" | "mlp.gate_up_proj" | "mlp.c_fc" => "ffn_up",
            "mlp.down_proj" | "mlp.c_proj" => "ffn_down",
            "mlp.gate" | "block_sparse_moe.gate" | "mlp.router" => "ffn_gate_inp",
            other => panic!("{other}"),
        };
        return format!("blk.{layer}.{part}.{suffix}");
    }
    match name {
        "embed_tokens.weight" | "wte.weight" => "token_embd.weight",
        "wpe.weight" => "position_embd.weight",
        "norm.weight" | "ln_f.weight" => "output_norm.weight",
        "ln_f.bias" => "output_norm.bias",
        "lm_head.weight" => "output.weight",
        other => panic!("{other}"),
    }
    .into()
}

fn write(writer: Writer, name: &str, shape: &[usize], values: &[f32]) -> Writer {
    let shape: Vec<u64> = shape.iter().rev().map(|length| *length as u64).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    // In GGUF, tensor type 0 is F32.
    writer.tensor(name, &shape, 0, &bytes)
}

fn one(writer: Writer, config: &Value, source: SourceTensor) -> Writer {
    let architecture = architecture(config);
    let name = renamed(&source.name, architecture);
    let SourceTensor { mut shape, mut values, .. } = source;
    let heads = size(config, "num_attention_heads");
    if architecture == "llama" && (name.contains(".attn_q.") || name.contains(".attn_k.")) {
        let kv = size(config, "num_key_value_heads").or(heads);
        let heads = if name.contains("attn_q") { heads } else { kv }.unwrap() as usize;
        values = permuted(&values, heads, shape.get(1).copied().unwrap_or(1));
    }
    if architecture.starts_with("gemma") && name.ends_with("norm.weight") {
        values.iter_mut().for_each(|value| *value += 1.0);
    }
    if architecture == "gpt2" && name.starts_with("blk.") && shape.len() == 2 {
        values = transposed(&values, shape[0], shape[1]);
        shape.swap(0, 1);
    }
    if config["scale_attn_by_inverse_layer_idx"] == true && name.contains("attn_qkv") {
        // GGUF has no key for `scale_attn_by_inverse_layer_idx`.
        // Dividing the query projection by `layer + 1` has the same effect.
        let layer: f32 = name.split('.').nth(1).unwrap().parse().unwrap();
        let queries = values.len() / 3;
        values[..queries].iter_mut().for_each(|value| *value /= layer + 1.0);
    }
    write(writer, &name, &shape, &values)
}

/// Interleaves the two halves of each head's rows, because llama.cpp's RoPE for Llama rotates adjacent elements.
fn permuted(values: &[f32], heads: usize, columns: usize) -> Vec<f32> {
    let head = values.len() / columns / heads;
    let mut out = Vec::with_capacity(values.len());
    for h in 0..heads {
        for i in 0..head / 2 {
            for half in 0..2 {
                let row = h * head + half * (head / 2) + i;
                out.extend(&values[row * columns..][..columns]);
            }
        }
    }
    out
}

/// Transposes a row-major matrix `[rows, columns]`.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}

fn separate_experts(mut writer: Writer, _: &Value, experts: Vec<SourceTensor>) -> Writer {
    for source in experts {
        let parts: Vec<&str> = source.name.split('.').collect();
        let [.., expert, matrix, "weight"] = parts[..] else { panic!("{}", source.name) };
        let part = match matrix {
            "w1" => "gate",
            "w3" => "up",
            _ => "down",
        };
        let layer = parts[2];
        writer = write(writer, &format!("blk.{layer}.ffn_{part}.{expert}.weight"), &source.shape, &source.values);
    }
    writer
}

/// Stacks the expert matrices of each layer into three tensors: gate, up and down.
fn stacked_experts(mut writer: Writer, config: &Value, experts: Vec<SourceTensor>) -> Writer {
    let layers = size(config, "num_hidden_layers").unwrap_or(0);
    for layer in 0..layers {
        for (part, names) in [("gate", ["w1", "gate_proj"]), ("up", ["w3", "up_proj"]), ("down", ["w2", "down_proj"])] {
            let of = |source: &&SourceTensor| {
                let matrix = source.name.rsplit('.').nth(1).unwrap();
                source.name.contains(&format!("layers.{layer}.")) && names.contains(&matrix)
            };
            let mut found: Vec<&SourceTensor> = experts.iter().filter(of).collect();
            found.sort_by_key(|source| source.name.rsplit('.').nth(2).unwrap().parse::<usize>().unwrap());
            let Some(first) = found.first() else { continue };
            let values: Vec<f32> = found.iter().flat_map(|source| source.values.iter().copied()).collect();
            let name = format!("blk.{layer}.ffn_{part}_exps.weight");
            writer = write(writer, &name, &[&[found.len()], &first.shape[..]].concat(), &values);
        }
    }
    writer
}

/// Writes the gpt-oss experts, with gate and up in separate tensors.
/// In ggml's MXFP4 blocks, the scale comes first. Byte `i` after the scale holds the elements `i` and `16 + i`.
fn packed_experts(mut writer: Writer, checkpoint: &Checkpoint, biases: Vec<SourceTensor>) -> Writer {
    for source in &biases {
        let layer = source.name.split('.').nth(2).unwrap();
        let (experts, rows) = (source.shape[0], source.shape[1]);
        if source.name.ends_with("down_proj_bias") {
            writer = write(writer, &format!("blk.{layer}.ffn_down_exps.bias"), &source.shape, &source.values);
            continue;
        }
        for (part, first) in [("gate", 0), ("up", 1)] {
            let values: Vec<f32> = source.values.iter().skip(first).step_by(2).copied().collect();
            writer = write(writer, &format!("blk.{layer}.ffn_{part}_exps.bias"), &[experts, rows / 2], &values);
        }
    }
    let names: Vec<String> = checkpoint.tensors().map(|(name, _)| name.to_string()).collect();
    for name in names.iter().filter(|name| name.ends_with("_blocks")) {
        let layer = name.split('.').nth(2).unwrap();
        let blocks = checkpoint.view(name).unwrap();
        let scales = checkpoint.view(&name.replace("_blocks", "_scales")).unwrap();
        let [experts, rows, groups, _] = blocks.info.shape[..] else { panic!("{name}") };
        let (blocks, scales) = (blocks.bytes.read().unwrap(), scales.bytes.read().unwrap());
        let parts: &[(&str, usize, usize)] =
            if name.contains("gate_up") { &[("gate", 0, 2), ("up", 1, 2)] } else { &[("down", 0, 1)] };
        for (part, first, step) in parts {
            let mut bytes = Vec::new();
            for row in (0..experts * rows).skip(*first).step_by(*step) {
                for block in row * groups..(row + 1) * groups {
                    bytes.push(scales[block]);
                    let packed = &blocks[16 * block..][..16];
                    let element = |i: usize| if i.is_multiple_of(2) { packed[i / 2] & 15 } else { packed[i / 2] >> 4 };
                    bytes.extend((0..16).map(|i| element(i) | element(16 + i) << 4));
                }
            }
            let shape = [32 * groups as u64, (rows / step) as u64, experts as u64];
            writer = writer.tensor(&format!("blk.{layer}.ffn_{part}_exps.weight"), &shape, MXFP4, &bytes);
        }
    }
    writer
}

/// Writes the RoPE frequency divisors of Llama 3 scaling or LongRoPE, if the config uses either.
fn rope_factors(mut writer: Writer, config: &Value) -> Writer {
    let scaling = &config["rope_scaling"];
    let number = |name: &str| scaling[name].as_f64().unwrap();
    if scaling["rope_type"] == "llama3" {
        let heads = number_of(config, "num_attention_heads");
        let dim = config["head_dim"].as_f64().unwrap_or(number_of(config, "hidden_size") / heads);
        let (factor, original) = (number("factor"), number("original_max_position_embeddings"));
        let (low, high) = (number("low_freq_factor"), number("high_freq_factor"));
        let divisor = |i: usize| {
            let wavelength = 2.0 * std::f64::consts::PI * number_of(config, "rope_theta").powf(2.0 * i as f64 / dim);
            let smooth = (original / wavelength - low) / (high - low);
            match wavelength {
                short if short < original / high => 1.0,
                long if long > original / low => factor as f32,
                _ => (1.0 / ((1.0 - smooth) / factor + smooth)) as f32,
            }
        };
        let values: Vec<f32> = (0..dim as usize / 2).map(divisor).collect();
        writer = write(writer, "rope_freqs.weight", &[values.len()], &values);
    }
    for (list, name) in [("short_factor", "short"), ("long_factor", "long")] {
        if let Some(values) = scaling[list].as_array() {
            let values: Vec<f32> = values.iter().map(|value| value.as_f64().unwrap() as f32).collect();
            writer = write(writer, &format!("rope_factors_{name}.weight"), &[values.len()], &values);
        }
    }
    writer
}

fn number_of(config: &Value, name: &str) -> f64 {
    config[name].as_f64().unwrap()
}

impl Writer {
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, F32, value.to_le_bytes())
    }

    /// Replaces the value of an existing u32 key.
    pub fn with_u32(mut self, key: &str, value: u32) -> Self {
        let mark = [string(key), super::writer::U32.to_le_bytes().to_vec()].concat();
        let at = self.keys.1.windows(mark.len()).position(|window| window == mark).expect(key) + mark.len();
        self.keys.1[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self
    }
}

//! Checkpoints with random weights, in sizes that the golden models do not cover.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};

use super::Random;

/// The sizes and options of a Llama model with random weights.
pub struct Llama {
    pub hidden_size: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub bias: bool,
    pub tied: bool,
}

/// Llama models by name.
pub const LLAMAS: &[(&str, Llama)] = &[
    (
        "head_size_64",
        Llama {
            hidden_size: 200,
            heads: 6,
            kv_heads: 2,
            head_dim: 64,
            intermediate_size: 264,
            vocab_size: 301,
            bias: true,
            tied: false,
        },
    ),
    (
        "head_size_80",
        Llama {
            hidden_size: 160,
            heads: 3,
            kv_heads: 3,
            head_dim: 80,
            intermediate_size: 328,
            vocab_size: 257,
            bias: false,
            tied: true,
        },
    ),
    (
        "head_size_96",
        Llama {
            hidden_size: 288,
            heads: 4,
            kv_heads: 1,
            head_dim: 96,
            intermediate_size: 416,
            vocab_size: 1001,
            bias: false,
            tied: false,
        },
    ),
    (
        "head_size_128",
        Llama {
            hidden_size: 1032,
            heads: 8,
            kv_heads: 2,
            head_dim: 128,
            intermediate_size: 2056,
            vocab_size: 5003,
            bias: true,
            tied: true,
        },
    ),
    // With this vocabulary, some threads of the sampling kernel process two logits: on the 132 multiprocessors of an
    // H200, the kernel runs 132 blocks of 1,024 threads.
    (
        "vocabulary_140001",
        Llama {
            hidden_size: 64,
            heads: 6,
            kv_heads: 2,
            head_dim: 16,
            intermediate_size: 72,
            vocab_size: 140_001,
            bias: false,
            tied: true,
        },
    ),
];

impl Llama {
    /// Writes the config and the weights of a model with three layers.
    pub fn write(&self, dir: &Path) {
        let Llama { hidden_size, heads, kv_heads, head_dim, intermediate_size, vocab_size, bias, tied } = *self;
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": hidden_size, "num_hidden_layers": 3, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": intermediate_size,
            "vocab_size": vocab_size, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": tied,
        });
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let mut tensors = RandomTensors::new(1);
        for layer in 0..3 {
            let at = |name: &str| format!("model.layers.{layer}.{name}");
            tensors.norm(&at("input_layernorm"), hidden_size);
            tensors.linear(&at("self_attn.q_proj"), heads * head_dim, hidden_size, bias);
            tensors.linear(&at("self_attn.k_proj"), kv_heads * head_dim, hidden_size, bias);
            tensors.linear(&at("self_attn.v_proj"), kv_heads * head_dim, hidden_size, bias);
            tensors.linear(&at("self_attn.o_proj"), hidden_size, heads * head_dim, bias);
            tensors.norm(&at("post_attention_layernorm"), hidden_size);
            tensors.linear(&at("mlp.gate_proj"), intermediate_size, hidden_size, bias);
            tensors.linear(&at("mlp.up_proj"), intermediate_size, hidden_size, bias);
            tensors.linear(&at("mlp.down_proj"), hidden_size, intermediate_size, bias);
        }
        tensors.norm("model.norm", hidden_size);
        tensors.linear("model.embed_tokens", vocab_size, hidden_size, false);
        if !tied {
            tensors.linear("lm_head", vocab_size, hidden_size, false);
        }
        tensors.save(dir);
    }
}

/// A Llama model for tests that quantize while loading. Its output head is tied to the embedding.
/// Row lengths are multiples of 256, the block length of K-quants, except in o_proj.
/// For o_proj, K-quants fall back to types with blocks of 32.
pub const QUANTIZED_LLAMA: Llama = Llama {
    hidden_size: 512,
    heads: 6,
    kv_heads: 2,
    head_dim: 64,
    intermediate_size: 768,
    vocab_size: 3001,
    bias: true,
    tied: true,
};

/// Writes a Qwen3-MoE model with random weights.
/// Row lengths are multiples of 256, the block length of K-quants, except in o_proj.
/// For o_proj, K-quants fall back to types with blocks of 32.
pub fn write_qwen3_moe(dir: &Path) {
    let (hidden, heads, kv_heads, head_dim, experts, chosen, width, vocab) = (256, 6, 2, 64, 37, 5, 512, 301);
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": 768, "moe_intermediate_size": width,
        "num_experts": experts, "num_experts_per_tok": chosen, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": vocab, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut tensors = RandomTensors::new(7);
    tensors.linear("model.embed_tokens", vocab, hidden, false);
    tensors.linear("lm_head", vocab, hidden, false);
    tensors.norm("model.norm", hidden);
    for layer in 0..2 {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        tensors.norm(&at("input_layernorm"), hidden);
        tensors.norm(&at("post_attention_layernorm"), hidden);
        tensors.norm(&at("self_attn.q_norm"), head_dim);
        tensors.norm(&at("self_attn.k_norm"), head_dim);
        tensors.linear(&at("self_attn.q_proj"), heads * head_dim, hidden, false);
        tensors.linear(&at("self_attn.k_proj"), kv_heads * head_dim, hidden, false);
        tensors.linear(&at("self_attn.v_proj"), kv_heads * head_dim, hidden, false);
        tensors.linear(&at("self_attn.o_proj"), hidden, heads * head_dim, false);
        tensors.linear(&at("mlp.gate"), experts, hidden, false);
        for expert in 0..experts {
            tensors.linear(&at(&format!("mlp.experts.{expert}.gate_proj")), width, hidden, false);
            tensors.linear(&at(&format!("mlp.experts.{expert}.up_proj")), width, hidden, false);
            tensors.linear(&at(&format!("mlp.experts.{expert}.down_proj")), hidden, width, false);
        }
    }
    tensors.save(dir);
}

/// Random weights in bf16 for a checkpoint.
struct RandomTensors {
    numbers: Random,
    tensors: HashMap<String, Tensor>,
}

impl RandomTensors {
    fn new(seed: u64) -> Self {
        Self { numbers: Random(seed), tensors: HashMap::new() }
    }

    /// Adds a tensor of uniform random values with mean `center` and a standard deviation of about `scale`.
    fn add(&mut self, name: String, shape: &[usize], scale: f32, center: f32) {
        let mut next = || (self.numbers.unit() - 0.5) * 3.4 * scale + center;
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        self.tensors.insert(name, tensor);
    }

    /// Adds the weight of a norm, with values near 1.
    fn norm(&mut self, name: &str, size: usize) {
        self.add(format!("{name}.weight"), &[size], 0.1, 1.0);
    }

    /// Adds a matrix `[rows, columns]`, and a bias if `has_bias` is true.
    /// Scales the matrix so that the outputs of the layer are about as large as its inputs.
    fn linear(&mut self, name: &str, rows: usize, columns: usize, has_bias: bool) {
        self.add(format!("{name}.weight"), &[rows, columns], (columns as f32).powf(-0.5), 0.0);
        if has_bias {
            self.add(format!("{name}.bias"), &[rows], 0.2, 0.0);
        }
    }

    fn save(&self, dir: &Path) {
        safetensors::save(&self.tensors, dir.join("model.safetensors")).unwrap();
    }
}

//! The dimensions of a model, read from config.json. Families use different keys for the same dimension.

use serde::Serialize;
use serde_json::Value;

use crate::models::Architecture;
use crate::nn::kv_cache::LayerSpec;

/// The dimensions of a model. A dimension is `None` if it is unknown or the model does not have it.
#[derive(Debug, Default, Serialize)]
pub struct ConfigSizes {
    pub layers: Option<u64>,
    pub hidden_size: Option<u64>,
    pub intermediate_size: Option<u64>,
    pub heads: Option<u64>,
    pub kv_heads: Option<u64>,
    pub head_dim: Option<u64>,
    pub experts: Option<u64>,
    pub experts_chosen: Option<u64>,
    /// The intermediate size of an expert, if config.json states it in `moe_intermediate_size`.
    pub expert_intermediate_size: Option<u64>,
    /// The maximum number of positions that a token attends to in a sliding-window layer.
    pub sliding_window: Option<u64>,
    /// The number of sliding-window layers.
    pub sliding_layers: Option<u64>,
    pub vocab_size: Option<u64>,
    pub context: Option<u64>,
    pub rope: Option<Rope>,
    pub tied_embeddings: Option<bool>,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct Rope {
    pub theta: Option<f64>,
    /// The scaling method, such as `yarn` or `llama3`. `default` means no scaling.
    pub scaling: String,
    pub factor: Option<f64>,
    pub original_context: Option<u64>,
}

impl ConfigSizes {
    /// Reads the dimensions from config.json.
    pub fn from_config(config: &Value) -> Self {
        // Multimodal models store the dimensions of their language model in `text_config`.
        let config = if config["text_config"].is_object() { &config["text_config"] } else { config };
        let first = |names: &[&str]| names.iter().find_map(|name| config[*name].as_u64());
        let (hidden_size, heads) =
            (first(&["hidden_size", "n_embd", "d_model"]), first(&["num_attention_heads", "n_head", "n_heads"]));
        let layers = first(&["num_hidden_layers", "n_layer", "n_layers", "num_layers"]);
        let default_head_dim = || hidden_size?.checked_div(heads?);
        let experts = first(&["num_local_experts", "num_experts", "n_routed_experts"]).filter(|&experts| experts > 0);
        let types = config["layer_types"].as_array();
        let is_sliding = |kind: &&Value| kind.as_str() == Some("sliding_attention");
        let sliding_layers = types.map(|types| types.iter().filter(is_sliding).count() as u64);
        let is_used = config["use_sliding_window"].as_bool() != Some(false) && sliding_layers != Some(0);
        let sliding_window = first(&["sliding_window"]).filter(|_| is_used);
        Self {
            layers,
            hidden_size,
            intermediate_size: first(&["intermediate_size", "n_inner", "ffn_dim", "d_ff"]),
            heads,
            kv_heads: first(&["num_key_value_heads", "n_head_kv"]).or(heads),
            head_dim: first(&["head_dim"]).or_else(default_head_dim),
            experts,
            experts_chosen: first(&["num_experts_per_tok", "experts_per_token"]).filter(|_| experts.is_some()),
            expert_intermediate_size: first(&["moe_intermediate_size"]),
            sliding_window,
            sliding_layers: sliding_window.and(sliding_layers.or(layers)),
            vocab_size: first(&["vocab_size"]),
            context: first(&["max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"]),
            rope: Rope::from_config(config),
            tied_embeddings: config["tie_word_embeddings"].as_bool(),
        }
    }

    /// Overrides dimensions with the values that the model's architecture reports.
    pub fn with_architecture(mut self, architecture: &dyn Architecture) -> Self {
        let layers = architecture.cache_layers();
        let windows: Vec<usize> = layers.iter().filter_map(|layer| layer.window).collect();
        self.layers = Some(layers.len() as u64);
        if let Some(layer) = layers.first() {
            (self.kv_heads, self.head_dim) = (Some(layer.kv_heads as u64), Some(layer.head_dim as u64));
        }
        self.sliding_window = windows.iter().max().map(|&window| window as u64);
        self.sliding_layers = (!windows.is_empty()).then_some(windows.len() as u64);
        self.vocab_size = Some(architecture.vocab_size() as u64);
        self.context = Some(architecture.max_position_embeddings() as u64);
        self
    }

    /// Estimates the KV cache shape of each layer from config.json, for an unsupported family.
    ///
    /// Assumes that each layer caches one key and one value per position and KV head.
    /// Puts the sliding-window layers first: the order of the layers does not affect the total size of the cache.
    /// Returns `None` for models with another kind of cache, and if the number of layers, the number of KV heads or
    /// the head size is missing or implausible.
    pub fn cache_layers(&self, config: &Value) -> Option<Vec<LayerSpec>> {
        // Layers with MLA, a state space or linear attention do not cache keys and values per KV head.
        let config = if config["text_config"].is_object() { &config["text_config"] } else { config };
        let other_caches = ["kv_lora_rank", "ssm_cfg", "state_size", "mamba_d_state", "linear_num_key_heads"];
        if other_caches.iter().any(|name| !config[*name].is_null()) {
            return None;
        }
        // No known model exceeds these limits. They keep a bogus size from causing a huge allocation or an overflow.
        let within = |size: Option<u64>, limit: usize| {
            size.and_then(|size| usize::try_from(size).ok()).filter(|size| (1..=limit).contains(size))
        };
        let layers = within(self.layers, 4096)?;
        let kv_heads = within(self.kv_heads, 1 << 16)?;
        let head_dim = within(self.head_dim, 1 << 16)?;
        let window = within(self.sliding_window, 1 << 24);
        let sliding = within(self.sliding_layers, layers).unwrap_or(0);
        let spec = |layer| LayerSpec { kv_heads, head_dim, window: window.filter(|_| layer < sliding) };
        Some((0..layers).map(spec).collect())
    }
}

impl Rope {
    fn from_config(config: &Value) -> Option<Self> {
        let scaling = [&config["rope_parameters"], &config["rope_scaling"]].into_iter().find(|json| json.is_object());
        let field = |name: &str| scaling.map(|scaling| &scaling[name]);
        let number = |name: &str| field(name).and_then(Value::as_f64);
        let theta = number("rope_theta").or_else(|| config["rope_theta"].as_f64());
        if scaling.is_none() && theta.is_none() {
            return None;
        }
        let kind = field("rope_type").and_then(Value::as_str).or(field("type").and_then(Value::as_str));
        Some(Self {
            theta,
            scaling: kind.unwrap_or("default").to_string(),
            factor: number("factor"),
            original_context: field("original_max_position_embeddings").and_then(Value::as_u64),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sizes_are_found_under_each_familys_names() {
        let sizes = ConfigSizes::from_config(&json!({"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}));
        assert_eq!((sizes.hidden_size, sizes.head_dim, sizes.kv_heads), (Some(768), Some(64), Some(12)));
        assert_eq!((sizes.layers, sizes.context), (Some(12), Some(1024)));
        let vision = json!({"model_type": "x", "text_config": {"hidden_size": 8, "num_hidden_layers": 2}});
        assert_eq!(ConfigSizes::from_config(&vision).layers, Some(2));
        assert!(ConfigSizes::from_config(&json!({"n_head": 0, "n_embd": 5})).head_dim.is_none());
        assert!(ConfigSizes::from_config(&json!([1, 2])).layers.is_none());
        let rope = json!({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4}});
        let expected = Rope { theta: Some(1e4), scaling: "linear".into(), factor: Some(4.0), original_context: None };
        assert_eq!(ConfigSizes::from_config(&rope).rope, Some(expected));
    }

    #[test]
    fn cache_of_an_unsupported_family_is_guessed_or_unknown() {
        let plain = json!({"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]});
        let layers = ConfigSizes::from_config(&plain).cache_layers(&plain).unwrap();
        assert_eq!(layers.len(), 4);
        assert_eq!(layers.iter().filter(|layer| layer.window == Some(16)).count(), 2);
        for other in [json!({"kv_lora_rank": 512}), json!({"num_hidden_layers": u64::MAX}), json!({})] {
            let mut config = plain.clone();
            if other == json!({}) {
                config = other;
            } else {
                config.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
            }
            assert!(ConfigSizes::from_config(&config).cache_layers(&config).is_none(), "{config}");
        }
    }
}

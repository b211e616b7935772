//! Known stop tokens. They are found by their text, because most files name only one of a model's stop tokens.
//!
//! Source: the list of end-of-generation tokens in ggml-org/llama.cpp, `src/llama-vocab.cpp`. Two groups are left out:
//! tokens of architectures that inferno does not support, and tokens such as `<|file_sep|>` of prompts that consist of
//! several files, which safetensors models do not name as stop tokens either. `</s>` and `<eos>` must be control tokens.

/// Returns whether a token with this text ends a generation in every model that has such a token.
pub fn is_stop_token(token: &str) -> bool {
    matches!(
        token,
        "<|eot_id|>"
            | "<|eom_id|>"
            | "<|im_end|>"
            | "<|end|>"
            | "<|return|>"
            | "<|call|>"
            | "<|endoftext|>"
            | "<|end_of_text|>"
            | "<end_of_turn>"
            | "<end_of_utterance>"
            | "<EOT>"
            | "▁<EOT>"
            | "<｜end▁of▁sentence｜>"
    )
}

/// Returns whether a control token with this text ends a generation.
/// `</s>` is a stop token only if it is a control token: in Gemma, it is an HTML tag.
pub fn is_control_stop_token(token: &str) -> bool {
    is_stop_token(token) || matches!(token, "</s>" | "<eos>")
}

/// Returns the ids of `stop_tokens`, which are known stop tokens of one vocabulary as (text, id) pairs.
/// Omits `<|end|>` in vocabularies of the harmony format, in which it ends a message but not the generation.
pub fn stop_ids(stop_tokens: &[(&str, u32)]) -> Vec<u32> {
    let contains = |text: &str| stop_tokens.iter().any(|(token, _)| *token == text);
    let is_harmony = contains("<|return|>") && contains("<|call|>");
    stop_tokens.iter().filter(|(token, _)| !(is_harmony && *token == "<|end|>")).map(|(_, id)| *id).collect()
}

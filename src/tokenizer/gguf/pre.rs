//! The pre-tokenizers that the metadata key `tokenizer.ggml.pre` can name.
//!
//! A pre-tokenizer applies its split patterns in order. Each pattern splits the pieces from the previous pattern: each
//! match becomes a piece, and so does the text between matches. The last pieces are the words that BPE encodes.
//!
//! The names come from ggml-org/llama.cpp, `src/llama-vocab.cpp`.
//! Most patterns come from the tokenizer.json of a model, not from llama.cpp, which rewrites them for its own regex
//! engine.

/// The split patterns of a byte-level BPE tokenizer, and other settings that depend on the name of the pre-tokenizer.
pub struct PreTokenizerSpec {
    names: &'static [&'static str],
    pub patterns: &'static [&'static str],
    /// Whether a word that is in the vocabulary becomes a single token, without applying merges.
    /// Has no effect for a vocabulary in which such a word could be a control token.
    pub ignore_merges: bool,
    /// Whether encoding adds BOS before the text by default. The GGUF file can override the default.
    pub add_bos: bool,
    /// Whether text is normalized to NFC, as in the model's tokenizer.json. llama.cpp does not normalize text.
    pub nfc: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);

const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);

const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);

const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const PLAIN: PreTokenizerSpec =
    PreTokenizerSpec { names: &[], patterns: &[], ignore_merges: false, add_bos: false, nfc: false };

const SPECS: &[PreTokenizerSpec] = &[
    PreTokenizerSpec {
        names: &["default"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
        ..PLAIN
    },
    PreTokenizerSpec {
        names: &["gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"],
        patterns: &[GPT2],
        ..PLAIN
    },
    PreTokenizerSpec {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"],
        patterns: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    PreTokenizerSpec { names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], patterns: &[LLAMA3], ..PLAIN },
    PreTokenizerSpec { names: &["qwen2"], patterns: &[QWEN2], nfc: true, ..PLAIN },
    PreTokenizerSpec { names: &["deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"], patterns: &[QWEN2], ..PLAIN },
    PreTokenizerSpec { names: &["qwen35"], patterns: &[QWEN35], nfc: true, ..PLAIN },
    // As in tiktoken and in the tokenizer.json of gpt-oss, whole words are looked up before merges are applied.
    PreTokenizerSpec { names: &["gpt-4o", "llama4"], patterns: &[GPT4O], ignore_merges: true, ..PLAIN },
    PreTokenizerSpec { names: &["tekken"], patterns: &[TEKKEN], ignore_merges: true, add_bos: true, ..PLAIN },
    PreTokenizerSpec {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        patterns: &[r"\p{N}", GPT2],
        ..PLAIN
    },
    PreTokenizerSpec {
        names: &["deepseek-v3", "hunyuan-dense"],
        patterns: &[r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK3],
        ..PLAIN
    },
    PreTokenizerSpec { names: &["falcon"], patterns: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"], ..PLAIN },
];

/// Returns the pre-tokenizer for a value of `tokenizer.ggml.pre`, or `None` if the value is not supported.
pub fn find(name: &str) -> Option<&'static PreTokenizerSpec> {
    SPECS.iter().find(|spec| spec.names.contains(&name))
}

/// Returns all supported values of `tokenizer.ggml.pre`, for an error message.
pub fn names() -> Vec<&'static str> {
    SPECS.iter().flat_map(|spec| spec.names).copied().collect()
}

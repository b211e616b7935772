//! The pre-tokenizers that `tokenizer.ggml.pre` names: patterns that cut a text one after the other, each what the one
//! before has left in a piece. What a pattern does not match stays a piece too.
//!
//! Source of names: ggml-org/llama.cpp, `src/llama-vocab.cpp`; of patterns: the models' tokenizer.json where there is
//! one, which llama.cpp rewrites for its own matcher.

/// How a byte-level BPE cuts a text into words, and what else is known by its name.
pub struct Pre {
    names: &'static [&'static str],
    pub patterns: &'static [&'static str],
    /// A word that is a token is that token, whatever the merges would make of it.
    pub ignore_merges: bool,
    /// Unless the file says otherwise.
    pub add_bos: bool,
    /// The model's tokenizer.json brings text into Unicode's form NFC, which llama.cpp does not.
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

const PLAIN: Pre = Pre { names: &[], patterns: &[], ignore_merges: false, add_bos: false, nfc: false };

const PRES: &[Pre] = &[
    Pre { names: &["default"], patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"], ..PLAIN },
    Pre { names: &["gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"], patterns: &[GPT2], ..PLAIN },
    Pre {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"],
        patterns: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    Pre { names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], patterns: &[LLAMA3], ..PLAIN },
    Pre { names: &["qwen2"], patterns: &[QWEN2], nfc: true, ..PLAIN },
    Pre { names: &["deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"], patterns: &[QWEN2], ..PLAIN },
    Pre { names: &["qwen35"], patterns: &[QWEN35], nfc: true, ..PLAIN },
    // Made from tiktoken's vocabularies, which take words whole: so does gpt-oss's tokenizer.json.
    Pre { names: &["gpt-4o", "llama4"], patterns: &[GPT4O], ignore_merges: true, ..PLAIN },
    Pre { names: &["tekken"], patterns: &[TEKKEN], ignore_merges: true, add_bos: true, ..PLAIN },
    Pre {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        patterns: &[r"\p{N}", GPT2],
        ..PLAIN
    },
    Pre {
        names: &["deepseek-v3", "hunyuan-dense"],
        patterns: &[r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK3],
        ..PLAIN
    },
    Pre { names: &["falcon"], patterns: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"], ..PLAIN },
];

pub fn find(name: &str) -> Option<&'static Pre> {
    PRES.iter().find(|pre| pre.names.contains(&name))
}

pub fn names() -> Vec<&'static str> {
    PRES.iter().flat_map(|pre| pre.names).copied().collect()
}

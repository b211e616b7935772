"""Mutations of JSON files: config.json, tokenizer.json and all others."""

from json_values import STRANGE, STRINGS, Pairs, get, hostile, parse, put, shown, to_bytes


def random_slot(rng, root):
    """Chooses a random item at any depth of a JSON value. Returns its container, index and path.

    Returns None if `root` has no items.
    """
    node, path, slot = root, "", None
    while isinstance(node, list) and node:
        index = rng.randrange(len(node))
        path += f".{node[index][0]}" if isinstance(node, Pairs) else f"[{index}]"
        slot = (node, index, path)
        node = node[index][1] if isinstance(node, Pairs) else node[index]
        if rng.random() < 0.3:
            break
    return slot


def mutate_tree(rng, root):
    """Makes one random change in a JSON value. Returns a description of the change, or None if `root` has no items."""
    slot = random_slot(rng, root)
    if slot is None:
        return None
    container, index, path = slot
    is_object = isinstance(container, Pairs)
    value = container[index][1] if is_object else container[index]

    def replace(new):
        if is_object:
            container[index][1] = new
        else:
            container[index] = new
        return f"set {shown(path)} to {shown(new)}"

    kind = rng.randrange(12)
    if kind == 0:
        del container[index]
        return f"delete {shown(path)}"
    if kind == 1:
        extra = [container[index][0], hostile(rng)] if is_object else container[index]
        container.insert(index + rng.randrange(2), extra)
        return f"duplicate {shown(path)}"
    if kind == 2 and is_object:
        container[index][0] = rng.choice([STRANGE, "", "x", container[index][0].upper(), container[index][0] + " "])
        return f"rename {shown(path)} to {shown(container[index][0])}"
    if kind == 3:
        other = rng.randrange(len(container))
        if is_object:
            container[index][1], container[other][1] = container[other][1], container[index][1]
        else:
            container[index], container[other] = container[other], container[index]
        return f"swap {shown(path)} with entry {other}"
    if kind == 4:
        return replace([value] if rng.randrange(2) else Pairs([["x", value]]))
    if kind in (5, 6, 7) and isinstance(value, (int, float)) and not isinstance(value, bool):
        new = rng.choice([value + 1, value - 1, -value, value * 2, value * 1000, value / 2, str(value)])
        return replace(int(new) if isinstance(value, int) and isinstance(new, float) and rng.randrange(2) else new)
    if kind in (5, 6) and isinstance(value, list) and value:
        return replace(type(value)(value[: rng.randrange(len(value))] if rng.randrange(2) else value + value))
    return replace(hostile(rng))


def tree_bytes(rng, root):
    description = mutate_tree(rng, root)
    if description is None:
        root = hostile(rng)
        description = f"replace everything with {shown(root)}"
    return to_bytes(root), description


def mutate_json(rng, data):
    return tree_bytes(rng, parse(data))


MODEL_TYPES = ["gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3_text"]
MODEL_TYPES += ["gemma3", "gpt2", "", "nonsense", "LLAMA"]


def config_addition(rng):
    """Returns a key of config.json and a new value. Many values have the right type, but are extreme or do not fit."""
    number = rng.choice([0, 1e-9, 0.5, 1, 2, 8, 40, 1e9, -1, 1e30])
    size = rng.choice([0, 1, 2, 3, 8, 16, 64, 128, 1000, 4096, 2**31, 2**40])
    rope = rng.choice(["yarn", "llama3", "linear", "longrope", "dynamic", "default", "su"])
    scaling = {"rope_type": rope, "factor": number, "original_max_position_embeddings": size, "low_freq_factor": 1,
               "high_freq_factor": rng.choice([1, 4, number]), "beta_fast": number, "beta_slow": 1, "mscale": number,
               "short_factor": [number] * rng.choice([0, 4, 20]), "long_factor": [number] * rng.choice([0, 4, 20])}
    group = {"targets": ["Linear"], "weights": {"num_bits": rng.choice([4, 8, 0]), "type": rng.choice(["int", "float"]),
             "strategy": rng.choice(["channel", "tensor", "group"]), "symmetric": True, "group_size": size}}
    compressed = {"quant_method": "compressed-tensors", "format": rng.choice(["int-quantized", "float-quantized", "x"]),
                  "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:(a+)+$"]}
    return rng.choice([
        ("rope_scaling", scaling), ("rope_parameters", scaling), ("rope_theta", number),
        ("model_type", rng.choice(MODEL_TYPES)),
        ("quantization_config",
         rng.choice([compressed, {"quant_method": "mxfp4"}, {"quant_method": "gptq", "bits": 4}])),
        ("layer_types", [rng.choice(["full_attention", "sliding_attention", "x"])] * rng.choice([0, 1, 2, 6, 5000])),
        ("sliding_window", size), ("head_dim", size), ("hidden_size", size), ("num_hidden_layers", size),
        ("num_attention_heads", size), ("num_key_value_heads", size), ("intermediate_size", size), ("vocab_size", size),
        ("max_position_embeddings", size), ("num_local_experts", size), ("num_experts_per_tok", size),
        ("num_experts", size), ("tie_word_embeddings", rng.choice([True, False])), ("partial_rotary_factor", number),
        ("final_logit_softcapping", number), ("attn_logit_softcapping", number), ("query_pre_attn_scalar", number),
        ("rms_norm_eps", number), ("hidden_act", rng.choice(["gelu", "relu", "silu", "gelu_pytorch_tanh", "x"])),
        ("eos_token_id", rng.choice([[], -1, 2**32, [0] * 1000, ["a"], 5])),
        ("torch_dtype", rng.choice(["float16", "x"])),
        ("attention_bias", True), ("layer_norm_epsilon", number), ("n_positions", size), ("n_inner", size),
        ("text_config", {"model_type": "gemma3_text", "hidden_size": size}), ("original_max_position_embeddings", size),
        ("use_sliding_window", True), ("max_window_layers", size), ("rope_local_base_freq", number),
        ("decoder_sparse_step", size), ("mlp_only_layers", [0, size]), ("norm_topk_prob", True),
        ("swiglu_limit", number),
    ])


def mutate_config(rng, data):
    root = parse(data)
    if not isinstance(root, Pairs) or rng.randrange(2):
        return tree_bytes(rng, root)
    key, value = config_addition(rng)
    put(root, key, value)
    return to_bytes(root), f"set {key} to {shown(value)}"


def step_replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(name, steps):
    return {"type": "Sequence", name: steps}


TOKENIZER_PARTS = {
    "normalizer": [
        {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁" * 1000}, {"type": "BertNormalizer"},
        sequence("normalizers", [step_replace("h", "h" * 100)] * 6), step_replace("", "aaaa"), {"type": "Precompiled"},
        step_replace("(a|a)*$", "b", "Regex"), sequence("normalizers", [{"type": "NFD"}, {"type": "StripAccents"}]),
        sequence("normalizers", []), step_replace("(", "b", "Regex"), step_replace("h", "<|end|>"),
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, {"type": "Nonsense"}, {"type": "ByteLevel"},
    ],
    "pre_tokenizer": [
        {"type": "Whitespace"},
        {"type": "Split", "pattern": {"Regex": "(?=(a+)+$)(a|a)+b"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "(" * 300 + ")" * 300}, "behavior": "Removed", "invert": True},
        {"type": "Split", "pattern": {"Regex": "(x{1000}){1000}"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"String": ""}, "behavior": "MergedWithNext", "invert": False},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}, {"type": "FixedLength", "length": 0},
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
        sequence("pretokenizers", [{"type": "Whitespace"}] * 1000), {"type": "UnicodeScripts"}, {"type": "Punctuation"},
    ],
    "decoder": [
        {"type": "Fuse"}, {"type": "ByteFallback"}, {"type": "Strip", "content": " ", "start": 2**40, "stop": 2**40},
        sequence("decoders", [step_replace("a", "a" * 100)] * 6), step_replace("(a+)+b", "", "Regex"),
        {"type": "BPEDecoder"},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        sequence("decoders", [{"type": "Fuse"}] * 100), step_replace("", "xyz"),
        {"type": "Metaspace", "replacement": "é"},
    ],
    "post_processor": [
        {"type": "TemplateProcessing",
         "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
         "special_tokens": {"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}}},
        {"type": "TemplateProcessing",
         "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "y", "type_id": 0}}],
         "pair": [], "special_tokens": {"y": {"id": "y", "ids": [2**32 - 1], "tokens": ["y"]}}},
        {"type": "RobertaProcessing", "sep": ["x", 5], "cls": ["y", 2**31], "trim_offsets": True,
         "add_prefix_space": True},
        {"type": "BertProcessing", "sep": ["x", 5], "cls": ["y", 6]}, {"type": "ByteLevel"},
    ],
    "version": ["2.0", STRANGE, "y" * 100_000],
    "truncation": [{"max_length": 1, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}],
    "padding": [{"strategy": {"Fixed": 2**40}, "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 9,
                 "pad_type_id": 0, "pad_token": "x"}],
    "model": [
        {"type": "Unigram", "unk_id": 0, "vocab": [["a" * length, -1.0] for length in range(1, 300)],
         "byte_fallback": False},
        {"type": "Unigram", "unk_id": 2**40, "vocab": [], "byte_fallback": True},
        {"type": "WordLevel", "vocab": {"hi": 0, "[UNK]": 2**32 - 1}, "unk_token": "[UNK]"},
        {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "", "max_input_chars_per_word": 2**60,
         "vocab": {"h": 0}},
        {"type": "BPE", "vocab": {}, "merges": []}, {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": [["a", "b"]]},
        {"type": "BPE", "vocab": {"h": 0, "i": 1, "hi": 2**32 - 1}, "merges": ["h i"], "byte_fallback": True},
    ],
}


def mutate_tokenizer(rng, data):
    root = parse(data)
    kind = rng.randrange(10)
    if kind < 4 and isinstance(root, Pairs):
        part = rng.choice(sorted(TOKENIZER_PARTS))
        value = rng.choice(TOKENIZER_PARTS[part])
        put(root, part, value)
        return to_bytes(root), f"set {part} to {shown(value)}"
    added = get(root, "added_tokens")
    if kind < 6 and isinstance(added, list):
        token = {"id": rng.choice([0, 1, 5, 2000, 2**31, 2**32 - 1]), "content": rng.choice(STRINGS + ["h", " "]),
                 "single_word": bool(rng.randrange(2)), "lstrip": bool(rng.randrange(2)),
                 "rstrip": bool(rng.randrange(2)), "normalized": bool(rng.randrange(2)),
                 "special": bool(rng.randrange(2))}
        added.insert(rng.randrange(len(added) + 1), token)
        return to_bytes(root), f"add the token {shown(token)}"
    model = get(root, "model")
    vocabulary, merges = get(model, "vocab"), get(model, "merges")
    if kind < 8 and isinstance(vocabulary, Pairs) and vocabulary:
        entry = rng.choice(vocabulary)
        if rng.randrange(2):
            entry[1] = rng.choice([0, -1, 2**31, 2**32 - 1, 2**32, 1.5, "0", None, rng.randrange(3000)])
        else:
            entry[0] = rng.choice(STRINGS)
        return to_bytes(root), f"change the vocabulary: {shown(entry)}"
    if kind == 8 and isinstance(merges, list) and merges:
        index = rng.randrange(len(merges))
        merges[index] = rng.choice(["", " ", "a", "a b c", ["a"], ["a", "b", "c"], [1, 2], ["zz", "zz"], None])
        return to_bytes(root), f"set merge {index} to {shown(merges[index])}"
    return tree_bytes(rng, root)

"""Writes a checkpoint whose answers follow scripts, so that the outcome of a test does not depend on a model.

The program under test loads the checkpoint like any other. A script has the form

    {"when": "What is the weather?", "play": "<|channel|>final<|message|>It is sunny.<|return|>"}

`when` is a text in the prompt. If several scripts match, the one whose text occurs last in the prompt plays. `play` is
the answer in harmony. A prompt without a match gets an empty answer.

The checkpoint is a Llama model with one layer, the demo's tokenizer and one more token for each `when`.

- Every token has a code: a word of the Reed-Muller code RM(2, 4), scaled to length 1. The dot product of two different
  codes is at most 0.5. There are 2,048 codes.
- Five attention heads copy the codes of earlier tokens into the residual stream, each from a fixed distance. Their
  queries are rotated so that the sum of RoPE's cosines is largest at this distance.
- One head copies the code of the last `when` token. Its score decreases slowly with the distance.
- Each MLP unit recognizes one `when` token, the current token and the tokens at these distances, and adds the code of the
  next token.
- Units that recognize more tokens add larger codes, so that the longest match wins.
"""

import json
import math
import struct
import subprocess
from array import array
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "assets/demo"
NAME = "test/scripted"  # the path below the folder of the server, which is also the model's name for clients
CONTEXT = 32768
CODES = 2048
CODE = 16  # length of a code, and the head size
# The tokens that an MLP unit recognizes. More heads would make long prompts slow.
DISTANCES = (0, 1, 2, 4, 7, 30)
HEADS = len(DISTANCES)  # all distances except 0, and one head for the `when` token
PAIRS = CODE // 2  # RoPE's frequencies; the last one measures the distance of `when` tokens
# The slowest frequency turns by 1/8 of a circle over the context.
ROPE_THETA = (CONTEXT / (math.pi / 4)) ** (PAIRS / (PAIRS - 1))

# The parts of the residual stream. The first slots have the codes of the tokens at DISTANCES.
WHEN_SLOT = HEADS
NEXT_SLOT = HEADS + 1
ONE = CODE * (NEXT_SLOT + 1)  # always 1
IS_WHEN = ONE + 1
IS_NOT_WHEN = ONE + 2
HIDDEN = ONE + 16

SHARPNESS = 500.0  # of the heads that copy previous tokens
RECENCY = 2e6  # of the head that copies the last `when` token
GATE = 200.0  # of the MLP units


def write(folder, program, scripts):
    """Writes a checkpoint to `folder / NAME`. `program` tokenizes the scripts."""
    folder = Path(folder) / NAME
    folder.mkdir(parents=True)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    first = 1 + max(max(ids.values()), max(tokenizer["model"]["vocab"].values()))
    whens = {script["when"]: first + index for index, script in enumerate(scripts)}
    assert len(whens) == len(scripts), "two scripts have the same `when`"
    assert first + len(whens) <= CODES, f"there are {len(whens)} scripts: the limit is {CODES - first}"
    tokenizer["added_tokens"] += [
        {"id": id, "content": when, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": False}
        for when, id in whens.items()
    ]  # fmt: skip
    answers = tokenize(folder, program, [script["play"] for script in scripts], ids["<|endoftext|>"])
    start = tokenize(folder, program, ["<|start|>assistant"], ids["<|endoftext|>"])[0]
    units = []
    for when, answer in zip(whens.values(), answers):
        assert answer[-1] in (ids["<|return|>"], ids["<|call|>"]), "a script must end with <|return|> or <|call|>"
        units += memorize(when, start, answer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for file in ("tokenizer_config.json", "generation_config.json"):
        (folder / file).write_text((DEMO / file).read_text())
    (folder / "config.json").write_text(json.dumps(config(len(units))))
    save(folder / "model.safetensors", tensors(units, set(whens.values()), ids["<|return|>"]))


def tokenize(folder, program, texts, separator):
    """Returns the token ids of texts that contain control tokens."""
    path = folder / "texts"
    path.write_text("<|endoftext|>".join(texts))
    command = [program, "tokenize", DEMO, "--json", "--file", path]
    ids = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["ids"]
    path.unlink()
    parts = [[]]
    for id in ids:
        if id == separator:
            parts.append([])
        else:
            parts[-1].append(id)
    return parts


def memorize(when, start, answer):
    """Returns the MLP units for one script: the `when` token, the tokens at DISTANCES and the next token."""
    tokens, units = list(start), {}
    for id in answer:
        seen = tuple(tokens[-1 - distance] for distance in DISTANCES if distance < len(tokens))
        assert units.setdefault(seen, id) == id, f"the same tokens have different successors: {seen} in {answer}"
        tokens.append(id)
    return [(when, seen, id) for seen, id in units.items()]


def config(units):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": CODES,
        "hidden_size": HIDDEN,
        "intermediate_size": units,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": CODE,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def code(id):
    """Returns the code of a token: the values of a quadratic polynomial in four bits, whose coefficients are `id`."""
    value = []
    for point in range(CODE):
        bits = [point >> shift & 1 for shift in range(4)]
        terms = [1, *bits, *(bits[i] & bits[j] for i in range(4) for j in range(i))]
        parity = sum(term for index, term in enumerate(terms) if id >> index & 1) & 1
        value.append((1 - 2 * parity) / math.sqrt(CODE))
    return value


class Matrix:
    """A matrix of f32, initially zero."""

    def __init__(self, rows, columns):
        self.shape = [rows, columns]
        self.values = array("f", bytes(4 * rows * columns))

    def set(self, row, column, *values):
        at = row * self.shape[1] + column
        self.values[at : at + len(values)] = array("f", values)


def norm(length):
    """Returns the weights of an RMS norm that leaves vectors of this length unchanged."""
    weights = Matrix(1, HIDDEN)
    weights.set(0, 0, *[length / math.sqrt(HIDDEN)] * HIDDEN)
    weights.shape = [HIDDEN]
    return weights


def tensors(units, whens, end):
    codes = [code(id) for id in range(CODES)]
    embed, head = Matrix(CODES, HIDDEN), Matrix(CODES, HIDDEN)
    for id in range(CODES):
        embed.set(id, 0, *codes[id])
        embed.set(id, ONE, 1.0)
        embed.set(id, IS_WHEN if id in whens else IS_NOT_WHEN, 1.0)
        head.set(id, CODE * NEXT_SLOT, *(20 * value for value in codes[id]))
    head.set(end, ONE, 1.0)  # the choice if no unit recognizes the last tokens

    q, k, v, o = (Matrix(HEADS * CODE, HIDDEN), Matrix(CODE, HIDDEN), Matrix(CODE, HIDDEN), Matrix(HIDDEN, HEADS * CODE))
    scale = math.sqrt(CODE)
    for pair in range(PAIRS):
        frequency = ROPE_THETA ** (-pair / PAIRS)
        is_slowest = pair == PAIRS - 1
        k.set(pair, IS_WHEN if is_slowest else ONE, 1.0)
        for attention_head in range(HEADS):
            is_when_head = attention_head == HEADS - 1
            if is_slowest != is_when_head:
                continue
            # The score at a distance of d tokens is the cosine of angle + d * frequency.
            angle = math.pi / 8 if is_when_head else -DISTANCES[attention_head + 1] * frequency
            size = scale * (RECENCY if is_when_head else SHARPNESS)
            q.set(attention_head * CODE + pair, ONE, size * math.cos(angle))
            q.set(attention_head * CODE + pair + PAIRS, ONE, size * math.sin(angle))
    for index in range(CODE):
        v.set(index, index, 1.0)
    for attention_head in range(HEADS):
        slot = attention_head + 1
        for index in range(CODE):
            o.set(CODE * slot + index, CODE * attention_head + index, 1.0)

    gate, up, down = Matrix(len(units), HIDDEN), Matrix(len(units), HIDDEN), Matrix(HIDDEN, len(units))
    for unit, (when, seen, following) in enumerate(units):
        gate.set(unit, CODE * WHEN_SLOT, *(GATE * value for value in codes[when]))
        for slot, id in enumerate(seen):
            gate.set(unit, CODE * slot, *(GATE * value for value in codes[id]))
        # A match of all codes gives GATE / 4, and any other input at most -GATE / 4.
        gate.set(unit, ONE, -GATE * (len(seen) + 1 - 0.25))
        up.set(unit, ONE, 4 / GATE)
        for index, value in enumerate(codes[following]):
            down.set(CODE * NEXT_SLOT + index, unit, value * 4 ** len(seen))
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": embed,
        layer + "input_layernorm.weight": norm(math.sqrt(3)),
        layer + "self_attn.q_proj.weight": q,
        layer + "self_attn.k_proj.weight": k,
        layer + "self_attn.v_proj.weight": v,
        layer + "self_attn.o_proj.weight": o,
        layer + "post_attention_layernorm.weight": norm(math.sqrt(3 + HEADS)),
        layer + "mlp.gate_proj.weight": gate,
        layer + "mlp.up_proj.weight": up,
        layer + "mlp.down_proj.weight": down,
        "model.norm.weight": norm(math.sqrt(HIDDEN)),
        "lm_head.weight": head,
    }


def save(path, tensors):
    """Writes a safetensors file."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        size = 4 * len(tensor.values)
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors.values():
            tensor.values.tofile(file)

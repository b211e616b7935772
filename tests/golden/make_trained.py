#!/usr/bin/env python3
"""Writes tests/golden/trained: a small trained Llama, and values that show how quantization affects its perplexity.

    python tests/golden/make_trained.py train                  # trains the model; takes a few minutes on two cores
    python tests/golden/make_trained.py measure GGML           # writes golden.safetensors

Requires torch, transformers, tokenizers, gguf, numpy and a C compiler. GGML is a folder with the sources of ggml-org/ggml.
The model is trained on the prose of this repository. Every 30th paragraph is held out; text.txt contains the start of the
held-out text. Rows have 256 elements, because the K types require that. Unlike in the other golden checkpoints, some sizes
are equal. This keeps all files together below 2 MB.

transformers computes the tensors in golden.safetensors from these files, in float32:

    ids             I64 [T]      the tokens of text.txt
    positions       I64 [P]      the positions that have logits
    logits          F32 [P, V]   the logits at those positions
    nll             F32 [T-1]    the negative log-likelihood of each token except the first
    TYPE.nll        F32 [T-1]    the same, after all matrices were quantized and dequantized
    TYPE.kl         F32 [T]      the KL divergence from the unquantized distribution
    TYPE.values     I64 [1]      a digest of the dequantized matrices, in name order

TYPE is a value of `--quantize`. ggml quantizes the weights (`ggml_quantize_chunk`, without an importance matrix), and the
gguf package dequantizes them. The gguf package can also quantize to some of the types. The script fails if the results
differ from ggml's. int8 and fp8 have one scale per row: the largest magnitude divided by 127 or 448. Their codes are
rounded half to even.
"""

import ctypes
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import tokenizers
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
OUT = ROOT / "tests" / "golden" / "trained"
import make

SEED = 20261122
SIZES = SimpleNamespace(C=256, F=256, L=2, H=4, K=1, D=64, V=311)
TOKENS = 1000  # of text.txt
POSITIONS = 40  # number of positions with logits
STEPS, BATCH, LENGTH, RATE = 900, 8, 1024, 3e-3
END = "<|endoftext|>"
TYPES = ("q8_0", "int8", "fp8", "q6_k", "q5_1", "q5_k", "q5_0", "q4_1", "q4_k", "q4_0", "q3_k", "q2_k")

# ------------------------------------------------------------------------------------------------------------------ training


def strings(value):
    """Yields all strings in a TOML value."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def paragraphs():
    """Yields the prose of the repository: the demo's questions and answers, documentation and code comments."""
    for name in ("using", "concepts", "talk"):
        for intent in tomllib.loads((ROOT / f"scripts/demo/data/{name}.toml").read_text())["intent"]:
            yield "\n".join(strings({key: intent[key] for key in ("ask", "answer") if key in intent}))
    for name in ("README.md", "scripts/demo/README.md", "tests/golden/README.md"):
        yield from (part.strip() for part in (ROOT / name).read_text().split("\n\n"))
    for path in sorted((ROOT / "src").rglob("*.rs")):
        lines = re.findall(r"^ *//[/!]? ?(.*)", path.read_text(), re.MULTILINE)
        yield from (part.strip() for part in "\n".join(lines).split("\n\n") if part.strip())


def make_tokenizer(texts):
    """Trains a byte-level BPE tokenizer on the texts."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=SIZES.V,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == SIZES.V
    return tokenizer


def config():
    s = SIZES
    rest = {"num_key_value_heads": s.K, "head_dim": s.D, "rms_norm_eps": 1e-5, "max_position_embeddings": LENGTH}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return make.llama_config(
        s, **rest, **ids, rope_theta=10000.0, tie_word_embeddings=True, attention_bias=False, mlp_bias=False, torch_dtype="bfloat16"
    )


def train():
    torch.manual_seed(SEED)
    texts = list(paragraphs())
    held_out, trained_on = texts[::30], [text for at, text in enumerate(texts) if at % 30]
    tokenizer = make_tokenizer(trained_on)
    encode = lambda texts: [id for text in texts for id in [*tokenizer.encode(text).ids, 0]]
    ids, left = torch.tensor(encode(trained_on)), encode(held_out)
    assert len(left) >= TOKENS, len(left)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(LlamaConfig(**config())).to(device)
    print(f"{len(ids)} tokens, {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    for step in range(STEPS):
        share = min((step + 1) / 30, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = RATE * share
        starts = torch.randint(0, len(ids) - LENGTH, (BATCH,))
        batch = torch.stack([ids[start : start + LENGTH] for start in starts]).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    weights = {name: tensor.detach().cpu().bfloat16() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    make.write_checkpoint(OUT, config(), weights, ["model.safetensors"])
    tokenizer.save(str(OUT / "tokenizer.json"), pretty=False)
    # Keep the first TOKENS tokens of the text.
    text = "\n\n".join(held_out)
    shown = tokenizer.encode(text)
    text = text[: shown.offsets[TOKENS - 1][1]]
    (OUT / "text.txt").write_text(text)
    assert len(tokenizer.encode(text).ids) == TOKENS
    facts = {"steps": STEPS, "batch": BATCH, "length": LENGTH, "rate": RATE, "tokens": len(ids), "last_loss": loss.item()}
    facts |= {"device": device, "torch": torch.__version__, "transformers": make.VERSIONS["transformers"]}
    facts["text_sha256"] = hashlib.sha256("\n\n".join(trained_on).encode()).hexdigest()
    (OUT / "provenance.json").write_text(json.dumps({"training": facts}, indent=1) + "\n")


# ----------------------------------------------------------------------------------------------------------------- measuring


def ggml_quantizer(sources):
    """Compiles ggml's quantizers. Returns a function that quantizes a float32 matrix [rows, columns] to blocks."""
    folder = Path(tempfile.mkdtemp())
    # Write stubs for ggml functions that the sources refer to. Quantization calls only two of them, which start and end
    # a critical section. They need not lock, because this script quantizes in one thread.
    stubs = ["ggml_critical_section_start", "ggml_critical_section_end", "ggml_backend_tensor_set"]
    stubs += ["ggml_backend_tensor_memset", "ggml_backend_buffer_get_usage"]
    (folder / "stubs.c").write_text("".join(f"void {name}(void) {{}}\n" for name in stubs))
    paths = [folder / "stubs.c", sources / "src/ggml.c", sources / "src/ggml-quants.c"]
    flags = ["-O2", "-shared", "-fPIC", "-D_GNU_SOURCE", '-DGGML_VERSION=""', '-DGGML_COMMIT=""']
    include = [f"-I{sources / name}" for name in ("include", "src")]
    subprocess.run(["cc", *flags, *include, *paths, "-o", folder / "ggml.so", "-lm"], check=True)
    library = ctypes.CDLL(str(folder / "ggml.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def quantize(kind, weight):
        weight = np.ascontiguousarray(weight, dtype=np.float32)
        rows, columns = weight.shape
        length, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.empty((rows, columns // length * size), dtype=np.uint8)
        pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)
        counts = [ctypes.c_int64(count) for count in (0, rows, columns)]
        written = library.ggml_quantize_chunk(int(kind), pointer(weight), pointer(blocks), *counts, None)
        assert written == blocks.nbytes
        return blocks

    return quantize


def blockwise(ggml, name, weight):
    """Quantizes and dequantizes a matrix. Checks that ggml and gguf produce the same blocks."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    blocks = ggml(kind, weight)
    try:
        other = gguf.quants.quantize(weight, kind)
    except NotImplementedError:
        assert name.endswith("_k"), name
    else:
        assert np.array_equal(blocks, other), f"{name}: ggml and gguf differ"
    return gguf.quants.dequantize(blocks, kind)


def rowwise(name, weight):
    """Quantizes a matrix to 8-bit codes with one scale per row and dequantizes it."""
    weight = torch.from_numpy(weight)
    largest = weight.abs().amax(1, keepdim=True)
    if name == "int8":
        return (torch.round(weight / (largest / 127)).to(torch.int8).float() * (largest / 127)).numpy()
    return ((weight / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448)).numpy()


def update_digest(digest, values):
    """Returns the updated digest: digest · 0x100000001B3 + bits (mod 2^64) for the bits of each value."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4").ravel().astype(np.uint64)
    powers = np.full(len(bits), 0x100000001B3, dtype=np.uint64)
    powers[-1] = 1
    powers = np.cumprod(powers[::-1], dtype=np.uint64)[::-1]
    return (digest * pow(0x100000001B3, len(bits), 2**64) + int((bits * powers).sum(dtype=np.uint64))) % 2**64


@torch.no_grad()
def log_probabilities(model, ids):
    return model(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)


def nll(logs, ids):
    return -logs[:-1].gather(1, ids[1:, None])[:, 0]


def measure(sources):
    torch.set_num_threads(1)
    ggml = ggml_quantizer(sources)
    tokenizer = Tokenizer.from_file(str(OUT / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode((OUT / "text.txt").read_text()).ids)
    assert len(ids) == TOKENS
    load = lambda dtype: AutoModelForCausalLM.from_pretrained(OUT, dtype=dtype, attn_implementation="eager").eval()
    model = load(torch.float32)
    plain = log_probabilities(model, ids)
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        exact = load(torch.float64)(input_ids=ids[None], use_cache=False).logits[0]
    positions = torch.linspace(0, TOKENS - 1, POSITIONS).long()
    golden = {"ids": ids, "positions": positions, "logits": logits[positions], "nll": nll(plain, ids).float()}
    facts = {"plain": {"perplexity": float(nll(plain, ids).mean().exp()), "float64_relative_error": make.relative(logits, exact)}}
    matrices = {name: p for name, p in sorted(model.named_parameters()) if p.dim() == 2}
    originals = {name: p.detach().clone() for name, p in matrices.items()}
    for name in TYPES:
        digest = 0
        for matrix, weight in originals.items():
            weight = weight.numpy()
            values = rowwise(name, weight) if name in ("int8", "fp8") else blockwise(ggml, name, weight)
            digest = update_digest(digest, values)
            matrices[matrix].data.copy_(torch.from_numpy(values))
        logs = log_probabilities(model, ids)
        kl = (plain.exp() * (plain - logs)).sum(-1)
        golden |= {f"{name}.nll": nll(logs, ids).float(), f"{name}.kl": kl.float()}
        golden[f"{name}.values"] = torch.from_numpy(np.array([digest], dtype=np.uint64).view(np.int64))
        facts[name] = {"perplexity": float(nll(logs, ids).mean().exp()), "mean_kl": float(kl.mean())}
        print(name, facts[name], flush=True)
    metadata = {**make.VERSIONS, "gguf": version("gguf"), "compute": "float32, eager attention, cpu, no cache"}
    make.write_safetensors(golden, OUT / "golden.safetensors", metadata)
    provenance = json.loads((OUT / "provenance.json").read_text())
    sums = lambda paths: {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    files = sorted(path for path in OUT.iterdir() if path.name != "provenance.json")
    ggml_files = [sources / "src" / name for name in ("ggml.c", "ggml-quants.c", "ggml-common.h")]
    made = {**metadata, "measured": facts, "sha256": sums(files), "ggml_sha256": sums(ggml_files)}
    (OUT / "provenance.json").write_text(json.dumps({"training": provenance["training"], **made}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train()
    else:
        measure(Path(sys.argv[2]))

"""The small models that run.py mutates."""

import json
import shutil
from pathlib import Path

from gguf_files import Gguf
from templates import CHATML

ROOT = Path(__file__).resolve().parents[2]


def make_models(folder):
    """Writes each model, without mutations, to a subfolder of `folder`. Returns the names of the models."""
    golden = ROOT / "tests/golden"

    def copy(name, source):
        shutil.copytree(source, folder / name,
                        ignore=shutil.ignore_patterns("golden.safetensors", "provenance.json", "text.txt"))
        return folder / name

    copy("demo", ROOT / "assets/demo")
    # Without the token <|start|>, inferno uses chat_template.jinja instead of the harmony format.
    demo = copy("template", ROOT / "assets/demo")
    text = (demo / "tokenizer.json").read_text()
    (demo / "tokenizer.json").write_text(text.replace("<|start|>", "<|begin|>"))
    (demo / "chat_template.jinja").write_text(CHATML)
    copy("trained", golden / "trained")
    chat = copy("chat", golden / "trained")
    (chat / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>", "chat_template": CHATML}))
    for name in ["gpt_oss", "llama3", "gemma3", "qwen3_moe", "phi4", "gpt2", "mixtral", "compressed/int8_packed",
                 "compressed/fp8"]:
        model = copy(name.replace("/", "_"), golden / name)
        size = json.loads((model / "config.json").read_text())["vocab_size"]
        (model / "tokenizer.json").write_text(json.dumps(small_tokenizer(size)))
    for name in ["llama", "gpt_oss", "qwen3_moe", "gemma3"]:
        file = Gguf((golden / "gguf_quantized" / f"{name}.gguf").read_bytes())
        add_vocabulary(file)
        (folder / f"gguf_{name}").mkdir()
        (folder / f"gguf_{name}" / "model.gguf").write_bytes(file.bytes())
    return sorted(path.name for path in folder.iterdir())


def small_tokenizer(size):
    """Returns the tokenizer of tests/golden/trained, cut to `size` tokens.

    Cuts `<|endoftext|>`, the lowercase letters and a few other tokens last.
    """
    tokenizer = json.loads((ROOT / "tests/golden/trained/tokenizer.json").read_text())
    model = tokenizer["model"]
    first = {token: index for index, token in enumerate(["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz.Ġ", "in", "th"])}
    tokens = sorted(model["vocab"], key=lambda token: (first.get(token, len(first)), model["vocab"][token]))
    model["vocab"] = {token: index for index, token in enumerate(tokens[:size])}
    parts = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    model["merges"] = [part for part in parts if all(text in model["vocab"] for text in [*part, "".join(part)])]
    return tokenizer


def add_vocabulary(file):
    """Adds a vocabulary and a chat template to a GGUF file."""
    embedding = next(dims for name, dims, _, _ in file.tensors if name == b"token_embd.weight")
    model = small_tokenizer(embedding[1])["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens += [f"<unused{index}>" for index in range(embedding[1] - len(tokens))]
    file.put("tokenizer.ggml.model", 8, b"gpt2")
    file.put("tokenizer.ggml.pre", 8, b"gpt-2")
    file.put("tokenizer.ggml.tokens", 9, [8, [token.encode() for token in tokens], 0])
    file.put("tokenizer.ggml.token_type", 9, [5, [3 if token.startswith("<|") else 1 for token in tokens], 0])
    file.put("tokenizer.ggml.merges", 9, [8, [" ".join(merge).encode() for merge in model["merges"]], 0])
    file.put("tokenizer.ggml.eos_token_id", 4, 0)
    file.put("tokenizer.chat_template", 8, CHATML.encode())

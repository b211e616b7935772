"""Copies a model to a home folder, and chooses a random command that reads the copy."""

import hashlib
import shutil

from folders import COMMIT, files_of
from json_values import to_bytes

PROMPTS = ["hi", "hi", "hello <|end|> world", "é世界🦀\u0301\ufdd0", "a" * 5000, "{{ messages }}", " "]
CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "hi <|end|><|start|>system"},
     {"role": "assistant", "content": "yes"},
     {"role": "user", "content": [{"type": "text", "text": "more"}]}],
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"}],
     "tools": [{"type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}]},
]


def lay_out(rng, source, home):
    """Copies a model to a home folder or to the cache in it.

    Returns the folder of the copy, the names that select the model on the command line,
    and the cached repository or None.
    """
    if rng.randrange(3) > 0:
        folder = home / "model"
        shutil.copytree(source, folder)
        file = folder / "model.gguf"
        return folder, [str(file if file.exists() and rng.randrange(2) else folder)], None
    repo = home / "models" / "models--stranger--model"
    folder = repo / "snapshots" / COMMIT
    shutil.copytree(source, folder)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    if rng.randrange(2):
        for path in files_of(folder):
            blob = repo / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            path.rename(blob)
            path.symlink_to(f"../../blobs/{blob.name}")
    return folder, ["stranger/model", "model"], repo


def command_of(rng, name, home, names, repo):
    """Returns the arguments of a random command for the model `name`.

    If the command reads a text or a chat, writes it to a file in `home`.
    """
    model, prompt = rng.choice(names), rng.choice(PROMPTS)
    cpu = ["--device", "cpu"]
    can_chat = name in ("demo", "template", "chat") or name.startswith("gguf")
    kind = rng.randrange(20)
    if repo is not None and kind < 6:
        return rng.choice([["list"], ["list", "--json"], ["list", "--sort", "params"], ["verify"],
                           ["verify", "stranger/model"]])
    if kind < 9:
        more = rng.choice([[], [], ["--json"], ["--context", "64"], ["--quantize", "q8_0"],
                           ["--temperature", "1", "--seed", "1"]])
        raw = ["--raw"] if rng.randrange(4) == 0 or not can_chat else []
        return ["play", model, *cpu, "--max-tokens", "2", "--prompt", prompt, *raw, *more]
    if kind < 13:
        (home / "text.txt").write_text(rng.choice(["a b", "The quick brown fox jumps over the lazy dog. " * 8]))
        more = rng.choice([[], [], ["--json"], ["--context", "16"],
                           ["--quantize", rng.choice(["fp8", "int8", "q4_k"]), "--kl"]])
        return ["perplexity", model, *cpu, "--file", str(home / "text.txt"), *more]
    if kind < 16:
        return ["show", model, *rng.choice([[], ["--json"], ["--context", "16"]])]
    if kind < 18 and can_chat:
        (home / "chat.json").write_bytes(to_bytes(rng.choice(CHATS)))
        return ["tokenize", model, "--chat", str(home / "chat.json"), *rng.choice([[], ["--json"]])]
    return ["tokenize", model, prompt, *rng.choice([[], ["--json"]])]

"""Mutations of the files in a model's folder, and of the model cache that contains the folder."""

import os
import shutil
import struct

from gguf_files import mutate_gguf
from json_files import mutate_config, mutate_json, mutate_tokenizer
from json_values import PATHS, STRANGE, Pairs, hostile, shown, to_bytes
from raw_bytes import mutate_bytes
from safetensors_files import mutate_safetensors
from templates import TEMPLATES, mutate_template

COMMIT = "0123456789012345678901234567890123456789"
# How often `mutate` chooses these files, as relative weights. All other files have weight 2.
WEIGHTS = {"config.json": 6, "tokenizer.json": 6, "chat_template.jinja": 5, "model.safetensors": 6, "model.gguf": 14}


def mutate(rng, folder):
    """Applies one mutation to the model in a folder. Returns a description of the mutation."""
    files = files_of(folder)
    if not files:
        write_new(folder / "config.json", b"{}")
        return "add a config.json with an empty object"
    path = rng.choices(files, [WEIGHTS.get(path.name, 2) for path in files])[0]
    if rng.randrange(8) == 0 or not is_plain(folder, path):
        return mutate_file_system(rng, folder, path)
    data = path.read_bytes()
    mutator = mutate_bytes if rng.randrange(8) == 0 else mutator_of(path)
    try:
        changed, description = mutator(rng, data)
    except (ValueError, ArithmeticError, RecursionError, LookupError, TypeError, AttributeError, struct.error):
        # The mutator failed, usually because an earlier mutation made the file invalid. Change bytes instead.
        changed, description = mutate_bytes(rng, data)
    path.write_bytes(changed)
    return f"{path.name}: {description}"


def mutator_of(path):
    if path.suffix == ".gguf":
        return mutate_gguf
    if path.suffix == ".safetensors":
        return mutate_safetensors
    if path.suffix == ".jinja":
        return mutate_template
    return {"config.json": mutate_config, "tokenizer.json": mutate_tokenizer}.get(path.name, mutate_json)


def mutate_file_system(rng, folder, path):
    """Replaces, adds or deletes a file, or removes its permissions. Returns a description of the change."""
    kind = rng.randrange(13)
    if kind < 4 or leads_outside(folder, path):
        remove(path)
    if kind == 0:
        os.mkfifo(path)
        return f"{path.name}: replace with a named pipe"
    if kind == 1:
        path.mkdir()
        return f"{path.name}: replace with a folder"
    if kind == 2:
        target = rng.choice(["/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem", "/proc/version", path.name,
                             "absent", "."])
        path.symlink_to(target)
        return f"{path.name}: replace with a link to {target}"
    if kind == 3:
        with path.open("wb") as file:
            file.truncate(rng.choice([1, 1_000_001, 200_000_000, 2**40]))
        return f"{path.name}: replace with zeros"
    if kind == 4 and path.exists():
        path.chmod(0)
        return f"{path.name}: remove all permissions"
    if kind == 5:
        name = rng.choice(["x\x1b[2J.gguf", "model-00002-of-00003.gguf", "mmproj.gguf", "y" * 200 + ".gguf",
                           "\u202egguf.safetensors"])
        write_new(folder / name, rng.choice([b"", b"GGUF", bytes(100)]))
        return f"add {shown(name)}"
    if kind == 6:
        weight_map = {"a": rng.choice(["model.safetensors", *PATHS]), rng.choice(["b", STRANGE]): "model.safetensors"}
        index = rng.choice([{"weight_map": weight_map}, {"weight_map": {}}, {"weight_map": [1]}, {}])
        write_new(folder / "model.safetensors.index.json", to_bytes(index))
        return f"add the index {shown(index)}"
    if kind == 7:
        template = rng.choice(TEMPLATES)
        write_new(folder / "chat_template.jinja", template.encode())
        return f"add the template {shown(template)}"
    if kind == 8:
        name = rng.choice(["generation_config.json", "special_tokens_map.json", "tokenizer_config.json",
                           "added_tokens.json"])
        keys = ["temperature", "top_k", "top_p", "eos_token_id", "bos_token", "chat_template", "repetition_penalty",
                "min_p"]
        values = Pairs([rng.choice(keys), hostile(rng)] for _ in range(3))
        write_new(folder / name, to_bytes(values))
        return f"{name}: {shown(values)}"
    if kind == 9:
        other = rng.choice(files_of(folder) or [path])
        data = other.read_bytes() if is_plain(folder, other) else b""
        write_new(path, data)
        return f"{path.name}: replace with the contents of {other.name}"
    remove(path)
    return f"delete {path.name}"


def mutate_cache(rng, repo):
    """Changes the refs or snapshots of a cached repository. Returns a description of the change."""
    kind = rng.randrange(5)
    if kind == 0:
        text = rng.choice(["", COMMIT[:7], COMMIT[::-1], "../../..", STRANGE, "f" * 100_000, COMMIT + "\n"])
        (repo / "refs" / "main").write_text(text)
        return f"refs/main: {shown(text)}"
    if kind == 1:
        name = rng.choice(["x\x1b[2J", "v1", "y" * 200])
        (repo / "refs" / name).write_text(COMMIT)
        return f"add the ref {shown(name)}"
    if kind == 2:
        (repo / "snapshots" / rng.choice(["f" * 40, "x", "main"])).mkdir(exist_ok=True)
        return "add an empty snapshot"
    if kind == 3:
        shutil.rmtree(repo / "refs")
        return "delete refs"
    folder = repo / "snapshots" / COMMIT / rng.choice(["a", "x\x1b[2J"]) / "b"
    folder.mkdir(parents=True)
    (folder / "c\n").symlink_to(rng.choice(["../../..", "c\n", "/dev/zero", "../../../../blobs"]))
    return "add a folder with a link"


def leads_outside(folder, path):
    """Returns whether a path leads outside the home folder, where the script must not write, or is a link to itself."""
    home = next(parent for parent in folder.parents if parent.name == "home")
    try:
        return not path.resolve().is_relative_to(home)
    except (OSError, RuntimeError):
        return True # a link to itself


def is_plain(folder, path):
    """Returns whether a path is a regular file in the home folder, under 50 MB, that the script can read and write."""
    if leads_outside(folder, path) or not path.is_file() or path.stat().st_size >= 50_000_000:
        return False
    return os.access(path, os.R_OK | os.W_OK)


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_new(path, data):
    """Creates or replaces a file.

    Removes an old file first. Otherwise, writing would follow a link, and would wait for the reader of a pipe.
    """
    remove(path)
    path.write_bytes(data)


def files_of(folder):
    return sorted(path for path in folder.iterdir() if path.is_symlink() or not path.is_dir())

"""Parses, mutates and writes GGUF files."""

import struct

from json_files import MODEL_TYPES
from json_values import STRANGE, shown
from raw_bytes import mutate_bytes
from templates import TEMPLATES

# The format character of `struct` for each GGUF value type, except 8 (a string) and 9 (an array).
GGUF_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
GGUF_KEYS = ["general.architecture", "general.alignment", "tokenizer.ggml.model", "tokenizer.chat_template",
             "split.count", "split.no",
             "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token", "llama.rope.scaling.type",
             "general.file_type"]


class Gguf:
    """A parsed GGUF file. Its counts, metadata and tensor table can be set to invalid values and written back."""

    def __init__(self, data):
        self.data, self.at = data, 0
        magic, self.version, tensors, pairs = struct.unpack("<4sIQQ", self.take(24))
        if magic != b"GGUF":
            raise ValueError("no GGUF file")
        self.magic, self.count_change, self.pair_count_change = magic, 0, 0
        self.pairs = [[self.string(), *self.value()] for _ in range(self.checked(pairs))]
        self.tensors = [self.tensor() for _ in range(self.checked(tensors))]
        self.alignment = 32
        self.body = data[-(-self.at // self.alignment) * self.alignment :]

    def checked(self, count):
        if count > len(self.data):
            raise ValueError(f"the file declares {count} items, but has only {len(self.data)} bytes")
        return count

    def take(self, count):
        if self.at + count > len(self.data):
            raise ValueError("the file is too short")
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, form):
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def string(self):
        return self.take(self.unpack("Q"))

    def value(self, kind=None):
        kind = self.unpack("I") if kind is None else kind
        if kind == 8:
            return kind, self.string()
        if kind == 9:
            inner, count = self.unpack("I"), self.checked(self.unpack("Q"))
            return kind, [inner, [self.value(inner)[1] for _ in range(count)], 0]
        return kind, self.unpack(GGUF_FORMATS[kind]) if kind in GGUF_FORMATS else self.take(0)

    def tensor(self):
        name, rank = self.string(), self.checked(self.unpack("I"))
        return [name, [self.unpack("Q") for _ in range(rank)], self.unpack("I"), self.unpack("Q")]

    def get(self, key):
        return next((pair[2] for pair in self.pairs if pair[0] == key.encode()), None)

    def put(self, key, kind, value):
        self.pairs = [pair for pair in self.pairs if pair[0] != key.encode()] + [[key.encode(), kind, value]]

    @staticmethod
    def packed_string(text):
        return struct.pack("<Q", len(text)) + text

    def packed(self, kind, value):
        """Returns a value as GGUF bytes, even if the value does not match the type `kind`."""
        if kind == 9 and isinstance(value, list):
            inner, items, extra = value
            head = struct.pack("<IQ", inner & 0xFFFFFFFF, (len(items) + extra) % 2**64)
            return head + b"".join(self.packed(inner, item) for item in items)
        if isinstance(value, bytes):
            return self.packed_string(value)
        if kind not in GGUF_FORMATS or isinstance(value, list):
            return bytes(8)
        form = GGUF_FORMATS[kind]
        if form in "fd":
            try:
                return struct.pack("<" + form, value)
            except OverflowError:
                return struct.pack("<" + form, float("inf"))
        size = struct.calcsize(form)
        finite = isinstance(value, int) or abs(value) < 2**64  # False for NaN
        return (int(value) % 2 ** (8 * size) if finite else 0).to_bytes(size, "little")

    def bytes(self):
        counts = (len(self.tensors) + self.count_change) % 2**64, (len(self.pairs) + self.pair_count_change) % 2**64
        out = struct.pack("<4sIQQ", self.magic, self.version, *counts)
        for key, kind, value in self.pairs:
            out += self.packed_string(key) + struct.pack("<I", kind) + self.packed(kind, value)
        for name, dims, kind, offset in self.tensors:
            out += self.packed_string(name) + struct.pack("<I", len(dims))
            out += b"".join(struct.pack("<Q", dim % 2**64) for dim in dims) + struct.pack("<IQ", kind, offset % 2**64)
        return out + bytes(-len(out) % self.alignment) + self.body


def mutate_gguf(rng, data):
    file = Gguf(data)
    kind = rng.randrange(16)
    size = rng.choice([0, 1, 2, 3, 5, 31, 33, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1])
    if kind == 0:
        file.count_change = rng.choice([-1, 1, 1000, 2**31, 2**63])
        return file.bytes(), f"change the tensor count in the header by {file.count_change}"
    if kind == 1:
        file.pair_count_change = rng.choice([-1, 1, 1000, 2**31, 2**63])
        return file.bytes(), f"change the key count in the header by {file.pair_count_change}"
    if kind == 2:
        file.version, file.magic = rng.choice([(0, b"GGUF"), (1, b"GGUF"), (2, b"GGUF"), (99, b"GGUF"),
                                               (3 << 24, b"GGUF"), (3, b"GGML")])
        return file.bytes(), f"set the version to {file.version} and the magic to {file.magic}"
    if kind == 3:
        return data[: rng.choice([rng.randrange(len(data)), rng.randrange(100)])], "truncate the file"
    if kind == 4:
        key = rng.choice(GGUF_KEYS)
        number_type = rng.choice([0, 4, 5, 6, 7, 10, 12])
        new = rng.choice([(8, rng.choice(MODEL_TYPES).encode()), (8, rng.choice(TEMPLATES).encode()),
                          (number_type, size), (9, [4, [size] * 3, 0])])
        file.put(key, *new)
        return file.bytes(), f"set {key} to {shown(str(new))}"
    if kind < 11 and file.pairs:
        # Choose a random key, not a random byte, so that short values change as often as the long vocabulary arrays.
        pair = rng.choice(file.pairs)
        key, value = pair[0].decode("utf-8", "replace"), pair[2]
        change = rng.randrange(7)
        if change == 0:
            file.pairs.remove(pair)
            return file.bytes(), f"delete {shown(key)}"
        if change == 1:
            file.pairs.append(list(pair))
            return file.bytes(), f"duplicate {shown(key)}"
        if change == 2:
            pair[1] = rng.choice([*range(13), 13, 255, 2**32 - 1])
            return file.bytes(), f"set the type of {shown(key)} to {pair[1]}"
        if change == 3:
            pair[0] = rng.choice([b"", STRANGE.encode(), b"\xff\xfe", b"x" * 70_000, rng.choice(file.pairs)[0]])
            return file.bytes(), f"rename {shown(key)} to {shown(repr(pair[0]))}"
        if isinstance(value, list) and value[1]:
            if change == 4:
                value[2] = rng.choice([-1, 1, 2**31, 2**63])
                return file.bytes(), f"change the length of {shown(key)} by {value[2]}"
            if change == 5:
                value[1] = value[1][: rng.randrange(len(value[1]))]
                return file.bytes(), f"shorten {shown(key)} to {len(value[1])}"
            index = rng.randrange(len(value[1]))
            strings = [b"", b"\xff", STRANGE.encode(), b"<|end|>", b"z" * 70_000, rng.choice(value[1])]
            value[1][index] = rng.choice(strings) if isinstance(value[1][index], bytes) else size
            return file.bytes(), f"set {shown(key)}[{index}] to {shown(repr(value[1][index]))}"
        if isinstance(value, bytes):
            pair[2] = rng.choice([b"", b"\xff\xfe", STRANGE.encode(), b"y" * 100_000, rng.choice(MODEL_TYPES).encode(),
                                  rng.choice(TEMPLATES).encode()])
        elif pair[1] in (6, 12):
            pair[2] = rng.choice([0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf")])
        else:
            pair[2] = size
        return file.bytes(), f"set {shown(key)} to {shown(repr(pair[2]))}"
    if not file.tensors:
        return mutate_bytes(rng, data)
    tensor = rng.choice(file.tensors)
    name, dims = tensor[0].decode("utf-8", "replace"), tensor[1]
    change = rng.randrange(7)
    if change == 0:
        tensor[1] = rng.choice([[], [0], [size], [size, size], [1] * 5, [1] * 1000, dims[::-1], dims + [1],
                                [dims[0] * 2, *dims[1:]]])
        return file.bytes(), f"set the shape of {shown(name)} to {shown(str(tensor[1]))}"
    if change == 1:
        tensor[2] = rng.choice([*range(42), 255, 2**32 - 1])
        return file.bytes(), f"set the type of {shown(name)} to {tensor[2]}"
    if change == 2:
        tensor[3] = rng.choice([size, tensor[3] + 1, tensor[3] + 32, rng.choice(file.tensors)[3]])
        return file.bytes(), f"set the offset of {shown(name)} to {tensor[3]}"
    if change == 3:
        tensor[0] = rng.choice([b"", STRANGE.encode(), b"\xff", b"x" * 70_000, rng.choice(file.tensors)[0],
                                b"blk.99.attn_q.weight", b"blk.0.x"])
        return file.bytes(), f"rename tensor {shown(name)} to {shown(repr(tensor[0]))}"
    if change == 4:
        file.tensors.remove(tensor)
        return file.bytes(), f"delete tensor {shown(name)}"
    if change == 5:
        fill = rng.choice([b"\xff", b"\x7f", b"\x00", b"\x80\x7f"])
        length = min(len(file.body) - tensor[3], 4096)
        file.body = file.body[: tensor[3]] + (fill * length)[:length] + file.body[tensor[3] + length :]
        return file.bytes(), f"fill {shown(name)} with {fill.hex()}"
    file.body = file.body[: rng.randrange(len(file.body) + 1)]
    return file.bytes(), "truncate the data"

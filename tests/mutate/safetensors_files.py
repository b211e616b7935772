"""Mutations of safetensors files."""

import struct

from json_files import mutate_tree
from json_values import STRANGE, get, hostile, parse, put, shown, to_bytes

DTYPES = ["F32", "F16", "BF16", "F64", "U8", "I8", "I32", "I64", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "U16", "", "X",
          STRANGE]


def mutate_safetensors(rng, data):
    (length,) = struct.unpack("<Q", data[:8])
    header, body = parse(data[8 : 8 + length]), data[8 + length :]
    tensors = [pair for pair in header if pair[0] != "__metadata__"]
    pair = rng.choice(tensors)
    name, info = pair
    shape, offsets = get(info, "shape"), get(info, "data_offsets")
    kind = rng.randrange(12)
    if kind == 0:
        return data[: rng.choice([rng.randrange(len(data)), 8 + rng.randrange(length),
                                  rng.randrange(9)])], "truncate the file"
    if kind == 1:
        new = rng.choice([0, 1, 7, length - 1, length + 1, len(data), 10**8 + 1, 2**31, 2**63, 2**64 - 1])
        return struct.pack("<Q", new) + data[8:], f"set the length of the header to {new}"
    if kind == 2:
        start, end = offsets
        fill = rng.choice([b"\xff", b"\x7f", b"\x00", b"\x80\x7f", b"\x80\xff", b"\x7b\x7f"])
        filled = (fill * (end - start))[: end - start]
        return data[: 8 + length + start] + filled + data[8 + length + end :], f"fill {shown(name)} with {fill.hex()}"
    if kind == 3:
        return data + bytes(rng.randrange(1, 100)), "append zeros"
    if kind in (4, 5):
        choices = [[], [0], [1], list(reversed(shape)), [2**63, 2], [2**32, 2**32], [1] * 10_000, [-1], shape + [1],
                   shape[1:], ["4"], [1.5]]
        choices += [[max(0, size + rng.choice([-1, 1])) for size in shape], [size * 2 for size in shape]]
        new = rng.choice(choices)
        put(info, "shape", new)
        description = f"set the shape of {shown(name)} to {shown(new)}"
    elif kind == 6:
        new = rng.choice(DTYPES)
        put(info, "dtype", new)
        description = f"set the dtype of {shown(name)} to {shown(new)}"
    elif kind == 7:
        start, end = offsets
        new = rng.choice([[end, start], [start, start], [start + 1, end + 1], [0, end], [start, 2**63],
                          [2**64 - 2, 2**64 - 1],
                          [-1, end], [start], [start, len(body) + 1], get(rng.choice(tensors)[1], "data_offsets")])
        put(info, "data_offsets", new)
        description = f"set the offsets of {shown(name)} to {shown(new)}"
    elif kind == 8:
        pair[0] = rng.choice(["", STRANGE, "y" * 1000, rng.choice(tensors)[0], name.replace("0", "9"), name + ".x",
                              "model.layers.-1.x"])
        description = f"rename tensor {shown(name)} to {shown(pair[0])}"
    elif kind == 9:
        header.remove(pair)
        description = f"delete tensor {shown(name)}"
    elif kind == 10:
        put(header, "__metadata__", hostile(rng))
        description = f"set the metadata to {shown(get(header, '__metadata__'))}"
    else:
        description = mutate_tree(rng, header)
    changed = to_bytes(header)
    return struct.pack("<Q", len(changed)) + changed + body, description

"""Mutations that work on files of any format."""

from json_values import NUMBERS, shown


def mutate_bytes(rng, data):
    """Applies a random mutation that ignores the format of the file. Returns the new contents and a description."""
    kind = rng.randrange(7)
    if kind == 0 or not data:
        new = rng.choice([b"", b"\0", b"{", b"[]", b"null", b"\xef\xbb\xbf{}", b"\xff\xfe{\0}\0",
                          bytes(range(256)) * 16, b"\n" * 1000])
        return new, f"replace the contents with {len(new)} bytes: {shown(repr(new[:20]))}"
    if kind == 1:
        end = rng.randrange(len(data))
        return data[:end], f"truncate to {end} bytes"
    at = rng.randrange(min(len(data), rng.choice([64, 4096, 10**9])))
    if kind == 2:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :], f"flip a bit of byte {at}"
    if kind == 3:
        new = rng.choice([b"\0", b"\xff", b'"', b"}", b"]", b",", b"\xed\xa0\x80", b"\x1b[2J"])
        return data[:at] + new + data[at:], f"insert {new} at byte {at}"
    if kind == 4:
        end = min(len(data), at + rng.randrange(1, 64))
        return data[:at] + data[end:], f"delete bytes {at}..{end}"
    if kind == 5:
        end = min(len(data), at + rng.randrange(1, 64))
        return data[:end] + data[at:end] * rng.choice([1, 100]) + data[end:], f"repeat bytes {at}..{end}"
    new = rng.choice(NUMBERS[:18]).to_bytes(8, "little")[: rng.choice([1, 2, 4, 8])]
    return data[:at] + new + data[at + len(new) :], f"overwrite bytes {at}..{at + len(new)} with {new.hex()}"

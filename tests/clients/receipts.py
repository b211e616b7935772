"""Verifies the receipts of a server with jwcrypto, a JOSE library that shares no code with inferno.

    receipts.py URL PROGRAM KEY_FILE

The server at URL has no API key. It signs receipts with the private key in KEY_FILE, which jwcrypto created.
PROGRAM verifies a receipt that jwcrypto signs.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from jwcrypto.common import JWException
from jwcrypto.jwk import JWK
from jwcrypto.jws import JWS

URL, PROGRAM, KEY_FILE = sys.argv[1:]
ALGORITHMS = ["EdDSA"]


def send(path, body=None):
    """Sends a request, and returns the response."""
    headers = {"Content-Type": "application/json", "x-request-id": "receipt-1"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request) as response:
        return response.read()


def verify(token, key):
    """Returns the payload of a token, or raises `JWException`."""
    signed = JWS()
    signed.allowed_algs = ALGORITHMS
    signed.deserialize(token, key)
    assert signed.jose_header == {"alg": "EdDSA", "typ": "inferno-receipt"}, signed.jose_header
    return json.loads(signed.payload)


def is_refused(token, key):
    try:
        verify(token, key)
    except JWException:
        return True
    return False


def inferno_receipt(token, key):
    """Returns the exit code of `inferno receipt`."""
    with tempfile.TemporaryDirectory() as folder:
        receipt, public = Path(folder, "receipt"), Path(folder, "key.json")
        receipt.write_text(token)
        public.write_text(key.export_public())
        command = [PROGRAM, "receipt", receipt, "--key", public]
        return subprocess.run(command, capture_output=True, check=False).returncode


def main():
    body = {"messages": [{"role": "user", "content": "Say hello"}], "seed": 7}
    answer = json.loads(send("/chat/completions", body))
    token, record = send("/receipts/receipt-1").decode(), send("/records/receipt-1")
    private = JWK.from_pem(Path(KEY_FILE).read_bytes())
    public = JWK.from_json(send("/receipts/key").decode())
    assert not public.has_private and public.thumbprint() == private.thumbprint()

    stated = verify(token, public)
    assert (stated["id"], stated["error"]) == ("receipt-1", None), stated
    assert stated["record_sha256"] == hashlib.sha256(record).hexdigest()
    [request], [recorded] = stated["requests"], json.loads(record)["requests"]
    tokens = [("prompt", request["prompt"], recorded["request"]["prompt"])]
    tokens.append(("completion", request["answers"][0], recorded["answers"][0]["tokens"]))
    for name, hashed, ids in tokens:
        assert hashed["sha256"] == hashlib.sha256(b"".join(id.to_bytes(4, "little") for id in ids)).hexdigest(), name
        assert hashed["tokens"] == len(ids) == answer["usage"][f"{name}_tokens"], name
    assert inferno_receipt(token, public) == 0

    # Both sides refuse a changed payload, a changed signature, and another key.
    header, payload, signature = token.split(".")
    other = JWK.generate(kty="OKP", crv="Ed25519")
    flipped = ("B" if signature[0] == "A" else "A") + signature[1:]
    changed = JWS(json.dumps(stated | {"id": "receipt-2"}))
    changed.add_signature(other, protected={"alg": "EdDSA", "typ": "inferno-receipt"})
    changed_payload = changed.serialize(compact=True).split(".")[1]
    for bad, key in [
        (f"{header}.{changed_payload}.{signature}", public),
        (f"{header}.{payload}.{flipped}", public),
        (token, other),
    ]:
        assert is_refused(bad, key), bad
        assert inferno_receipt(bad, key) == 6, bad

    # inferno accepts what jwcrypto signs with the same key.
    signed = JWS(json.dumps(stated | {"id": "receipt-2"}))
    signed.add_signature(private, protected={"alg": "EdDSA", "typ": "inferno-receipt"})
    assert inferno_receipt(signed.serialize(compact=True), public) == 0


if __name__ == "__main__":
    main()

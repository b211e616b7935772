#!/usr/bin/env python3
"""Compares the logits that transformers computes from GGUF files with the golden values.

    mkdir DIR && INFERNO_GGUF_OUT=DIR cargo test --test it gguf::models::logits
    python tests/golden/check_gguf.py DIR

Requires torch, transformers and gguf. tests/it/support/gguf/converter.rs writes the files. The script loads each file twice.
The first time, it uses the config.json of the checkpoint, which tests only the tensors. The second time, it uses the
config that transformers derives from the GGUF metadata.

Prints the largest logit difference divided by the largest logit. If transformers cannot load the file, prints '-' and
the reason.
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).parent

def error(folder, file, golden, **options):
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager", **options).eval()
        with torch.no_grad():
            got = model(golden["ids"][None]).logits[0].float()
        want = golden["logits"].float()
        return f"{((got - want).abs().max() / want.abs().max()).item():.1e}"
    except Exception as exception:  # noqa: BLE001 - the table shows each error
        return f"- ({type(exception).__name__}: {str(exception).splitlines()[0][:80]})"

for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    golden = load_file(GOLDEN / path.stem / "golden.safetensors")
    config = AutoConfig.from_pretrained(GOLDEN / path.stem)
    config.scale_attn_by_inverse_layer_idx = False  # the queries in the file are already scaled
    config.quantization_config = None
    print(f"{path.stem:15} config.json: {error(path.parent, path.name, golden, config=config):10} metadata: {error(path.parent, path.name, golden)}", flush=True)

#!/usr/bin/env python3
"""Reads the GGUF files that tests/it/gguf/converter.rs writes with transformers and compares logits with the golden values.

    mkdir DIR && INFERNO_GGUF_OUT=DIR cargo test --test it gguf::models::logits
    python scripts/check_gguf_with_transformers.py DIR

Needs torch, transformers and gguf. Each file is read twice: with the config.json of its checkpoint, which tests the tensors
only, and with the config that transformers makes of the metadata. Prints the largest difference of logits, divided by the
largest logit, or '-' with the reason if transformers cannot read the file.
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"

def error(folder, file, golden, **options):
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager", **options).eval()
        with torch.no_grad():
            got = model(golden["ids"][None]).logits[0].float()
        want = golden["logits"].float()
        return f"{((got - want).abs().max() / want.abs().max()).item():.1e}"
    except Exception as exception:
        return f"- ({type(exception).__name__}: {str(exception).splitlines()[0][:80]})"

for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    golden = load_file(GOLDEN / path.stem / "golden.safetensors")
    config = AutoConfig.from_pretrained(GOLDEN / path.stem)
    config.scale_attn_by_inverse_layer_idx = False  # the file has scaled queries instead
    config.quantization_config = None
    print(f"{path.stem:15} config.json: {error(path.parent, path.name, golden, config=config):10} metadata: {error(path.parent, path.name, golden)}", flush=True)

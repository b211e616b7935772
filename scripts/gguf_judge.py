#!/usr/bin/env python3
"""Has transformers read the GGUF files that tests/it/gguf/converter.rs writes, against the golden values.

    mkdir DIR && INFERNO_GGUF_OUT=DIR cargo test --test it gguf::models::logits
    python scripts/gguf_judge.py DIR

Needs torch, transformers and gguf. Of each file: with the config.json that the checkpoint was made with, so that only the
tensors are judged; and with the config that transformers reads from the metadata. Largest difference of logits over the
largest logit; '-' where transformers does not read the architecture, or not all that the metadata say.
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"

def error(folder, file, golden, **given):
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager", **given).eval()
        with torch.no_grad():
            got = model(golden["ids"][None]).logits[0].float()
        want = golden["logits"].float()
        return f"{((got - want).abs().max() / want.abs().max()).item():.1e}"
    except Exception as problem:
        return f"- ({type(problem).__name__}: {str(problem).splitlines()[0][:80]})"

for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    golden = load_file(GOLDEN / path.stem / "golden.safetensors")
    config = AutoConfig.from_pretrained(GOLDEN / path.stem)
    config.scale_attn_by_inverse_layer_idx = False  # the file's queries are scaled instead
    config.quantization_config = None
    print(f"{path.stem:15} config.json: {error(path.parent, path.name, golden, config=config):10} metadata: {error(path.parent, path.name, golden)}", flush=True)

#!/usr/bin/env python3
"""Writes logits from transformers for the test `full_size_logits_agree_with_transformers`.

    reference_logits.py MODEL_DIR [--tokens 384]

Requires torch, transformers, accelerate and a GPU that fits all weights in float32 (84 GB for gpt-oss-20b).
Writes MODEL_DIR/reference.safetensors: ids [T], and logits [T, V] in bf16 and in f32 from the same weights.
"""
import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=384)
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    options = {}
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        from transformers import Mxfp4Config

        options["quantization_config"] = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, device_map="cuda", attn_implementation="eager", **options
    )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(config["vocab_size"], 200_000), (args.tokens,), generator=generator)
    out = {"ids": ids}
    for name, dtype in [("bf16", torch.bfloat16), ("f32", torch.float32)]:
        # Convert only the parameters: `model.to` would also round buffers, such as the RoPE frequencies.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        assert all(buffer.dtype == torch.float32 for buffer in model.buffers() if buffer.is_floating_point())
        with torch.no_grad():
            logits = model(ids[None].cuda(), use_cache=False).logits[0]
        out[name] = logits.float().cpu().contiguous()
        print(name, tuple(logits.shape), "largest", logits.abs().max().item(), flush=True)
    save_file(out, args.model / "reference.safetensors")


if __name__ == "__main__":
    main()

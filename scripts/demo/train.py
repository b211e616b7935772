"""Trains inferno's demo model and its tokenizer, writes the snapshot, and measures how often its answers are correct.

    python train.py --out OUT                  takes about 10 minutes on one data-center GPU
    python train.py --out OUT --smoke          tests this script in a few minutes, even on a CPU; the model is useless

If a command may not take that long, split the training into two commands with the same --minutes:

    python train.py --out OUT --checkpoint FILE --pause-after 6
    python train.py --out OUT --resume FILE
"""

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evaluate import evaluate
from harmony import Writer, developer_text, system_text, train_tokenizer
from model import CONFIG, GptOss, load_snapshot, mxfp4_dequantize, mxfp4_round, snapshot_tensors
from objects import ObjectSampler
from questions import Conversation, Sampler
from tools import AFTER_CALL, ToolSampler

# Shapes of batches: sequence length T, samples per batch. A sample may have T + 1 ids, because the targets are shifted
# by one. It goes into the first shape that is long enough. Samples that are too long for every shape are dropped.
SHAPES = [(176, 256), (288, 160), (480, 96), (800, 48), (1600, 24)]
# Kinds of conversations: sampler, share of all samples in percent, minimum and maximum number of turns.
KINDS = [
    ("plain", 52, 1, 1), ("plain", 10, 2, 4), ("plain", 2, 5, 28),
    ("tools", 20, 1, 1), ("tools", 4, 2, 3), ("tools", 1, 4, 10),
    ("json", 11, 1, 2),
]  # fmt: skip
SAVE_SECONDS = 60  # the time between checkpoints


# ---- data ----


def tokenizer_texts(sampler, count):
    for _ in range(count):
        conversation = sampler.conversation(1)
        yield system_text(conversation.date, conversation.effort)
        yield conversation.developer
        for turn in conversation.turns:
            yield from (turn.user, turn.think, turn.answer)
    tools = ToolSampler(sampler)
    for _ in range(count // 5):  # without arguments and results, so that the vocabulary has no long tokens for them
        tool = tools.tool()
        yield developer_text("", [tools.spec(tool)])
        yield from (*tool.ask, f'Call {tool.name}: = . {{"": "", "": }}', "The is and the is.", AFTER_CALL)
    names = ["assistant", "system", "developer", "user", "analysis", "final", "commentary", " to=", "functions", "json"]
    yield from names * count


class Batches(IterableDataset):
    """An endless stream of batches. A batch consists of ids and their loss weights, both [B, T + 1]."""

    def __init__(self, tokenizer_json, seed, shrink):
        self.tokenizer_json, self.seed, self.shrink = tokenizer_json, seed, shrink

    def __iter__(self):
        worker = get_worker_info()
        sampler = Sampler(self.seed * 1000 + (worker.id if worker else 0) + 1)
        writer = Writer(Tokenizer.from_str(self.tokenizer_json))
        samplers = {"plain": sampler, "tools": ToolSampler(sampler), "json": ObjectSampler(sampler)}
        waiting = {shape: [] for shape in SHAPES}
        while True:
            [(kind, _, fewest, most)] = sampler.random.choices(KINDS, [share for _, share, _, _ in KINDS])
            conversation = samplers[kind].conversation(sampler.random.randint(fewest, most))
            prompt, weights = writer.prompt(conversation)
            completion, completion_weights = writer.completion(conversation)
            ids, weights = prompt + completion, weights + completion_weights
            shape = next((shape for shape in SHAPES if len(ids) <= shape[0] + 1), None)
            if shape:
                waiting[shape].append((ids, weights))
                if len(waiting[shape]) >= max(shape[1] // self.shrink, 1):
                    yield self.batch(shape[0], waiting[shape])
                    waiting[shape] = []

    def batch(self, length, samples):
        ids = torch.zeros(len(samples), length + 1, dtype=torch.int32)
        weights = torch.zeros(len(samples), length + 1)
        for row, (sample, sample_weights) in enumerate(samples):
            ids[row, : len(sample)] = torch.tensor(sample)
            weights[row, : len(sample)] = torch.tensor(sample_weights)
        return ids, weights


# ---- training ----


def train(tokenizer_json, checkpoint, args):
    """Trains until the first limit: `--minutes`, `--steps` or `--pause-after`.

    Returns the model, and whether training is complete, that is, not paused.
    """
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = GptOss().to(device).train()
    for layer in model.model.layers:
        layer.dropout.p = args.dropout
        if args.compile:
            torch._dynamo.config.suppress_errors = True  # if a layer cannot be compiled, run it uncompiled
            layer.compile(dynamic=False)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=device.type == "cuda")
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, layers compiled: {args.compile}",
        flush=True,
    )

    def step(ids, weights):
        ids, weights = ids.to(device, non_blocking=True).long(), weights.to(device, non_blocking=True)[:, 1:]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits, balance = model(ids[:, :-1])
        losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        (loss + 0.01 * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), balance.detach(), norm

    began = time.time()
    missing = dict(SHAPES)
    # Run one step of each batch shape with learning rate 0 before the clock starts, so that the training time excludes
    # compilation.
    for batch in Batches(tokenizer_json, args.seed, args.shrink):
        if missing.pop(batch[0].shape[1] - 1, None):
            loss = step(*batch)[0]
        if not missing:
            break
    print(f"one training step of each batch shape took {time.time() - began:.0f} s, loss {float(loss):.3f}", flush=True)

    earlier, steps = 0.0, 0  # seconds and steps of training before this command
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        earlier, steps = checkpoint["seconds"], checkpoint["steps"]
        print(f"resumed after {earlier:.0f} s and {steps} steps of training", flush=True)

    def save():
        if not args.checkpoint:
            return
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tokenizer": tokenizer_json}
        partial = args.checkpoint.with_suffix(".partial")
        torch.save(state | {"seconds": earlier + time.time() - began, "steps": steps}, partial)
        partial.replace(args.checkpoint)

    batches = Batches(tokenizer_json, args.seed + steps, args.shrink)  # a resumed run samples new conversations

    loader = iter(
        DataLoader(
            batches,
            batch_size=None,
            num_workers=args.workers,
            prefetch_factor=8 if args.workers else None,
            pin_memory=device.type == "cuda",
        )
    )
    batch = next(loader)
    budget, began, said, saved, samples, waited, first = args.minutes * 60, time.time(), 0.0, 0.0, 0, 0.0, steps
    pause = args.pause_after * 60 if args.pause_after else math.inf
    losses = []
    while (progress := (earlier + time.time() - began) / budget) < 1 and (args.steps is None or steps < args.steps):
        seconds = time.time() - began
        if seconds >= pause:
            break
        # Warm up for 2% of the training time, then decay to 0 along a cosine. The schedule follows time, not steps.
        rate = args.lr * min(1, progress * 50 + 1e-3) * (0.5 + 0.5 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, balance, norm = step(*batch)
        losses.append(loss)
        steps, samples = steps + 1, samples + len(batch[0])
        wait = time.time()
        batch = next(loader)
        waited += time.time() - wait
        if progress - said >= 0.04:
            said, seconds = progress, time.time() - began
            mean = float(torch.stack(losses).mean())
            print(
                f"{seconds:4.0f} s  step {steps:6}  loss {mean:.4f}"
                f"  balance {float(balance):.2f}  norm {float(norm):.2f}"
                f"  {(steps - first) / seconds:.1f} steps/s  {samples / seconds:.0f} samples/s"
                f"  waited {waited:.0f} s",
                flush=True,
            )
            losses = []
        if seconds - saved >= SAVE_SECONDS:
            saved = seconds
            save()
    print(f"{steps} steps, {samples} samples in {time.time() - began:.0f} s", flush=True)
    save()
    torch.set_float32_matmul_precision("highest")
    return model.eval(), progress >= 1 or (args.steps is not None and steps >= args.steps)


# ---- the snapshot ----


def export(model, tokenizer_json, out):
    out.mkdir(parents=True, exist_ok=True)
    id_of = Tokenizer.from_str(tokenizer_json).token_to_id
    eos, start, pad = (id_of(token) for token in ("<|return|>", "<|startoftext|>", "<|endoftext|>"))
    config = CONFIG | {"eos_token_id": eos, "pad_token_id": pad}
    generation = {
        "bos_token_id": start,
        "do_sample": False,
        "eos_token_id": [eos, pad, id_of("<|call|>")],
        "pad_token_id": pad,
    }
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    added = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"}
        for token in json.loads(tokenizer_json)["added_tokens"]
    }
    tokenizer_config = special | {
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, content in {
        "config": config,
        "generation_config": generation,
        "special_tokens_map": special,
        "tokenizer_config": tokenizer_config,
    }.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    compact = json.dumps(json.loads(tokenizer_json), ensure_ascii=False, separators=(",", ":"))
    (out / "tokenizer.json").write_text(compact, encoding="utf-8")
    save_file(snapshot_tensors(model), out / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def verify(model, out):
    """Checks the tokenizer and compares the logits and greedy tokens of the snapshot with those of transformers.

    Also compares the logits of the trained module, to find errors in `export`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

    theirs = AutoModelForCausalLM.from_pretrained(
        out,
        quantization_config=Mxfp4Config(dequantize=True),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    theirs = theirs.float().eval()  # bf16 represents the dequantized experts exactly
    ours = load_snapshot(out)
    trained = GptOss().eval()
    trained.load_state_dict(model.state_dict())
    for name, parameter in trained.named_parameters():  # round the parameters as `export` does
        packed = name.endswith(("gate_up_proj", "down_proj"))
        parameter.copy_(mxfp4_dequantize(*mxfp4_round(parameter)) if packed else parameter.bfloat16())

    tokenizer = AutoTokenizer.from_pretrained(out)
    for text in ("Grüße, 你好 🦀!\r\n\tfn main() {}  ", bytes(range(256)).decode("latin-1")):
        assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text, "lossy tokenizer"
    writer = Writer(Tokenizer.from_file(str(out / "tokenizer.json")))
    talk = Sampler(seed=3).other_turns(14, date="2026-01-15")
    ids = writer.prompt(Conversation(talk))[0] + writer.completion(Conversation(talk))[0]
    assert tokenizer.encode(writer.tokenizer.decode(ids, skip_special_tokens=False)) == ids, "re-encoding changes ids"
    ids = torch.tensor([ids])  # longer than the sliding window and YaRN's original context
    reference = theirs(ids).logits
    for who, logits in (("load_snapshot", ours(ids)[0]), ("training module", trained(ids)[0])):
        error = float((logits - reference).abs().max() / reference.abs().max())
        print(f"{who}: max relative logit error {error:.1e} against transformers over {ids.shape[1]} tokens")
        assert error < 1e-4, who
    start = writer.prompt(Conversation(talk[:1]))[0]
    generated = theirs.generate(torch.tensor([start]), max_new_tokens=24)[0, len(start) :].tolist()
    mine = ours.generate([start], writer.stop_ids, 24)[0]
    assert generated[: len(mine)] == mine, "load_snapshot and transformers generate different greedy tokens"


def main():
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # because DataLoader forks the workers
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the snapshot")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="the training time in minutes, excluding compilation and checks"
    )
    parser.add_argument("--steps", type=int, help="stop after this many steps in total")
    parser.add_argument("--checkpoint", type=Path, help="file for the training state, saved each minute and at the end")
    parser.add_argument("--resume", type=Path, help="continue training from this file, up to --minutes in total")
    parser.add_argument(
        "--pause-after", type=float, help="stop after this many minutes of training; needs --checkpoint or --resume"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--workers", type=int, help="the number of processes that generate batches")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--smoke", action="store_true", help="train briefly on small batches, to test the script")
    args = parser.parse_args()
    if args.workers is None:
        args.workers = 0 if args.smoke else max(min(14, (os.cpu_count() or 2) - 2), 1)
    args.shrink = 64 if args.smoke else 1
    args.minutes = min(args.minutes, 0.4) if args.smoke else args.minutes
    has_compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    args.compile = args.compile and args.device.startswith("cuda") and bool(has_compiler)

    args.checkpoint = args.checkpoint or args.resume
    if args.pause_after and not args.checkpoint:
        parser.error("cannot pause: the training state would be lost; add --checkpoint FILE")
    checkpoint = torch.load(args.resume, map_location=args.device, weights_only=True) if args.resume else None
    if checkpoint:
        tokenizer_json = checkpoint["tokenizer"]
    else:
        texts = tokenizer_texts(Sampler(seed=1), 20_000)
        tokenizer_json = train_tokenizer(texts, CONFIG["vocab_size"]).to_str()
    model, is_complete = train(tokenizer_json, checkpoint, args)
    if not is_complete:
        print(f"paused; continue with --resume {args.checkpoint}")
        return
    export(model, tokenizer_json, args.out)
    verify(model, args.out)
    shares = evaluate(args.out, args.device, *((6, 16) if args.smoke else ()))
    files = {path.name: path.stat().st_size for path in sorted(args.out.iterdir())}
    print(
        f"{args.out}: {sum(files.values()) / 1e6:.2f} MB in total; " + ", ".join(f"{n} {s}" for n, s in files.items())
    )
    print("summary: " + ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items()))


if __name__ == "__main__":
    main()

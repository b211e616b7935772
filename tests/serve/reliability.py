#!/usr/bin/env python3
"""Tests `inferno serve` with faulty clients and overload, and compares the results with targets.

    tests/serve/reliability.py --program target/release/inferno [--short] [--only WORDS] [--out FILE]

Requires only Python 3.11 or later.
--short takes about two minutes. Without --short, the run takes about ten minutes plus --minutes.
Prints one row for each figure, and exits with code 1 if a figure misses its target or a test breaks off.
Speeds are meaningful only on an otherwise idle machine. With --any-speed, they cannot make the script fail.
"""

import argparse
import subprocess
import sys
import time

import answers
import bodies
import cancel
import connections
import limits
import report as reports
import scrapes
import soak
from background import raise_file_limit
from process import Server

TESTS = {
    "loris": connections.slow_loris,
    "bodies": bodies.large_bodies,
    "idle": connections.idle_connections,
    "killed": cancel.killed_clients,
    "latency": cancel.cancel_latency,
    "readers": connections.slow_readers,
    "malformed": bodies.malformed_bodies,
    "timeouts": connections.timeouts,
    "shutdown": cancel.shutdown_under_load,
    "restart": cancel.restart,
    "burst": limits.burst,
    "fairness": limits.fairness,
    "grammars": limits.grammars,
    "constrained": limits.constrained,
    "answers": answers.answers,
    "metrics": scrapes.scrapes,
    "soak": soak.soak,
}


def main():
    parser = argparse.ArgumentParser(description="Tests the reliability of `inferno serve`.")
    parser.add_argument("--program", default="target/release/inferno", help="the program to test")
    parser.add_argument("--model", default="demo", help="the model to serve")
    parser.add_argument("--device", default="cpu", help="the device; empty for the first GPU")
    parser.add_argument("--flags", default="", help="further flags for `inferno serve`, separated by spaces")
    parser.add_argument("--short", action="store_true", help="run smaller and shorter tests; ignores --minutes and --burst")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help=f"the tests to run, separated by spaces: {', '.join(TESTS)}"
    )
    parser.add_argument(
        "--any-speed",
        action="store_true",
        help="do not fail because of figures that depend on the speed of the machine",
    )
    parser.add_argument("--minutes", type=float, default=10, help="the length of the soak in minutes")
    parser.add_argument("--soak-sequences", type=int, default=8, help="--max-sequences in the soak")
    parser.add_argument(
        "--burst", type=int, default=16, help="--max-sequences in the burst, which has six times as many requests"
    )
    parser.add_argument("--out", help="the file for the report, in JSON")
    options = parser.parse_args()
    options.flags = options.flags.split()
    chosen = options.only.replace(",", " ").split() or list(TESTS)
    unknown = [name for name in chosen if name not in TESTS]
    if unknown:
        parser.error(f"no test has the name {unknown[0]}: choose from {', '.join(TESTS)}")
    raise_file_limit()
    report = reports.Report(options)
    with Server(options) as server:
        report.server = reports.describe(server)
    for name in chosen:
        started = time.monotonic()
        try:
            TESTS[name](options, report)
        except (OSError, EOFError, AssertionError, subprocess.SubprocessError) as error:
            report.add(name, "the test runs", f"{type(error).__name__}: {str(error)[:500]}", False)
        print(f"      {name}: {time.monotonic() - started:.1f} s", flush=True)
    sys.exit(0 if report.write(options.out) else 1)


if __name__ == "__main__":
    main()

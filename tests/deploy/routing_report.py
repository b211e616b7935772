#!/usr/bin/env python3
"""Runs the routing tests with more load than `.ci/run`, and writes a report.

    tests/deploy/routing_report.py --program target/release/inferno --report benches/results/DATE-cpu-smg.json

The run includes the slow test that `.ci/run` omits, and takes about eight minutes on two cores.
Three `inferno serve demo` processes run on the CPU behind SMG, which has the flags of deploy/smg/smg.sh.
All servers listen on 127.0.0.1.
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

import routing
import tools

SIZE = routing.Size(conversations=54, turns=8, prompts=300, clients=12, seconds=10, rounds=3, is_long=True)
DEFAULT_CACHE = Path.home() / ".cache/inferno-ci/deploy"


def test_names(only):
    """Returns the names that `routing.run` yields for the tests selected by `only`, if no test fails."""
    names = []
    for _, has_file, tests in routing.SUITES.values():
        for test in tests:
            if only in test.__name__:
                suffix = "_with_a_file" if has_file and test is routing.conversations_stay else ""
                names.append(test.__name__ + suffix)
    return names


def run_tests(program, smg, folder, only):
    """Runs the tests and prints the results. Returns the results by name. A test that did not run counts as failed."""
    results, reason = {}, "did not run because an earlier test failed"
    try:
        for name, outcome, seconds in routing.run(program, smg, folder, SIZE, only):
            print(f"{name}: {outcome}; {seconds:.0f} s", flush=True)
            results[name] = {"failure": str(outcome)} if isinstance(outcome, routing.Failure) else outcome
            results[name]["seconds"] = round(seconds, 1)
    except routing.Failure as failure:
        reason = f"did not run because the servers did not start: {failure}"
    for name in test_names(only):
        if name not in results:
            print(f"{name}: {reason}", flush=True)
            results[name] = {"failure": reason}
    return results


def main():
    parser = argparse.ArgumentParser(description="Runs the routing tests with more load than .ci/run. Writes a report.")
    parser.add_argument("--program", type=Path, required=True, help="the program to test")
    parser.add_argument("--report", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="the folder for SMG and other tools")
    parser.add_argument("--only", default="", metavar="WORD", help="run only the tests whose name contains WORD")
    options = parser.parse_args()
    if not test_names(options.only):
        names = dict.fromkeys(test.__name__ for _, _, tests in routing.SUITES.values() for test in tests)
        parser.error(f"no test has {options.only!r} in its name: choose from {', '.join(names)}")
    try:
        file = open(options.report, "w", encoding="utf-8")  # noqa: SIM115 - opened before the slow tests
    except OSError as error:
        parser.error(f"cannot write the report: {error}")
    with file:
        passed = write_report(options, file)
    sys.exit(0 if passed else 1)


def write_report(options, file):
    """Runs the tests and writes the report. Returns whether all tests passed."""
    program, cache = options.program.resolve(), options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    try:
        python = tools.python(cache)
    except tools.Unavailable as reason:
        sys.exit(f"routing_report.py: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="inferno-routing-"))
    results = run_tests(program, python / "smg", folder, options.only)
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
    file.write(json.dumps(report, indent=1) + "\n")
    print(f"wrote {options.report}; logs in {folder}")
    return not any("failure" in result for result in results.values())


if __name__ == "__main__":
    main()

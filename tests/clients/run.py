#!/usr/bin/env python3
"""Tests `inferno serve` with the programs that people use: OpenAI's clients, Codex and two test suites for servers.

    tests/clients/run.py --program target/release/inferno [--cache FOLDER] [--only WORD]

Requires python3 with venv, Node 20 or later and npm. The cache keeps the installed clients. The server runs a model
whose answers follow scripts (scripted_model.py), so every outcome is exact.

The test suites come from GitHub. If one cannot be fetched, the output has a line `skipped: NAME`. To test with a copy of
a suite, unpack it into the folder that this line names.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import suites

HERE = Path(__file__).resolve().parent
FETCH_SECONDS = 120


class Tools:
    """The installed clients. Installs those that the cache lacks."""

    def __init__(self, cache):
        self.cache = cache
        cache.mkdir(parents=True, exist_ok=True)
        self.python = self.install("python", HERE / "requirements.txt", install_python) / "bin/python"
        self.node = self.install("node", HERE / "package.json", install_node)
        # Node looks for packages next to the script.
        for script in HERE.glob("*.mjs"):
            shutil.copy(script, self.node)

    def install(self, name, versions, install):
        """Returns the folder with the packages that a file lists. The name of the folder depends on the file."""
        folder = self.cache / f"{name}-{hashlib.sha256(versions.read_bytes()).hexdigest()[:16]}"
        complete = folder / "complete"
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"installing the clients for {name}", flush=True)
            install(folder, versions)
            complete.touch()
        return folder

    def program(self, name):
        """Returns the path of a program in an npm package."""
        return self.node / "node_modules/.bin" / name

    def fetch(self, repository, commit):
        """Returns the folder with a commit of a GitHub repository, or raises `Unavailable`."""
        folder = self.cache / f"{repository.replace('/', '-')}-{commit[:7]}"
        if not folder.exists():
            url = f"https://github.com/{repository}/archive/{commit}.tar.gz"
            try:
                with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as response:
                    archive = response.read()
            except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
                raise suites.Unavailable(f"{repository}@{commit[:7]} could not be fetched to {folder}: {error}") from None
            unpacked = Path(tempfile.mkdtemp(dir=self.cache))
            subprocess.run(["tar", "-xz", "-C", unpacked, "--strip-components=1"], input=archive, check=True)
            unpacked.rename(folder)  # last, so that the folder is always complete
        return folder


def install_python(folder, requirements):
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/pip", "install", "--quiet", "--no-deps", "-r", requirements], check=True)


def install_node(folder, package):
    folder.mkdir()
    shutil.copy(package, folder / "package.json")
    # No lock file: it would contain the address of a registry. package.json has exact versions.
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"], cwd=folder, check=True)


def main():
    parser = argparse.ArgumentParser(description="Tests `inferno serve` with real clients.")
    parser.add_argument("--program", type=Path, required=True, help="the program to test")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/inferno-ci/clients", help="installed clients")
    parser.add_argument("--only", default="", metavar="WORD", help="run only the suites whose name contains WORD")
    options = parser.parse_args()
    try:
        tools = Tools(options.cache.resolve())
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"skipped: all clients: cannot install them: {error}")
        return
    for name, suite in suites.ALL.items():
        if options.only not in name:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            try:
                detail = suite(options.program.resolve(), tools, Path(scratch))
            except suites.Unavailable as reason:
                print(f"skipped: {name}: {reason}", flush=True)
                continue
        print(f"{name}: {detail}; {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()

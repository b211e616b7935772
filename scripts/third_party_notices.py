#!/usr/bin/env python3
"""Writes docs/third-party-notices.txt: the licenses of all crates in a Linux binary with GPU support.

    scripts/third_party_notices.py           writes the file
    scripts/third_party_notices.py --check   fails if the file is out of date

If a crate offers several licenses, the script chooses the one that comes first in `PREFERRED`.
Each license text appears only once, below the copyright lines of all crates that use the text.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTICES = ROOT / "docs" / "third-party-notices.txt"
# SPDX license identifiers, in order of preference.
PREFERRED = ["0BSD", "MIT", "ISC", "Zlib", "BSD-2-Clause", "BSD-3-Clause"]
PREFERRED += ["Unicode-3.0", "CDLA-Permissive-2.0", "Apache-2.0", "MPL-2.0"]
# Patterns that match the names of license files, for crates with one file per license.
FILE_NAMES = {"MIT": r"MIT", "Apache-2.0": r"APACHE", "0BSD": r"0BSD", "Zlib": r"ZLIB", "ISC": r"ISC"}
HEADER = """\
Third-party notices

An inferno binary that is built on Linux with `--features cuda` contains the crates below.
inferno itself is licensed under MIT or Apache-2.0. The binary does not contain NVIDIA's libraries; it loads the installed ones at run time.

scripts/third_party_notices.py writes this file.
"""


def linked_crates():
    """Returns the crates whose code is in the binary. Omits crates for build scripts, macros and tests."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--features", "cuda"]
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    metadata = json.loads(subprocess.check_output(command, cwd=ROOT))
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    root = metadata["resolve"]["root"]
    found, open_ids = set(), [root]
    while open_ids:
        crate = open_ids.pop()
        if crate in found:
            continue
        found.add(crate)
        for dependency in nodes[crate]["deps"]:
            is_normal = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            is_macro = any("proc-macro" in target["kind"] for target in packages[dependency["pkg"]]["targets"])
            if is_normal and not is_macro:
                open_ids.append(dependency["pkg"])
    found.remove(root)
    return sorted((packages[crate] for crate in found), key=lambda package: (package["name"], package["version"]))


def chosen_licenses(package):
    """Returns the licenses to comply with: the preferred one for `A OR B`, both for `A AND B`."""
    expression = re.sub(r"\s*/\s*", " OR ", package["license"])
    choices = [[part.strip("() ") for part in choice.split(" AND ")] for choice in expression.split(" OR ")]

    def rank(choice):
        return max(PREFERRED.index(license) if license in PREFERRED else len(PREFERRED) for license in choice)

    return min(choices, key=rank)


def license_text(package, license):
    """Returns the text of a license from a crate's license files, or None if the crate has no suitable file."""
    folder = Path(package["manifest_path"]).parent
    files = sorted(
        file for file in folder.iterdir() if re.match(r"(?i)(un)?licen[cs]e|copying", file.name) and file.is_file()
    )
    named = [file for file in files if re.search(FILE_NAMES.get(license, license), file.name, re.IGNORECASE)]
    general = [file for file in files if not re.search(r"(?i)mit|apache|zlib|0bsd|unlicense", file.name)]
    for file in named + general:
        return file.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
    return None


def split_copyrights(text, license):
    """Splits a license text into its copyright lines and the remaining text."""
    # In Apache-2.0, a line that starts with "copyright" is part of the terms. In other licenses, it names the owner.
    is_copyright = re.compile(r"(?i)^\W*(copyright (\(c\)|©|\d{4}|the|by)|©)").match
    # Some crates put the copyright year on one line and the name on the next line.
    text = re.sub(r"(?im)^(\W*copyright \(c\) [\d\-, ]+)\n+(?!Permission)", r"\1 ", text)
    lines = [line.strip() for line in text.split("\n")]
    copyrights = [line for line in lines if is_copyright(line)] if license != "Apache-2.0" else []
    body = "\n".join(line.rstrip() for line in text.split("\n") if line.strip() not in copyrights).strip("\n")
    return copyrights, body


def group_crates(packages):
    """Returns groups of crates, each with its license, license text and crates.

    MIT and Apache-2.0 have one group each. Another license has one group for each different text.
    """
    groups = {}
    for package in packages:
        crate = f"{package['name']} {package['version']}"
        for license in chosen_licenses(package):
            text = license_text(package, license)
            if text is None and license in ("MIT", "Apache-2.0"):
                # The crate contains no license text. Its group uses another crate's text; MIT needs a copyright line.
                text = f"Copyright (c) {', '.join(package['authors']) or 'the authors of ' + package['name']}\n"
            elif text is None:
                sys.exit(f"cannot find the text of license {license} in {crate}")
            copyrights, body = split_copyrights(text, license)
            if license in ("MIT", "Apache-2.0"):
                key = license  # all crates share one text
            else:
                key = license + re.sub(r"\W+", "", body).lower()
            group = groups.setdefault(key, {"license": license, "body": "", "crates": []})
            # Use the shortest complete text, because longer texts contain additions by individual crates.
            # A complete MIT text has more than 900 characters, even without its copyright lines.
            # Until there is one, the body of the MIT or Apache-2.0 group is empty or the copyright line written above.
            if len(body) > 900 and (len(group["body"]) <= 900 or len(body) < len(group["body"])):
                group["body"] = body
            group["body"] = group["body"] or body
            group["crates"].append((crate, copyrights))
    return sorted(groups.values(), key=lambda group: (PREFERRED.index(group["license"]), group["crates"]))


def notices(groups):
    """Returns the contents of docs/third-party-notices.txt."""
    out = [HEADER]
    for group in groups:
        out.append("=" * 100)
        out.append(group["license"] + "\n")
        if group["license"] == "MPL-2.0":
            out.append(
                "The unmodified source code of these crates is in their repositories, which `cargo info NAME` shows.\n"
            )
        for crate, copyrights in group["crates"]:
            out.append(crate)
            out.extend(f"    {line}" for line in copyrights)
        out.append("\n" + group["body"] + "\n")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description="Writes docs/third-party-notices.txt.")
    parser.add_argument("--check", action="store_true", help="fail if the file is out of date, instead of writing it")
    options = parser.parse_args()
    text = notices(group_crates(linked_crates()))
    if not options.check:
        NOTICES.write_text(text, encoding="utf-8")
    elif not NOTICES.exists() or NOTICES.read_text(encoding="utf-8") != text:
        sys.exit(f"{NOTICES.relative_to(ROOT)} is out of date; run: scripts/third_party_notices.py")


if __name__ == "__main__":
    main()

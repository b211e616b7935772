#!/usr/bin/env bash
# Writes docs/cli.md: the `--help` output of inferno and of every command.
#
#   cargo build && scripts/cli-reference.sh [target/debug/inferno]
set -euo pipefail
cd "$(dirname "$0")/.."
inferno=$(realpath -m "${1:-target/debug/inferno}")
if [ ! -x "$inferno" ]; then # checked before the page is overwritten
  echo "cli-reference.sh: cannot find $inferno; run: cargo build" >&2
  exit 1
fi
export COLUMNS=100 NO_COLOR=1

help_of() {
  printf '\n## %s\n\n```text\n' "inferno${1:+ $1}"
  # shellcheck disable=SC2086
  "$inferno" $1 --help | sed 's/ *$//'
  printf '```\n'
}

{
  printf '# Commands and flags\n\n'
  printf 'This page shows the output of `inferno --help` and `inferno COMMAND --help`.\n'
  printf '`scripts/cli-reference.sh` writes the page, and a test compares it with the program.\n'
  help_of ""
  "$inferno" --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p' | grep -v '^help$' | while read -r command; do
    help_of "$command"
  done
} > docs/cli.md

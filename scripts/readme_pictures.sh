#!/usr/bin/env bash
# Types commands into terminals in tmux, and saves pictures for the documentation: docs/play.svg shows a chat with the
# demo model, docs/commands.svg shows chat commands, and docs/markdown.svg shows formatted Markdown.
#
#   cargo build --release --example markdown --bin inferno && scripts/readme_pictures.sh [target/release]
set -euo pipefail
cd "$(dirname "$0")/.."
built=$(realpath -m "${1:-target/release}")
fail() {
  echo "readme_pictures.sh: $*" >&2
  exit 1
}
command -v tmux > /dev/null || fail "cannot find tmux; install it"
[ -x "$built/inferno" ] && [ -x "$built/examples/markdown" ] ||
  fail "cannot find inferno and examples/markdown in $built; run: cargo build --release --example markdown --bin inferno"
scratch=$(mktemp -d)
session=pictures-$$
trap 'tmux kill-session -t $session 2> /dev/null; rm -rf "$scratch"' EXIT
export PATH=$built:$built/examples:$PATH HOME=$scratch INFERNO_CACHE=$scratch/models TERM=xterm-256color LC_ALL=C.UTF-8
export XDG_STATE_HOME=$scratch/state XDG_CONFIG_HOME=$scratch/config

# start ROWS: opens a new terminal with ROWS rows and the prompt "$ ".
start() {
  tmux kill-session -t $session 2> /dev/null || true
  tmux -f /dev/null new-session -d -s $session -x 92 -y "$1" "PS1='\$ ' bash --norc --noprofile"
  tmux set-option -t $session history-limit 1000
  sleep 0.5
}

# type_and_wait TEXT PATTERN: types a line, and waits until the terminal's last nonblank line matches the pattern.
# Exits with an error after about 60 s.
type_and_wait() {
  tmux send-keys -t $session -l "$1"
  sleep 0.3
  tmux send-keys -t $session Enter
  for _ in $(seq 600); do
    sleep 0.1
    if tmux capture-pane -p -t $session | grep -v '^ *$' | tail -n 1 | grep -qE "$2"; then
      return
    fi
  done
  fail "pattern '$2' did not appear after typing '$1'"
}

# picture NAME TITLE: saves a picture of the terminal as docs/NAME.svg.
picture() {
  sleep 0.3
  tmux capture-pane -e -p -t $session | scripts/terminal_to_svg.py --title "$2" --columns 92 -o "docs/$1.svg"
}

start 42
type_and_wait "inferno play demo --device cpu --temperature 0" '^>>> *$'
type_and_wait "My name is Ada" '^>>> *$'
type_and_wait "How do I download a model?" '^>>> *$'
type_and_wait "What is MXFP4?" '^>>> *$'
type_and_wait "What is my name?" '^>>> *$'
picture play "inferno play demo"
type_and_wait "/exit" '^\$ *$'

start 40
type_and_wait "inferno play demo --device cpu --temperature 0 2> /dev/tty" '^>>> *$'
tmux send-keys -t $session C-l
type_and_wait "/help" '^>>> *$'
type_and_wait "/set top-p 0.9" '^>>> *$'
type_and_wait "/file tests/it/render/ordinary.md" '^>>> *$'
type_and_wait "/context" '^>>> *$'
picture commands "inferno play demo"
type_and_wait "/exit" '^\$ *$'

start 52
type_and_wait "clear; markdown < tests/it/render/ordinary.md" '^\$ *$'
picture markdown "an answer in Markdown"

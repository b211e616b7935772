#!/usr/bin/env bash
# Builds the last stage of deploy/Dockerfile with buildah from a program that is already built, and tests the image.
#
#   scripts/image.sh --program target/release/inferno [--cuda DIR] [--base IMAGE] [--tag NAME] [--output FILE]
#
# --cuda     a toolkit folder from scripts/cuda-toolkit.sh; the image then contains its cuBLAS, cuBLASLt and cuRAND
# --base     a Debian image; without this flag, mmdebstrap makes one, so that no registry is needed
# --tag      the name of the image [localhost/inferno:test]
# --output   writes the image to this file, as an archive for `docker load`
#
# Exits with 1 if the build or a test failed, and with 2 if the arguments are wrong.
#
# Requires root and buildah, and without --base also mmdebstrap:
# apt-get install --no-install-recommends buildah mmdebstrap
# Uses buildah's chroot isolation, so that the script can run in a container.
# The tested server shares this machine's network, so it listens on 127.0.0.1 only.
# INFERNO_IMAGE_CACHE names the folder in which buildah keeps the images. Without it, the folder is temporary, and only
# --output keeps the image.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "image.sh: $*" >&2
  exit 1
}

usage() {
  echo "image.sh: $*; usage: scripts/image.sh --program FILE [--cuda DIR] [--base IMAGE] [--tag NAME] [--output FILE]" >&2
  exit 2
}

program='' cuda='' base='' tag=localhost/inferno:test output=''
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || usage "$1 needs a value"
  case $1 in
    --program) program=$(realpath -m "$2") ;;
    --cuda) cuda=$(realpath "$2") ;;
    --base) base=$2 ;;
    --tag) tag=$2 ;;
    --output) output=$(realpath -m "$2") ;;
    *) usage "unknown option $1" ;;
  esac
  shift 2
done
[ -n "$program" ] || usage "--program is missing"
[ -x "$program" ] || fail "cannot find $program; run: cargo build --release"
command -v buildah > /dev/null || fail "cannot find buildah; install it (on Debian: apt-get install buildah)"

scratch=$(mktemp -d)
storage=${INFERNO_IMAGE_CACHE:-$scratch/storage}
container='' server=''
ended() {
  [ -z "$server" ] || kill "$server" 2> /dev/null || true
  [ -z "$container" ] || builder rm "$container" > /dev/null || true
  rm -rf "$scratch"
}
trap ended EXIT

builder() {
  buildah --root "$storage/root" --runroot "$storage/run" --storage-driver vfs "$@"
}

if [ -z "$base" ]; then
  base=localhost/debian:bookworm
  if ! builder inspect --type image "$base" > /dev/null 2>&1; then
    command -v mmdebstrap > /dev/null || fail "cannot find mmdebstrap; install it or pass --base"
    echo "== building $base with mmdebstrap"
    mmdebstrap --quiet --variant=minbase bookworm "$scratch/base.tar"
    container=$(builder from scratch)
    builder add --quiet "$container" "$scratch/base.tar" / > /dev/null
    builder commit --quiet --rm "$container" "$base" > /dev/null
    container=''
    rm "$scratch/base.tar"
  fi
fi

echo "== building $tag from $base"
# $scratch/stage replaces the Dockerfile's stage `build`: the last stage copies the program and the libraries from it.
mkdir -p "$scratch/stage/out/lib"
cp "$program" "$scratch/stage/out/inferno"
if [ -n "$cuda" ]; then
  # shellcheck source=/dev/null
  home=$(. "$cuda/env.sh" && echo "$CUDA_HOME")
  for name in cublas cublasLt curand; do
    cp -L "$home"/lib/lib$name.so.[0-9]* "$scratch/stage/out/lib/"
  done
fi
builder build --quiet --isolation chroot --format docker --file deploy/Dockerfile \
  --build-arg BASE="$base" --build-context build="$scratch/stage" --tag "$tag" . > /dev/null
builder images --format '{{.Name}}:{{.Tag}} {{.Size}}' "$base"
builder images --format '{{.Name}}:{{.Tag}} {{.Size}}' "$tag"

container=$(builder from "$tag")
inside() {
  builder run --isolation chroot "$container" -- "$@"
}

echo "== checking the user and the files"
[ "$(inside id -u)" = 65532 ] || fail "the container runs as $(inside id), not as user 65532"
inside inferno --version
if inside ldd /usr/local/bin/inferno | grep "not found"; then
  fail "the image lacks a library that the program is linked against"
fi
inside cat /usr/share/doc/inferno/LICENSE-MIT > /dev/null

echo "== play demo"
inside inferno play demo --device cpu --prompt "How do I download a model?" > "$scratch/answer"
head -c 300 "$scratch/answer"
echo
grep -q "inferno download" "$scratch/answer" || fail "the demo's answer does not say how to download a model"

echo "== serve demo"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# The image sets a drain delay of 10 s. A shorter delay makes the test faster.
inside env INFERNO_DRAIN_DELAY=1 inferno serve demo --device cpu --host 127.0.0.1 --port "$port" > "$scratch/log" 2>&1 &
server=$!
health() {
  # Run the HEALTHCHECK command with this port, because port 8000 of the shared network may be in use.
  inside inferno health --port "$port"
}
for _ in $(seq 100); do
  health > /dev/null 2>&1 && break
  kill -0 "$server" 2> /dev/null || fail "the server exited: $(cat "$scratch/log")"
  sleep 0.2
done
health
python3 - "$port" << 'PYTHON'
import json, sys, urllib.request
body = {"messages": [{"role": "user", "content": "What is the KV cache?"}], "max_tokens": 30}
request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=60))["usage"])
PYTHON

echo "== SIGTERM"
# Find the server process by its port. `^` excludes buildah, whose command line contains the port too.
pid=$(pgrep -f "^inferno serve demo .*--port $port\$") || fail "cannot find the process of the server"
started=$SECONDS
kill -TERM "$pid"
code=0
wait "$server" || code=$?
server=''
[ $code = 0 ] || fail "the server exited with code $code: $(cat "$scratch/log")"
echo "the server exited with code 0 after $((SECONDS - started)) s"

if [ -n "$output" ]; then
  builder push --quiet "$tag" "docker-archive:$output:$tag"
  ls -l "$output"
fi
echo "== the image works"

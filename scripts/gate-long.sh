#!/usr/bin/env bash
# Runs the checks of releases and of deploy/ that take too long for .ci/run. Takes about an hour.
#
#   scripts/gate-long.sh [PART…]
#
#   cuda12    builds the program with a CUDA 12 toolkit, and runs the demo on the CPU
#   cpu       builds the CPU program, and runs the demo
#   image     builds a container image with the CPU program, and tests it (requires root, buildah and mmdebstrap)
#   routing   runs the routing tests of tests/deploy/ with more load than .ci/run
#
# Without PART, runs all parts. `image` and `routing` need the program that `cpu` builds.
# Exits with 1 if a check failed, and with 2 if a part is unknown.
# Reads CARGO_TARGET_DIR, CUDA_COMPUTE_CAP and the other environment variables of scripts/release.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
target=${CARGO_TARGET_DIR:-target}
# By default, build kernels for only one compute capability. The checks need no others, and the build takes less time.
export INFERNO_EXTRA_COMPUTE_CAPS=${INFERNO_EXTRA_COMPUTE_CAPS-}

[ $# -gt 0 ] || set -- cuda12 cpu image routing
for part in "$@"; do # checked first, because a part can take long
  if [[ ! $part =~ ^(cuda12|cpu|image|routing)$ ]]; then
    echo "gate-long.sh: unknown part '$part': choose from cuda12, cpu, image and routing" >&2
    exit 2
  fi
done
for part in "$@"; do
  case $part in
    cuda12 | cpu) scripts/release.sh --output "$scratch/dist" --only "$part" ;;
    image) scripts/image.sh --program "$target/release/inferno" ;;
    routing) scripts/routing_report.py --program "$target/release/inferno" --report "$scratch/routing.json" ;;
  esac
done
echo "== passed: $*"

#!/usr/bin/env bash
# Runs the checks of releases and of deploy/ that take too long for .ci/run. Takes about an hour.
#
#   scripts/gate-long.sh [PART…]
#
#   cuda12    builds the program with a CUDA 12 toolkit, and checks that it works without a GPU
#   cpu       builds the CPU program, and checks that it works
#   image     builds the image around the CPU program with buildah, and tests it (requires root, buildah and mmdebstrap)
#   routing   runs the routing tests with more load
#
# Without PART, runs all parts. `image` and `routing` need the program that `cpu` builds.
# Reads CARGO_TARGET_DIR, CUDA_COMPUTE_CAP and the other environment variables of scripts/release.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
target=${CARGO_TARGET_DIR:-target}
# The checks of this script need kernels for only one GPU generation.
export INFERNO_EXTRA_COMPUTE_CAPS=${INFERNO_EXTRA_COMPUTE_CAPS-}

[ $# -gt 0 ] || set -- cuda12 cpu image routing
for part in "$@"; do
  case $part in
    cuda12 | cpu) scripts/release.sh --output "$scratch/dist" --only "$part" ;;
    image) scripts/image.sh --program "$target/release/inferno" ;;
    routing) scripts/routing_report.py --program "$target/release/inferno" --report "$scratch/routing.json" ;;
    *)
      echo "gate-long.sh: unknown part '$part': choose from cuda12, cpu, image and routing" >&2
      exit 2
      ;;
  esac
done
echo "== passed: $*"

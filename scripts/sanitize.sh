#!/usr/bin/env bash
# Runs the tests of the CUDA kernels under NVIDIA's compute-sanitizer. Takes hours, because the tools slow kernels down.
# Needs a GPU, and a CUDA toolkit with compute-sanitizer.
#
#   scripts/sanitize.sh [TOOL…] [-- FILTER…]
#
#   memcheck    finds accesses outside of allocations, and misaligned accesses
#   racecheck   finds data races in shared memory
#   synccheck   finds barriers that not all threads of a block or warp reach
#
# Without TOOL, runs all three. FILTER is a part of the test names. Without FILTER, runs the tests in kernels, quantized
# and runner::decode_graph. Continues with the next tool after a failure. Exits with 1 if a tool found an error or a
# test failed, and with 2 if the tools cannot run.
#
# The tools miss some errors:
#   - memcheck cannot see that a kernel leaves one tensor and reaches the next one, if both are in the same segment of
#     src/device/reused_memory.rs, which serves allocations of up to 32 MiB.
#   - racecheck checks shared memory only. It finds no races in global memory, such as between thread blocks.
#
# Two kinds of checks are left out:
#   - The tool initcheck, because some kernels read uninitialized padding rows on purpose and discard the results.
#   - The tests in ranks::on_gpus, because a rank waits at most 5 s for the kernels of another rank. Under a tool,
#     kernels can take longer.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "sanitize.sh: $*" >&2
  exit 2
}

tools=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  [[ $1 =~ ^(memcheck|racecheck|synccheck)$ ]] || fail "unknown tool '$1': choose from memcheck, racecheck and synccheck"
  tools+=("$1")
  shift
done
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck synccheck)
[ $# -eq 0 ] || shift # --
filters=("$@")
[ ${#filters[@]} -gt 0 ] || filters=(kernels:: quantized:: runner::decode_graph)

export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
command -v compute-sanitizer > /dev/null || fail "cannot find compute-sanitizer; install a CUDA toolkit that includes it, and set CUDA_HOME to its folder"
nvidia-smi -L 2> /dev/null | grep -q '^GPU ' || fail "cannot find an NVIDIA GPU; check that nvidia-smi -L lists one"

# Build first, so that a failed build is not reported as a failed tool.
cargo test --locked --features cuda --test it --no-run || fail "cannot build the tests"

export INFERNO_REQUIRE_GPU=1
failed=()
for tool in "${tools[@]}"; do
  echo "== $tool"
  # Without --report-api-errors no, the tool would report CUDA calls that fail and whose error inferno handles.
  # One test at a time, because the reports do not name the test.
  sanitizer="['compute-sanitizer', '--tool', '$tool', '--report-api-errors', 'no', '--error-exitcode', '1']"
  cargo test --locked --features cuda --test it --config "target.'cfg(all())'.runner = $sanitizer" -- \
    --test-threads 1 "${filters[@]}" || failed+=("$tool")
done
[ ${#failed[@]} -eq 0 ] || {
  echo "sanitize.sh: failed: ${failed[*]}" >&2
  exit 1
}
echo "== passed: ${tools[*]}"

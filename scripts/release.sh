#!/usr/bin/env bash
# Builds the files of a release into a folder: programs, image, SBOM, release notes and SHA256SUMS.
#
#   scripts/release.sh [--output DIR] [--tag vVERSION] [--only PART,PART…]
#
# --output   the folder for the files [dist]
# --tag      fails unless the tag names the version in Cargo.toml, CHANGELOG.md has a dated section for this version,
#            and the working tree has no changes
# --only     the parts to build [cpu,cuda12,cuda13,aarch64,image,sbom,notes]
#
#   cpu, cuda12, cuda13   one archive each, with the program for Linux on x86-64
#   aarch64               an archive with the CPU program for Linux on ARM64, cross-compiled, and started in qemu-user
#                         if possible. Requires a cross compiler and Rust's standard library for ARM64, from rustup or
#                         from Debian's libstd-rust-dev:arm64; skipped if either is missing
#   image                 the container image from scripts/image.sh, with the cuda13 program if it exists, else with the
#                         cpu program
#   sbom                  the crates of the CUDA build for x86-64, in CycloneDX format, listed by cargo-cyclonedx
#   notes                 the release notes: the section of CHANGELOG.md for this version
#
# Exits with 1 if a part failed, and with 2 if the arguments are wrong.
# SHA256SUMS covers all files in the folder. To fill the folder in several runs, pass different parts to --only.
# The programs may not start with an older glibc than the build machine's, so build on the oldest supported system.
#
# INFERNO_CUDA_12, INFERNO_CUDA_13   folders with CUDA toolkits [cuda12, cuda13 in the target folder; installed if missing]
# CUDA_COMPUTE_CAP                   the lowest compute capability of the CUDA programs [80]
# INFERNO_EXTRA_COMPUTE_CAPS         higher compute capabilities for which they also contain machine code [86,89,90]
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "release.sh: $*" >&2
  exit 1
}

usage() {
  echo "release.sh: $*; usage: scripts/release.sh [--output DIR] [--tag vVERSION] [--only PART,PART…]" >&2
  exit 2
}

parts=cpu,cuda12,cuda13,aarch64,image,sbom,notes
output=dist tag='' only=$parts
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || usage "$1 needs a value"
  case $1 in
    --output) output=$2 ;;
    --tag) tag=$2 ;;
    --only) only=$2 ;;
    *) usage "unknown option $1" ;;
  esac
  shift 2
done
has_part() {
  [[ ,$only, == *,$1,* ]]
}
for part in ${only//,/ }; do
  [[ ,$parts, == *,$part,* ]] || usage "unknown part $part: choose from $parts"
done

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
if [ -n "$tag" ]; then
  [ "$tag" = "v$version" ] || fail "the tag is $tag, but Cargo.toml has the version $version"
  grep -qE "^## ${version//./\\.} \([0-9]{4}-[0-9]{2}-[0-9]{2}\)" CHANGELOG.md || fail "CHANGELOG.md has no dated section for $version"
  [ -z "$(git status --porcelain)" ] || fail "the working tree has changes; commit them"
fi
mkdir -p "$output"
output=$(realpath "$output")
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
target=$(realpath "$target")
export CARGO_TARGET_DIR=$target
# Files in the program archives get the time of the commit, so archives of one commit differ only if their files do.
time=$(git log -1 --format=%ct)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# archive NAME PROGRAM: packs a program with the licenses, the readme and the changelog.
archive() {
  local folder=$scratch/$1
  mkdir "$folder"
  cp "$2" "$folder/inferno"
  cp README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT docs/third-party-notices.txt "$folder/"
  tar -C "$scratch" --sort=name --mtime="@$time" --owner=0 --group=0 --numeric-owner -cf - "$1" | gzip -9n > "$output/$1.tar.gz"
  ls -l "$output/$1.tar.gz"
}

# check_links PROGRAM: fails if the program is linked against NVIDIA's libraries.
# A program with such links would not start on a machine without the libraries (docs/nvidia-libraries.md).
check_links() {
  readelf -d "$1" > "$scratch/needed"
  ! grep -E 'NEEDED.*lib(cu|nv)' "$scratch/needed" || fail "$1 is linked against NVIDIA's libraries"
}

# check_start COMMAND...: fails unless the program prints its version, answers a prompt with the demo model on the
# CPU, and reports its build in `doctor`.
# The program must also start on machines without CUDA, so call this function without the CUDA toolkit in
# LD_LIBRARY_PATH. If this machine has a driver, or a toolkit in /usr/local/cuda, the program finds them anyway.
check_start() {
  "$@" --version
  "$@" play demo --device cpu --prompt "What is a token?" > "$scratch/answer"
  [ -s "$scratch/answer" ] || fail "the demo gave no answer"
  # Ignore the exit code: `inferno doctor` exits with 1 if the program cannot use a GPU.
  "$@" doctor > "$scratch/doctor" 2>&1 || true
  grep -q "^PASS  build" "$scratch/doctor" || fail "doctor does not report the build: $(cat "$scratch/doctor")"
}

scripts/third_party_notices.py --check

if has_part cpu; then
  echo "== cpu"
  cargo build --release --locked
  check_links "$target/release/inferno"
  check_start "$target/release/inferno"
  archive "inferno-$version-linux-x86_64-cpu" "$target/release/inferno"
fi

for cuda in 12 13; do
  has_part cuda$cuda || continue
  echo "== cuda$cuda"
  variable=INFERNO_CUDA_$cuda
  toolkit=${!variable:-$target/cuda$cuda}
  scripts/cuda-toolkit.sh "$toolkit" $cuda
  (
    # shellcheck source=/dev/null
    . "$toolkit/env.sh"
    export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-80} INFERNO_EXTRA_COMPUTE_CAPS=${INFERNO_EXTRA_COMPUTE_CAPS-86,89,90}
    # Use one target folder per CUDA version, because candle's build script does not recompile for a changed toolkit.
    cargo build --release --locked --features cuda --target-dir "$target/release-cuda$cuda"
  )
  program=$target/release-cuda$cuda/release/inferno
  check_links "$program"
  check_start "$program"
  archive "inferno-$version-linux-x86_64-cuda$cuda" "$program"
done

if has_part aarch64; then
  echo "== aarch64"
  triple=aarch64-unknown-linux-gnu
  if ! rustup target add $triple > /dev/null 2>&1 && [ ! -d "$(rustc --print sysroot)/lib/rustlib/$triple" ]; then
    echo "skipped: aarch64: no standard library for $triple; run: rustup target add $triple (Debian's rustc: install libstd-rust-dev:arm64)"
  elif ! command -v aarch64-linux-gnu-gcc > /dev/null || ! command -v aarch64-linux-gnu-g++ > /dev/null; then
    echo "skipped: aarch64: no cross compiler; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user"
  else
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc \
      CXX_aarch64_unknown_linux_gnu=aarch64-linux-gnu-g++ cargo build --release --locked --target $triple
    program=$target/$triple/release/inferno
    if emulator=$(command -v qemu-aarch64-static || command -v qemu-aarch64); then
      "$emulator" -L /usr/aarch64-linux-gnu "$program" --version
      # The demo starts a sandbox process, which the kernel can run only if qemu is registered in binfmt_misc.
      if compgen -G '/proc/sys/fs/binfmt_misc/*aarch64*' > /dev/null; then
        check_start "$program"
      else
        echo "skipped: aarch64: the demo was not started, because qemu-aarch64 is not registered in binfmt_misc"
      fi
    else
      echo "skipped: aarch64: the program was not started, because qemu-aarch64 is missing"
    fi
    archive "inferno-$version-linux-aarch64-cpu" "$program"
  fi
fi

if has_part image; then
  echo "== image"
  if [ -x "$target/release-cuda13/release/inferno" ]; then
    scripts/image.sh --program "$target/release-cuda13/release/inferno" --cuda "${INFERNO_CUDA_13:-$target/cuda13}" \
      --tag "localhost/inferno:$version-cuda13" --output "$scratch/image.tar"
    name=inferno-$version-image-cuda13
  else
    scripts/image.sh --program "$target/release/inferno" --tag "localhost/inferno:$version-cpu" --output "$scratch/image.tar"
    name=inferno-$version-image-cpu
  fi
  gzip -1n < "$scratch/image.tar" > "$output/$name.tar.gz"
  ls -l "$output/$name.tar.gz"
fi

if has_part sbom; then
  echo "== sbom"
  cyclonedx=0.5.9
  if [ ! -x "$target/cyclonedx-$cyclonedx/bin/cargo-cyclonedx" ]; then
    CARGO_TARGET_DIR=$scratch/cyclonedx cargo install --quiet --locked --debug --root "$target/cyclonedx-$cyclonedx" \
      "cargo-cyclonedx@$cyclonedx"
  fi
  SOURCE_DATE_EPOCH=$time "$target/cyclonedx-$cyclonedx/bin/cargo-cyclonedx" cyclonedx --format json --spec-version 1.5 \
    --features cuda --target x86_64-unknown-linux-gnu --override-filename inferno-sbom
  mv inferno-sbom.json "$output/inferno-$version.cdx.json"
  python3 -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["components"]), "crates")' "$output/inferno-$version.cdx.json"
fi

if has_part notes; then
  echo "== notes"
  awk -v title="## $version " 'index($0, "## ") == 1 { inside = index($0, title) == 1; next } inside' CHANGELOG.md > "$output/release-notes.md"
  [ -s "$output/release-notes.md" ] || fail "CHANGELOG.md has no section for $version"
fi

cd "$output"
find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%P\n' | sort | xargs sha256sum > SHA256SUMS
sha256sum --check --quiet SHA256SUMS
cat SHA256SUMS

#!/usr/bin/env bash
# Installs a CUDA 13.0 toolkit from NVIDIA's Python wheels into a folder.
# Needs no root access, GPU or driver. The download is 1.2 GB and takes about a minute.
#
#   scripts/cuda-toolkit.sh DIR && source DIR/env.sh
#
# Fills DIR with a standard toolkit tree (bin/nvcc, include, lib64, lib64/stubs/libcuda.so) and env.sh.
# env.sh sets the variables that cargo, the linker and CUDA programs need.
# Does nothing if DIR already contains a complete installation by this version of the script.
set -euo pipefail

fail() {
  echo "cuda-toolkit.sh: $*" >&2
  exit 1
}

[ $# = 1 ] || fail "usage: scripts/cuda-toolkit.sh DIR"
[ "$(uname -sm)" = "Linux x86_64" ] || fail "cannot install on $(uname -sm): the wheels are for Linux on x86-64"
for tool in python3 gcc g++; do # nvcc needs g++; the driver stub needs gcc
  command -v $tool > /dev/null || fail "cannot find $tool; install it (on Debian: apt-get install python3-venv g++)"
done

script=$(realpath "$0")
mkdir -p "$1"
dir=$(cd "$1" && pwd)
if cmp -s "$script" "$dir/made-by.sh" && grep -qF "CUDA_HOME=$dir/" "$dir/env.sh"; then
  echo "already installed; run: source $dir/env.sh"
  exit
fi
rm -f "$dir/made-by.sh"

python3 -m venv --clear "$dir/venv"
"$dir/venv/bin/pip" install -q --disable-pip-version-check \
  nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-nvrtc==13.0.88 nvidia-cublas==13.1.0.3 nvidia-curand==10.4.0.35
home=$(echo "$dir"/venv/lib/python3*/site-packages/nvidia/cu13)
cd "$home"

# The linker looks for lib64 and for library names without a version. The wheels contain neither.
[ -e lib64 ] || ln -s lib lib64
for library in lib/*.so.*; do
  name=${library%%.so.*}.so
  [ -e "$name" ] || ln -s "$(basename "$library")" "$name"
done

# Build a driver stub for the linker: an empty function for every cu* name in the headers.
# At run time, the real libcuda.so.1 is loaded.
mkdir -p lib/stubs
grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' include/cuda.h include/cudaTypedefs.h | sort -u |
  awk '{ print "void " $1 "(void) {}" }' |
  gcc -shared -fno-builtin -w -Wl,-soname,libcuda.so.1 -x c - -o lib/stubs/libcuda.so

# Without a GPU, compile for the oldest supported architecture. Newer GPUs can run its PTX.
cat > "$dir/env.sh" << ENV
export CUDA_HOME=$home
export NVCC=\$CUDA_HOME/bin/nvcc
export PATH=\$CUDA_HOME/bin:\$PATH
export LIBRARY_PATH=\$CUDA_HOME/lib:\$CUDA_HOME/lib/stubs\${LIBRARY_PATH:+:\$LIBRARY_PATH}
export LD_LIBRARY_PATH=\$CUDA_HOME/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
if [ -z "\${CUDA_COMPUTE_CAP:-}" ] && ! nvidia-smi -L > /dev/null 2>&1; then
  export CUDA_COMPUTE_CAP=80
fi
ENV
"$home/bin/nvcc" --version | grep release
cp "$script" "$dir/made-by.sh"
echo "ready; run: source $dir/env.sh"

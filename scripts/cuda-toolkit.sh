#!/usr/bin/env bash
# Installs a CUDA toolkit from packages into a folder: CUDA 13.0, or CUDA 12.4, which works with driver 550 or later.
# Needs no root access, GPU or driver. The download is 1.2 GB for CUDA 13 and 0.7 GB for CUDA 12.
#
#   scripts/cuda-toolkit.sh DIR [13|12] && source DIR/env.sh
#
# CUDA 13 comes from NVIDIA's Python wheels. The wheels of CUDA 12 contain no nvcc, so nvcc comes from Debian's package
# of CUDA 12.4, which requires apt-get and Debian's keyring.
#
# Writes a standard toolkit tree (bin/nvcc, include, lib64, lib64/stubs/libcuda.so) to a subfolder of DIR.
# Also writes DIR/env.sh, which sets the variables that cargo, the linker and CUDA programs need.
# Does nothing if this version of the script has already installed the same CUDA version in DIR.
set -euo pipefail

fail() {
  echo "cuda-toolkit.sh: $*" >&2
  exit 1
}

[ $# = 1 ] || [ $# = 2 ] || fail "usage: scripts/cuda-toolkit.sh DIR [13|12]"
version=${2:-13}
[[ $version =~ ^1[23]$ ]] || fail "cannot install CUDA $version; choose 13 or 12"
[ "$(uname -sm)" = "Linux x86_64" ] || fail "cannot install on $(uname -sm): the packages are for Linux on x86-64; install NVIDIA's CUDA toolkit instead"
for tool in python3 gcc g++; do # nvcc needs g++; the driver stub needs gcc
  command -v $tool > /dev/null || fail "cannot find $tool; install it (on Debian: apt-get install python3-venv g++)"
done

script=$(realpath "$0")
mkdir -p "$1"
dir=$(cd "$1" && pwd)
if cmp -s "$script" "$dir/made-by.sh" && grep -qF "CUDA_HOME=$dir/" "$dir/env.sh" && [ "$(cat "$dir/version")" = "$version" ]; then
  echo "already installed; run: source $dir/env.sh"
  exit
fi
rm -f "$dir/made-by.sh"
echo "$version" > "$dir/version"
python3 -m venv --clear "$dir/venv"

wheels() {
  "$dir/venv/bin/pip" install -q --disable-pip-version-check "$@"
}

# debian_packages FOLDER RELEASE COMPONENT NAME...: downloads Debian packages and unpacks them into FOLDER/tree.
# Uses this machine's Debian mirror and a separate folder for apt's state, so the machine may run another Debian release.
debian_packages() {
  local folder=$1 release=$2 component=$3 mirror keys=/usr/share/keyrings/debian-archive-keyring.gpg
  shift 3
  command -v apt-get > /dev/null && [ -f $keys ] || fail "cannot install CUDA 12: this machine has no apt-get with Debian's keyring; use Debian, or install CUDA 13"
  # shellcheck disable=SC2016 # apt replaces these variables
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' 'Origin: Debian' |
    awk '$2 !~ /-/ { print $1; exit }')
  [ -n "$mirror" ] || fail "cannot find Debian's mirror in apt's package lists; on Debian, run: apt-get update"
  rm -rf "$folder"
  mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
  echo "deb [signed-by=$keys] $mirror $release $component" > "$folder/sources.list"
  cat > "$folder/apt.conf" << CONF
Dir::Etc::SourceList "$folder/sources.list";
Dir::Etc::SourceParts "-";
Dir::State::Lists "$folder/lists";
Dir::State::status "/dev/null";
Dir::Cache "$folder/cache";
APT::Sandbox::User "";
CONF
  APT_CONFIG=$folder/apt.conf apt-get update -qq
  (cd "$folder" && APT_CONFIG=apt.conf apt-get download -qq "$@")
  for package in "$folder"/*.deb; do
    dpkg-deb -x "$package" "$folder/tree"
  done
}

if [ "$version" = 13 ]; then
  wheels nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 \
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-nvrtc==13.0.88 nvidia-cublas==13.1.0.3 nvidia-curand==10.4.0.35
  home=$(echo "$dir"/venv/lib/python3*/site-packages/nvidia/cu13)
else
  # nvidia-cuda-nvcc-cu12 contains libdevice and nvcc's headers. NVIDIA withdrew CCCL 12.4; CCCL 12.9 works with CUDA 12.4.
  wheels nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-cccl-cu12==12.9.27 nvidia-cuda-runtime-cu12==12.4.127 \
    nvidia-cuda-nvrtc-cu12==12.4.127 nvidia-cublas-cu12==12.4.5.8 nvidia-curand-cu12==10.3.5.147
  # nvcc links the static CUDA runtime by default, but the runtime wheel of CUDA 12.4 does not contain it.
  # The static runtime of CUDA 12.9 works with the drivers of every CUDA 12 release.
  wheels --no-deps --target "$dir/static" nvidia-cuda-runtime-cu12==12.9.79
  debian_packages "$dir/debian" trixie non-free nvidia-cuda-toolkit=12.4.131*
  home=$dir/cu12
  rm -rf "$home"
  mkdir -p "$home/bin" "$home/nvvm/bin" "$home/include" "$home/lib"
  for part in "$dir"/venv/lib/python3*/site-packages/nvidia/*/; do
    [ ! -d "$part/include" ] || cp -rlf "$part/include/." "$home/include"
    [ ! -d "$part/lib" ] || cp -rlf "$part/lib/." "$home/lib"
    [ ! -d "$part/nvvm/libdevice" ] || cp -rl "$part/nvvm/libdevice" "$home/nvvm/"
  done
  mv "$dir"/static/nvidia/cuda_runtime/lib/*.a "$home/lib/"
  rm -rf "$dir/static"
  tree=$dir/debian/tree/usr
  cp -l "$tree"/bin/{cudafe++,fatbinary,nvlink,ptxas,bin2c} "$tree/lib/nvidia-cuda-toolkit/bin/nvcc" "$home/bin/"
  cp -rl "$tree/lib/nvidia-cuda-toolkit/bin/crt" "$home/bin/"
  cp -l "$tree/lib/nvidia-cuda-toolkit/bin/cicc" "$home/nvvm/bin/"
  # Debian's nvcc.profile has other paths, so write a new one. nvcc itself expands $(…) and _HERE_.
  cat > "$home/bin/nvcc.profile" << 'PROFILE'
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH += $(TOP)/lib:
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"
CUDAFE_FLAGS +=
PTXAS_FLAGS +=
PROFILE
  rm -rf "$dir/debian"
fi
cd "$home"

# Builds look for libraries in a folder lib64, under names without a version. NVIDIA's wheels contain neither.
[ -e lib64 ] || ln -s lib lib64
for library in lib/*.so.*; do
  name=${library%%.so.*}.so
  [ -e "$name" ] || ln -s "$(basename "$library")" "$name"
done

# Build a driver stub for the linker: an empty function for every name in cuda.h and cudaTypedefs.h that starts with
# `cu` and a capital letter. At run time, the real libcuda.so.1 is loaded.
mkdir -p lib/stubs
grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' include/cuda.h include/cudaTypedefs.h | sort -u |
  awk '{ print "void " $1 "(void) {}" }' |
  gcc -shared -fno-builtin -w -Wl,-soname,libcuda.so.1 -x c - -o lib/stubs/libcuda.so

# Without a GPU and without CUDA_COMPUTE_CAP, compile for the oldest supported architecture. Newer GPUs can run its PTX.
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

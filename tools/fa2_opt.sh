#!/usr/bin/env bash
# Builds the resident decode and its baseline (include/millrace/kernels/flash_attention_v2*.h) as a small library of
# their own, with their test and their benchmark: build/fa2-opt. Needs nvcc and nothing else of this tree's build.
#   CUDA_ARCH   what nvcc is told about GPUs; sm_75 and later
#   NVCC, OUT   another compiler, another folder
set -euo pipefail
cd "$(dirname "$0")/.."
nvcc=${NVCC:-nvcc}
out=${OUT:-build/fa2-opt}
# Turing, Ampere and Ada, Hopper; later GPUs by translation.
arch=${CUDA_ARCH:-}
for code in 75,code=sm_75 80,code=sm_80 90,code=sm_90 90,code=compute_90; do
  [ -n "${CUDA_ARCH:-}" ] || arch+=" -gencode arch=compute_$code"
done
command -v "$nvcc" >/dev/null || {
  echo 'make fa2-opt: nvcc is not on the PATH; install the CUDA toolkit (12.8 or later)' >&2
  exit 2
}
mkdir -p "$out"
read -ra arch <<<"$arch"
flags=(-std=c++20 -O3 --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra,-fPIC,-fvisibility=hidden)
flags+=(-I. -Iinclude "${arch[@]}")
sources=(kernels/cuda/resident/*.cu kernels/api/cuda/flash_attention_v2*.cpp
  kernels/cuda/resident/resident_session.cpp kernels/api/mr_status_name.cpp tests/fa2/standalone_status.cpp)
objects=()
for source in "${sources[@]}"; do
  object=$out/$(basename "$source").o
  "$nvcc" "${flags[@]}" -c "$source" -o "$object"
  objects+=("$object")
done
rm -f "$out/libmillrace_fa2.a"
ar rcs "$out/libmillrace_fa2.a" "${objects[@]}"
"$nvcc" "${arch[@]}" -shared -o "$out/libmillrace_fa2.so" "${objects[@]}"
for program in fa2_opt_test fa2_opt_bench; do
  "$nvcc" "${flags[@]}" "tests/fa2/$program.cpp" "$out/libmillrace_fa2.a" -o "$out/$program" -lpthread
done
echo "$out: libmillrace_fa2.so and .a, fa2_opt_test, fa2_opt_bench"

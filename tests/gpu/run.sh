#!/usr/bin/env bash
# Builds the CUDA backend in build/gpu and tests it on this machine's GPU against the reference and the golden
# models, then under compute-sanitizer. Some minutes; without a GPU or nvcc it says so and ends with status 0.
#   tests/gpu/run.sh
#   MILLRACE_DEPS_DIR=dir tests/gpu/run.sh   where fmt, nlohmann-json and CLI11 are not installed: dir/include/fmt,
#                                            dir/include/nlohmann, dir/include/CLI (and dir/googletest, its source)
#   FALLBACK=1 tests/gpu/run.sh              also as on a GPU before sm_90: the driver translates code for 8.0
# Other settings: CUDA_ARCHITECTURES (90a), JOBS, SANITIZER_SECONDS (90: limit of each sanitizer run).
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
export PATH="$PATH:/usr/local/cuda/bin"

skip() {
  printf '\n*** SKIPPED: the GPU tests did not run: %s ***\n\n' "$1" >&2
  exit 0
}
nvidia-smi -L >/dev/null 2>&1 || skip "nvidia-smi finds no GPU"
command -v nvcc >/dev/null || skip "nvcc is not installed"
command -v cmake >/dev/null || skip "cmake is not installed"

build=build/gpu
jobs=${JOBS:-$(nproc)}
limit=${SANITIZER_SECONDS:-90}
logs=$build/logs
mkdir -p "$logs"
summary=()
failed=0

step() { # step NAME COMMAND...: runs it, keeps its output, notes how it ended; its status
  local name=$1 began=$SECONDS status=0
  shift
  echo "--- $name"
  "$@" >"$logs/$name.log" 2>&1 || status=$?
  if [ "$status" = 0 ]; then
    summary+=("$(printf 'passed   %-12s %4d s' "$name" $((SECONDS - began)))")
  else
    failed=1
    summary+=("$(printf 'FAILED   %-12s %4d s  status %d, %s' "$name" $((SECONDS - began)) "$status" "$logs/$name.log")")
    tail -n 40 "$logs/$name.log"
  fi
  return "$status"
}

finish() {
  echo
  printf '%s\n' "${summary[@]}"
  exit "$failed"
}

# A test program that ran nothing on the GPU has proved nothing.
expect_on_cuda() { # expect_on_cuda STEP PATTERN
  local count
  count=$(grep -cE "$2" "$logs/$1.log")
  summary+=("         $1: $count results on cuda")
  if [ "$count" = 0 ]; then
    failed=1
    summary+=("FAILED   $1: no line matches '$2': nothing ran on cuda")
  fi
}

[ -z "${FALLBACK:-}" ] || CUDA_ARCHITECTURES="80-virtual;${CUDA_ARCHITECTURES:-90a-real}"
configure=(--preset cuda -B "$build" -DMILLRACE_TESTS=ON "-DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES:-90a}")
command -v ninja >/dev/null || configure+=(-G "Unix Makefiles")
[ -z "${MILLRACE_DEPS_DIR:-}" ] || configure+=("-DMILLRACE_DEPS_DIR=$(realpath "$MILLRACE_DEPS_DIR")")

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
step configure cmake "${configure[@]}" || finish
step build cmake --build "$build" --parallel "$jobs" --target backend_cuda_test backend_test engine_test integration_test ||
  finish

step host "$build/src/backend/cuda/backend_cuda_test"

export MILLRACE_TEST_DEVICES=cuda
step conformance "$build/src/backend/backend_test" \
  --gtest_filter='*cuda*:Attention.*:Damaged.*:SameBits.HoweverThePrompt*:SameBits.WhateverElse*:SameBitsDecode.*:Blocks.*'
expect_on_cuda conformance '\[ +OK \].*/cuda_'
step golden "$build/tests/integration_test" --gtest_filter='*Golden.Device*:*Golden.SameBits*:KvCache.*'
expect_on_cuda golden '\[ +figure +\] cuda '
model=build/models/SmolLM2-135M-Instruct.Q4_1.gguf
if [ -f "$model" ]; then
  step real "$build/tests/integration_test" --gtest_filter='SmolLm2.FurtherDevices*'
  expect_on_cuda real '\[ +figure +\] cuda SmolLM2'
else
  summary+=("SKIPPED  real: $model is not there; python3 tools/fetch_model.py smollm2")
fi
step sampling "$build/tests/integration_test" --gtest_filter='Sampling.*:*Embedding*'
expect_on_cuda sampling '\[ +figure +\] cuda sampling'
step engine "$build/src/engine/engine_test" --gtest_filter='Ahead.*'
expect_on_cuda engine '\[ +figure +\] cuda schedules'

if [ -n "${FALLBACK:-}" ]; then
  step fallback env CUDA_FORCE_PTX_JIT=1 "$build/src/backend/backend_test" \
    --gtest_filter='*Experts/cuda*:*cuda_mxfp4*:*cuda_q8_0*:SameBitsDecode.*'
  expect_on_cuda fallback '\[ +OK \].*/cuda_'
fi

if command -v compute-sanitizer >/dev/null; then
  # A small model with everything in it: sinks, windows, experts, ragged batches.
  small='--gtest_filter=*Golden.Device*/gpt_oss_w32:*Golden.Device*/qwen3:Sampling.EnginesAnswer*'
  for tool in memcheck racecheck; do
    step "$tool" timeout "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$build/tests/integration_test" "$small"
    expect_on_cuda "$tool" '\[ +figure +\] cuda '
  done
else
  summary+=("SKIPPED  memcheck, racecheck: compute-sanitizer is not installed")
fi
grep -hE '\[ +figure +\] cuda' "$logs"/*.log | sort -u
finish

#!/usr/bin/env bash
# Builds the CUDA backend in build/gpu and proves it on this machine's GPU: every step against its oracle, side by side,
# some of them under compute-sanitizer; then what is timed, alone. Under seven minutes on 16 cores, the build included.
# Prints the seconds of each step; ends with status 1 if one failed or ran nothing on cuda. Without a GPU or nvcc it says
# so and ends with status 0.
#   tests/gpu/run.sh
#   MILLRACE_DEPS_DIR=dir tests/gpu/run.sh   where fmt, nlohmann-json and CLI11 are not installed: dir/include/fmt,
#                                            dir/include/nlohmann, dir/include/CLI (and dir/googletest, its source)
#   PORTABLE=1 tests/gpu/run.sh              also the kernels of other GPUs, each in a build of its own: those of sm_80,
#                                            translated by the driver, and those with bulk copies but no warpgroup products
#   ONLY='host|attention' tests/gpu/run.sh   some steps (a regular expression), after the build
# Other settings: CUDA_ARCHITECTURES (this GPU's), JOBS, STEP_SECONDS (240: limit of a step), PYTHON (python3, with torch).
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
logs=build/gpu/logs
jobs=${JOBS:-$(nproc)}
limit=${STEP_SECONDS:-240}
python=${PYTHON:-python3}
only=${ONLY:-.}
summary=()
failed=0
SECONDS=0
rm -rf "$logs" && mkdir -p "$logs"

note() { summary+=("$(printf '%-8s %-16s %s' "$@")"); }

# ---------------------------------------------------------------- steps

# start NAME COMMAND...: beside the others. finish_all waits for them and notes how each ended; most_done for all but
# those that go on by themselves (racecheck), since every process on the GPU takes time of all others.
started=()
declare -A pids
start() {
  local name=$1
  shift
  [[ $name =~ $only ]] || return 0
  started+=("$name")
  (
    SECONDS=0
    status=0
    timeout "$limit" "$@" >"$logs/$name.log" 2>&1 || status=$?
    echo "$status $SECONDS" >"$logs/$name.status"
  ) &
  pids[$name]=$!
}
most_done() {
  local name
  for name in "${started[@]}"; do
    [[ $name = racecheck ]] || wait "${pids[$name]}"
  done
}
finish_all() {
  local name status seconds
  wait
  for name in "${started[@]}"; do
    read -r status seconds <"$logs/$name.status"
    if [ "$status" = 0 ]; then
      note passed "$name" "$seconds s"
    elif [ "$status" = 77 ]; then
      note SKIPPED "$name" "$(grep -h -m1 'SKIPPED' "$logs/$name.log")"
    else
      failed=1
      note FAILED "$name" "$seconds s, status $status$([ "$status" = 124 ] && echo ": over $limit s"), $logs/$name.log"
      echo "--- $name"
      grep -E 'FAILED|Failure|error' "$logs/$name.log" | head -n 20
      tail -n 15 "$logs/$name.log"
    fi
  done
  started=()
}
alone() { # alone NAME COMMAND...: nothing beside it
  start "$@"
  finish_all
}
# A test program that ran nothing on the GPU has proved nothing.
expect_on_cuda() { # expect_on_cuda PATTERN NAME...
  local count name pattern=$1
  shift
  for name in "$@"; do
    [ -f "$logs/$name.log" ] && ! grep -qs '^77 ' "$logs/$name.status" || continue
    count=$(grep -cE "$pattern" "$logs/$name.log")
    note '' "$name" "$count results on cuda"
    if [ "$count" = 0 ]; then
      failed=1
      note FAILED "$name" "no line matches '$pattern': nothing ran on cuda"
    fi
  done
}
finish() {
  echo
  grep -hE '\[ +figure +\] cuda' "$logs"/*.log | sort -u
  printf '%s\n' "${summary[@]}"
  echo "$([ "$failed" = 0 ] && echo passed || echo FAILED): $SECONDS s in all, the build included"
  exit "$failed"
}

build_in() { # build_in DIRECTORY ARCHITECTURES TARGET...
  local directory=$1 architectures=$2 configure
  shift 2
  configure=(--preset cuda -B "$directory" -DMILLRACE_TESTS=ON "-DCMAKE_CUDA_ARCHITECTURES=$architectures")
  command -v ninja >/dev/null || configure+=(-G "Unix Makefiles")
  [ -z "${MILLRACE_DEPS_DIR:-}" ] || configure+=("-DMILLRACE_DEPS_DIR=$(realpath "$MILLRACE_DEPS_DIR")")
  cmake "${configure[@]}" && cmake --build "$directory" --parallel "$jobs" --target "$@"
}
build_step() { # build_step NAME DIRECTORY ARCHITECTURES TARGET...: its status
  local name=$1 began=$SECONDS status=0
  shift
  build_in "$@" >"$logs/$name.log" 2>&1 || status=$?
  if [ "$status" = 0 ]; then
    note passed "$name" "$((SECONDS - began)) s"
  else
    failed=1
    note FAILED "$name" "$((SECONDS - began)) s, status $status, $logs/$name.log"
    grep -E 'error|FAILED' "$logs/$name.log" | head -n 20
  fi
  return "$status"
}

# ---------------------------------------------------------------- what is proved

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
case $capability in
  90) architectures=90a-real kind=wgmma ;;
  1[0-9][0-9]) architectures=$capability-real kind=bulk ;;
  *) architectures=$capability-real kind=portable ;;
esac
[ -z "${CUDA_ARCHITECTURES:-}" ] || kind='' # whatever was asked for
build_step build "$build" "${CUDA_ARCHITECTURES:-$architectures}" \
  millrace kernels_cuda_test kernels_api_test backend_cuda_test backend_test engine_test integration_test \
  ranks_test attention_driver gemm_bench millrace_kernels_shared flash_mma_driver || finish

export MILLRACE_TEST_DEVICES=cuda
export XDG_CACHE_HOME=$PWD/$build/cache # a table of tuned kernels that somebody else made is not under test
rm -rf "$XDG_CACHE_HOME" && mkdir -p "$XDG_CACHE_HOME"

# Kernels with the programs of one build: every op, type and odd shape against the reference; bit by bit however a prompt
# is cut and whatever else is in the batch, 10,000 ragged batches among it.
kernels() { # kernels SUFFIX DIRECTORY KIND
  local s=$1 backend_test=$2/src/backend/backend_test
  start "host$s" env ${3:+MILLRACE_EXPECT_KERNELS="$3"} "$2/kernels/cuda/kernels_cuda_test"
  start "executor$s" "$2/src/backend/cuda/backend_cuda_test"
  start "api$s" "$2/kernels/api/kernels_api_test"
  start "side_by_side$s" "$backend_test" --gtest_filter='SideBySide.*'
  start "conformance$s" "$backend_test" --gtest_filter='*cuda*:Attention.*:Mixture.*:Operations.*:Damaged.*:Blocks.*'
  start "latent$s" "$backend_test" --gtest_filter='LatentAttention.*:IndexedAttention.*'
  start "cut$s" "$backend_test" --gtest_filter='SameBitsDecode.HoweverThePrompt*:SameBits.HoweverThePrompt*'
  start "fp8$s" "$backend_test" --gtest_filter='SameBitsDecode.InACacheOfFp8'
  start "tall$s" "$backend_test" --gtest_filter='SameBitsDecode.HoweverTall*:SameBitsDecode.AndThey*'
  start "types$s" "$backend_test" --gtest_filter='SameBitsDecode.WhateverTheTypes:SameBitsDecode.Whether*'
  start "batch$s" "$backend_test" --gtest_filter='SameBits*.WhateverElse*:SameBitsDecode.Among*'
  start "ragged$s" "$backend_test" --gtest_filter='SameBitsDecode.InEvery*'
}
attention() { # attention SUFFIX DIRECTORY: against torch in float64, with the GPU almost to itself
  local part
  most_done
  for part in 0 1 2; do
    start "attention$1.$part" "$python" tests/gpu/attention_test.py "$2/tests/attention_driver" --part $part/3
  done
  finish_all
}
kernels_ran() { # kernels_ran SUFFIX
  expect_on_cuda '\[ +OK \].*/cuda_' "conformance$1"
  expect_on_cuda '\[ +figure +\] cuda ' "host$1" "side_by_side$1" "ragged$1" "attention$1".{0,1,2}
}

kernels '' "$build" "$kind"
# Golden models against transformers; a real model's 64 greedy tokens against the CPU's; the engine.
integration=$build/tests/integration_test
start golden "$integration" --gtest_filter='*Golden.Device*:*Golden.SameBits*:KvCache.*'
start sampling "$integration" --gtest_filter='Sampling.*:*Embedding*:*Encoders.*'
start adapters "$integration" --gtest_filter='*AdapterGolden.Agrees*:*AdapterBatch.*'
# Ranks that share this GPU: threads of a process, and processes of mpirun (status 77: there is none).
for part in 0 1 2 3 4; do
  start "ranks.$part" env GTEST_TOTAL_SHARDS=5 GTEST_SHARD_INDEX=$part PATH="$PWD/$build:$PATH" \
    "$build/tests/ranks_test" --gtest_filter='*Gpu*'
done
if command -v mpirun >/dev/null; then
  start mpi_ranks "$python" tests/gpu/ranks_test.py "$build/millrace"
else
  note SKIPPED mpi_ranks '*** mpirun is not installed: ranks as processes did not run ***'
fi
start engine "$build/src/engine/engine_test" --gtest_filter='Ahead.*:Fp8Prompts.*'
start errors "$python" tests/gpu/errors_test.py "$build/millrace"
model=build/models/SmolLM2-135M-Instruct.Q4_1.gguf
if [ -f "$model" ]; then
  start real "$integration" --gtest_filter='SmolLm2.FurtherDevices*'
else
  note SKIPPED real "*** $model is not there: python3 tools/fetch_model.py smollm2 ***"
fi
# The kernel library as other programs call it, against torch in float64.
library=$build/libmillrace_kernels.so
start fused "$python" tests/gpu/fused_test.py "$library" --device cuda --repeat 50
start products "$python" tests/gpu/gemm_test.py "$library"
start lowbit "$python" tests/gpu/lowbit_test.py "$library"
start tiles "$python" tests/tile_test.py
start flash_mma "$python" tests/gpu/flash_mma_test.py "$build/tests/libflash_mma_driver.so"
for part in 0 1 2; do start "flash.$part" "$python" tests/gpu/flash_attention_test.py "$library" --part $part/3; done
for part in 0 1; do
  start "flash_backward.$part" "$python" tests/gpu/flash_attention_test.py "$library" --what backward --part $part/2 --runs 10
done
start flash_fp8 "$python" tests/gpu/flash_attention_test.py "$library" --what fp8
start flash_same_bits "$python" tests/gpu/flash_attention_test.py "$library" --what backward --part 5/23 --runs 100
if command -v compute-sanitizer >/dev/null; then
  # Small models with everything in them: sinks, windows, experts, ragged batches.
  small='*Golden.Device*/gpt_oss_w32:*Golden.Device*/qwen3'
  start racecheck compute-sanitizer --tool racecheck --error-exitcode 9 "$integration" --gtest_filter="$small"
  start memcheck compute-sanitizer --tool memcheck --error-exitcode 9 "$integration" \
    --gtest_filter="$small:Sampling.EnginesAnswer*"
  for of in memcheck:fp8 memcheck:backward racecheck:fp8; do # some cases; torch's own kernels are not looked at
    start "flash_${of/:/.}" compute-sanitizer --tool "${of%:*}" --kernel-regex kns=flash_ --error-exitcode 9 \
      "$python" tests/gpu/flash_attention_test.py "$library" --what "${of#*:}" --part 5/23 --runs 2
  done
else
  note SKIPPED sanitizers '*** compute-sanitizer is not installed: neither memcheck nor racecheck ran ***'
fi
attention '' "$build"
kernels_ran ''
expect_on_cuda '\[ +figure +\] cuda ' golden sampling engine real memcheck racecheck products
[ "$kind" != wgmma ] || expect_on_cuda '\[ +figure +\] cuda ' tiles
expect_on_cuda 'comparisons on cuda, 0 failures' fused
expect_on_cuda 'WithAGpu.* \.\.\. ok' errors

if [ -n "${PORTABLE:-}" ]; then
  for kind in portable:80-virtual bulk:90-real; do
    directory=build/gpu-${kind%%:*}
    build_step "build_${kind%%:*}" "$directory" "${kind#*:}" kernels_cuda_test kernels_api_test backend_cuda_test backend_test \
      attention_driver || continue
    # What the driver has translated is kept for the others.
    [ "$kind" = bulk:90-real ] || alone "translate" "$directory/src/backend/backend_test" --gtest_filter='*cuda_q8_0*'
    kernels "_${kind%%:*}" "$directory" "${kind%%:*}"
    attention "_${kind%%:*}" "$directory"
    kernels_ran "_${kind%%:*}"
  done
fi

# ---------------------------------------------------------------- what is timed

alone tune "$build/millrace" tune
alone tuned "$build/millrace" tune --print
alone gemm_bench "$build/bench/gemm_bench"
for name in tuned gemm_bench; do [ ! -f "$logs/$name.log" ] || cat "$logs/$name.log"; done
finish

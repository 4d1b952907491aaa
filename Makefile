# The commands of the project. Each installs what it needs by Debian package name, if it is missing.
# CMakePresets.json has the builds; tools/run_tests.py has what `make test` runs.

# What may be given to `make run`. $(value) keeps every character as typed; tools/run.sh reads the environment.
PROMPT ?=
MODEL ?=
N ?= 200
ARGS ?=
export RUN_PROMPT := $(value PROMPT)
export RUN_MODEL := $(value MODEL)
export RUN_N := $(value N)
unexport PROMPT MODEL N

# Objects are found again in any clone: paths count from its root.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 3600
PREFIX ?= /usr/local
NVCC ?= nvcc

.DEFAULT_GOAL := help
.PHONY: help run build test check install package deps deps-test fuzz soak format lint asan tsan cross cuda cuda-all clean
.PHONY: fa2-opt test-fa2-opt wheel wheel-kernels hub

help:
	@echo 'make run      answer a prompt with SmolLM2-135M-Instruct (installs, builds and fetches what is missing)'
	@echo '                PROMPT="Why is the sky blue?"  what to ask'
	@echo '                MODEL=path/to/model.gguf       another model: a GGUF file or a Hugging Face directory'
	@echo '                N=200                          at most so many tokens'
	@echo '                ARGS="--temp 0.7 --seed 1"     more options; see build/release/millrace run --help'
	@echo 'make build    build/release/millrace, the one binary'
	@echo 'make test     build and run every functional test'
	@echo 'make check    that, and format, every file alone, clang-tidy, sanitizers, fuzz corpus, the other architecture, CUDA'
	@echo
	@echo 'make fuzz     each fuzz target for a minute (FUZZ_SECONDS=60)'
	@echo 'make soak     200 clients and attackers on one server for an hour (SOAK_SECONDS=3600)'
	@echo 'make format   rewrite the sources with clang-format'
	@echo 'make lint     clang-format and clang-tidy only'
	@echo 'make install  program, libraries, headers, man page and completions under PREFIX=/usr/local (DESTDIR is kept)'
	@echo 'make package  build/package/millrace_VERSION_ARCH.deb, for Debian 12'
	@echo 'make wheel    build/wheelhouse/*.whl: the Python packages (WHEEL="--cuda off": without CUDA)'
	@echo 'make asan     tests under the address and undefined-behaviour sanitizers'
	@echo 'make tsan     tests of the threads under the thread sanitizer'
	@echo 'make cross    tests of the kernels on the other architecture (x86-64 or ARM) under qemu'
	@echo 'make cuda     build/cuda/millrace, with the CUDA backend (needs nvcc)'
	@echo 'make cuda-all the kernels alone, for every GPU architecture from sm_80 on'
	@echo 'make fa2-opt  build/fa2-opt: the resident decode as a small library of its own (CUDA_ARCH: flags for nvcc)'
	@echo 'make test-fa2-opt  its results against float64 and its frozen benchmark, on a GPU'
	@echo 'make wheel-kernels  build/wheels/millrace_kernels-*.whl: the kernels for torch, JAX and numpy (PYTHON has torch, jaxlib)'
	@echo 'make hub      build/hub: that wheel as a repository of Hugging Face kernels'
	@echo 'make deps     install the packages a build needs'
	@echo 'make clean    remove everything built; fetched models in build/models stay'

deps:
	@tools/install_deps.sh build

deps-test:
	@tools/install_deps.sh build test optional

build: deps
	@test -f build/release/build.ninja || cmake --preset release
	@cmake --build --preset release

run: build
	@tools/run.sh $(ARGS)

install: build
	@cmake --install build/release --prefix '$(PREFIX)' --strip

package: build
	@tools/install_deps.sh package
	@cd build/release && cpack -G DEB >/dev/null
	@ls build/package/*.deb

wheel:
	@tools/install_deps.sh build wheel
	@python3 tools/make_wheel.py $(WHEEL)

test: deps-test
	@python3 tools/run_tests.py

check: deps-test
	@python3 tools/run_tests.py --check

fuzz:
	@tools/install_deps.sh build test fuzz
	@python3 tools/run_tests.py --only fuzz --fuzz-seconds $(FUZZ_SECONDS)

soak: deps-test
	@python3 tools/run_tests.py --only soak --soak-seconds $(SOAK_SECONDS)

format:
	@tools/install_deps.sh build test
	@python3 tools/lint.py format --fix

lint: deps-test
	@python3 tools/run_tests.py --only format,tidy

asan tsan cross: deps-test
	@python3 tools/run_tests.py --only $@

cuda: deps
	@command -v $(NVCC) >/dev/null || { \
	  echo 'make cuda: nvcc is not on the PATH; install the CUDA toolkit (12.8 or later), or use: make build' >&2; exit 2; }
	@test -f build/cuda/build.ninja || cmake --preset cuda -DCMAKE_CUDA_COMPILER="$$(command -v $(NVCC))"
	@cmake --build --preset cuda

cuda-all: deps
	@cmake --preset cuda -B build/cuda-all -DCMAKE_CUDA_COMPILER="$$(command -v $(NVCC))" >/dev/null
	@cmake --build build/cuda-all --target millrace_backend_cuda

# Variables that are not given keep the script's defaults.
fa2-opt:
	@CUDA_ARCH='$(CUDA_ARCH)' NVCC='$(NVCC)' tools/fa2_opt.sh

test-fa2-opt: fa2-opt
	@python3 tests/fa2/fa2_gate.py build/fa2-opt

# Torch's and JAX's headers are PYTHON's; without an archive of a build the root is built, preset release.
PYTHON ?= python3
KERNELS_ARCHIVE ?=
wheel-kernels: deps
	@$(PYTHON) -m pip wheel -q --no-build-isolation --no-deps -w build/wheels \
	  -C cmake.define.MILLRACE_KERNELS_ARCHIVE='$(abspath $(KERNELS_ARCHIVE))' -C build-dir=$(CURDIR)/build/kernels_python python/kernels
	@ls build/wheels/millrace_kernels-*.whl

hub:
	@ls build/wheels/millrace_kernels-*.whl >/dev/null 2>&1 || $(MAKE) --no-print-directory wheel-kernels
	@python3 tools/make_hub.py build/wheels/millrace_kernels-*.whl build/hub

clean:
	@if [ -d build ]; then find build -mindepth 1 -maxdepth 1 ! -name models -exec rm -rf {} +; fi

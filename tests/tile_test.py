#!/usr/bin/env python3
"""The tile vocabulary (include/millrace/kernels/tile) as a user has it: its examples are as short as they promise and
see nothing but installed headers; with an nvcc they compile without a warning, and run where there is a Hopper GPU.

    tile_test.py
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = {"tile_gemm.cu": 80, "tile_attention.cu": 150}
RUNS = {"tile_gemm.cu": (["1000"], ["4096"]), "tile_attention.cu": (["1024", "3"],)}
FLAGS = "-std=c++20 -gencode arch=compute_90a,code=sm_90a -O2 -Werror=all-warnings -Xcompiler=-Wall,-Wextra".split()
INCLUDE = re.compile(r'^#include [<"]([^>"]+)[>"]', re.MULTILINE)


def has_hopper():
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True).stdout.startswith("9.0")
    except OSError:
        return False


def faults_of(name, prefix, compiler, gpu):
    source = ROOT / "examples" / name
    text = source.read_text()
    lines = len(text.splitlines())
    if lines > LINES[name]:
        yield f"{name} has {lines} lines, expected at most {LINES[name]}"
    for include in INCLUDE.findall(text):
        if "/" in include and not include.startswith("millrace/kernels/tile/"):
            yield f"{name} includes {include}, expected headers of millrace/kernels/tile"
    if compiler is None:
        return
    program = prefix / name.removesuffix(".cu")
    copy = shutil.copy(source, prefix)  # outside of the tree
    built = subprocess.run([compiler, *FLAGS, f"-I{prefix}/include", copy, "-o", program], capture_output=True, text=True)
    if built.returncode != 0:
        yield f"{name} does not compile:\n{(built.stdout + built.stderr)[:3000]}"
        return
    for arguments in RUNS[name] if gpu else ():
        ran = subprocess.run([program, *arguments], capture_output=True, text=True)
        print(f"[  figure  ] cuda {name}: {ran.stdout.strip()}")
        if ran.returncode != 0:
            yield f"{name} {' '.join(arguments)}: status {ran.returncode}: {ran.stdout}{ran.stderr}"


def main():
    compiler, gpu = shutil.which(os.environ.get("NVCC", "nvcc")), has_hopper()
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder)
        shutil.copytree(ROOT / "include", prefix / "include")  # as `cmake --install` has it
        faults = [fault for name in LINES for fault in faults_of(name, prefix, compiler, gpu)]
    for fault in faults:
        print(fault)
    how = "not compiled: no nvcc" if compiler is None else "compiled" if not gpu else "compiled and run"
    print(f"tile examples: {len(LINES)}, {how}, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

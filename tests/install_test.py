#!/usr/bin/env python3
"""Installs a build into an empty prefix and builds programs outside the tree against it, as a user would.

  tests/install_test.py BUILD    BUILD: a build folder

The engine's example by find_package(millrace), with the shared and with the static libraries; a C program, by a C
compiler and pkg-config, that runs attention on the CPU; the man page, the completions; what the libraries export.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from programs import expect, run

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests/golden/models/llama3/model.gguf"

PROJECT = """cmake_minimum_required(VERSION 3.25)
project(outside LANGUAGES C CXX)
find_package(millrace {version} REQUIRED)
add_executable(generate generate.cpp)
target_link_libraries(generate PRIVATE millrace::millrace)
add_executable(generate_static generate.cpp)
target_link_libraries(generate_static PRIVATE millrace::millrace_static)
add_executable(attention attention.c)
target_link_libraries(attention PRIVATE millrace::kernels m)
add_executable(attention_static attention.c)
target_link_libraries(attention_static PRIVATE millrace::kernels_static m)
"""


def exported(library):
    lines = run("nm", "-D", "--defined-only", "-C", library).splitlines()
    return [line.split(maxsplit=2)[2] for line in lines]


def check_exports(lib):
    symbols = exported(lib / "libmillrace_kernels.so")
    strange = [name for name in symbols if not name.startswith(("mr_", "flash_attention_v2_"))]
    expect(symbols and not strange,
           f"libmillrace_kernels.so exports {strange[:5]}, expected mr_* and flash_attention_v2_* alone")
    declared = set()
    for header in (ROOT / "include/millrace/kernels").glob("*.h"):
        declared |= set(re.findall(r"MR_API[^;(]*?\b((?:mr|flash_attention_v2)_\w+)\(", header.read_text()))
    expect(declared == set(symbols), f"declared and exported differ: {sorted(declared ^ set(symbols))}")
    strange = [name for name in exported(lib / "libmillrace.so") if "millrace::" not in name]
    expect(not strange, f"libmillrace.so exports {strange[:5]}, expected millrace:: alone")


def main():
    build = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        prefix, outside = Path(folder) / "prefix", Path(folder) / "outside"
        run("cmake", "--install", build, "--prefix", prefix)
        lib = next(path.parent for path in prefix.rglob("libmillrace.so"))
        version = run(prefix / "bin/millrace", "--version").split()[-1]
        soname = ".".join(version.split(".")[:2])
        for name in (f"libmillrace.so.{soname}", f"libmillrace_kernels.so.{soname}", "libmillrace.a", "libmillrace_kernels.a"):
            expect((lib / name).exists(), f"{name} is not installed")
        for name in ("share/man/man1/millrace.1", "share/bash-completion/completions/millrace",
                     "share/zsh/vendor-completions/_millrace", "share/fish/vendor_completions.d/millrace.fish"):
            expect((prefix / name).is_file(), f"{name} is not installed")
        completions = prefix / "share/bash-completion/completions/millrace"
        words = run("bash", "-c", f"source '{completions}'; COMP_WORDS=(millrace bench --roof); COMP_CWORD=2; _millrace; "
                    "echo ${COMPREPLY[@]}")
        expect(words.strip() == "--roofline", f"bash completes --roof to '{words.strip()}'")
        check_exports(lib)

        outside.mkdir()
        shutil.copy(ROOT / "examples/generate.cpp", outside)
        shutil.copy(ROOT / "examples/attention.c", outside)
        (outside / "CMakeLists.txt").write_text(PROJECT.format(version=soname))
        run("cmake", "-S", outside, "-B", outside / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
        run("cmake", "--build", outside / "build")
        answers = [run(outside / "build" / name, MODEL) for name in ("generate", "generate_static")]
        expect("tokens" in answers[0], f"the example says {answers[0]}")
        for name in ("attention", "attention_static"):
            print(run(outside / "build" / name), end="")

        environment = {**os.environ, "PKG_CONFIG_PATH": str(lib / "pkgconfig"), "LD_LIBRARY_PATH": str(lib)}
        flags = run("pkg-config", "--cflags", "--libs", "millrace_kernels", env=environment).split()
        run("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", outside / "attention.c", *flags, "-lm", "-o",
            outside / "attention_pc")
        print(run(outside / "attention_pc", env=environment), end="")
        flags = run("pkg-config", "--cflags", "--libs", "millrace", env=environment).split()
        run("c++", "-std=c++20", outside / "generate.cpp", *flags, "-o", outside / "generate_pc")
        run(outside / "generate_pc", MODEL, env=environment)
    print("install: 1 passed, 0 failed")


if __name__ == "__main__":
    main()

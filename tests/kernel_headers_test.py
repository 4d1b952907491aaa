#!/usr/bin/env python3
"""Each header of the CPU kernels compiles alone, for the instruction sets that it is for.

    kernel_headers_test.py COMPILER

A translation unit that includes nothing but the header is checked (-fsyntax-only) with all warnings as errors. A
kernel header says what it needs by a guard, `#if !defined(MILLRACE_HAS_X)` before `#error`; it is checked for every
target of simd/target.h that meets the guards of all it includes, but a header for every family only for plain C++ and
for this processor's last target. COMPILER is for this machine; targets of another processor are checked where Debian's
cross compiler is installed. The last check is of a header that must fail.
"""

import concurrent.futures
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARNINGS = "-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror".split()
# Nobody uses a header's kernels here; g++ calls its own headers' undefined registers uninitialized (its bug 105593).
WARNINGS += ["-Wno-unused-function", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512_BW = AVX2 + ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512 = AVX512_BW + ["-mavx512vnni", "-mavx512vbmi", "-mamx-tile", "-mamx-int8", "-mamx-bf16"]
# target -> its flags and the macros that simd/target.h defines for it; the last one of a processor has them all
TARGETS = {
    "scalar": {"SCALAR": ([], {"SIMD_SCALAR"})},
    "x86_64": {
        "AVX2": (AVX2, {"SIMD_X86", "SIMD_AVX2"}),
        "AVX_VNNI": (AVX2 + ["-mavxvnni"], {"SIMD_X86", "SIMD_AVX2", "HAS_AVX_VNNI"}),
        "AVX512_BW": (AVX512_BW, {"SIMD_X86", "SIMD_AVX512"}),
        "AVX512": (AVX512, {"SIMD_X86", "SIMD_AVX512", "HAS_AVX512_VNNI", "HAS_AVX512_VBMI"}),
    },
    "aarch64": {
        "NEON": ([], {"SIMD_NEON"}),
        "NEON_DOTPROD": (["-march=armv8.2-a+dotprod"], {"SIMD_NEON", "HAS_DOTPROD"}),
        "NEON_I8MM": (["-march=armv8.2-a+dotprod+i8mm"], {"SIMD_NEON", "HAS_DOTPROD", "HAS_I8MM"}),
    },
}
FOLDERS = ("kernels/cpu", "kernels/quant", "kernels/reference")
TARGET_HEADER = "kernels/cpu/simd/target.h"  # included by what is compiled for several instruction sets
DIRECTIVE = re.compile(r'^#[ \t]*(if|ifdef|ifndef|endif|include)\b[ \t]*(.*)$', re.MULTILINE)
GUARD = re.compile(r"^#if (!?)defined\(MILLRACE_(\w+)\)\n#error", re.MULTILINE)


def plain_includes(text):
    """What a header includes whatever is defined."""
    depth = 0
    for directive, rest in DIRECTIVE.findall(text):
        depth += {"if": 1, "ifdef": 1, "ifndef": 1, "endif": -1}.get(directive, 0)
        if directive == "include" and depth == 0 and rest.startswith('"kernels/'):
            yield rest.split('"')[1]


def guards_of(header, seen):
    """{(must be defined, macro)} of a header and all it includes."""
    if header in seen:
        return set()
    seen.add(header)
    text = (ROOT / header).read_text()
    found = {(negated == "!", macro) for negated, macro in GUARD.findall(text)}
    for included in plain_includes(text):
        found |= guards_of(included, seen)
    return found


def meets(guards, macros):
    return all((macro in macros) == wanted for wanted, macro in guards)


def compilers(native):
    """processor -> compiler, of those that there are."""
    here = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    found = {"scalar": native, here: native}
    for processor in ("x86_64", "aarch64"):
        cross = shutil.which(f"{processor}-linux-gnu-g++")
        if processor not in found and cross:
            found[processor] = cross
    return here, found


def check(compiler, flags, target, header, root=ROOT):
    """None, or what the compiler said."""
    command = [compiler, "-std=c++20", "-fsyntax-only", "-ffp-contract=off", *WARNINGS, *flags]
    command += [f"-DMILLRACE_TARGET_{target}", f"-I{root}", f"-I{ROOT}", f"-I{ROOT}/src", f"-I{ROOT}/include"]
    result = subprocess.run(command + ["-x", "c++", "-"], input=f'#include "{header}"\n', capture_output=True, text=True)
    return None if result.returncode == 0 else f"{header} alone, target {target}:\n{result.stderr[:2000]}"


def checks(native):
    here, by_processor = compilers(native)
    headers = [p.relative_to(ROOT).as_posix() for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.h"))]
    for header in headers:
        if header.startswith("kernels/cpu/emulated/"):
            continue  # it stands for a system header
        seen = set()
        guards = guards_of(header, seen)
        of_one_family = any(wanted for wanted, _ in guards)
        for processor, targets in TARGETS.items():
            fitting = [target for target, (_, macros) in targets.items() if meets(guards, macros)]
            if not of_one_family and processor != "scalar":
                fitting = fitting[-1:] if processor == here and TARGET_HEADER in seen else []
            for target in fitting if processor in by_processor else []:
                yield by_processor[processor], targets[target][0], target, header


def broken_header_fails(compiler):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "broken.h").write_text("#pragma once\ninline int f() { return defined_elsewhere; }\n")
        return check(compiler, [], "SCALAR", "broken.h", Path(folder)) is not None


def main():
    compiler = sys.argv[1]
    work = list(checks(compiler))
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        faults = [fault for fault in pool.map(lambda w: check(*w), work) if fault]
    for fault in faults:
        print(fault)
    if not broken_header_fails(compiler):
        faults.append("a header that needs another one was not found")
        print(faults[-1])
    print(f"{len(work)} checks of headers alone, {len(faults)} failed")
    return 1 if faults or not work else 0


if __name__ == "__main__":
    sys.exit(main())

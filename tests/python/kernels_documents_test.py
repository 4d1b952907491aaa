#!/usr/bin/env python3
"""Runs every Python block of docs/python_kernels.md, in order, in one process; compares the type stubs with what is
there. Run by kernels_test.py."""

import ast
import inspect
import os
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "python_kernels.md"


def check_stub(module, path):
    """Functions of a stub have the parameters, the kinds and the defaults that the module's have, and all have one."""
    stubs = {node.name: node for node in ast.parse(path.read_text()).body if hasattr(node, "name")}
    public = set(module.__all__)
    assert public == set(stubs), f"{path.name}: {sorted(public ^ set(stubs))} is in one alone"
    for name, node in stubs.items():
        of, parameters = getattr(module, name), {}
        if isinstance(node, ast.ClassDef):
            continue
        late = len(node.args.args) - len(node.args.defaults)
        for i, a in enumerate(node.args.args):
            parameters[a.arg] = ast.literal_eval(node.args.defaults[i - late]) if i >= late else inspect.Parameter.empty
        for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults):
            parameters["*" + a.arg] = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        there = {("*" if p.kind == p.KEYWORD_ONLY else "") + p.name: p.default
                 for p in inspect.signature(of).parameters.values()}
        if "*return_lse" in parameters:
            parameters["*return_lse"] = False  # the overload that has none
        assert parameters == there, f"{path.name}: {name} is {parameters}, expected {there}"


def main():
    os.environ["JAX_PLATFORMS"] = "cpu"
    text = PAGE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    if len(blocks) < 8:
        sys.exit(f"{PAGE.name}: {len(blocks)} blocks were found, there should be more")
    names = {}
    for block in blocks:
        line = text[:block.start()].count("\n") + 2
        code = compile("\n" * (line - 1) + block[1], str(PAGE), "exec")
        exec(code, names)
    import millrace.jax
    import millrace.torch
    assert millrace.torch is names["mt"] and millrace.jax is names["mj"]
    package = Path(names["millrace_kernels"].__file__).parent
    for module, stub in ((names["mt"], "torch/__init__.pyi"), (names["mj"], "jax.pyi"), (names["ma"], "arrays.pyi")):
        check_stub(module, package / stub)
    print(f"documents: passed, {len(blocks)} blocks")


if __name__ == "__main__":
    main()

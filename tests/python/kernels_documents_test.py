#!/usr/bin/env python3
"""Runs every Python block of docs/python_kernels.md, in order, in one process. Run by kernels_test.py."""

import os
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "python_kernels.md"


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
    print(f"documents: passed, {len(blocks)} blocks")


if __name__ == "__main__":
    main()

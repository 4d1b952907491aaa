#!/usr/bin/env python3
"""Runs every Python block of docs/python.md, in order, as one program; and refuses a block that no program could run.

    PYTHONPATH=build/dev/python tests/python/docs_test.py
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "build" / "models"
PAGE = ROOT / "docs" / "python.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main():
    if not (MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf").is_file():
        print("SKIPPED: docs/python.md because SmolLM2 is not there; python3 tools/fetch_model.py smollm2 fetches it")
        return 77
    text = PAGE.read_text()
    blocks = list(BLOCK.finditer(text))
    other = [m.group(1) for m in blocks if m.group(1) != "python"]
    if other or len(blocks) < 10:
        print(f"{PAGE}: found {len(blocks)} blocks, of which {other} are not Python, expected at least 10 and all of it")
        return 1
    os.chdir(MODELS)
    names = {"__name__": "docs_python"}
    for match in blocks:
        line = text.count("\n", 0, match.start()) + 2
        # Lines keep their numbers, so that a traceback names the page's own.
        exec(compile("\n" * (line - 1) + match.group(2), str(PAGE), "exec"), names)
    print(f"docs/python.md: {len(blocks)} blocks ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())

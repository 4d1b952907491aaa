#!/usr/bin/env python3
"""schemathesis against /openapi.json, by hand: no answer may be a 500, and every answer must be as described.

    tests/server/schemathesis_check.py BINARY [--examples 60]

The tool comes from PyPI into build/python/schemathesis; the model is SmolLM2 (tools/fetch_model.py smollm2).
"""

import argparse
import os
import subprocess
import sys

from harness import PYTHON, SMOLLM2, Server, package


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--examples", type=int, default=60)
    arguments = parser.parse_args()
    missing = package("schemathesis")
    if missing:
        print(f"SKIPPED: {missing}", file=sys.stderr)
        return 0
    # Answers end after a second wherever they are: what is checked is their shape.
    with Server(arguments.binary, SMOLLM2, "--ctx", 256, "--max-running", 4, "--request-timeout", 1, "--quiet") as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json", "--checks",
                   "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
                   "--max-examples", str(arguments.examples), "--phases", "examples,fuzzing", "--request-timeout", "60"]
        status = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(PYTHON / "schemathesis")}).returncode
        failed = server.stats()["server"]["responses"]["5xx"]
        print(f"5xx: {failed}")
    return 1 if status or failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""examples/context_parallel as its reader runs it: threads, and processes by mpirun where there is one.

  tests/context_parallel_test.py CONTEXT_PARALLEL

Every run compares with one device and must have no row that differs; ring, mesh and WallFacer's grouping, uneven and
tiny prompts, a slow link. Bad options are one line and status 1. Without mpirun that part is skipped, and said.
"""

import json
import os
import shutil
import subprocess
import sys

SMALL = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16"]
BAD = (  # options, a piece of the line
    (["--threads", "2", "--tokens", "many"], "--tokens is many"),
    (["--threads", "2", "--tokens", "-3"], "--tokens is -3"),
    (["--threads", "2", "--schedule", "star"], "--schedule is star"),
    (["--threads", "4", "--schedule", "mesh", "--a", "3"], "a is 3, expected a divisor of the 4 ranks"),
    (["--threads", "2", "--heads", "3", "--kv-heads", "2"], "problem.heads is 3"),
    (["--threads", "2", "--head-dim", "20"], "problem.head_dim is 20"),
    (["--threads"], "--threads needs a value"),
    (["--colour", "red"], "--colour is no option"),
)


def run(command, env=None):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    if done.returncode != 0:
        return None, f"{' '.join(command)}: status {done.returncode}: {done.stderr[-300:]}"
    result = json.loads([line for line in done.stdout.split("\n") if line.startswith("{")][0])
    if result["rows_that_differ"] != 0:
        return None, f"{' '.join(command)}: {result['rows_that_differ']} rows differ from one device's"
    if "step " not in done.stderr:
        return None, f"{' '.join(command)}: no progress line: {done.stderr[-300:]}"
    return result, None


def main():
    program, faults = sys.argv[1], []

    def expect(options, name, prefix=(), env=None):
        result, fault = run([*prefix, program, *SMALL, *options], env)
        if fault:
            faults.append(fault)
        elif result["schedule"] != name:
            faults.append(f"{options}: schedule {result['schedule']}, expected {name}")

    expect(["--threads", "3", "--tokens", "1537"], "ring")
    expect(["--threads", "4", "--tokens", "1900", "--schedule", "mesh", "--a", "2", "--backward", "1"], "mesh 2 x 2")
    expect(["--threads", "4", "--tokens", "1100", "--schedule", "wallfacer", "--backward", "1"], "wallfacer 2")
    expect(["--threads", "5", "--tokens", "1"], "ring")
    expect(["--threads", "2", "--tokens", "700", "--mbit", "100"], "ring")
    for options, piece in BAD:
        done = subprocess.run([program, *options], capture_output=True, text=True, timeout=60, check=False)
        lines = set(done.stderr.strip().split("\n"))  # of every thread the same
        if done.returncode != 1 or len(lines) != 1 or piece not in done.stderr:
            faults.append(f"{options}: status {done.returncode}, {done.stderr!r}, expected a line with '{piece}'")
    if shutil.which("mpirun"):
        env = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        env["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
        expect(["--tokens", "1537", "--schedule", "mesh", "--a", "3"], "mesh 3 x 1", ["mpirun", "-n", "3"], env)
    else:
        print("SKIPPED: no mpirun here, ranks were threads alone")
    for fault in faults:
        print(fault)
    print(f"context_parallel: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Two builds of the program in turn on one machine: the same bits? the same speed?

  bench/compare_builds.py BEFORE AFTER --bits tests/golden/models/*/model.gguf --isa avx2,avx512 --device cpu
  bench/compare_builds.py BEFORE AFTER --model gpt-oss-20b.gguf --bench "-p 2048 -n 128" --bench "--depth 32000 -n 64"

--bits compares the logits of every model, on every instruction set named, byte by byte. --bench runs `millrace bench
MODEL` with those options, the builds in turn (before, after, after, before, ..) so that what else the machine does falls
on both alike, and prints medians and their ratio. Status 1 when bits differ or a build failed; a ratio never fails.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENS = ",".join(str(1 + (i * 7) % 50) for i in range(40))  # of every golden model's vocabulary


def run(command, environment=None):
    try:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    except OSError as error:
        raise RuntimeError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def logits(program, model, device, isa, folder):
    out = Path(folder) / "logits.npy"
    run([program, "logits", str(model), "--tokens", TOKENS, "--out", str(out), "--device", device],
        {"MILLRACE_ISA": isa} if isa else {})
    data = out.read_bytes()
    out.unlink()
    return data


def compare_bits(arguments):
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for isa in arguments.isa.split(","):
            for model in arguments.bits:
                try:
                    before, after = (logits(program, model, arguments.device, isa, folder)
                                     for program in (arguments.before, arguments.after))
                    verdict = "same bits" if before == after else "DIFFERENT BITS"
                except RuntimeError as error:
                    verdict = f"FAILED: {error}"
                failed += verdict != "same bits"
                print(f"{arguments.device:5} {isa or 'default':12} {Path(model).parent.name}/{Path(model).name:24} {verdict}", flush=True)
    return failed


def numbers(value, name=""):
    """Every figure of a bench's JSON that is a speed, by its key."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, key)
    elif isinstance(value, (int, float)) and (name.endswith("tok_s") or name.endswith("tokens_per_s")):
        yield name, float(value)


def compare_speed(arguments):
    failed = 0
    for options in arguments.bench:
        figures = {"before": {}, "after": {}}
        order = [side for turn in range(arguments.turns) for side in (("before", "after") if turn % 2 == 0 else ("after", "before"))]
        for side in order:
            command = [getattr(arguments, side), "bench", arguments.model, "--json", "--device", arguments.device, *options.split()]
            try:
                for name, value in numbers(json.loads(run(command))):
                    figures[side].setdefault(name, []).append(value)
            except (RuntimeError, json.JSONDecodeError) as error:
                print(f"bench {options}: {side} FAILED: {error}", flush=True)
                failed += 1
        for name in figures["before"]:
            before, after = figures["before"][name], figures["after"].get(name, [])
            if after:
                ratio = statistics.median(after) / max(statistics.median(before), 1e-9)
                print(f"bench {options:40} {name:28} before {statistics.median(before):10.1f} "
                      f"({min(before):.1f}-{max(before):.1f})  after {statistics.median(after):10.1f} "
                      f"({min(after):.1f}-{max(after):.1f})  ratio {ratio:.3f}", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the program of the build to compare with")
    parser.add_argument("after", help="the program of this build")
    parser.add_argument("--bits", nargs="*", default=[], metavar="MODEL", help="models whose logits are compared")
    parser.add_argument("--isa", default="", help="instruction sets (MILLRACE_ISA), separated by commas; empty: the best")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="for --bench")
    parser.add_argument("--bench", action="append", default=[], metavar="OPTIONS", help="of millrace bench; may be repeated")
    parser.add_argument("--turns", type=int, default=4, help="runs of each build per --bench")
    arguments = parser.parse_args()
    if arguments.bench and not arguments.model:
        parser.error("--bench needs --model")
    return 1 if compare_bits(arguments) + compare_speed(arguments) else 0


if __name__ == "__main__":
    sys.exit(main())

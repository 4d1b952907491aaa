#!/usr/bin/env python3
"""Every shape that people run, ours beside llama.cpp's, with the worst ratio first.

  bench/shapes.py --llama-bench ~/llama.cpp/build/bin/llama-bench       all sets of a GPU
  bench/shapes.py --few-cores --llama-bench ..           what people run on two cores
  bench/shapes.py --sets cpu-llama-8b,gpu-qwen3-moe      these alone; without a peer: shares of the limit
  bench/shapes.py --dry-run                                             print the commands and write nothing

The sets are those of bench/record.py, one after the other, measured and recorded as it does. A model file that is
missing is made first (`millrace synth`: random weights of exact shape) and removed afterwards, unless --keep. A set
that fails is named at the end with its line, the others go on; the status is 2 then.
"""

import argparse
import os
import shlex
import subprocess
import sys

import record
import records
from record import SETS, Measurement, MeasureError
from records import ROOT, RecordError


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", metavar="NAME,..", help="sets of bench/record.py (all that need a GPU)")
    parser.add_argument("--few-cores", action="store_true",
                        help="the sets of a processor with few cores: SmolLM2 in four types and gpt-oss-20b's shape")
    parser.add_argument("--keep", action="store_true", help="model files that were made")
    parser.add_argument("--dry-run", action="store_true", help="print the commands; run and write nothing")
    options, rest = parser.parse_known_args(arguments)
    cuda = [name for name, one in SETS.items() if one.device == "cuda"]
    few = [name for name in SETS if name.startswith("cpu-smollm2")] + ["cpu-gpt-oss-few-cores"]
    options.sets = options.sets.split(",") if options.sets else few if options.few_cores else cuda
    for name in options.sets:
        if name not in SETS:
            parser.error(f"--sets: found '{name}', expected one of {', '.join(SETS)}")
    # What is left is record.py's: it refuses what it does not know.
    options.each = {name: record.parse([name, *rest]) for name in options.sets}
    return options


def make_model(options, measured, path):
    if not os.access(options.millrace, os.X_OK):
        raise MeasureError(f"{options.millrace}: found no program to make {path.name} with; --millrace names one")
    words = [word.format(millrace=options.millrace, file=path, folder=path.parent)
             for word in shlex.split(measured.model.make)]
    print(f"making {path.name}: {shlex.join(words)}", file=sys.stderr, flush=True)
    if subprocess.run(words, cwd=ROOT, check=False).returncode != 0:
        raise MeasureError(f"{shlex.join(words)}: failed")


def measure(name, options, keep):
    """The records of one set, appended to the machine's file."""
    measured = SETS[name]
    model = options.models / measured.model.file
    made = not model.exists()
    try:
        if made:
            make_model(options, measured, model)
        record.check_needs(options, measured, model)
        measurement = Measurement(options, measured, model)
        measurement.run()
        found = measurement.make_records()
        records.append(options.results / f"{record.slug(found[0]['machine']['name'])}.json", found)
        return found
    finally:
        if made and not keep:
            model.unlink(missing_ok=True)


def ratio(entry):
    """Ours over the peer's; without one the share of the limit; 2 and more where there is neither."""
    if entry["peers"]:
        ours, peer = entry["median"], entry["peers"][0]["median"]
        return peer / ours if entry["unit"] == "s" else ours / peer
    share = records.share_of_limit(entry)
    return 2.0 + (share if share is not None else 1.0)


def table(found):
    lines = []
    for entry in sorted(found, key=ratio):
        text = f"{ratio(entry):.2f}x" if entry["peers"] else "no peer"
        lines.append(f"{text:>8}  {entry['model']}:{record.summary(entry)[1:]}")
    return "\n".join(lines)


def main():
    options = parse(sys.argv[1:])
    if options.dry_run:
        for name, each in options.each.items():
            for words in Measurement(each, SETS[name], each.models / SETS[name].model.file).all_commands():
                print(shlex.join(words))
        return 0
    found, failed = [], []
    for name, each in options.each.items():
        try:
            found += measure(name, each, options.keep)
        except (MeasureError, RecordError) as error:
            failed.append(f"shapes: {name}: {error}")
        except KeyboardInterrupt:
            print("shapes: interrupted; what was measured before is recorded", file=sys.stderr)
            return 130
    print(table(found))
    print("\n".join(failed), file=sys.stderr, end="\n" if failed else "")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

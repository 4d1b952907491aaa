#!/usr/bin/env python3
"""Compiles every file of a build by itself, for its errors and warnings only (-fsyntax-only).

  tools/compile_alone.py BUILD    BUILD: a folder with compile_commands.json, configured with CMAKE_UNITY_BUILD=OFF

Sources that the build itself writes are written first. A file whose headers have not changed since it last passed is
left out. Tests begin with GoogleTest's header, precompiled: it takes longer to read than most of them. Status 1 when a
file does not compile.
"""

import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

JOBS = os.cpu_count() or 2


def passed_before(stamp):
    """Whether the file passed and nothing that it read then (the stamp is a list of dependencies) is newer."""
    if not stamp.is_file():
        return False
    when = stamp.stat().st_mtime
    names = stamp.read_text(encoding="utf-8").replace("\\\n", " ").partition(":")[2].split()
    return bool(names) and all(os.path.exists(name) and os.path.getmtime(name) <= when for name in names)


def command_of(entry):
    return [part for part in shlex.split(entry["command"]) if not part.endswith("/ccache")]


def is_test(entry):
    return entry["file"].endswith("_test.cpp")


def precompile_googletest(entries, stamps):
    """Of the tests' own flags; a test whose flags differ reads the header as it is."""
    header = stamps / "googletest.h"
    header.write_text("#include <gtest/gtest.h>\n")
    for entry in filter(is_test, entries):
        command = command_of(entry)
        at = command.index("-o")
        end = command.index("-c")
        flags = command[:at] + command[at + 2:end]
        dependencies = [i for i, part in enumerate(flags) if part in ("-MF", "-MT")]
        for i in reversed(dependencies):
            del flags[i:i + 2]
        flags = [part for part in flags if part != "-MD"]
        subprocess.run([*flags, "-x", "c++-header", header, "-o", f"{header}.gch"], cwd=entry["directory"],
                       capture_output=True)
        return ["-include", str(header)]
    return []


def compile_alone(entry, stamps, googletest):
    """None when the file compiles, else what the compiler said."""
    command = command_of(entry)
    at = command.index("-o")
    name = command[at + 1]
    stamp = stamps / (name.replace("/", "_") + ".d")
    if passed_before(stamp):
        return None
    fresh = stamp.with_suffix(".new")
    command[at:at + 2] = ["-fsyntax-only", "-MD", "-MF", str(fresh), *(googletest if is_test(entry) else [])]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    if done.returncode != 0:
        return f"{entry['file']}\n{done.stderr}"
    fresh.rename(stamp)
    return None


def main():
    build = Path(sys.argv[1]).resolve()
    stamps = build / "alone"
    stamps.mkdir(exist_ok=True)
    entries = [entry for entry in json.loads((build / "compile_commands.json").read_text())
               if not entry["file"].endswith(".cu") and "site-packages" not in entry["file"]]  # nanobind's are its own
    generated = [entry["file"] for entry in entries if Path(entry["file"]).is_relative_to(build)]
    if generated and subprocess.run(["ninja", "-C", build, *generated], stdout=subprocess.DEVNULL).returncode != 0:
        return 1
    googletest = precompile_googletest(entries, stamps)
    failed = 0
    with ThreadPoolExecutor(JOBS) as pool:
        for fault in pool.map(lambda entry: compile_alone(entry, stamps, googletest), entries):
            if fault:
                failed += 1
                print(fault, flush=True)
    print(f"alone: {len(entries)} files, {failed} do not compile by themselves")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

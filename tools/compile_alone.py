#!/usr/bin/env python3
"""Compiles every file of a build by itself, for its errors and warnings only (-fsyntax-only).

  tools/compile_alone.py BUILD [UNITY]    BUILD: a folder with compile_commands.json, configured with
                                          CMAKE_UNITY_BUILD=OFF; UNITY: one configured with ON, and built

Sources that the build itself writes are written first. What UNITY compiles by itself too is left out, and so is a file
whose headers have not changed since it last passed. Headers of others that take longer to read than most files (HEAVY)
are precompiled, and stand first in the files that include them, if only through others. What that would hide is looked
for in the text: a header names nothing of std (OF_STD) that it does not include. Status 1 when a file does not compile.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

JOBS = os.cpu_count() or 2
ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"gtest/gtest.h", "nlohmann/json.hpp", "fmt/core.h"}
# Flags that change no error of -fsyntax-only: without them the files of all targets share what is precompiled.
WITHOUT = re.compile(r"-(O\w*|g\d?|fPIC|fPIE)")
# What headers take from std, by the header that has it.
OF_STD = {name: header for header, names in {
    "vector": "vector", "string": "string", "string_view": "string_view", "optional": "optional",
    "memory": "unique_ptr shared_ptr weak_ptr make_unique make_shared", "functional": "function", "span": "span",
    "array": "array", "map": "map", "unordered_map": "unordered_map", "set": "set", "list": "list", "deque": "deque",
    "mutex": "mutex lock_guard unique_lock", "thread": "thread jthread", "atomic": "atomic", "chrono": "chrono",
    "condition_variable": "condition_variable", "variant": "variant"}.items() for name in names.split()}
# What other headers are there to bring: those of other projects, and of std what their own interface is made of.
BRINGS = {"string": {"string_view"}, "filesystem": {"string", "string_view"}, "condition_variable": {"mutex"},
          "fmt/core.h": {"string", "string_view"}, "fmt/format.h": {"string", "string_view"},
          "nlohmann/json.hpp": {"string", "string_view", "vector", "map", "memory"},
          "nlohmann/json_fwd.hpp": {"string", "vector", "map", "memory"},
          "gtest/gtest.h": {"string", "string_view", "vector", "memory", "set", "map", "functional"}}


def passed_before(stamp):
    """Whether the file passed and nothing that it read then (the stamp is a list of dependencies) is newer."""
    if not stamp.is_file():
        return False
    when = stamp.stat().st_mtime
    names = stamp.read_text(encoding="utf-8").replace("\\\n", " ").partition(":")[2].split()
    return bool(names) and all(os.path.exists(name) and os.path.getmtime(name) <= when for name in names)


def command_of(entry):
    return [part for part in shlex.split(entry["command"]) if not part.endswith("/ccache") and not WITHOUT.fullmatch(part)]


def reached(source, folders, seen):
    """The headers of other projects that a file includes, itself or through the project's own; `seen`: files read."""
    found = set()
    for name in re.findall(r'^#include [<"]([^>"]+)[>"]', source.read_text(encoding="utf-8"), re.MULTILINE):
        for folder in (source.parent, *folders):
            header = folder / name
            if header.is_file():
                if header not in seen:
                    seen.add(header)
                    found |= reached(header, folders, seen)
                break
        else:
            found.add(name)
    return found


def headers_that_lack():
    """Headers that name what of std neither they nor what they include includes."""
    folders = [ROOT, ROOT / "apps", *(ROOT / top for top in ("src", "include", "apps/cli", "apps/server"))]
    faults = []
    for header in sorted(path for top in ("src", "apps", "kernels", "include", "python/src", "tests")
                         for path in (ROOT / top).rglob("*.h")):
        text = re.sub(r"//[^\n]*", "", header.read_text(encoding="utf-8"))
        has = reached(header, folders, set())
        has |= {brought for name in has for brought in BRINGS.get(name, ())}
        for name in sorted(set(re.findall(r"\bstd::(\w+)\b", text))):
            if name in OF_STD and OF_STD[name] not in has:
                faults.append(f"{header.relative_to(ROOT)}: names std::{name} and includes no <{OF_STD[name]}>")
    return faults


class Precompiled:
    """The headers of HEAVY, each combination precompiled once for each set of flags."""

    def __init__(self, stamps):
        self.stamps = stamps
        self.lock = threading.Lock()
        self.made = {}

    def option(self, entry, flags):
        """What has the compiler of this file begin with the precompiled ones among its headers."""
        heavy = tuple(sorted(reached(Path(entry["file"]), [ROOT, ROOT / "src", ROOT / "include"], set()) & HEAVY))
        if not heavy:
            return []
        # Folders and names that a target defines do not reach these headers; everything else has to be the same.
        key = heavy + tuple(part for part in flags if not part.startswith(("-I", "-D")))
        with self.lock:
            if key not in self.made:
                header = self.stamps / f"precompiled{len(self.made)}.h"
                header.write_text("".join(f"#include <{name}>\n" for name in heavy))
                subprocess.run([*flags, "-x", "c++-header", header, "-o", f"{header}.gch"], cwd=entry["directory"],
                               capture_output=True)
                self.made[key] = header
            return ["-include", str(self.made[key])]


def flags_of(command):
    """Without the file, its output and its list of dependencies."""
    flags, skip = [], False
    for part in command:
        if skip or part == "-MD":
            skip = False
        elif part in ("-o", "-c", "-MF", "-MT"):
            skip = True
        else:
            flags.append(part)
    return flags


def compile_alone(entry, stamps, precompiled):
    """None when the file compiles, else what the compiler said."""
    command = command_of(entry)
    at = command.index("-o")
    name = command[at + 1]
    stamp = stamps / (name.replace("/", "_") + ".d")
    if passed_before(stamp):
        return None
    fresh = stamp.with_suffix(".new")
    command[at:at + 2] = ["-fsyntax-only", "-MD", "-MF", str(fresh), *precompiled.option(entry, flags_of(command))]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    if done.returncode != 0:
        return f"{entry['file']}\n{done.stderr}"
    fresh.rename(stamp)
    return None


def entries_of(build):
    return [entry for entry in json.loads((build / "compile_commands.json").read_text())
            if not entry["file"].endswith(".cu") and "site-packages" not in entry["file"]]  # nanobind's are its own


def main():
    build = Path(sys.argv[1]).resolve()
    stamps = build / "alone"
    stamps.mkdir(exist_ok=True)
    compiled = {entry["file"] for unity in sys.argv[2:] for entry in entries_of(Path(unity))}
    entries = [entry for entry in entries_of(build) if entry["file"] not in compiled]
    generated = [entry["file"] for entry in entries if Path(entry["file"]).is_relative_to(build)]
    if generated and subprocess.run(["ninja", "-C", build, *generated], stdout=subprocess.DEVNULL).returncode != 0:
        return 1
    precompiled = Precompiled(stamps)
    lacking = headers_that_lack()
    print("".join(fault + "\n" for fault in lacking), end="", flush=True)
    failed = 0
    with ThreadPoolExecutor(JOBS) as pool:
        for fault in pool.map(lambda entry: compile_alone(entry, stamps, precompiled), entries):
            if fault:
                failed += 1
                print(fault, flush=True)
    print(f"alone: {len(entries)} files, {failed} do not compile by themselves; {len(lacking)} headers lack one")
    return 1 if failed or lacking else 0


if __name__ == "__main__":
    sys.exit(main())

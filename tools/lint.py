#!/usr/bin/env python3
"""The checks that read the source and do not run it.

  tools/lint.py format [--fix]   clang-format 14 over src, kernels, include, apps, tests, bench, python; --fix rewrites
  tools/lint.py tidy             clang-tidy 14 (.clang-tidy) over what build/dev compiles of src, kernels and apps, no tests

build/dev compiles many files of a folder as one, and so they are read here: the headers once. What clang-tidy found
clean is remembered in build/tidy by the content of everything it includes from the repository, so that a second run
looks only at what changed. Status 3: the tool is not installed.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

ROOT = Path(__file__).resolve().parent.parent
FORMATTED = ("src", "kernels", "include", "apps", "python", "tests", "bench")
SUFFIXES = {".cpp", ".h", ".cu", ".cuh", ".inc"}
BUILD = ROOT / "build" / "dev"
CLEAN = ROOT / "build" / "tidy"
NOT_INSTALLED = 3
JOBS = os.cpu_count() or 2
# clang 14 cannot read libstdc++'s <coroutine>: the two files that have coroutines in them.
COROUTINES = {"apps/server/http/connection.cpp", "apps/server/http/server.cpp"}


def require(tool):
    if which(tool) is None:
        print(f"{tool} is not installed: apt-get install {tool}", file=sys.stderr)
        sys.exit(NOT_INSTALLED)
    return tool


def check_format(fix):
    files = [str(path.relative_to(ROOT)) for top in FORMATTED for path in sorted((ROOT / top).rglob("*"))
             if path.suffix in SUFFIXES]
    if not files:
        return 0
    command = [require("clang-format-14"), *(["-i"] if fix else ["--dry-run", "-Werror"])]
    parts = [files[first::JOBS] for first in range(min(JOBS, len(files)))]
    with ThreadPoolExecutor(JOBS) as pool:
        status = int(any(pool.map(lambda part: subprocess.run([*command, *part], cwd=ROOT).returncode != 0, parts)))
    print(f"format: {len(files)} files, {'formatted' if fix else 'clean' if status == 0 else 'run: make format'}")
    return status


def repository_headers():
    """Object file -> what it includes from the repository, as ninja recorded it when it was compiled."""
    listing = subprocess.run(["ninja", "-C", str(BUILD), "-t", "deps"], capture_output=True, text=True).stdout
    headers, current = {}, None
    for line in listing.splitlines():
        if line.startswith("    "):
            path = (BUILD / line.strip()).resolve()
            if path.is_relative_to(ROOT) and current is not None:
                current.append(path)
        elif ": #deps" in line:
            current = headers.setdefault(line.split(": #deps")[0], [])
    return headers


def content_hash(command, paths, version):
    digest = hashlib.sha256((version + command + (ROOT / ".clang-tidy").read_text()).encode())
    for path in sorted(set(paths)):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def name_of(source):
    """The file, or the files in one, by what they are called: src/kv/unity_0 is some of the files of src/kv."""
    source = Path(source)
    if source.parent.name == "Unity":
        parts = source.relative_to(BUILD).parts
        return Path(*parts[:parts.index("CMakeFiles")], parts[-1].removesuffix("_cxx.cxx"))
    return source.relative_to(ROOT)


def to_check(entry):
    name = name_of(entry["file"])
    in_a_test = "_test.dir/" in entry["file"] or name.stem.endswith("_test")
    return name.parts[0] in ("src", "kernels", "apps") and str(name) not in COROUTINES and not in_a_test and name.suffix != ".cu"


def object_of(entry):
    return re.search(r" -o (\S+)", entry["command"]).group(1)


def tidy_one(entry, headers, version):
    """(file, what was found or None, whether it was known clean) for one entry of the compilation database."""
    source = Path(entry["file"])
    name = name_of(source)
    key = content_hash(entry["command"], [source, *headers.get(object_of(entry), [])], version)
    # By the object: two libraries of a folder each have a unity_0.
    stamp = CLEAN / (object_of(entry).replace("/", "_") + ".clean")
    if stamp.is_file() and stamp.read_text() == key:
        return name, None, True
    result = subprocess.run(["clang-tidy-14", "--quiet", "-p", str(BUILD), "--extra-arg=-Wno-unknown-warning-option",
                             str(source)], capture_output=True, text=True, cwd=ROOT)
    if result.returncode != 0:
        return name, result.stdout + result.stderr, False
    stamp.write_text(key)
    return name, None, False


def check_tidy():
    version = subprocess.run([require("clang-tidy-14"), "--version"], capture_output=True, text=True).stdout
    database = json.loads((BUILD / "compile_commands.json").read_text())
    entries = [entry for entry in database if Path(entry["file"]).is_relative_to(ROOT) and to_check(entry)]
    CLEAN.mkdir(parents=True, exist_ok=True)
    headers = repository_headers()
    # The longest first, so that no processor waits for the other at the end.
    entries.sort(key=lambda entry: -sum(path.stat().st_size for path in headers.get(object_of(entry), [])))
    bad = remembered = 0
    with ThreadPoolExecutor(JOBS) as pool:
        for count, (name, output, cached) in enumerate(
                pool.map(lambda entry: tidy_one(entry, headers, version), entries), 1):
            remembered += cached
            if output is not None:
                bad += 1
                print(output, end="", flush=True)
            if not cached:
                print(f"[{count}/{len(entries)}] {name}{'' if output is None else ': FAILED'}", flush=True)
    print(f"tidy: {len(entries)} files ({remembered} unchanged since they were clean), {bad} with findings")
    return 1 if bad else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=["format", "tidy"])
    parser.add_argument("--fix", action="store_true")
    arguments = parser.parse_args()
    return check_format(arguments.fix) if arguments.check == "format" else check_tidy()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Fails when a variable is read from the environment and docs/environment.md does not have it, or the other way round.

  tests/environment_test.py
  tests/environment_test.py --self-test    small trees with a fault each; fails unless each is found

Every option of the command line has a variable, MILLRACE_PORT for --port: nothing else may be called so.

Read means: getenv("X") in C and C++, os.environ["X"], .get("X") and os.getenv("X") in Python, ${X:-...} and ${X:?...}
in shell scripts, ${X-...} in HAProxy's configuration, $ENV{X} in CMake, X ?= and an exported X in the Makefile.
"""

import re
import sys
import tempfile
from pathlib import Path

from made_trees import write_tree

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/environment.md"
FOLDERS = ("src", "include", "kernels", "apps", "bench", "tests", "tools", "examples", "cmake", "deploy", "python",
           ".ci")
C_READ = re.compile(r'\bgetenv\("(\w+)"\)')
PYTHON_READ = re.compile(r"""\b(?:os\.)?environ(?:\.get\(|\[)["'](\w+)["'](?!\]\s*=[^=])|\bgetenv\(["'](\w+)["']\)""")
SHELL_READ = re.compile(r"\$\{([A-Z][A-Z0-9_]*):?[-?+]")
CMAKE_READ = re.compile(r"\$ENV\{(\w+)\}")
MAKE_READ = re.compile(r"^(?:export )?([A-Z][A-Z0-9_]*) (?:\?=|:=)", re.MULTILINE)
READERS = {".cpp": C_READ, ".h": C_READ, ".cu": C_READ, ".cuh": C_READ, ".c": C_READ, ".inc": C_READ,
           ".py": PYTHON_READ, ".sh": SHELL_READ, ".cfg": SHELL_READ, ".yaml": SHELL_READ, ".cmake": CMAKE_READ,
           ".txt": CMAKE_READ, "": SHELL_READ}
# An option's name as apps/cli/ gives it to the command line, "-n,--max-tokens".
OPTION = re.compile(r'"(?:(?:-\w,)?--([a-z][a-z0-9-]*)|(MODEL))"')
OPTIONS_IN = "apps/cli"
# Who reads the variables of options.
OPTION_READER = "apps/cli/option_sources.cpp"
# Read through a name that is in a variable, where no pattern sees it: file -> names.
BY_NAME = {"bench/vs_llama_cpp.py": {"PYTHONPATH", "LD_LIBRARY_PATH"}}


def variables_read(root):
    """Name -> a file that reads it."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            pattern = READERS.get(path.suffix)
            if pattern is None or not path.is_file() or path.name == "environment_test.py" or "__pycache__" in path.parts:
                continue
            name = path.relative_to(root).as_posix()
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            matches = {next(group for group in match.groups() if group) for match in pattern.finditer(text)}
            for variable in matches | BY_NAME.get(name, set()):
                found.setdefault(variable, name)
    makefile = root / "Makefile"
    if makefile.is_file():
        for variable in MAKE_READ.findall(makefile.read_text(encoding="utf-8")):
            found.setdefault(variable, "Makefile")
    return found


def variables_listed(root):
    """Name -> line of the page: the code spans of a table's first column."""
    listed = {}
    for number, line in enumerate((root / PAGE).read_text(encoding="utf-8").split("\n"), 1):
        if line.startswith("| `"):
            for name in re.findall(r"`(\w+)`", line.split("|")[1]):
                listed[name] = number
    return listed


def option_variables(root):
    """Name -> the option whose value it is."""
    found = {}
    for path in (root / OPTIONS_IN).glob("*.cpp"):
        for option, place in OPTION.findall(path.read_text(encoding="utf-8")):
            found["MILLRACE_" + (place or option.upper().replace("-", "_"))] = place or "--" + option
    return found


def faults_in(root):
    read, listed, options = variables_read(root), variables_listed(root), option_variables(root)
    faults = [f"{read[name]}: reads {name}, which {PAGE} does not list" for name in sorted(read.keys() - listed.keys())]
    faults += [f"{PAGE}:{listed[name]}: lists {name}, which nothing reads"
               for name in sorted(listed.keys() - read.keys() - options.keys())]
    faults += [f"{read[name]}: reads {name}, which is the variable of {options[name]}"
               for name in sorted(read.keys() & options.keys()) if read[name] != OPTION_READER]
    return faults, len(read) + len(options)


TREE = {"src/a.cpp": 'std::getenv("A_ONE");', "tools/b.py": 'os.environ.get("B_TWO")\nos.environ["SET_ONLY"] = "1"\n',
        "tools/c.sh": "echo ${C_THREE:-x}\n", "Makefile": "D_FOUR ?= 1\nexport E_FIVE := 2\n",
        "deploy/f.cfg": '"${F_SIX-y}"', "apps/cli/g.cpp": 'option("-g,--good-seven", x); option("--eight", y);',
        "apps/cli/option_sources.cpp": 'std::getenv("MILLRACE_EIGHT")'}
NAMES = ("A_ONE", "B_TWO", "C_THREE", "D_FOUR", "E_FIVE", "F_SIX", "MILLRACE_EIGHT")


def self_test():
    wrong = []

    def judge(names, expected, more=None):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            page = "| variable |\n|---|\n" + "".join(f"| `{name}` |\n" for name in names)
            write_tree(root, {**TREE, **(more or {}), PAGE: page})
            faults = faults_in(root)[0]
            if len(faults) != len(expected) or any(piece not in fault for piece, fault in zip(expected, faults)):
                wrong.append(f"{names}: found {faults}, expected {expected}")

    judge(NAMES, [])
    for name in NAMES:
        judge([other for other in NAMES if other != name], [f"reads {name}"])
    judge((*NAMES, "GONE"), ["lists GONE"])
    judge((*NAMES, "MILLRACE_GOOD_SEVEN"), [])
    judge((*NAMES, "MILLRACE_GOOD_SEVEN"), ["is the variable of --good-seven"],
          {"src/h.cpp": 'getenv("MILLRACE_GOOD_SEVEN")'})
    for line in wrong:
        print(line)
    print(f"self-test: {len(NAMES) + 4} pages, {len(wrong)} judged wrongly")
    return 1 if wrong else 0


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    faults, count = faults_in(ROOT)
    for fault in faults:
        print(fault)
    print(f"environment: {count} variables, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

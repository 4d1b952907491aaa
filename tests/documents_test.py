#!/usr/bin/env python3
"""Fails when a document names what is not there: a file, a link, a symbol, an option, a command, a make target.

  tests/documents_test.py [MILLRACE]     check; MILLRACE is the binary whose --help knows commands and options
  tests/documents_test.py --self-test    write documents with a fault each, and fail unless each is found

What is looked at: README.md, CONTRIBUTING.md, SECURITY.md and docs/, in `code spans`, code blocks and links. docs/log
and CHANGELOG.md are history, which may name what was: there links and lengths alone are checked, and in docs/api.md and
docs/benchmarks.md, which are generated and have tests of their own.

How a name is judged:
  a/b.h, b.h, a/*.cu     a file of the tree, whole, or from src, include, kernels or apps on, or by its last parts
  Foo::bar, foo_bar, kFoo, FooBar, MILLRACE_X     words that occur in the tree's sources
  --option               of `millrace COMMAND` where one is named before it, else of any command or script of the tree
  make target            a target of the Makefile
  /v1/path               a path of the server's sources
Also: documents that sources refer to exist, and another page links to each. No line of prose over 120 characters; of
docs/kernels and docs/architecture.md no line at all. An essay of docs/kernels has all of ESSAY_PARTS. A C or C++ program in a fenced block is a file of examples/, to the
letter.
"""

import fnmatch
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from made_trees import told, write_tree

ROOT = Path(__file__).resolve().parent.parent
MAX_LINE = 120
SOURCE_DIRS = ("src", "include", "kernels", "apps", "bench", "tests", "tools", "examples", "cmake", "deploy", "web",
               "python", ".ci")
SOURCE_FILES = ("Makefile", "CMakeLists.txt", "CMakePresets.json")
PREFIXES = ("", "src/", "include/", "kernels/", "apps/", "docs/", "tests/",
            "src/backend/", "kernels/cuda/", "kernels/cpu/")
TEXT_SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".inc", ".py", ".sh", ".txt", ".cmake", ".json", ".js",
                 ".html", ".css", ".yaml", ".yml", ".cfg", ".service", ".in", ".map", ".md", ""}
FILE_SUFFIXES = (".h", ".cpp", ".c", ".cu", ".cuh", ".inc", ".py", ".sh", ".cmake", ".md", ".svg", ".in")
HISTORY = ("docs/log/", "CHANGELOG.md")
# What a heading of an essay speaks of; the schedule is drawn, and what was tried stands in the log.
ESSAY_PARTS = ("problem", "layout", "schedule", "limit", "figures", "did not work")
NO_ESSAYS = ("docs/kernels/README.md", "docs/kernels/tile.md")  # the list of them; what kernels are written in
GENERATED = ("docs/api.md", "docs/benchmarks.md")

# Names that are right and are in no source: instructions and types of others, file names of users, placeholders.
KNOWN = {"millrace::millrace", "millrace::kernels", "config.json", "tokenizer.json", "model.safetensors",
         "FileHugePages", "FilePmdMapped", "find_package", "YYYY-MM-DD-subject.md", "--streaming",
         "ASAN_OPTIONS=detect_leaks=0"}

SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
# Where a shell looks for a command: at the beginning, behind ; | & (, behind sudo, behind X=y.
COMMAND = re.compile(r"(?:^\s*|[;|&(]\s*|\bsudo\s+|\b[A-Z_]+=\S*\s+)(?:[\w./-]*/)?millrace ([a-z]+)\b([^;|&]*)")


class Tree:
    """What the repository has, read once."""

    def __init__(self, root, binary=None):
        self.root = root
        self.files = [path.relative_to(root).as_posix() for path in self.walk()]
        self.folders = {parent.as_posix() for name in self.files for parent in Path(name).parents}
        self.words, self.options, self.pages = set(), set(), []  # pages: (source, the document it refers to)
        for name in self.files:
            if name.endswith(".md") or Path(name).suffix not in TEXT_SUFFIXES or name.startswith("tests/golden/"):
                continue
            try:
                text = (root / name).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if name != "tests/documents_test.py":
                self.words.update(WORD.findall(text))
                self.pages += [(name, page) for page in re.findall(r"\bdocs/[\w/-]+\.md\b", text)]
                self.options.update(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
        makefile = root / "Makefile"
        rules = re.findall(r"^([a-z][\w -]*):", makefile.read_text(), re.MULTILINE) if makefile.is_file() else []
        self.targets = {target for rule in rules for target in rule.split()}
        self.server = "".join((root / name).read_text(encoding="utf-8") for name in self.files
                              if name.startswith("apps/server/") and Path(name).suffix in (".cpp", ".h", ".json"))
        self.binary, self.help_texts = binary, {}
        self.commands = set(re.findall(r"^  ([a-z]+) ", self.help(), re.MULTILINE)) if binary else None

    def walk(self):
        for top in (*SOURCE_DIRS, "docs"):
            for path in (self.root / top).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    yield path
        for path in self.root.glob("*"):
            if path.is_file():
                yield path

    def help(self, *command):
        if command not in self.help_texts:
            answer = subprocess.run([self.binary, *command, "--help"], capture_output=True, text=True)
            self.help_texts[command] = answer.stdout if answer.returncode == 0 else ""
        return self.help_texts[command]

    def options_of(self, command):
        return set(re.findall(r"--[a-z][a-z0-9-]*", self.help(command)))

    def has_file(self, name, document):
        name = name.rstrip("/").removeprefix("./")
        beside = (Path(document).parent / name).as_posix()
        if "{" in name:
            head, _, rest = name.partition("{")
            choices, _, tail = rest.partition("}")
            return all(self.has_file(head + choice.strip() + tail, document) for choice in choices.split(","))
        if "*" in name:
            return any(fnmatch.fnmatch(file, prefix + name) or fnmatch.fnmatch(file, "*/" + name)
                       for prefix in PREFIXES for file in self.files)
        if any(prefix + name in self.folders or (self.root / (prefix + name)).exists() for prefix in PREFIXES):
            return True
        return beside in self.folders or any(file == beside or file.endswith("/" + name) for file in self.files)


def looks_like_file(text):
    if re.search(r"[\s<>$~=:;|()\[\]']", text) or text.startswith(("/", "-")):
        return False
    if text.startswith(("build/", "path/", "http", ".github")) or re.search(r"(^|/)([A-Z]+|NAME\.\w+)(/|$)", text):
        return False  # what a build makes, what a reader has, a name to be filled in
    if text.endswith(FILE_SUFFIXES):
        return bool(re.match(r"[\w.*/{},+-]+$", text))
    return bool(re.match(r"(?:%s|docs)/[\w./*{},+-]*$" % "|".join(re.escape(top) for top in SOURCE_DIRS), text))


def looks_like_symbol(word):
    return bool("_" in word.strip("_") or re.match(r"k[A-Z]\w", word) or re.match(r"[A-Z][a-z0-9]+[A-Z]\w*$", word))


def blocks_of(text):
    """(line number, line, in a code block) for every line."""
    fence = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fence = not fence
            yield number, line, True
            continue
        yield number, line, fence or line.startswith("    ")


def anchor_of(heading):
    text = re.sub(r"[`*]", "", heading.strip())
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors_of(path):
    return {anchor_of(match) for match in re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)}


class Checker:
    def __init__(self, tree):
        self.tree, self.faults, self.checked, self.linked = tree, [], 0, set()

    def fault(self, document, number, message):
        self.faults.append(f"{document}:{number}: {message}")

    def check_link(self, document, number, target):
        if re.match(r"[a-z]+:", target):
            return
        self.checked += 1
        name, _, anchor = target.partition("#")
        path = (self.tree.root / document).parent / name if name else self.tree.root / document
        if name and document != "CHANGELOG.md":
            self.linked.add(path.resolve())
        if not path.exists():
            self.fault(document, number, f"links to {target}: no such file")
        elif anchor and path.suffix == ".md" and anchor not in anchors_of(path):
            self.fault(document, number, f"links to {target}: no such heading there")

    def check_command(self, document, number, text):
        """`millrace X --y`, `make X`, `tools/x.py --y`, wherever in the text."""
        rest = text
        for match in COMMAND.finditer(text):
            command, arguments = match.group(1), match.group(2).split("#")[0]
            rest = rest.replace(match.group(), " ")
            if self.tree.commands is None:
                continue
            self.checked += 1
            if command not in self.tree.commands:
                self.fault(document, number, f"'millrace {command}': no such command")
                continue
            for option in OPTION.findall(arguments):
                if option not in self.tree.options_of(command):
                    self.fault(document, number, f"'millrace {command} {option}': no such option in its --help")
        for target in re.findall(r"(?:^|[\s;&(])make ([a-z][\w-]*)(?=$|[\s;,)])", rest):
            self.checked += 1
            if target not in self.tree.targets:
                self.fault(document, number, f"'make {target}': no such target in the Makefile")
        for script, arguments in re.findall(r"((?:bench|tools|tests)/[\w/.-]+\.(?:py|sh))([^;|`]*)", rest):
            self.checked += 1
            if not self.tree.has_file(script, document):
                if rest.strip() != script:  # as a span of its own it is judged as a file
                    self.fault(document, number, f"{script}: no such file")
                continue
            known = (self.tree.root / script).read_text(encoding="utf-8")
            for option in OPTION.findall(arguments.split("#")[0]):
                if option not in known:
                    self.fault(document, number, f"'{script} {option}': the script has no such option")

    def check_span(self, document, number, text):
        if text in KNOWN:
            return
        self.check_command(document, number, text)
        if looks_like_file(text):
            self.checked += 1
            if not self.tree.has_file(text, document):
                self.fault(document, number, f"`{text}`: no such file")
            return
        if re.match(r"/(?:v1|health|metrics|tokenize|detokenize)\b[\w/]*$", text):
            self.checked += 1
            if text not in self.tree.server:
                self.fault(document, number, f"`{text}`: no such path in apps/server")
            return
        of_others = re.match(r"[a-z][\w-]* ", text)  # a program that is not ours; ours were looked at above
        if not of_others and not re.search(r"\.(py|sh)\b", text):
            for option in OPTION.findall(text):
                self.checked += 1
                if option not in self.tree.options:
                    self.fault(document, number, f"`{option}`: no program or script of the tree has such an option")
        if re.search(r"[/\\]", text) and not re.search(r"::|\(", text):
            return  # a path of a user's machine, a ratio, a pattern
        for word in WORD.findall(text):
            is_type = word == text and re.match(r"[A-Z][a-z]+$", word)  # `Planner`, a span of its own
            if (looks_like_symbol(word) or is_type) and word not in KNOWN:
                self.checked += 1
                if word not in self.tree.words:
                    self.fault(document, number, f"`{word}`: occurs in no source of the tree")

    def check_lengths(self, document, lines):
        strict = document.startswith("docs/kernels/") or document == "docs/architecture.md"
        for number, line in enumerate(lines, 1):
            may_be_long = line.startswith(("|", "    ")) or "](" in line  # tables, code, links
            if len(line) > MAX_LINE and (strict or not may_be_long):
                self.fault(document, number, f"has {len(line)} characters, expected at most {MAX_LINE}")

    def check_essay(self, document, text):
        if not document.startswith("docs/kernels/") or document in NO_ESSAYS:
            return
        sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
        headings = [section.partition("\n")[0].lower() for section in sections]
        for part in ESSAY_PARTS:
            self.checked += 1
            if not any(part in heading for heading in headings):
                self.fault(document, 1, f"no heading of this essay has '{part}'")
        drawn = (section for section, heading in zip(sections, headings) if "schedule" in heading)
        if "schedule" in " ".join(headings) and not any(re.search(r"^    \S", section, re.MULTILINE) for section in drawn):
            self.fault(document, 1, "no diagram under its schedule")
        if "](../log/" not in text:
            self.fault(document, 1, "no link to the log")

    def check_examples(self, document, text):
        """A C or C++ program that a page shows is one of examples/, to the letter."""
        for match in re.finditer(r"^```(c|cpp)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            self.checked += 1
            programs = [(self.tree.root / name).read_text(encoding="utf-8") for name in self.tree.files
                        if name.startswith("examples/") and name.endswith((".c", ".cpp"))]
            if "int main(" in match.group(2) and match.group(2) not in programs:
                number = text.count("\n", 0, match.start()) + 1
                self.fault(document, number, "shows a program that is no file of examples/, or an older state of one")

    def check_map(self, document, text):
        """Folders that begin the lines of the map in docs/architecture.md; those indented further are below them."""
        above = ""
        for number, line in enumerate(text.split("\n"), 1):
            match = re.match(r"(    |      )((?:[\w.]+/[\w/]*\s)+)", line)
            if document != "docs/architecture.md" or not match:
                continue
            folders = match.group(2).split()
            if match.group(1) == "    ":
                above = folders[0]
            for folder in folders:
                self.checked += 1
                path = folder if match.group(1) == "    " else above + folder
                if not (self.tree.root / path).is_dir():
                    self.fault(document, number, f"the map has {path}: no such folder")

    def check(self, document):
        text = (self.tree.root / document).read_text(encoding="utf-8")
        history = document.startswith(HISTORY)
        for number, line, code in blocks_of(text):
            if not code:
                for match in LINK.finditer(SPAN.sub("", line)):
                    self.check_link(document, number, match.group(1) or match.group(2))
            if history or document in GENERATED:
                continue
            if code:
                self.check_command(document, number, line)
            else:
                for span in SPAN.findall(line):
                    self.check_span(document, number, span)
        self.check_lengths(document, text.split("\n"))
        if not history and document not in GENERATED:
            self.check_essay(document, text)
            self.check_examples(document, text)
            self.check_map(document, text)


def documents_in(root):
    return sorted(path.relative_to(root).as_posix() for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md")])


def faults_in(root, binary=None):
    checker = Checker(Tree(root, binary))
    for document in documents_in(root):
        checker.check(document)
    if (root / "README.md").is_file():  # pages that nobody finds
        checker.faults += [f"{document}: no page links to it" for document in documents_in(root)
                           if "/" in document and (root / document).resolve() not in checker.linked]
    for source, page in checker.tree.pages:
        checker.checked += 1
        if not (root / page).is_file():
            checker.faults.append(f"{source}: refers to {page}: no such document")
    return checker.faults, checker.checked


# ---------------------------------------------------------------- does it find faults?

GOOD_TREE = {
    "Makefile": "run: build\n\t@true\nbuild:\n\t@true\n",
    "src/base/paging.h": "struct BlockTable { int first_block(); };\ninline constexpr int kBlockTokens = 16;\n",
    "kernels/cuda/gemm/bf16_wgmma.cu": "",
    "apps/server/api.cpp": 'route("/v1/models");',
    "tools/fetch.py": 'parser.add_argument("--all")  # MILLRACE_ISA\n',
    "examples/hello.c": "int main(void) { return 0; }\n",
    "docs/example.md": "```c\nint main(void) { return 0; }\n```\n\n```cpp\nint part = 1;\n```\n",
    "docs/kernels/gemm.md": "# GEMM\n\n## Problem\n\n## Layout and schedule\n\n    load | multiply\n\n## The limit\n\n"
                            "## Figures\n\n## What did not work\n\n[Log](../log/gemm.md)\n",
    "docs/log/gemm.md": "",
    "docs/log/old.md": "Here `gone_name` and `src/gone.h` were, and [the page](../good.md).\n",
    "docs/good.md": "# Good\n\n`base/paging.h` has `kBlockTokens`, `BlockTable::first_block` and `paging.h`; "
                    "`make run`; `tools/fetch.py --all`;\n`--all`; `/v1/models`; `kernels/cuda/gemm/*.cu`; "
                    "`kernels/{cuda,cuda/gemm}`; [gemm](kernels/gemm.md#the-limit); `wgmma`.\n\n    make build\n"
                    "    tools/fetch.py --all   # --not-an-option\n"
                    "    install -g millrace keys /etc\n",
}
BAD_DOCUMENTS = {  # text -> a piece of the message that must come
    "`src/base/gone.h`": "no such file",
    "`gone.cuh`": "no such file",
    "`kernels/{cuda,hip}`": "no such file",
    "`kernels/cuda/gemm/*.metal`": "no such file",
    "`kGoneConstant`": "occurs in no source",
    "`BlockTable::last_block`": "occurs in no source",
    "`GoneClass`": "occurs in no source",
    "`Gone`": "occurs in no source",
    "`--gone`": "no program or script",
    "`tools/fetch.py --gone`": "has no such option",
    "`tools/gone.py`": "no such file",
    "`make gone`": "no such target",
    "    make gone\n": "no such target",
    "[x](gone.md)": "no such file",
    "[x](kernels/gemm.md#gone)": "no such heading",
    '<img src="gone.svg">': "no such file",
    "`/v1/gone`": "no such path",
    "```c\nint main(void) { return 1; }\n```": "no file of examples/",
    "word " * 30: "expected at most 120",
    "`millrace gone model`": "no such command",
    "`MILLRACE_ISA=x millrace gone; make run`": "no such command",
    "`millrace run model --gone`": "no such option in its --help",
    "    build/release/millrace run model --gone\n": "no such option in its --help",
}
STAND_IN = """\
#!/bin/sh
case "$1" in
  --help) echo 'Commands:'; echo '  run   answers' ;;
  run) echo '  --temp T' ;;
  *) exit 2 ;;
esac
"""


def self_test():
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        write_tree(root, GOOD_TREE)
        binary = Path(folder) / "millrace"
        binary.write_text(STAND_IN)
        binary.chmod(0o755)
        if faults := faults_in(root, str(binary))[0]:
            wrong.append(f"a good tree is called bad: {faults}")
        for text, message in BAD_DOCUMENTS.items():
            write_tree(root, {"docs/bad.md": f"# Bad\n\n{text}\n"})
            faults = faults_in(root, str(binary))[0]
            if len(faults) != 1 or message not in faults[0] or not faults[0].startswith("docs/bad.md:"):
                wrong.append(f"{text!r}: found {faults}, expected one fault with '{message}'")
            (root / "docs/bad.md").unlink()
        write_tree(root, {"README.md": "[a](docs/good.md), [b](docs/example.md)\n",
                          "CHANGELOG.md": "[c](docs/log/old.md)\n"})
        faults = faults_in(root, str(binary))[0]
        if faults != ["docs/log/old.md: no page links to it"]:
            wrong.append(f"a page that only the changelog links to: found {faults}")
        (root / "README.md").unlink()
        write_tree(root, {"CHANGELOG.md": "word " * 30 + "`gone_name`\n"})
        faults = faults_in(root, str(binary))[0]
        if len(faults) != 1 or "CHANGELOG.md:1: has" not in faults[0]:
            wrong.append(f"a long line of history: found {faults}")
        (root / "CHANGELOG.md").unlink()
        map_text = "    src/     all\n      base/ gone/  below\n    docs/ none/   more\n"
        write_tree(root, {"docs/architecture.md": map_text})
        faults = faults_in(root, str(binary))[0]
        if [fault.split("has ")[-1].split(":")[0] for fault in faults] != ["src/gone/", "none/"]:
            wrong.append(f"a map with two folders that are not there: found {faults}")
        (root / "docs/architecture.md").unlink()
        whole = GOOD_TREE["docs/kernels/gemm.md"]
        for without, message in (("## Problem\n", "has 'problem'"), ("## Figures\n", "has 'figures'"),
                                 ("    load | multiply\n", "no diagram"), ("[Log](../log/gemm.md)", "no link to the log")):
            write_tree(root, {"docs/kernels/gemm.md": whole.replace(without, "")})
            faults = faults_in(root, str(binary))[0]
            if len(faults) != 1 or message not in faults[0]:
                wrong.append(f"an essay without {without!r}: found {faults}")
        write_tree(root, {"docs/kernels/gemm.md": whole})
        write_tree(root, {"src/base/bad.h": "// docs/gone.md\n"})
        if (faults := faults_in(root, str(binary))[0]) != ["src/base/bad.h: refers to docs/gone.md: no such document"]:
            wrong.append(f"a source that refers to a document that is gone: found {faults}")
    return told(wrong, len(BAD_DOCUMENTS) + 9)


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    binary = str(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else None
    faults, checked = faults_in(ROOT, binary)
    for fault in faults:
        print(fault)
    print(f"documents: {len(documents_in(ROOT))} files, {checked} names, {len(faults)} faults"
          + ("" if binary else " (commands and options of millrace not checked: no binary named)"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

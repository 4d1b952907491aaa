#!/usr/bin/env python3
"""Writes docs/api.md from the public headers: every declaration with the comment above it, in the headers' order.

  tools/make_api_docs.py            write docs/api.md
  tools/make_api_docs.py --check    write nothing; status 1 where the page is not what the headers say

The headers are the documentation: a comment before a declaration becomes its text, comments within it stay where they
are. Reads include/millrace/*.h (C++) and include/millrace/kernels/*.h (C) as text; private parts, includes and the
frame that lets C++ include a C header are left out.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
PARTS = (
    ("The engine, in C++", ("include/millrace/*.h",),
     ("engine.h", "options.h", "request.h", "sampling.h", "stats.h", "error.h"),
     "`#include \"millrace/engine.h\"` and link against the engine: [examples](../examples) has whole programs.\n"
     "Everything is in the namespace `millrace`. What goes wrong is thrown as `Error`."),
    ("The kernels, in C", ("include/millrace/kernels.h", "include/millrace/kernels/*.h"),
     ("kernels.h", "device.h", "attention.h", "flash_attention.h", "flash_partial.h", "matmul.h", "gemm.h", "grouped_gemm.h",
      "lowbit.h", "fp4_gemm.h", "moe.h", "rows.h", "norm.h",
      "rotary.h", "activation.h", "softmax.h", "cross_entropy.h", "embedding.h", "dropout.h", "sample.h", "quant.h",
      "flash_attention_v2_optimized.h", "flash_attention_v2.h"),
     "Functions over plain structs, callable from C: pointers, shapes, strides, types and a stream. Every call returns\n"
     "a status, and `mr_last_error()` has a line about the last one that failed."),
)
HEAD = """\
<!-- Written by tools/make_api_docs.py from include/millrace: change the headers, not this page. -->

# The public API

Everything that a program outside this tree may include. [README](../README.md) shows how to use it,
[architecture](architecture.md) what lies behind it. The HTTP API: [server](server.md).
"""
COMMENT_BLOCK = re.compile(r"\s*(?://[^\n]*\n\s*)+|\s*/\*.*?\*/\s*", re.DOTALL)


def comment_text(block):
    """A comment's words, without its marks."""
    lines = []
    for line in block.strip().split("\n"):
        line = re.sub(r"^\s*(?://+|/\*+|\*/|\*(?!/))\s?", "", line.rstrip())
        lines.append(re.sub(r"\s*\*/$", "", line).rstrip())
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def prose(lines):
    """Comment lines as Markdown: lines that are indented by two or more stay a block, lists stay lists."""
    out, in_list = [], False
    for line in lines:
        if re.match(r"\s*- ", line):
            if out and out[-1] and not in_list:
                out.append("")
            in_list = True
        elif not line.startswith("   "):
            in_list = in_list and line.startswith(" ")
        if in_list:
            out.append(line[2:] if line.startswith("  ") else line)
            continue
        is_code = line.startswith("  ")
        if is_code and out and out[-1] and not out[-1].startswith("    "):
            out.append("")
        if not is_code and out and out[-1].startswith("    ") and line:
            out.append("")
        out.append("    " + line.strip() if is_code else line)
    return out


def split_head(text):
    """(the comment the file begins with, the rest)."""
    match = re.match(r"(?:\s*//[^\n]*\n)+|\s*/\*.*?\*/", text, re.DOTALL)
    return (match.group(), text[match.end():]) if match else ("", text)


def without_frame(text):
    """Declarations alone: no includes, guards, namespaces, extern "C"."""
    text = re.sub(r"^#ifdef __cplusplus\n.*?^#endif[^\n]*\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^#ifndef (\w+_H_?)\n#define \1\n(.*)^#endif[^\n]*\n?", r"\2", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^#(?:pragma once|include)[^\n]*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^(?:inline )?namespace [\w:]+ \{\n|^\}\s*// namespace[^\n]*\n?", "", text, flags=re.MULTILINE)


def end_of_declaration(text, begin):
    """The position behind a declaration that begins at `begin`: its ';', or the '}' of a body."""
    depth, idx = 0, begin
    while idx < len(text):
        two = text[idx:idx + 2]
        if two == "//":
            idx = text.find("\n", idx)
            continue
        if two == "/*":
            idx = text.find("*/", idx) + 2
            continue
        char = text[idx]
        if char == '"':
            idx = re.compile(r'"(?:\\.|[^"\\])*"').match(text, idx).end()
            continue
        if char in "{(":
            depth += 1
        elif char in "})":
            depth -= 1
            if char == "}" and depth == 0 and not re.match(r"\s*[\w\s\[\]]*[;,)]", text[idx + 1:]):
                return idx + 1
        elif char == ";" and depth == 0:
            end = text.find("\n", idx)  # with a comment on the same line
            return end if end >= 0 else len(text)
        idx += 1
    return len(text)


def declarations(text):
    """(comment lines, declaration) of everything in a header, in order."""
    found, idx = [], 0
    while idx < len(text):
        match = COMMENT_BLOCK.match(text, idx)
        comment = []
        while match:
            gap = "\n\n" in match.group().rstrip(" ")[-2:]
            comment = comment_text(match.group()) if not gap else []
            idx = match.end()
            match = COMMENT_BLOCK.match(text, idx)
        idx += len(text[idx:]) - len(text[idx:].lstrip())
        if idx >= len(text):
            break
        if text[idx] == "#":
            end = re.compile(r"(?:[^\n]*\\\n)*[^\n]*").match(text, idx).end()
        else:
            end = end_of_declaration(text, idx)
        found.append((comment, text[idx:end].strip()))
        idx = end
    return found


def name_of(declaration):
    if match := re.match(r"#define (\w+)", declaration):
        return match.group(1)
    if match := re.match(r"typedef [^{]*?\b(\w+);", declaration, re.DOTALL):
        return match.group(1)
    kinds = r"(?:template <.*?>\s*)?(?:typedef )?(?:enum class|struct|class|enum|union)\s+(\w+)"
    if match := re.match(kinds, declaration):
        return match.group(1)
    if match := re.match(r"using (\w+)", declaration):
        return match.group(1)
    match = re.search(r"(\w+)\s*\(", declaration) or re.search(r"(\w+)\s*(?:=|;)", declaration)
    return match.group(1) if match else declaration.split("\n")[0]


def public_part(declaration):
    """A class without what is private in it."""
    return re.sub(r"\n private:\n.*(?=\n\};?$)", "", declaration, flags=re.DOTALL)


def is_c(path):
    return path.name == "kernels.h" or path.parent.name == "kernels"


def render_header(path):
    intro, rest = split_head(path.read_text(encoding="utf-8"))
    name = path.relative_to(ROOT).as_posix()
    lines = [f"### [{name}](../{name})", "", *prose(comment_text(intro)), ""]
    for comment, declaration in declarations(without_frame(rest)):
        if declaration.startswith("#") and not re.match(r"#define \w+ [\w(\"-]+$", declaration):
            continue  # conditions, and macros that are no numbers
        if re.fullmatch(r"(?:struct|class|enum class) \w+;", declaration):
            continue  # said again where it is defined
        lines += [f"#### `{name_of(declaration)}`", ""]
        if comment:
            lines += [*prose(comment), ""]
        lines += ["```c" if is_c(path) else "```cpp", public_part(declaration).removeprefix("MR_API "), "```", ""]
    return lines


def page():
    lines = [HEAD]
    for title, patterns, first, about in PARTS:
        found = {path for pattern in patterns for path in ROOT.glob(pattern)}
        headers = sorted((path for path in found if is_c(path) == title.endswith("C")),
                         key=lambda path: (first.index(path.name) if path.name in first else len(first), path.name))
        if not headers:
            continue
        lines += [f"## {title}", "", about, ""]
        for path in headers:
            lines += render_header(path)
    return "\n".join(lines).rstrip() + "\n"


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    text = page()
    if sys.argv[1:] == ["--check"]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print("docs/api.md is not what the headers say; `tools/make_api_docs.py` writes it anew", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote docs/api.md: {text.count(chr(10))} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())

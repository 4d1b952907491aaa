#!/usr/bin/env python3
"""Fails when an #include crosses the layers the wrong way (docs/architecture.md, the map).

    base <- tensor <- {io, quant} <- backend <- model <- engine <- apps
    jinja, tokenizer, kv, sched and sample see base only; engine and apps see them.
    grammar sees base only; chat sees grammar and the public API; apps see both.
    A device folder (backend/cpu, backend/cuda, ...) sees what backend sees and no other device; nobody above
    backend sees a device folder, and inside backend only the registry's source file names them.
    include/millrace sees nothing of src; millrace/error.h is for everybody, millrace/sampling.h for sample and grammar too, the
    rest of it for engine and apps.

Also: every header has #pragma once, every quoted include names a file, and no headers include each other in a
ring. Run with --self-test it builds small trees with each of these faults and fails unless each is found.
"""

import re
import sys
import tempfile
from pathlib import Path

BELOW_BACKEND = {"base", "tensor", "quant"}
MAY_SEE = {  # folder of src -> the other folders of src whose headers it may include
    "base": set(),
    "tensor": {"base"},
    "io": {"base", "tensor"},
    "quant": {"base", "tensor"},
    "jinja": {"base"},
    "tokenizer": {"base"},
    "kv": {"base"},
    "sched": {"base"},
    "sample": {"base"},
    "grammar": {"base"},
    "backend": BELOW_BACKEND,
    "model": BELOW_BACKEND | {"io", "backend"},
    "engine": BELOW_BACKEND | {"io", "backend", "model", "jinja", "tokenizer", "kv", "sched", "sample"},
}
MAY_SEE["chat"] = {"base", "grammar"}
MAY_SEE["apps"] = MAY_SEE["engine"] | {"engine", "grammar", "chat"}
SEES_PUBLIC_API = {"engine", "chat", "apps", "include"}
DEVICES = {"reference", "cpu", "cuda", "no_cuda"}
REGISTRY = "src/backend/registry.cpp"  # the one list of devices

SOURCES = {".cpp", ".h", ".cu", ".cuh", ".inc"}
HEADERS = {".h", ".cuh"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<(millrace/[^>]+)>)', re.MULTILINE)
# A comment, or what may look like the start of one and is not: a string or a character.
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def layer_of(path):
    """(layer, device) of a path relative to the root: src/io/gguf.h -> (io, None)."""
    parts = path.parts
    if parts[0] != "src":
        return parts[0], None
    device = parts[2] if parts[1] == "backend" and len(parts) > 3 else None
    return parts[1], device


def resolve(root, source, name):
    """The file an include names, looked for where the compiler looks, or None."""
    own_app = Path(*source.parts[:2])  # apps/cli: its files name each other from there
    for folder in (source.parent, own_app, Path("apps"), Path("src"), Path("include")):
        candidate = root / folder / name
        if candidate.is_file():
            resolved = candidate.resolve()
            return resolved.relative_to(root) if resolved.is_relative_to(root) else None
    return None


def without_comments(text):
    def replacement(match):
        return "\n" * match.group().count("\n") if match.group().startswith("/") else match.group()

    return COMMENT.sub(replacement, text)


def fault_of_include(source, target):
    """None, or why `source` may not include `target`."""
    layer, device = layer_of(source)
    other, other_device = layer_of(target)
    is_test = source.stem.endswith("_test") or source.stem.startswith("test_")
    if other == "include":
        if layer in SEES_PUBLIC_API or target == Path("include/millrace/error.h"):
            return None
        if layer in ("sample", "grammar") and target == Path("include/millrace/sampling.h"):  # its parameters are what clients write
            return None
        return "the public API is for engine and apps"
    if layer == "include":
        return "include/millrace may not see src"
    if other in ("apps", "tests", "bench"):
        return None if layer == other else f"{layer} may not see {other}"
    if layer == "backend" == other:
        if other_device in (None, device):
            return None
        if device is None:  # the conformance suite beside backend.h compares all devices
            return None if is_test or source == Path(REGISTRY) else f"only {REGISTRY} may name a device"
        if is_test and other_device == "reference":  # the oracle of every test
            return None
        return f"device {device} may not see device {other_device}"
    if layer != other and other not in MAY_SEE.get(layer, set()):
        return f"{layer} may not see {other}"
    if other_device is not None and layer != "backend":
        return f"{layer} may see backend/*.h, not the device folder backend/{other_device}"
    return None


def ring_in(graph):
    """A list of headers that include each other in a ring, or None."""
    state, trail = {}, []

    def visit(node):
        state[node] = "open"
        trail.append(node)
        for target in sorted(graph.get(node, ())):
            if state.get(target) == "open":
                return trail[trail.index(target):] + [target]
            if target not in state and (ring := visit(target)):
                return ring
        trail.pop()
        state[node] = "done"
        return None

    for node in sorted(graph):
        if node not in state and (ring := visit(node)):
            return ring
    return None


def faults_in(root):
    root = root.resolve()
    faults, graph, count = [], {}, 0
    files = sorted(path.relative_to(root) for top in ("src", "include", "apps") for path in (root / top).rglob("*")
                   if path.suffix in SOURCES)
    for source in files:
        layer, _ = layer_of(source)
        if source.parts[0] == "src" and layer not in MAY_SEE:
            faults.append(f"{source}: '{layer}' is no layer, expected one of {', '.join(sorted(MAY_SEE))}")
            continue
        text = (root / source).read_text(encoding="utf-8")
        text = without_comments(text)
        if source.suffix in HEADERS and not re.search(r"^[ \t]*#[ \t]*pragma once\b", text, re.MULTILINE):
            faults.append(f"{source}: has no #pragma once")
        for match in INCLUDE.finditer(text):
            count += 1
            name = match.group(1) or match.group(2)
            where = f"{source}:{text.count(chr(10), 0, match.start()) + 1}: includes {name}"
            target = resolve(root, source, name)
            if target is None:
                faults.append(f"{where}: no such file under src, include or beside it")
                continue
            graph.setdefault(source, set()).add(target)
            if reason := fault_of_include(source, target):
                faults.append(f"{where}: {reason}")
    if ring := ring_in(graph):
        faults.append("headers include each other in a ring: " + " -> ".join(map(str, ring)))
    return faults, len(files), count


GOOD_TREE = {
    "include/millrace/error.h": "#pragma once\n",
    "include/millrace/engine.h": '#pragma once\n#include "millrace/error.h"\n',
    "src/base/error.h": '#pragma once\n#include "millrace/error.h"\n',
    "src/tensor/dtype.h": '#pragma once\n#include "base/error.h"\n',
    "src/quant/blocks.h": '#pragma once\n#include "tensor/dtype.h"\n',
    "src/io/gguf.h": '#pragma once\n#include "tensor/dtype.h"\n',
    "src/jinja/value.h": '#pragma once\n#include "base/error.h"\n',
    "src/tokenizer/bpe.h": '#pragma once\n#include "base/error.h"\n',
    "src/kv/pool.h": '// kv/*.h\n#pragma once\n#include "base/error.h"\n/*\n#include "io/gguf.h"\n*/\n',
    "src/backend/backend.h": '#pragma once\n#include "quant/blocks.h"\n',
    "src/backend/registry.cpp": '#include "backend/cpu/cpu.h"\n',
    "src/backend/conformance_test.cpp": '#include "backend/cpu/cpu.h"\n#include "backend/reference/reference.h"\n',
    "src/backend/cpu/cpu.h": '#pragma once\n#include "backend/backend.h"\n',
    "src/backend/cpu/cpu_test.cpp": '#include "backend/reference/reference.h"\n#include "cpu.h"\n',
    "src/backend/reference/reference.h": '#pragma once\n#include "backend/backend.h"\n',
    "src/model/llama.h": '#pragma once\n#include "backend/backend.h"\n#include "io/gguf.h"\n',
    "src/engine/engine.cpp": '#include "millrace/engine.h"\n#include "model/llama.h"\n#include "tokenizer/bpe.h"\n',
    "apps/cli/main.cpp": '#include <millrace/engine.h>\n#include "io/gguf.h"\n',
    "apps/cli/synth/plan.h": "#pragma once\n",
    "apps/cli/synth/plan.cpp": '#include "synth/plan.h"\n',
}
BAD_FILES = {  # file -> (text, a piece of the message that must come)
    "src/base/bad.h": ('#pragma once\n#include "tensor/dtype.h"\n', "base may not see tensor"),
    "src/io/bad.cpp": ('#include "quant/blocks.h"\n', "io may not see quant"),
    "src/tokenizer/bad.cpp": ('#  include "io/gguf.h"\n', "tokenizer may not see io"),
    "src/tokenizer/bad2.cpp": ('#include "jinja/value.h"\n', "tokenizer may not see jinja"),
    "src/jinja/bad.cpp": ('#include "tokenizer/bpe.h"\n', "jinja may not see tokenizer"),
    "src/kv/bad.cpp": ('#include "../tensor/dtype.h"\n', "kv may not see tensor"),
    "src/backend/bad.h": ('#pragma once\n#include "backend/cpu/cpu.h"\n', "only src/backend/registry.cpp"),
    "src/backend/cpu/bad.cpp": ('#include "backend/reference/reference.h"\n', "cpu may not see device reference"),
    "src/backend/reference/bad_test.cpp": ('#include "backend/cpu/cpu.h"\n', "reference may not see device cpu"),
    "src/backend/cuda/bad.cu": ('#include "model/llama.h"\n', "backend may not see model"),
    "src/model/bad.cpp": ('\n#include "backend/cpu/cpu.h"\n', "bad.cpp:2: includes backend/cpu/cpu.h: model may see"),
    "src/model/bad2.cpp": ('#include "tokenizer/bpe.h"\n', "model may not see tokenizer"),
    "src/model/bad3.cpp": ('#include "millrace/engine.h"\n', "the public API is for engine and apps"),
    "include/millrace/bad.h": ('#pragma once\n#include "base/error.h"\n', "include/millrace may not see src"),
    "apps/cli/bad.cpp": ('#include "backend/cpu/cpu.h"\n', "apps may see backend/*.h"),
    "src/engine/bad.cpp": ('#include "missing.h"\n', "no such file"),
    "src/engine/bad2.h": ('#include "model/llama.h"\n', "has no #pragma once"),
    "src/utils/bad.h": ("#pragma once\n", "'utils' is no layer"),
    "src/io/ring.h": ('#pragma once\n#include "io/ring.h"\n', "in a ring"),
}


def write_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def self_test():
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_tree(root, GOOD_TREE)
        if faults := faults_in(root)[0]:
            wrong.append(f"a good tree is called bad: {faults}")
        for name, (text, message) in BAD_FILES.items():
            write_tree(root, {name: text})
            faults = faults_in(root)[0]
            if len(faults) != 1 or message not in faults[0]:
                wrong.append(f"{name}: found {faults}, expected one fault with '{message}'")
            (root / name).unlink()
    for line in wrong:
        print(line)
    print(f"self-test: {len(BAD_FILES) + 1} trees, {len(wrong)} judged wrongly")
    return 1 if wrong else 0


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    faults, num_files, num_includes = faults_in(Path(__file__).resolve().parent.parent)
    for fault in faults:
        print(fault)
    print(f"layers: {num_files} files, {num_includes} includes, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Fails when an #include crosses the layers the wrong way (docs/architecture.md, the map), or in a circle.

    base <- tensor <- {io, quant, kernels} <- backend <- model <- engine <- apps
    jinja, tokenizer, kv, sched, sample, image and dist see base only; engine and apps see them, and dist backend and model too.
    grammar sees base only; chat sees grammar and the public API; apps see both. hub sees base only; apps see it.
    kernels/ sees base and tensor. Its folders cpu, cuda and reference see kernels/quant and not one another (tests see
    reference, the oracle); kernels/api, which dispatches the C API to devices, sees all of them.
    A device folder (backend/cpu, backend/cuda, ...) sees what backend sees, its own folder of kernels/, and no other
    device. Nobody above backend sees a device, and inside backend only the registry's source file names them; of
    kernels/ the block formats (kernels/quant) and the encoders (kernels/cpu/quant) are for everybody from quant on.
    include/millrace sees nothing of src; millrace/error.h is for everybody, millrace/sampling.h for sample and grammar
    too, the rest of it for engine and apps. include/millrace/kernels (and kernels.h, all of it in one) sees nothing but
    itself and C's own headers (its device code, tile/, C++'s and CUDA's), and is for kernels, dist and everybody above.
    python, the engine as a Python package, stands above apps and sees what they see, and them; python/kernels, the
    kernel library as operations of others, sees include/millrace/kernels alone. examples see include/millrace, and
    dist, which has no public header yet. tests and bench see everything, and nobody sees them.

Also: every header is read once, every quoted include names a file, and no headers include each other in a circle,
anywhere in the tree; inline assembly of CUDA stands in include/millrace/kernels/tile/ptx alone. Run with --self-test it builds small trees with each of these faults and fails unless each is
found. tests/tree_test.py looks at the files themselves.
"""

import re
import sys
from pathlib import Path

import made_trees

BELOW_BACKEND = {"base", "tensor", "quant"}
MAY_SEE = {  # layer -> the other layers whose headers it may include; what of kernels/ is said below
    "base": set(),
    "tensor": {"base"},
    "kernels": {"base", "tensor"},
    "io": {"base", "tensor"},
    "quant": {"base", "tensor"},
    "jinja": {"base"},
    "tokenizer": {"base"},
    "kv": {"base"},
    "sched": {"base"},
    "sample": {"base"},
    "dist": {"base"},
    "hub": {"base"},
    "image": {"base"},
    "grammar": {"base"},
    "chat": {"base", "grammar"},
    "backend": BELOW_BACKEND | {"dist"},
    "model": BELOW_BACKEND | {"io", "backend", "dist"},
    "engine": BELOW_BACKEND | {"io", "backend", "model", "jinja", "tokenizer", "kv", "sched", "sample", "image", "dist"},
    "examples": {"dist"},
}
MAY_SEE["apps"] = MAY_SEE["engine"] | {"engine", "grammar", "chat", "hub"}
MAY_SEE["python"] = MAY_SEE["apps"] | {"apps"}
MAY_SEE["train"] = MAY_SEE["engine"] | {"engine"}
ANYTHING = {"tests", "bench"}
SEES_PUBLIC_API = {"engine", "chat", "apps", "train", "python", "examples", "include"}
SEES_BLOCK_FORMATS = {"quant", "backend", "model", "engine", "train", "apps"}
SEES_KERNEL_API = SEES_BLOCK_FORMATS | {"kernels", "dist", "python/kernels", "examples"}
DEVICES = {"reference", "cpu", "cuda", "no_cuda"}
REGISTRY = "src/backend/registry.cpp"  # the one list of devices

TOPS = ("src", "include", "kernels", "apps", "python", "examples", "bench", "tests")
SOURCES = {".cpp", ".c", ".h", ".cu", ".cuh", ".inc"}
HEADERS = {".h", ".cuh"}
C_HEADERS = {"stddef.h", "stdint.h", "stdbool.h"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<(millrace/[^>]+)>)', re.MULTILINE)
SYSTEM_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(?!millrace/)([^>]+)>", re.MULTILINE)
ASSEMBLY = re.compile(r"\basm(?: volatile)?\s*\(")
PTX = Path("include/millrace/kernels/tile/ptx")
READ_ONCE = re.compile(r"^[ \t]*#[ \t]*(?:pragma once\b|ifndef (\w+)\s+#[ \t]*define \1\b)", re.MULTILINE)
# A comment, or what may look like the start of one and is not: a string or a character.
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def layer_of(path):
    """(layer, folder in it) of a path relative to the root: src/io/gguf.h -> (io, ""), src/backend/cpu/weight.h ->
    (backend, "cpu"), kernels/cuda/gemm/gemm.h -> (kernels, "cuda/gemm")."""
    parts = path.parts
    if parts[:3] == ("include", "millrace", "kernels") or parts[:3] == ("include", "millrace", "kernels.h"):
        return "kernel_api", ""
    if parts[0] == "src":
        return parts[1], "/".join(parts[2:-1])
    if parts[:2] == ("python", "kernels"):
        return "python/kernels", ""
    return parts[0], "/".join(parts[1:-1])


def resolve(root, source, name):
    """The file an include names, looked for where the compiler looks, or None."""
    own_app = Path(*source.parts[:2])  # apps/cli: its files name each other from there
    folders = [source.parent, own_app, Path("apps"), Path("src"), Path("include"), Path(".")]
    if source.parts[0] in ANYTHING:
        folders.append(Path("apps/server"))
    for folder in folders:
        candidate = root / folder / name
        if candidate.is_file():
            resolved = candidate.resolve()
            return resolved.relative_to(root) if resolved.is_relative_to(root) else None
    return None


def without_comments(text):
    def replacement(match):
        return "\n" * match.group().count("\n") if match.group().startswith("/") else match.group()

    return COMMENT.sub(replacement, text)


def is_test(source):
    return source.stem.endswith("_test") or source.stem.startswith("test_")


def fault_of_public_api(layer, target):
    if layer in SEES_PUBLIC_API or target == Path("include/millrace/error.h"):
        return None
    # What a client writes is what these take.
    if layer in ("sample", "grammar") and target == Path("include/millrace/sampling.h"):
        return None
    return "the public API is for engine and apps"


def fault_of_kernels(source, layer, folder, part):
    """Why `source` may not include a header of the folder `part` of kernels/, or None."""
    device = part.split("/")[0]
    own = folder.split("/")[0]
    if device in ("", "quant"):  # what all of kernels/ shares
        return None if layer in SEES_BLOCK_FORMATS | {"kernels"} else f"{layer} may not see kernels"
    if layer == "kernels" and own == "api":  # the C API dispatches to all devices
        return None
    if layer == "kernels":
        if own in ("", device) or is_test(source) and device == "reference":
            return None
        return f"kernels/{own} may not see kernels/{device}"
    if layer == "backend" and (own == device or own == "" and is_test(source)):
        return None
    if layer in SEES_BLOCK_FORMATS and part == "cpu/quant":
        return None
    return f"{'/'.join(filter(None, (layer, own)))} may not see kernels/{device}"


def fault_of_devices(source, device, other_device):
    """Why a file of backend/ may not include one of backend/`other_device`, or None."""
    if other_device in ("", device):
        return None
    if device == "":  # the conformance suite beside backend.h compares all devices
        return None if is_test(source) or source == Path(REGISTRY) else f"only {REGISTRY} may name a device"
    if is_test(source) and other_device == "reference":  # the oracle of every test
        return None
    return f"device {device} may not see device {other_device}"


def fault_of_include(source, target):
    """None, or why `source` may not include `target`."""
    layer, folder = layer_of(source)
    other, other_folder = layer_of(target)
    if layer in ANYTHING:
        return None
    if layer == "kernel_api":
        return None if other == "kernel_api" else "include/millrace/kernels may see itself alone"
    if other == "kernel_api":
        return None if layer in SEES_KERNEL_API else "the kernel library's API is for kernels and what is above them"
    if other == "include":
        return fault_of_public_api(layer, target)
    if layer == "include":
        return "include/millrace may not see src"
    if other == "kernels":
        return fault_of_kernels(source, layer, folder, other_folder)
    if layer == "backend" == other:
        return fault_of_devices(source, folder.split("/")[0], other_folder.split("/")[0])
    if layer != other and other not in MAY_SEE.get(layer, set()):
        return f"{layer} may not see {other}"
    if other == "backend" and other_folder:
        return f"{layer} may see backend/*.h, not the device folder backend/{other_folder}"
    return None


def circles_in(graph):
    """Every circle of includes once: for each group of files that reach one another, a way around."""
    state, trail, found = {}, [], []

    def visit(node):
        state[node] = "open"
        trail.append(node)
        for target in sorted(graph.get(node, ())):
            if state.get(target) == "open":
                found.append(trail[trail.index(target):] + [target])
            elif target not in state:
                visit(target)
        trail.pop()
        state[node] = "done"

    for node in sorted(graph):
        if node not in state:
            visit(node)
    return found


def faults_in_file(root, source, graph):
    """(faults, number of includes) of one file; its includes go into `graph`."""
    faults, count = [], 0
    layer, _ = layer_of(source)
    text = without_comments((root / source).read_text(encoding="utf-8"))
    if source.suffix in HEADERS and not READ_ONCE.search(text):
        faults.append(f"{source}: has no #pragma once")
    for match in INCLUDE.finditer(text):
        count += 1
        name = match.group(1) or match.group(2)
        where = f"{source}:{text.count(chr(10), 0, match.start()) + 1}: includes {name}"
        target = resolve(root, source, name)
        if target is None:
            faults.append(f"{where}: no such file under src, include, kernels or beside it")
            continue
        graph.setdefault(source, set()).add(target)
        if reason := fault_of_include(source, target):
            faults.append(f"{where}: {reason}")
    if source.suffix in (".cu", ".cuh") and layer not in ANYTHING and source.parent != PTX and ASSEMBLY.search(text):
        faults.append(f"{source}: has inline assembly, which is for {PTX}")
    if layer == "kernel_api" and source.suffix != ".cuh":  # device code (tile/) is C++ and CUDA
        faults += [f"{source}: includes <{name}>: expected a header of C: {', '.join(sorted(C_HEADERS))}"
                   for name in SYSTEM_INCLUDE.findall(text) if name not in C_HEADERS]
    return faults, count


def faults_in(root):
    root = root.resolve()
    faults, graph, count = [], {}, 0
    files = sorted(path.relative_to(root) for top in TOPS for path in (root / top).rglob("*") if path.suffix in SOURCES)
    for source in files:
        layer, _ = layer_of(source)
        if source.parts[0] == "src" and layer not in MAY_SEE:
            faults.append(f"{source}: '{layer}' is no layer, expected one of {', '.join(sorted(MAY_SEE))}")
            continue
        found, includes = faults_in_file(root, source, graph)
        faults += found
        count += includes
    faults += ["files include each other in a circle: " + " -> ".join(map(str, circle)) for circle in circles_in(graph)]
    return faults, len(files), count


ONCE = "#pragma once\n"
GOOD_TREE = {
    "include/millrace/error.h": ONCE,
    "include/millrace/engine.h": ONCE + '#include "millrace/error.h"\n',
    "include/millrace/kernels.h": '#ifndef K_H\n#define K_H\n#include "millrace/kernels/norm.h"\n#endif\n',
    "include/millrace/kernels/device.h": "/* C */\n#ifndef D_H\n#define D_H\n#include <stdint.h>\n#endif\n",
    "include/millrace/kernels/norm.h": ONCE + '#include "millrace/kernels/device.h"\n',
    "src/base/error.h": ONCE + '#include "millrace/error.h"\n',
    "src/tensor/dtype.h": ONCE + '#include "base/error.h"\n',
    "src/quant/request.h": ONCE + '#include "kernels/quant/blocks.h"\n#include "kernels/cpu/quant/encoder.h"\n',
    "src/io/gguf.h": ONCE + '#include "tensor/dtype.h"\n',
    "src/jinja/value.h": ONCE + '#include "base/error.h"\n',
    "src/tokenizer/bpe.h": ONCE + '#include "base/error.h"\n',
    "src/kv/pool.h": '// kv/*.h\n#pragma once\n#include "base/error.h"\n/*\n#include "io/gguf.h"\n*/\n',
    "kernels/api/matmul.cpp": '#include "kernels/cpu/matmul/gemv.h"\n#include "kernels/cuda/gemm/gemm.h"\n',
    "kernels/quant/blocks.h": ONCE + '#include "tensor/dtype.h"\n',
    "kernels/cpu/quant/encoder.h": ONCE + '#include "kernels/quant/blocks.h"\n',
    "kernels/cpu/matmul/gemv.h": ONCE + '#include "millrace/kernels/device.h"\n#include "base/error.h"\n',
    "kernels/cpu/matmul/gemv_test.cpp": '#include "gemv.h"\n#include "kernels/reference/matmul.h"\n',
    "kernels/cuda/gemm/gemm.h": ONCE + '#include "millrace/kernels/tile/ptx/wgmma.cuh"\n',
    "include/millrace/kernels/tile/ptx/wgmma.cuh": ONCE + 'asm volatile("wgmma.fence;");\n',
    "kernels/reference/matmul.h": ONCE + '#include "kernels/quant/blocks.h"\n',
    "src/backend/backend.h": ONCE + '#include "quant/request.h"\n',
    "src/backend/registry.cpp": '#include "backend/cpu/cpu.h"\n',
    "src/backend/conformance_test.cpp": '#include "backend/cpu/cpu.h"\n#include "backend/reference/reference.h"\n',
    "src/backend/cpu/cpu.h": ONCE + '#include "backend/backend.h"\n#include "kernels/cpu/matmul/gemv.h"\n',
    "src/backend/cpu/cpu_test.cpp": '#include "backend/reference/reference.h"\n#include "cpu.h"\n',
    "src/backend/reference/reference.h": ONCE + '#include "backend/backend.h"\n',
    "src/model/llama.h": ONCE + '#include "backend/backend.h"\n#include "io/gguf.h"\n',
    "src/engine/engine.cpp": '#include "millrace/engine.h"\n#include "model/llama.h"\n#include "tokenizer/bpe.h"\n',
    "apps/cli/main.cpp": '#include <millrace/engine.h>\n#include "io/gguf.h"\n',
    "apps/cli/synth/plan.h": ONCE,
    "apps/cli/synth/plan.cpp": '#include "synth/plan.h"\n',
    "apps/server/http.h": ONCE,
    "examples/ask.cpp": "#include <millrace/engine.h>\n",
    "examples/attend.c": "#include <millrace/kernels.h>\n",
    "python/src/model.h": ONCE + '#include "server/http.h"\n#include "millrace/engine.h"\n',
    "python/src/model.cpp": '#include "model.h"\n#include "io/gguf.h"\n',
    "python/kernels/src/ops.cpp": "#include <millrace/kernels.h>\n",
    "tests/engine_test.cpp": '#include "engine_cases.h"\n#include "http.h"\n#include "backend/cpu/cpu.h"\n',
    "tests/engine_cases.h": ONCE,
}
BAD_FILES = {  # file -> (text, a piece of the message that must come)
    "src/base/bad.h": (ONCE + '#include "tensor/dtype.h"\n', "base may not see tensor"),
    "src/base/bad2.h": (ONCE + '#include "kernels/quant/blocks.h"\n', "base may not see kernels"),
    "src/io/bad.cpp": ('#include "quant/request.h"\n', "io may not see quant"),
    "src/quant/bad.cpp": ('#include "kernels/cpu/matmul/gemv.h"\n', "quant may not see kernels/cpu"),
    "src/tokenizer/bad.cpp": ('#  include "io/gguf.h"\n', "tokenizer may not see io"),
    "src/tokenizer/bad2.cpp": ('#include "jinja/value.h"\n', "tokenizer may not see jinja"),
    "src/hub/bad.cpp": ('#include "io/gguf.h"\n', "hub may not see io"),
    "src/jinja/bad.cpp": ('#include "tokenizer/bpe.h"\n', "jinja may not see tokenizer"),
    "src/kv/bad.cpp": ('#include "../tensor/dtype.h"\n', "kv may not see tensor"),
    "src/kv/bad2.cpp": ('#include "millrace/kernels.h"\n', "the kernel library's API is for kernels"),
    "kernels/cpu/bad.h": (ONCE + '#include "backend/backend.h"\n', "kernels may not see backend"),
    "kernels/cpu/bad2.h": (ONCE + '#include "kernels/cuda/gemm/gemm.h"\n', "kernels/cpu may not see kernels/cuda"),
    "kernels/cpu/bad3.cpp": ('#include "kernels/reference/matmul.h"\n', "kernels/cpu may not see kernels/reference"),
    "kernels/quant/bad.h": (ONCE + '#include "kernels/cpu/quant/encoder.h"\n', "kernels/quant may not see kernels/cpu"),
    "kernels/cuda/gemm/bad.cu": ('#include "quant/request.h"\n', "kernels may not see quant"),
    "kernels/cuda/gemm/bad2.cu": ('asm volatile("bar.sync 1, 128;");\n', "has inline assembly"),
    "kernels/bad.cpp": ('#include "millrace/engine.h"\n', "the public API is for engine and apps"),
    "include/millrace/kernels/bad.h": (ONCE + '#include "millrace/error.h"\n', "may see itself alone"),
    "include/millrace/kernels/bad2.h": (ONCE + "#include <vector>\n", "includes <vector>: expected a header of C"),
    "src/backend/bad.h": (ONCE + '#include "backend/cpu/cpu.h"\n', "only src/backend/registry.cpp"),
    "src/backend/bad2.h": (ONCE + '#include "kernels/cuda/gemm/gemm.h"\n', "backend may not see kernels/cuda"),
    "src/backend/cpu/bad.cpp": ('#include "backend/reference/reference.h"\n', "cpu may not see device reference"),
    "src/backend/cpu/bad2.cpp": ('#include "kernels/cuda/gemm/gemm.h"\n', "backend/cpu may not see kernels/cuda"),
    "src/backend/reference/bad_test.cpp": ('#include "backend/cpu/cpu.h"\n', "reference may not see device cpu"),
    "src/backend/cuda/bad.cu": ('#include "model/llama.h"\n', "backend may not see model"),
    "src/model/bad.cpp": ('\n#include "backend/cpu/cpu.h"\n', "bad.cpp:2: includes backend/cpu/cpu.h: model may see"),
    "src/model/bad2.cpp": ('#include "tokenizer/bpe.h"\n', "model may not see tokenizer"),
    "src/model/bad3.cpp": ('#include "millrace/engine.h"\n', "the public API is for engine and apps"),
    "include/millrace/bad.h": (ONCE + '#include "base/error.h"\n', "include/millrace may not see src"),
    "apps/cli/bad.cpp": ('#include "backend/cpu/cpu.h"\n', "apps may see backend/*.h"),
    "apps/cli/bad2.cpp": ('#include "tests/engine_cases.h"\n', "apps may not see tests"),
    "examples/bad.cpp": ('#include "io/gguf.h"\n', "examples may not see io"),
    "apps/cli/bad3.cpp": ('#include "python/src/model.h"\n', "apps may not see python"),
    "python/src/bad.cpp": ('#include "backend/cpu/cpu.h"\n', "python may see backend/*.h"),
    "python/kernels/src/bad.cpp": ('#include "millrace/engine.h"\n', "the public API is for engine and apps"),
    "python/kernels/src/bad2.cpp": ('#include "base/error.h"\n', "python/kernels may not see base"),
    "src/engine/bad.cpp": ('#include "missing.h"\n', "no such file"),
    "src/engine/bad2.h": ('#include "model/llama.h"\n', "has no #pragma once"),
    "src/utils/bad.h": (ONCE, "'utils' is no layer"),
    "src/io/circle.h": (ONCE + '#include "io/circle.h"\n', "in a circle"),
    "tests/circle.h": (ONCE + '#include "circle.h"\n', "in a circle"),
}
CIRCLE = {  # of three headers, in folders that may see one another
    "kernels/cpu/matmul/a.h": ONCE + '#include "kernels/cpu/matmul/b.h"\n',
    "kernels/cpu/matmul/b.h": ONCE + '#include "kernels/cpu/simd/c.h"\n',
    "kernels/cpu/simd/c.h": ONCE + '#include "kernels/cpu/matmul/a.h"\n',
}


def self_test():
    bad_trees = made_trees.of_one_file(BAD_FILES)
    bad_trees.append((CIRCLE, "a.h -> kernels/cpu/matmul/b.h -> kernels/cpu/simd/c.h -> kernels/cpu/matmul/a.h"))
    return made_trees.judge(lambda root: faults_in(root)[0], GOOD_TREE, bad_trees)


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

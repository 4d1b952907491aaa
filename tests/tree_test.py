#!/usr/bin/env python3
"""Fails on two files of one name, on files that have grown too long and on sources without a header.

Names: a file of src, apps or kernels is found by its name, so no two have the same, unless they play the same role in
parallel folders (PARALLEL below): the devices of backend/, the devices and operations of kernels/, a part that an
installed library gives and its stand-in.

Lengths: no source has more than 800 lines, unless a program generated it or TABLES names it.

Headers: what a source defines for others stands in the header of its name, beside it, in the folder above (an interface
with several implementations) or in include/; mr_NAME.cpp has the public kernels/NAME.h. NAME_part.cpp is a part of
NAME.h. Where one header stands for a family on purpose, FAMILIES says so, and every member reads that header; what
nobody calls by name is in WITHOUT_HEADER.

The version: CMakeLists.txt says it, and nothing else does.

Run with --self-test it builds small trees with each of these faults and fails unless each is found.
"""

import itertools
import re
import sys
from pathlib import Path

import made_trees

ANYWHERE = {"CMakeLists.txt"}
# Patterns of folders that are parallel: files of one name in two folders that match the same pattern are the same role.
PARALLEL = (
    r"src/backend/(cpu|cuda|reference|no_cuda)",  # executors of the devices
    r"kernels/(cpu|cuda|reference)",              # what a device has once: device.h
    r"kernels/(cpu|cuda|reference)/\w+",          # the same variant of another operation, or on another device
    r"apps/server/(http|no_http)",                # sockets, and what says that there are none
    r"src/kv/(zstd|no_zstd)",
    r"src/hub/(curl|no_curl)",
    r"apps/cli/(quantize|synth)",                 # what a command that writes a model puts into its file
)
# Names that say a role which folders of src have each: the list of what there is of its kind, the proof of "Same bits".
ROLES_OF_SRC = {"registry.cpp", "same_bits_test.cpp"}
MAX_LINES = 800
TABLES = set()  # written by hand and longer, each with its reason
HAVE_HEADERS = ("src", "apps", "kernels", "python")
# Headers that stand for several sources -> those, and why one header is what a reader wants.
FAMILIES = {
    # A class whose methods are grouped into files by what they are about.
    "src/backend/cpu/cpu_executor.h": ("src/backend/cpu/executor_*.cpp",),
    "src/backend/cuda/step_launcher.h": ("src/backend/cuda/step_*.cpp", "src/backend/cuda/state_launcher.cpp"),
    "src/grammar/schema_compiler.h": ("src/grammar/schema_{containers,scalars}.cpp",),
    "src/jinja/parser_impl.h": ("src/jinja/parser_expr.cpp",),
    "src/grammar/grammar.h": ("src/grammar/{constraint,gbnf}.cpp",),
    "include/millrace/request.h": ("src/engine/finish_reason.cpp",),
    "include/millrace/kernels/cross_entropy.h": ("kernels/api/mr_linear_cross_entropy.cpp",),
    "include/millrace/kernels/device.h": ("kernels/api/mr_status_name.cpp",),
    "kernels/api/cpu_device.h": ("kernels/api/cpu_{attention,flash,gemm,linear_attention}.cpp",),
    "kernels/api/cuda/cuda_device.h": ("kernels/api/cuda/cuda_{flash_attention,attention,gemm,grouped_gemm,matmul}.cpp",
                                       "kernels/api/cuda/cuda_linear_attention.cpp", "kernels/api/cuda/upload_weight.cpp"),
    # The list of what a folder has, a file for each: who calls them takes whichever the list says.
    "apps/server/endpoints.h": ("apps/server/{anthropic_messages,chat_completions,completions,embeddings,infill,info}.cpp",
                                "apps/server/{metrics,models_info,ollama,ollama_*,rerank,responses}.cpp"),
    "src/model/quantized_weights/schemes.h": (
        "src/model/quantized_weights/{awq,bitsandbytes,compressed_integers,gptq,packed_floats}.cpp",),
    "python/src/module_parts.h": ("python/src/{bind_*,module}.cpp",),
    "kernels/cpu/tables/isa_parts.h": ("kernels/cpu/tables/{scalar,left_out,*_avx*,*_neon*}.cpp",),
    "kernels/cpu/quant/encode_table.h": ("kernels/cpu/quant/encode_{scalar,avx2,neon,neon_dotprod}.cpp",),
    # One operation, whose phases and variants are kernels in files of their own: callers choose by shape, not by file.
    "kernels/cuda/attention/attention.h": ("kernels/cuda/attention/{decode*,generic,prefill_wgmma,rope_append_kv}.cu",),
    "kernels/cuda/attention/flash_mma.h": ("kernels/cuda/attention/flash_{quantize,*_mma}.cu",),
    "kernels/cuda/fused/fused.h": ("kernels/cuda/fused/*.cu",),
    "kernels/cuda/gemm/gemm.h": ("kernels/cuda/gemm/{*_wgmma,bf16_wgmma_cluster,packed_mma}.cu",),
    "kernels/cuda/gemv/gemv.h": ("kernels/cuda/gemv/dense.cu",),
    "kernels/cuda/linear/state_scan.h": ("kernels/cuda/linear/{gated_delta,selective_scan}.cu",),
    "kernels/cuda/moe/moe.h": ("kernels/cuda/moe/{decode_persistent,generic,keep_experts,router}.cu",),
    "kernels/cuda/norm/norm.h": ("kernels/cuda/norm/{embed,rmsnorm}.cu",),
    # An interface above, implemented by a library where it is installed.
    "apps/cli/line_editor.h": ("apps/cli/line_editor/{libedit,plain}.cpp",),
    "src/hub/http_client.h": ("src/hub/{curl/curl_client,no_curl/no_network}.cpp", "python/src/hub_by_python.cpp"),
    "src/hub/digest.h": ("src/hub/curl/digest_openssl.cpp",),
    "src/image/codecs.h": ("src/image/{codecs/jpeg_file,codecs/png_file,no_codecs/no_codecs}.cpp",),
    "src/kv/compressor.h": ("src/kv/{zstd/zstd,no_zstd/no}_compressor.cpp",),
    "src/backend/cuda_backend.h": ("src/backend/no_cuda/no_cuda.cpp",),
    "src/backend/backend.h": ("src/backend/registry.cpp",),
    "kernels/api/mr_device.h": ("kernels/api/no_cuda/no_cuda_device.cpp",),
    "include/millrace/kernels/flash_attention_v2.h": ("kernels/api/no_cuda/no_cuda_resident_decode.cpp",),
    "kernels/cuda/resident/resident_error.h": ("kernels/api/cuda/resident_status.cpp",),
}
WITHOUT_HEADER = (
    "apps/cli/main.cpp",
    "src/model/*.cpp",                       # an architecture registers itself: architecture_list.h has its object
    "python/kernels/src/{torch/*,jax/handlers,fmt_inside}.cpp",  # operations that register themselves with a library
)
GENERATED = re.compile(r"^// (?:Generated|Written) by tools/", re.MULTILINE)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^">]+)[">]', re.MULTILINE)
NAMED = ("src", "apps", "kernels")
MEASURED = (*NAMED, "include", "tests", "bench", "examples", "python", "tools", "web", "cmake", "deploy")
SOURCES = {".cpp", ".c", ".h", ".cu", ".cuh", ".inc", ".py", ".sh", ".js", ".mjs", ".css", ".html", ".cmake", ".txt"}


def are_parallel(a, b):
    if a.name in ROLES_OF_SRC and all(re.fullmatch(r"src/\w+", path.parent.as_posix()) for path in (a, b)):
        return True
    return any(re.fullmatch(pattern, a.parent.as_posix()) and re.fullmatch(pattern, b.parent.as_posix())
               for pattern in PARALLEL)


def files_of(root, tops):
    return sorted(path.relative_to(root) for top in tops for path in (root / top).rglob("*")
                  if path.is_file() and "__pycache__" not in path.parts)


def faults_of_names(root):
    by_name = {}
    for path in files_of(root, NAMED):
        by_name.setdefault(path.name, []).append(path)
    return [f"{a} and {b}: two files of one name, and their folders are not parallel (see PARALLEL in tests/tree_test.py)"
            for name, paths in sorted(by_name.items()) if name not in ANYWHERE
            for a, b in itertools.combinations(paths, 2) if not are_parallel(a, b)]


def faults_of_lengths(root):
    faults = []
    for path in files_of(root, MEASURED):
        if path.suffix not in SOURCES or path.as_posix() in TABLES or "golden" in path.parts:
            continue
        text = (root / path).read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > MAX_LINES and not GENERATED.search(text[:400]):
            faults.append(f"{path}: {lines} lines, expected at most {MAX_LINES} of what is no table")
    return faults


def expanded(pattern):
    """The patterns that a{b,c}d stands for."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    choices, _, tail = rest.partition("}")
    return [choice for part in choices.split(",") for choice in expanded(head + part + tail)]


def includes_of(root, path, known):
    """The headers of the tree that a file names."""
    if path not in known:
        folders = (path.parent, *map(Path, ("apps/cli", "apps/server", "apps", "src", "include", ".")))
        names = INCLUDE.findall((root / path).read_text(encoding="utf-8"))
        found = [next((folder / name for folder in folders if (root / folder / name).is_file()), None) for name in names]
        known[path] = [header for header in found if header]
    return known[path]


def headers_read_by(root, path, known):
    """Itself or through others of the tree."""
    seen, todo = set(), [path]
    while todo:
        new = set(includes_of(root, todo.pop(), known)) - seen
        seen |= new
        todo += new
    return seen


def headers_named_for(path):
    """Where the header of a source stands by its name alone, the nearest first."""
    parts = path.stem.split("_")
    for end in range(len(parts), 0, -1):
        stem = "_".join(parts[:end])
        yield from (path.parent / (stem + suffix) for suffix in (".h", ".cuh"))
        if end == len(parts):
            yield path.parent.parent / (stem + ".h")
            public = stem.removeprefix("mr_")
            yield from (Path(folder) / (public + ".h") for folder in ("include/millrace", "include/millrace/kernels"))


def faults_of_headers(root):
    sources = [path for path in files_of(root, HAVE_HEADERS)
               if path.suffix in (".cpp", ".c", ".cu") and not path.stem.endswith("_test")]
    family_of = {pattern: header for header, patterns in FAMILIES.items() for group in patterns
                 for pattern in expanded(group)}
    free = [pattern for group in WITHOUT_HEADER for pattern in expanded(group)]
    faults, known = [], {}
    for path in sources:
        reads = headers_read_by(root, path, known)
        if any(header in reads for header in headers_named_for(path)):
            continue
        families = [Path(header) for pattern, header in family_of.items() if path.match(pattern)]
        if any(path.match(pattern) for pattern in free) or any(header in reads for header in families):
            continue
        wanted = families[0] if families else path.with_suffix(".h")
        faults.append(f"{path}: reads no header of its own; expected {wanted}, or a family (FAMILIES in tests/tree_test.py)")
    return faults


def faults_of_lists(root):
    """Patterns that no file matches any more."""
    patterns = [pattern for groups in (*FAMILIES.values(), WITHOUT_HEADER) for group in groups for pattern in expanded(group)]
    return [f"tests/tree_test.py: {pattern}: no such source" for pattern in patterns if not any(root.glob(pattern))]


def faults_of_version(root):
    lists = root / "CMakeLists.txt"
    version = re.search(r"project\(millrace VERSION ([0-9.]+)", lists.read_text()) if lists.is_file() else None
    return [] if not version else [
        f"{path}: says the version, which is for CMakeLists.txt alone"
        for path in files_of(root, (*NAMED, "include", "python", "tools", "cmake"))
        if path.suffix in SOURCES | {".toml"} and not path.stem.endswith("_test")
        and f'"{version.group(1)}"' in (root / path).read_text(encoding="utf-8")]


def faults_in(root):
    return faults_of_names(root) + faults_of_lengths(root) + faults_of_headers(root) + faults_of_version(root)


GOOD_TREE = {
    "CMakeLists.txt": "project(millrace VERSION 0.2.0 LANGUAGES C CXX)\n",
    "src/io/CMakeLists.txt": "",
    "src/kv/CMakeLists.txt": "",
    "src/backend/cpu/workspace.h": "",
    "src/backend/cuda/workspace.h": "",
    "src/backend/backend.h": "",
    "src/backend/registry.cpp": '#include "backend/backend.h"\n',
    "src/model/registry.cpp": "",
    "src/engine/same_bits_test.cpp": "",
    "kernels/cuda/device.h": "",
    "kernels/cuda/gemm/generic.h": "",
    "kernels/cuda/moe/generic.h": "",
    "kernels/cpu/gemm/generic.h": "",
    "kernels/cuda/fused/fused.h": "",
    "kernels/cuda/fused/each_row.cuh": '#include "kernels/cuda/fused/fused.h"\n',
    "kernels/cuda/fused/dropout.cu": '#include "kernels/cuda/fused/each_row.cuh"\n',
    "apps/server/server.h": "",
    "apps/server/http/server.cpp": '#include "server.h"\n',
    "apps/server/no_http/server.cpp": '#include "server.h"\n',
    "src/io/gguf.h": "",
    "src/io/gguf.cpp": '#include "io/gguf.h"\n' + "x\n" * 799,
    "src/io/gguf_types.cpp": '#include "io/gguf.h"\n',
    "src/io/table.h": "// Generated by tools/make_table.py: do not edit.\n" + "1,\n" * 2000,
    "include/millrace/gguf.h": "",
    "tests/gguf.cpp": "",
}
BAD_FILES = {  # file -> (text, a piece of the message that must come)
    "apps/cli/gguf.h": ("", "apps/cli/gguf.h and src/io/gguf.h: two files of one name"),
    "src/engine/device.h": ("", "kernels/cuda/device.h and src/engine/device.h: two files of one name"),
    "kernels/same_bits_test.cpp": ("", "kernels/same_bits_test.cpp and src/engine/same_bits_test.cpp: two files"),
    "src/backend/workspaces.h": ("x\n" * 801, "src/backend/workspaces.h: 801 lines"),
    "src/io/lonely.cpp": ('#include "io/gguf.h"\n', "src/io/lonely.cpp: reads no header of its own"),
    "src/io/gguf_writer.cpp": ("", "src/io/gguf_writer.cpp: reads no header of its own"),
    "kernels/cuda/fused/softmax.cu": ("", "softmax.cu: reads no header of its own; expected kernels/cuda/fused/fused.h"),
    "python/kernels/pyproject.toml": ('version = "0.2.0"\n', "pyproject.toml: says the version"),
    "tests/long_test.py": ("x\n" * 900, "tests/long_test.py: 900 lines"),
    "kernels/quant/lengths.h": ("// Not Generated by tools/make.py.\n" + "x\n" * 801, "802 lines"),
}


def self_test():
    return made_trees.judge(faults_in, GOOD_TREE, made_trees.of_one_file(BAD_FILES))


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    root = Path(__file__).resolve().parent.parent
    faults = faults_in(root) + faults_of_lists(root)
    for fault in faults:
        print(fault)
    print(f"tree: {len(files_of(root, MEASURED))} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

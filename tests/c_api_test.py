#!/usr/bin/env python3
"""The kernel library's C API keeps its rules (include/millrace/kernels/device.h): each header compiles alone, as strict
C and as C++; a function returns a status, takes its device or a handle first and the stream last; nothing but C's
own types, the API's and the stream's crosses it; handles are opaque.

  tests/c_api_test.py [CC CXX]       the headers of the tree, by these compilers (cc, c++)
  tests/c_api_test.py --self-test    declarations with a fault each
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include"
HEADERS = sorted((INCLUDE / "millrace/kernels").glob("*.h")) + [INCLUDE / "millrace/kernels.h"]

HANDLES = {"mr_attention", "mr_device", "mr_weight", "flash_attention_v2_opt"}
# What says what it is, and cannot fail; what ends a handle.
NO_STATUS = {"mr_last_error", "mr_status_name", "mr_version", "mr_dtype_name", "mr_device_description",
             "mr_attention_destroy", "mr_weight_destroy", "mr_device_close"}
NO_DEVICE = {"mr_dtype_block", "mr_dtype_parse", "mr_row_bytes", "mr_lowbit_bytes",  # of types and layouts
             "mr_device_open", "mr_flash_sink_gradient"}                             # makes one; sums of the host
# Host memory, and what is done when the call returns.
NO_STREAM = {"mr_quantize", "mr_dequantize", "mr_weight_create", "mr_weight_adopt", "mr_attention_create"} | NO_DEVICE
OWN_RULES = "flash_attention_v2"  # a small library with a device and a stream of its own in its handle
C_TYPES = {"void", "char", "float", "double", "size_t", "const", "struct",
           *(f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64))}
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
DECLARATION = re.compile(r"MR_API\s+([\w\s*]+?)\b(\w+)\(([^)]*)\)\s*;")
TYPE = re.compile(r"typedef\s+(enum|struct)\s+(\w+)\s*(\{[^}]*\})?[\s*]*(\w+);")


def words_of(declared):
    """The names of types in `const mr_matrix* matrix` or `int64_t rows, sizes[4]`."""
    return set(re.findall(r"\w+", re.sub(r"\w+(\[\w*\])*$", "", declared.split(",")[0].strip())))


def faults_in(text, types):
    """`types`: what all headers define."""
    text = COMMENT.sub(" ", text)
    for kind, name, body, _ in TYPE.findall(text):
        if name in HANDLES and body:
            yield f"{name} is a handle and is not opaque"
        for field in body.strip("{}").split(";") if kind == "struct" and body else ():
            if strange := words_of(field) - C_TYPES - types:
                yield f"{name} has a field of type {', '.join(sorted(strange))}"
    for result, name, parameters in DECLARATION.findall(text):
        parameters = [] if parameters.strip() == "void" else [part.strip() for part in parameters.split(",")]
        strange = set().union(*(words_of(part) for part in parameters)) - C_TYPES - types
        if strange:
            yield f"{name} takes {', '.join(sorted(strange))}"
        if name not in NO_STATUS and result.strip() != "mr_status":
            yield f"{name} returns {result.strip()}, expected mr_status"
        if name.startswith(OWN_RULES) or name in NO_STATUS:
            continue
        first = re.match(r"(?:const )?(\w+)\*", parameters[0]) if parameters else None
        if name not in NO_DEVICE and (not first or first.group(1) not in HANDLES):
            yield f"{name} takes no device or handle first"
        if name not in NO_STREAM and not name.endswith("_bytes") and parameters[-1:] != ["mr_stream stream"]:
            yield f"{name} does not take its stream last"


def types_of(texts):
    types = {"mr_stream"}
    for text in texts:
        for _, name, _, alias in TYPE.findall(COMMENT.sub(" ", text)):
            types |= {name, alias}
    return types


def compile_alone(header, compiler, *options):
    source = f'#include "{header.relative_to(INCLUDE)}"\n'
    warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
    done = subprocess.run([compiler, *options, *warnings, "-fsyntax-only", "-I", INCLUDE, "-"], input=source,
                          capture_output=True, text=True)
    return [f"{header.name}: {compiler} {options[-1]}: {done.stderr.strip()}"] if done.returncode else []


def self_test():
    good = ("typedef struct mr_device mr_device;\n"
            "typedef struct mr_args { int64_t rows, cols; const float* x; } mr_args;\n")
    types = types_of([good])
    bad = {
        "MR_API mr_status mr_run(mr_device* device, const mr_args* args, mr_stream stream);": 0,
        "MR_API mr_status mr_run_bytes(const mr_device* device, size_t* bytes);": 0,
        "MR_API void mr_run(mr_device* device, mr_stream stream);": 1,
        "MR_API mr_status mr_run(const mr_args* args, mr_stream stream);": 1,
        "MR_API mr_status mr_run(mr_device* device, const mr_args* args);": 1,
        "MR_API mr_status mr_run(mr_device* device, std_vector* args, mr_stream stream);": 1,
        "MR_API mr_status mr_run(mr_device* device, cudaStream_t args, mr_stream stream);": 1,
        "typedef struct mr_device { int32_t id; } mr_device;": 1,
        "typedef struct mr_args { int64_t rows; CUtensorMap map; } mr_args;": 1,
    }
    wrong = [text for text, count in bad.items() if len(list(faults_in(text, types))) != count]
    print(*wrong, f"self-test: {len(bad)} declarations, {len(wrong)} judged wrongly", sep="\n")
    return 1 if wrong else 0


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    cc, cxx = sys.argv[1:3] or ("cc", "c++")
    texts = {header: header.read_text() for header in HEADERS}
    types = types_of(texts.values())
    faults = [f"{header.name}: {fault}" for header, text in texts.items() for fault in faults_in(text, types)]
    for header in HEADERS:
        faults += compile_alone(header, cc, "-x", "c", "-std=c11")
        faults += compile_alone(header, cxx, "-x", "c++", "-std=c++17")
    functions = sum(len(DECLARATION.findall(COMMENT.sub(" ", text))) for text in texts.values())
    written = sum(len(re.findall(r"^MR_API ", text, re.MULTILINE)) for text in texts.values())
    if functions != written:
        faults.append(f"read {functions} declarations of {written}")
    print(*faults, f"C API: {len(HEADERS)} headers, {functions} functions, {len(types)} types, {len(faults)} faults",
          sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Nothing is kept per process (docs/architecture.md, Devices): what the libraries can write to, outside of objects that
somebody made, is the list below. None of it can change a result.

  tests/process_state_test.py BUILD        the archives of a build folder, and CUDA's sources: into what is made of
                                           those nvcc puts variables of its own
  tests/process_state_test.py --self-test  lines of a symbol table and of sources, and what must be said of them
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

KEPT = {  # variable -> why there is one for all. Tables that are computed once and never change are not listed: a
    # variable of its name is declared const in the library's folder.
    "buffer_pool()::pool": "an allocator, as malloc is one",
    "AtomicFile::AtomicFile(": "a counter in names of temporary files",
    "dist::(anonymous namespace)::library()::only": "MPI, which a process starts once",
    "job_group(millrace::EngineOptions const&)::known": "the ranks that mpirun started with this process",
    "make_http_client()::once": "libcurl, which a process starts once",
}
OF_A_THREAD = {  # what a call leaves is of no use to the next one, or is for the caller to ask
    "api::(anonymous namespace)::last_error": "mr_last_error()",
    "WorkBudget::active_": "what the request that this thread reads may cost",
    "jinja::Budget::active_": "what the template that this thread renders may cost",
    "::nesting": "how deep a value is that it prints",
    "::context": "zstd's memory, used again",
    "::scratch": "the sampler's memory, used again",
    "::entries": "the same",
}
# CUDA's folders, and what their sources keep for a thread: functions that have no handle to keep it in.
CUDA_FOLDERS = ("kernels/cuda", "kernels/api/cuda", "src/backend/cuda")
OF_A_CUDA_THREAD = {
    "query_buffer, key_buffer, value_buffer, output_buffer": "flash_attention_v2_decode's memory, used again",
    "thread_default": "the sequence of flash_attention_v2_opt_decode, which _reset and _cleanup name by NULL",
}
# thread_local, static and device variables anywhere; at the first column of a line any other that is not constant.
VARIABLE = re.compile(
    r"^(?:[ \t]*thread_local[ \t]+(?P<of_thread>[^;({=]+?)[ \t]*[;={]"
    r"|[ \t]*(?:static|__device__|__managed__|__constant__)[ \t]+(?!const\b|constexpr\b)[\w:<>,*&\[\] ]+?[ \t]*[;={]"
    r"|(?!using|struct|class|union|enum|return|extern|namespace|typedef|friend|template|static|inline constexpr|constexpr|const\b)"
    r"(?:inline )?[A-Za-z_][\w:<>,*& ]*[ *&]\w+(?:\[\w*\])*(?: = [^;]*)?;)", re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# objdump -t: address, flags, section, size, name. Constants with addresses in them lie in .data.rel.ro.
SYMBOL = re.compile(r"^[0-9a-f]+ .{7} \.(data|bss|tdata|tbss)(?:\.(?!rel)\S*)?\t[0-9a-f]+ +(?:\.hidden )?(\S.*)$")
CONSTANT = re.compile(r"(?:^|::)k[A-Z]\w*$")  # g++ 12 leaves a constexpr std::array of deduced type in .data
NOT_OURS = (".", "guard variable for", "__tls_guard", "std::")
DECLARED_CONST = re.compile(r"^ *static const\w* [^;=(){]*?\b(\w+)(?: =|\{|\(|;)", re.MULTILINE)


def constants_of(library):
    """Names of static variables that are declared const in the folder of libmillrace_X.a."""
    folders = {"kernels": ROOT / "kernels", "backend": ROOT / "src/backend"}
    name = library.removeprefix("libmillrace_").removesuffix(".a")
    folder = folders.get(name.split("_")[0], ROOT / "src" / name)
    return {match for path in sorted(folder.rglob("*")) if path.suffix in (".cpp", ".h")
            for match in DECLARED_CONST.findall(path.read_text())}


def faults_in(library, table, constants=frozenset()):
    """(what is wrong, the names of KEPT and OF_A_THREAD that were seen)."""
    faults, seen = [], set()
    for line in table.splitlines():
        match = SYMBOL.match(line)
        if not match or match.group(2).startswith(NOT_OURS) or CONSTANT.search(match.group(2)):
            continue
        section, name = match.groups()
        if section == "bss" and name.split("::")[-1] in constants:
            continue
        allowed = OF_A_THREAD if section.startswith("t") else KEPT
        known = next((part for part in allowed if part in name), None)
        if known is None:
            whose = "thread" if section.startswith("t") else "process"
            faults.append(f"{library}: {name} lies in .{section}: state of the {whose}")
        else:
            seen.add(known)
    return faults, seen


def faults_of_source(name, text):
    faults = []
    for match in VARIABLE.finditer(COMMENT.sub("", text)):
        kept = match.group("of_thread")
        if kept is None or not any(kept.endswith(known) for known in OF_A_CUDA_THREAD):
            faults.append(f"{name}: {match.group().strip()}: state of the {'process' if kept is None else 'thread'}")
    return faults


def faults_of_cuda():
    sources = [path for folder in CUDA_FOLDERS for path in sorted((ROOT / folder).rglob("*"))
               if path.suffix in (".cpp", ".cu", ".h", ".cuh") and not path.stem.endswith("_test")]
    faults = [] if sources else ["no sources of CUDA"]
    for path in sources:
        faults += faults_of_source(path.relative_to(ROOT), path.read_text())
    return faults


def self_test():
    line = "0000000000000000 l     O .{}\t0000000000000008 {}"
    cases = {
        line.format("bss", "millrace::buffer_pool()::pool"): 0,
        line.format("bss", "guard variable for millrace::buffer_pool()::pool"): 0,
        line.format("data.rel.ro", "millrace::cpu::kAvx2Table"): 0,
        line.format("data", "millrace::quant::(anonymous namespace)::kEncodable"): 0,
        line.format("rodata", "millrace::names"): 0,
        line.format("text", "millrace::run()"): 0,
        line.format("bss", "millrace::name_of(int)::names"): 0,
        line.format("data", "millrace::name_of(int)::names"): 1,
        line.format("bss", "millrace::Device::current"): 1,
        line.format("data", "millrace::(anonymous namespace)::next_id"): 1,
        line.format("bss._ZN8millrace1aE", "millrace::a"): 1,
        line.format("tbss", "millrace::cpu::workspace"): 1,
        line.format("bss", "millrace::api::(anonymous namespace)::last_error"): 1,  # of the process: not per thread
    }
    sources = {
        "constexpr int kWarps = 4;": 0,
        "const Table kTable = make();": 0,
        "static constexpr int kWarps = 4;": 0,
        "  static void release(void* data) noexcept;": 0,
        "static __global__ void plan(Call call) {": 0,
        "  int count = 0;": 0,  # a member, or of a function
        "thread_local std::unique_ptr<flash_attention_v2_opt> thread_default;": 0,
        "// static int calls = 0;": 0,
        "thread_local std::vector<int> scratch;": 1,
        "  static int calls = 0;": 1,
        "  static std::once_flag once;": 1,
        "int calls = 0;": 1,
        "std::unique_ptr<Device> current;": 1,
        "__device__ unsigned tickets[64];": 1,
        "__constant__ float table[256];": 1,
    }
    wrong = [text for text, count in cases.items() if len(faults_in("x.a", text, {"names"})[0]) != count]
    wrong += [text for text, count in sources.items() if len(faults_of_source("x.cu", text)) != count]
    print(*wrong, f"self-test: {len(cases) + len(sources)} lines, {len(wrong)} judged wrongly", sep="\n")
    return 1 if wrong else 0


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    build, faults, seen = Path(sys.argv[1]), [], set()
    libraries = [path for top in ("kernels", "src") for path in sorted((build / top).rglob("libmillrace_*.a"))
                 if "cuda" not in path.name]
    for library in libraries:
        table = subprocess.run(["objdump", "-tC", library], check=True, capture_output=True, text=True).stdout
        found, known = faults_in(library.name, table, constants_of(library.name))
        faults, seen = faults + found, seen | known
    if not libraries:
        faults.append(f"{build}: no libraries")
    faults += faults_of_cuda()
    unused = {"buffer_pool()::pool", "api::(anonymous namespace)::last_error"} - seen
    faults += [f"{name} was not found: is this still how symbols are listed?" for name in unused]
    print(*faults, f"process state: {len(libraries)} libraries, {len(seen)} variables, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What `make test` and `make check` run, in phases, and one closing line: N passed, N failed, N skipped.

  tools/run_tests.py                        `make test`: the dev build and every functional test
  tools/run_tests.py --check                `make check`: that and everything else but fuzzing
  tools/run_tests.py --rest                 what `make check` adds to `make test`
  tools/run_tests.py --rest --minutes 60    ... in an hour: a phase that would not be over by then is skipped
  tools/run_tests.py --only format,tidy     some phases
  tools/run_tests.py --only fuzz --fuzz-seconds 60
  tools/run_tests.py --only soak --soak-seconds 3600

What this machine cannot do is skipped with a line that says why and what would change it. Status 1 when anything
failed. Every ctest run counts its tests; a check without tests of its own (format, tidy) counts as one.
"""

import argparse
import atexit
import fnmatch
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import python_env

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
JOBS = os.cpu_count() or 2
# Objects are found again in any clone, as from the Makefile: paths count from its root.
os.environ.update(CCACHE_BASEDIR=str(ROOT), CCACHE_NOHASHDIR="1")

# What runs a second time under the address sanitizer: everything that reads input, the kernels, the engine, and the
# fuzz corpus with mutations of it (the *_replay programs).
ASAN_TARGETS = ("base_test", "tensor_test", "kernels_*_test", "quant_test", "io_test", "jinja_test", "tokenizer_test", "kv_test",
                "sched_test", "sample_test", "backend_test", "engine_test", "*_replay")
# ... without what measures time, and sweeps of what is run in other ways: every kernel of every type and instruction set
# against the reference (Conformance), and for any number of rows, which is what a cut prompt comes to in a kernel. What
# compares numbers (bounds in double, what lies behind a sequence, any split) reads the same memory as these.
SWEEPS = "Attention.*:LatentAttention.ALong*:LatentAttention.*ManyHeads:SameBitsDecode.*:InstructionCount.*"
# Experts are the products of MatrixProduct behind one gather: those of the vectors' types are enough of them.
SEEN = ("*Conformance.Experts/scalar_*:CpuDequantized/Conformance.Experts/*:"
        "Int8Cache.IsNear*:Int8Cache.DoesNotSee*:SparseAttention.HasTheSameBits*:SameBits.HoweverThePromptIsCut:"
        "IndexedAttention.ALongContext*:FlashPartial.AnySplit*:Operations.NormsOfQueriesAndKeys")
ASAN_FILTER = f"-*Golden*:*IsLinear*:*Speed*:*Runaways*:Load.*:Trace.*:{SWEEPS}:{SEEN}"
# Everything with threads: the pool, the tiers of the cache, masks, and the whole engine.
TSAN_TARGETS = ("base_test", "kv_test", "sched_test", "grammar_test", "engine_test")
# ... without what measures time, and the long ones of a single thread.
TSAN_FILTER = ("-*Speed*:*IsLinear*:Load.*:Trace.*:InstructionCount.*:Allocation.*:Json*:Heap.*:Evictor.*:"
               "Regex.*:Runaway.*:Schema.*:Mask.IsWhat*:Mask.DeepNesting")
# Random schedules of the engine under a sanitizer: so many of each of the 40 engines, where dev has 25.
FEWER_SCHEDULES = {"MILLRACE_TEST_SCHEDULES": "1"}
# What depends on the instruction set, run under qemu on the other architecture.
CROSS_TARGETS = ("base_test", "tensor_test", "kernels_*_test", "quant_test", "backend_test")
# Threads, blocks, buffers and how a prompt is cut are the same on every processor: every number of rows of every type is
# what a cut comes to in a kernel. What has the bits of `scalar` is as near, and sees as much, as `scalar` does.
# qemu does not pass on what reads pages ahead (madvise). JSON is text, and its time is not qemu's. What the C API calls
# are the kernels of backend_test.
# Nor is every kernel compared with the reference in double here: SameBits runs every kernel of every type too.
CONFORMANCE = "*/scalar_*:*/neon_*:*/avx*:*/amx*"
CROSS_FILTER = (f"-{CONFORMANCE}:LatentAttention.*:{SWEEPS}:{SEEN}:Json*:*IsLinear*:SameBits.HoweverManyThreads:SameBits.WhicheverRowsAreRead:"
                f"Int8Cache.Shows*:LongContext.*:Blocks.*:BufferPool.*:ReadBefore.BringsIn*:WarmPages.AreRead*:"
                f"MrMatmul.Is*:MrAttention.Is*:MrMoe.*")
# What is built, or read by clang-tidy, while the tests of other phases run: they leave a core idle where they wait for
# one another or for a server. alone and tidy are the last: of small parts, they fill both cores to the end.
# Kernels that are empty but on one architecture, and its name.
BLACKWELL_SOURCES = (("kernels/cuda/gemm/fp4_tcgen05.cu", "100a"), ("kernels/cuda/gemm/fp4_mma.cu", "120a"))
AHEAD = ("asan", "tsan", "cross", "cuda", "alone", "tidy")
# What `make test` neither builds nor runs (IN_BULK in cmake/millrace.cmake), and everything else.
BULK_TARGETS = ("all", "amx_emulated_test", "*_replay")
# What phases took on two cores with a warm ccache, and some room (--minutes).
MINUTES = {"dev": 24, "format": 1, "asan": 20, "tsan": 8, "cross": 5, "cuda": 4, "slow": 30, "alone": 6, "tidy": 5, "soak": 4}
FETCHERS = (("fetch_model.py", "smollm2"), ("fetch_tokenizers.py",), ("fetch_templates.py",))


class Result:
    def __init__(self, passed=0, failed=0, skipped=0):
        self.passed, self.failed, self.skipped = passed, failed, skipped

    def __iadd__(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        return self

    def __str__(self):
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


PASSED, FAILED, SKIPPED = Result(passed=1), Result(failed=1), Result(skipped=1)


def say(text):
    print(text, flush=True)


def run(command, **options):
    return subprocess.run([str(part) for part in command], cwd=ROOT, **options).returncode


def skip(what, why, remedy):
    say(f"SKIPPED: {what} because {why}; {remedy}")
    return SKIPPED


def configure(preset):
    """Only once: ninja itself configures again when a CMake file or the list of sources changes."""
    if (BUILD / preset / "build.ninja").is_file():
        return True
    return run(["cmake", "--preset", preset], stdout=subprocess.DEVNULL) == 0


def build(preset, targets=()):
    """Builds what matches the patterns in `targets` (all when there are none); False when that fails."""
    if not configure(preset):
        say(f"configuring {preset} failed")
        return False
    if targets:
        # Before asking what there is: the list of sources may have changed.
        if run(["ninja", "-C", BUILD / preset, "build.ninja"], stdout=subprocess.DEVNULL) != 0:
            return False
        listing = subprocess.run(["ninja", "-C", str(BUILD / preset), "-t", "targets", "all"], capture_output=True,
                                 text=True).stdout
        known = set(re.findall(r"^([\w.-]+): phony$", listing, re.MULTILINE))
        targets = sorted({name for pattern in targets for name in fnmatch.filter(known, pattern)})
        if not targets:
            return True
    return run(["cmake", "--build", BUILD / preset, "--", "-k", "20", *targets]) == 0


def build_ahead(phase, arguments):
    """Starts to build, one after another, what comes after this phase, out of the tests' way: they go first wherever
    both could run. What fails is repeated in its own phase, which shows why."""
    names = arguments.only.split(",")
    later = [name for name in names[names.index(phase) + 1:] if name in AHEAD]
    if arguments.ahead or not later:
        return
    arguments.ahead = {name: threading.Event() for name in later}

    def build_all():
        for name, done in arguments.ahead.items():
            try:
                # A session of its own: what is left of it ends with this program, compilers and all.
                building = subprocess.Popen(
                    ["nice", "-n", "10", sys.executable, __file__, "--build-only", "--only", name], cwd=ROOT,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
                at_end = atexit.register(end_session, building)
                building.wait()
                atexit.unregister(at_end)
            finally:
                done.set()

    threading.Thread(target=build_all, daemon=True).start()


def end_session(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


def ctest(preset, prefix=(), built=None, only=(), **environment):
    """Runs the tests; `built`: patterns of the programs that were built, where not all were; `only`: more of ctest's own."""
    report = BUILD / preset / "junit.xml"
    report.unlink(missing_ok=True)
    # In dev a test takes three places, and one that mostly waits one (tests/CMakeLists.txt).
    places = 3 * JOBS + 2 if preset == "dev" else JOBS
    command = [*prefix, "ctest", "--test-dir", BUILD / preset, "-j", places, "--output-on-failure", "--no-tests=ignore",
               "--output-junit", report, *only]
    if built:
        # fuzz_replay_NAME is the test of the program NAME_replay.
        names = [pattern.replace("*_replay", "fuzz_replay_*").replace("*", ".*") for pattern in built]
        # NAME_2 is the second half of NAME (cmake/millrace.cmake).
        command += ["-R", "^(" + "|".join(names) + ")(_2)?$"]
    status = run(command, env={**os.environ, **environment})
    if not report.is_file():
        return FAILED
    # Not an XML parser: what a failing test printed may be no XML.
    text = report.read_text(encoding="utf-8", errors="replace")
    states = re.findall(r'<testcase name="[^"]*" classname="[^"]*" time="[^"]*" status="(\w+)"', text)
    result = Result(passed=states.count("run"), failed=states.count("fail"))
    result.skipped = len(states) - result.passed - result.failed
    if status != 0 and result.failed == 0:
        result += FAILED
    return result


def lint(check):
    status = run([sys.executable, "tools/lint.py", check])
    if status == 3:
        return skip(check, f"clang-{check}-14 is not installed", f"install it: apt-get install clang-{check}-14")
    return PASSED if status == 0 else FAILED


def run_format(_):
    return lint("format")


def run_tidy(_):
    if not build("dev"):
        return FAILED
    return lint("tidy")


def fetch():
    for script, *arguments in FETCHERS:
        if (ROOT / "tools" / script).is_file() and run([sys.executable, f"tools/{script}", *arguments],
                                                       stdout=subprocess.DEVNULL) != 0:
            say(f"tools/{script} could not fetch everything: the tests that want it will skip and say so")


def make_python_env():
    """What CMake finds nanobind in, before it looks: without it the Python package is not built, and one line says so."""
    python, why = python_env.environment()
    if python is None:
        say(f"SKIPPED: the Python package because what it is built with cannot be had from PyPI ({why})")


def run_dev(arguments):
    make_python_env()
    if not build("dev"):
        return FAILED
    build_ahead("dev", arguments)
    arguments.fetching.join()
    return ctest("dev", only=("-LE", "check"))


def run_slow(arguments):
    """What wants packages and other programs, or takes minutes: real clients, browsers, a proxy, torch, a program built on
    the headers, random schedules of the engine, tests in bulk (cmake/millrace.cmake)."""
    if not build("dev", BULK_TARGETS):
        return FAILED
    build_ahead("slow", arguments)
    return ctest("dev", only=("-L", "check"))


def run_alone(_):
    """Compiles every file by itself: what a unity build leaves out is a missing include, or a name from a neighbour."""
    # Every time: nothing is built there, so that nobody else sees that the list of files has changed.
    if run(["cmake", "--preset", "dev", "-B", BUILD / "alone", "-DCMAKE_UNITY_BUILD=OFF",
            "-DMILLRACE_RUNNABLE_KERNELS_ONLY=OFF"],
           stdout=subprocess.DEVNULL) != 0 or not build("dev"):
        return FAILED
    return PASSED if run([sys.executable, "tools/compile_alone.py", BUILD / "alone", BUILD / "dev"]) == 0 else FAILED


def runs_here(compiler, flags, prefix=()):
    """Whether a program built with these flags starts on this machine at all."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
        built = subprocess.run([compiler, *flags, "-o", f"{folder}/probe", str(source)], capture_output=True)
        if built.returncode != 0:
            return False
        return subprocess.run([*prefix, f"{folder}/probe"], capture_output=True).returncode == 0


def run_asan(arguments):
    if shutil.which("clang++-14") is None:
        return skip("the address sanitizer", "clang++-14 is not installed",
                    "install it: apt-get install clang-14 libclang-rt-14-dev")
    if not runs_here("clang++-14", ["-fsanitize=address,undefined"]):
        return skip("the address sanitizer", "a program built with it does not start here", "try another kernel")
    if not build("asan", ASAN_TARGETS):
        return FAILED
    if arguments.build_only:
        return PASSED
    build_ahead("asan", arguments)
    return ctest("asan", built=ASAN_TARGETS, GTEST_FILTER=ASAN_FILTER, UBSAN_OPTIONS="print_stacktrace=1",
                 **FEWER_SCHEDULES)


def run_tsan(arguments):
    # g++ 12's runtime refuses some kernels' address space layouts; without randomization it takes them.
    for prefix in ((), ("setarch", "-R")):
        if runs_here("g++", ["-fsanitize=thread"], prefix):
            break
    else:
        return skip("the thread sanitizer", "a program built with it does not start here",
                    "try sysctl vm.mmap_rnd_bits=28")
    if not build("tsan", TSAN_TARGETS):
        return FAILED
    if arguments.build_only:
        return PASSED
    build_ahead("tsan", arguments)
    return ctest("tsan", prefix, TSAN_TARGETS, GTEST_FILTER=TSAN_FILTER, **FEWER_SCHEDULES)


def run_fuzz(arguments):
    if not (ROOT / "tests" / "fuzz" / "CMakeLists.txt").is_file():
        return skip("fuzzing", "there is no tests/fuzz", "write a target")
    if shutil.which("clang++-14") is None:
        return skip("fuzzing", "clang++-14 is not installed", "install it: apt-get install clang-14 libclang-rt-14-dev")
    if not build("fuzz", ("*_fuzz", "fuzz_*")):
        return FAILED
    result = Result()
    programs = sorted(path for path in (BUILD / "fuzz" / "tests" / "fuzz").iterdir()
                      if path.is_file() and os.access(path, os.X_OK))
    for program in programs:
        result += fuzz_one(program, arguments.fuzz_seconds)
    return result if programs else FAILED


def fuzz_one(program, seconds):
    """The kept corpus, then new inputs for some seconds; what is found new stays in build/fuzz/found."""
    name = re.sub(r"^fuzz_|_fuzz$|_fuzzer$", "", program.name)
    kept = [path for path in (ROOT / "tests" / "fuzz" / "corpus" / name, ROOT / "tests" / "fuzz" / name)
            if path.is_dir()]
    found = BUILD / "fuzz" / "found" / name
    found.mkdir(parents=True, exist_ok=True)
    say(f"{program.name}: {sum(1 for folder in kept for _ in folder.iterdir())} kept inputs, then {seconds} s of new ones")
    # A file of a few hundred KB justifies no gigabyte: the limit on one allocation is part of the check.
    command = [program, f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048", "-malloc_limit_mb=512",
               "-print_final_stats=1", "-verbosity=0", f"-artifact_prefix={BUILD / 'fuzz'}/{name}-crash-", found, *kept]
    log = subprocess.run([str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, errors="replace")
    if log.returncode != 0:
        say(log.stdout[-6000:])
        say(f"{program.name}: FAILED; the input is kept as build/fuzz/{name}-crash-*")
        return FAILED
    runs = re.search(r"stat::number_of_executed_units:\s*(\d+)", log.stdout)
    say(f"{program.name}: {runs.group(1) if runs else 'no'} inputs, none crashed, leaked or asked for too much memory")
    return PASSED


def run_cross(arguments):
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    missing = [package for tool, package in
               ((f"{other}-linux-gnu-g++", f"g++-{other.replace('_', '-')}-linux-gnu"), (f"qemu-{other}", "qemu-user"))
               if shutil.which(tool) is None]
    if not Path("/usr/src/googletest").is_dir():
        missing.append("googletest")
    if missing:
        return skip(f"the {other} build under qemu", f"{' and '.join(missing)} is not installed",
                    f"install it: apt-get install {' '.join(missing)}")
    preset = f"cross-{other}"
    if not build(preset, CROSS_TARGETS):
        return FAILED
    if arguments.build_only:
        return PASSED
    build_ahead("cross", arguments)
    return ctest(preset, built=CROSS_TARGETS, GTEST_FILTER=CROSS_FILTER)


def run_cuda(_):
    """Compiles the CUDA backend for Hopper (`make cuda-all`: every architecture), and what is written with Blackwell's
    own instructions for it; what runs on a GPU is tests/gpu/run.sh's."""
    if shutil.which("nvcc") is None:
        return skip("compiling the CUDA backend", "nvcc is not installed", "install the CUDA toolkit, 12.8 or later")
    directory = BUILD / "cuda-check"
    # Code that nobody runs need not be fast.
    options = subprocess.run(["nvcc", "--help"], capture_output=True, text=True).stdout
    flags = "--Ofast-compile=max" if "Ofast-compile" in options else "-Xptxas=-O0"
    if not (directory / "build.ninja").is_file() and run(
            ["cmake", "--preset", "cuda", "-B", directory, "-DCMAKE_CUDA_ARCHITECTURES=90a-real",
             f"-DCMAKE_CUDA_FLAGS={flags}", "-DCMAKE_OPTIMIZE_DEPENDENCIES=ON"], stdout=subprocess.DEVNULL) != 0:
        return FAILED
    # What has CUDA in it, without the libraries below: the CPU's kernels are compiled often enough.
    if run(["cmake", "--build", directory, "--target", "millrace_kernels_cuda", "millrace_backend_cuda",
            "millrace_kernels_api"]) != 0:
        return FAILED
    for source, architecture in BLACKWELL_SOURCES:
        if run(["nvcc", "-std=c++20", flags, "--expt-relaxed-constexpr", "-I.", "-Iinclude", "-Isrc",
                f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-c", source, "-o", "/dev/null"]) != 0:
            return FAILED
    return PASSED


def run_soak(arguments):
    """Clients and attackers on one server (tests/server/soak.py), after everything else: it measures time."""
    if not build("dev", ("millrace",)):
        return FAILED
    return PASSED if run([sys.executable, "tests/server/soak.py", BUILD / "dev" / "millrace", "--seconds",
                          arguments.soak_seconds]) == 0 else FAILED


# alone and tidy read what dev compiles, mostly while the tests of the others run (AHEAD).
PHASES = {"dev": run_dev, "format": run_format, "asan": run_asan, "tsan": run_tsan, "fuzz": run_fuzz, "cross": run_cross,
          "cuda": run_cuda, "slow": run_slow, "alone": run_alone, "tidy": run_tidy, "soak": run_soak}
TEST = ["dev"]
# Fuzzing needs a build of its own; without one, asan replays the corpus.
REST = [name for name in PHASES if name not in (*TEST, "fuzz")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", default=",".join(TEST), help=f"phases, separated by commas; of {', '.join(PHASES)}")
    which.add_argument("--check", action="store_const", dest="only", const=",".join(TEST + REST), help="all but fuzz")
    which.add_argument("--rest", action="store_const", dest="only", const=",".join(REST), help="all but dev and fuzz")
    parser.add_argument("--fuzz-seconds", type=int, default=5, help="per fuzz target")
    parser.add_argument("--soak-seconds", type=int, default=180)
    parser.add_argument("--build-only", action="store_true", help="of asan, tsan, cross: no tests")
    parser.add_argument("--minutes", type=float, help="skip a phase that would not be over by then, and say so")
    arguments = parser.parse_args()
    arguments.ahead = {}
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in PHASES]:
        parser.error(f"no phase {unknown[0]}, expected some of {', '.join(PHASES)}")
    # On a new machine this waits for the network for minutes, while the compiler does not.
    arguments.fetching = threading.Thread(target=fetch if "dev" in names else lambda: None, daemon=True)
    arguments.fetching.start()
    total, rows, began = Result(), [], time.monotonic()
    for name in names:
        say(f"== {name}")
        start = time.monotonic()
        # None: as long as it takes. What is built ahead counts too: this waits for it.
        left = None if arguments.minutes is None else arguments.minutes - (start - began) / 60
        room = None if left is None else left - MINUTES.get(name, 0)
        ahead = arguments.ahead.get(name)
        if (room is not None and room < 0) or (ahead and not ahead.wait(None if room is None else 60 * room)):
            result = skip(f"the phase {name}", f"it would not be over within the {max(0, left):.0f} minutes that are left",
                          f"run it by itself: tools/run_tests.py --only {name}")
        else:
            result = PHASES[name](arguments)
        total += result
        rows.append(f"{name:8} {time.monotonic() - start:6.0f} s   {result}")
        if name == "dev" and result.failed and not (BUILD / "dev" / "junit.xml").is_file():
            say("the build failed: the other phases would only fail again")
            break
    say("\n" + "\n".join(rows))
    say(str(total))
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())

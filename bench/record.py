#!/usr/bin/env python3
"""Runs a named set of measurements and appends what it found to bench/results, as data.

  bench/record.py --list                           the sets, and what each needs
  bench/record.py cpu-smollm2                      measure; then `bench/render.py` writes docs/benchmarks.md anew
  bench/record.py cpu-gpt-oss --llama-bench ~/llama.cpp/build/bin/llama-bench
  bench/record.py gpu-gpt-oss --rounds 3 --machine "One H200" --models /dev/shm
  bench/record.py cpu-smollm2 --dry-run            print the commands and write nothing

How a figure is made. A round is one process of Millrace for each command of the set and, where --llama-bench names
llama.cpp's llama-bench, one process of it with the same file, sizes and threads; who goes first alternates. Each
process warms up untimed and then measures once. The record holds the median over the rounds, the lowest and the
highest.

The limit is measured in the same call: for decode the bytes of weights that a token reads over the bandwidth that the
same threads (`millrace bench` on the CPU) or a copy on the GPU (through libcuda) reach; for prefill on the CPU the
times that reading and arithmetic of each operation take at the machine's measured peaks (`millrace bench
--roofline`). What could not be measured is null in the record, never guessed. Where other work was on the machine the
note says so.

Status 2 and one line when something is missing or fails; then nothing is written.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import records
from records import ROOT, RecordError


@dataclass(frozen=True)
class ModelFile:
    title: str  # of the page
    file: str  # under --models
    make: str  # the command that makes it, from the root; {file} is its path


@dataclass(frozen=True)
class Metric:
    name: str  # of the page
    key: str  # of `millrace bench --json`
    phase: str  # of the plots, or None
    unit: str = "tok/s"


@dataclass(frozen=True)
class Command:
    """One call of `millrace bench`, and what is taken from it."""
    metrics: tuple
    prompt: int
    generate: int
    depth: int = 0
    clients: int = 0
    options: tuple = ()

    def arguments(self, device):
        words = ["-p", str(self.prompt), "-n", str(self.generate), *self.options, "--device", device, "--json"]
        if self.clients:
            count = str(self.clients)
            return words + ["--clients", count, "--requests", "1", "--max-running", count, "--exact"]
        return words + (["--depth", str(self.depth)] if self.depth else []) + ["--repeat", "1", "--warm-up"]


@dataclass(frozen=True)
class MeasuredSet:
    about: str
    device: str
    model: ModelFile
    commands: tuple
    gibibytes: float  # of memory that the model wants


def decode(name="decode"):
    return Metric(name, "decode_tok_s", "decode")


def prefill(name):
    return Metric(name, "prefill_tok_s", "prefill")


SMOLLM2 = ModelFile("SmolLM2-135M, Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf", "tools/fetch_model.py smollm2")
GPT_OSS = ModelFile("gpt-oss-20b shape, MXFP4 and Q8_0", "gpt-oss-20b.gguf", "{millrace} synth gpt-oss-20b {file}")
LLAMA_Q4_K = ModelFile("Llama 8B shape, Q4_K", "llama-8b-q4_k.gguf",
                       "{millrace} synth bench/shapes/llama-3.1-8b.json {file} --type q4_k")
LLAMA_Q8_0 = ModelFile("Llama 8B shape, Q8_0", "llama-8b-q8_0.gguf",
                       "{millrace} synth bench/shapes/llama-3.1-8b.json {file} --type q8_0")
QWEN3_MOE = ModelFile("Qwen3-30B-A3B shape, Q4_K", "qwen3-30b-a3b-q4_k.gguf",
                      "{millrace} synth qwen3-30b-a3b {file} --type q4_k")
GPU_BIG = ("--ctx", "16384")


def smollm2_sets():
    """The small real model in each type that people run on few cores: decode, prefill of 128 and 512."""
    models = {"cpu-smollm2": SMOLLM2}
    for kind in ("Q8_0", "F16", "Q4_K"):
        models[f"cpu-smollm2-{kind.lower()}"] = ModelFile(
            f"SmolLM2-135M, {kind}", f"SmolLM2-135M-Instruct.{kind}.gguf",
            f"{{millrace}} quantize {{folder}}/{SMOLLM2.file} {{file}} --type {kind.lower()}")
    commands = (Command((decode(), prefill("prefill of 512 tokens")), 512, 64),
                Command((prefill("prefill of 128 tokens"),), 128, 8))
    return {name: MeasuredSet(f"{model.title} on the CPU: decode, prefill of 128 and 512", "cpu", model, commands, 0.5)
            for name, model in models.items()}


def shape_sets():
    """Dense models of other sizes on a GPU, each in Q4_K and Q8_0."""
    sets = {}
    for title, shape, gibibytes in (("Llama 1B", "llama-3.2-1b", {"q4_k": 8.0, "q8_0": 8.0}),
                                    ("Qwen3 14B", "qwen3-14b", {"q4_k": 40.0, "q8_0": 46.0}),
                                    ("Llama 70B", "llama-3.3-70b", {"q4_k": 60.0, "q8_0": 84.0})):
        for kind, memory in gibibytes.items():
            model = ModelFile(f"{title} shape, {kind.upper()}", f"{shape}-{kind}.gguf",
                              f"{{millrace}} synth bench/shapes/{shape}.json {{file}} --type {kind}")
            sets[f"gpu-{shape}-{kind}"] = MeasuredSet(
                f"{title}'s shape in {kind.upper()} on a GPU", "cuda", model,
                (Command((decode(), prefill("prefill of 2,048 tokens")), 2048, 128),), memory)
    return sets


SETS = {
    **smollm2_sets(),
    "cpu-gpt-oss": MeasuredSet(
        "gpt-oss-20b's shape on the CPU: decode, prefill of 512, decode at 32,000 tokens", "cpu", GPT_OSS,
        (Command((decode(), prefill("prefill of 512 tokens")), 512, 48),
         Command((decode("decode at 32,000 tokens"),), 16, 32, depth=32000, options=("--ctx", "33024"))), 14.0),
    "cpu-gpt-oss-few-cores": MeasuredSet(
        "the same where a prompt of 512 takes minutes: decode, prefill of 64", "cpu", GPT_OSS,
        (Command((decode(), prefill("prefill of 64 tokens")), 64, 16),), 14.0),
    "cpu-llama-8b": MeasuredSet("Llama 8B's shape in Q4_K on the CPU: decode, prefill of 256", "cpu", LLAMA_Q4_K,
                                (Command((decode(), prefill("prefill of 256 tokens")), 256, 48),), 6.0),
    "gpu-gpt-oss": MeasuredSet(
        "gpt-oss-20b's shape on a GPU: decode, at 32,000 tokens, prefill of 2,048, 128 sequences", "cuda", GPT_OSS,
        (Command((decode(), prefill("prefill of 2,048 tokens")), 2048, 128, options=GPU_BIG),
         Command((decode("decode at 32,000 tokens"), prefill("prefill of 512 behind 32,000 tokens")), 512, 128,
                 depth=32000),
         Command((decode("decode of 128 sequences"),
                  Metric("128 sequences of 1,024 + 256 tokens, whole run", "seconds", None, "s")), 1024, 256,
                 clients=128)), 20.0),
    "gpu-llama-8b-q4_k": MeasuredSet("Llama 8B's shape in Q4_K on a GPU", "cuda", LLAMA_Q4_K,
                                     (Command((decode(), prefill("prefill of 2,048 tokens")), 2048, 128),), 24.0),
    "gpu-llama-8b-q8_0": MeasuredSet("Llama 8B's shape in Q8_0 on a GPU", "cuda", LLAMA_Q8_0,
                                     (Command((decode(), prefill("prefill of 2,048 tokens")), 2048, 128),), 24.0),
    "gpu-qwen3-moe": MeasuredSet("Qwen3-30B-A3B's shape in Q4_K on a GPU", "cuda", QWEN3_MOE,
                                 (Command((decode(), prefill("prefill of 2,048 tokens")), 2048, 128),), 64.0),
    **shape_sets(),
}


class MeasureError(Exception):
    """One line: what went wrong and what to do."""


# ---------------------------------------------------------------- running things


class Progress:
    """One line on standard error that says what runs, how far all of it is and for how long."""

    def __init__(self, total):
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.live = sys.stderr.isatty()

    def show(self, what):
        line = f"[{self.done + 1}/{self.total}, {time.monotonic() - self.start:.0f} s] {what}"
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def step(self):
        self.done += 1

    def clear(self):
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def run_json(command):
    """What a command prints, as JSON."""
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise MeasureError(f"{command[0]}: cannot be run: {error.strerror}") from error
    if result.returncode != 0:
        why = (result.stderr.strip() or result.stdout.strip()).splitlines()
        said = why[-1] if why else "it said nothing"
        raise MeasureError(f"{shlex.join(command)}: status {result.returncode}: {said}")
    try:
        return json.loads(result.stdout)
    except json.JSONDecodeError as error:
        raise MeasureError(f"{shlex.join(command)}: found no JSON on its output ({error.msg})") from error


def number_in(answer, key, command):
    value = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(value, (int, float)):
        raise MeasureError(f"{shlex.join(command)}: found no number '{key}' in its answer; is the binary of this tree?")
    return float(value)


# ---------------------------------------------------------------- the machine


def processor_name():
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    if found:
        return re.sub(r"\s+", " ", found.group(1)).replace("(R)", "").replace("(TM)", "")
    return platform.machine()


def gpu_name():
    if not shutil.which("nvidia-smi"):
        return None
    answer = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    names = answer.stdout.strip().splitlines()
    return names[0] if answer.returncode == 0 and names else None


def describe_machine(options, measured, isa):
    cores = len(os.sched_getaffinity(0))
    gpu = gpu_name() if measured.device == "cuda" else None
    name = options.machine or (f"one {gpu}" if gpu else f"{cores} cores of {processor_name()}")
    return {"name": name, "cores": cores, "isa": None if measured.device == "cuda" else isa, "gpu": gpu,
            "about": options.about or processor_name()}


def commit_of_tree():
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if answer.returncode != 0:
        return None
    sources = ("src", "kernels", "include", "apps", "CMakeLists.txt", "cmake")
    changed = subprocess.run(["git", "status", "--porcelain", "--", *sources], cwd=ROOT, capture_output=True, text=True)
    return answer.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def gpu_copy_gb_s():
    """What copies within a GPU's memory read and write in a second: what decoding could read. None without libcuda."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    source, target = ctypes.c_uint64(), ctypes.c_uint64()
    size, copies = 4 << 30, 8
    try:
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
            return None
        if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) or cuda.cuCtxSetCurrent(context):
            return None
        for pointer in (source, target):
            if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)):
                return None
        best = 0.0
        for _ in range(4):
            cuda.cuCtxSynchronize()
            start = time.perf_counter()
            for _ in range(copies):
                if cuda.cuMemcpyDtoDAsync_v2(target, source, ctypes.c_size_t(size), None):
                    return None
            if cuda.cuCtxSynchronize():
                return None
            best = max(best, 2.0 * size * copies / (time.perf_counter() - start) * 1e-9)
        return best
    finally:
        for pointer in (source, target):
            if pointer.value:
                cuda.cuMemFree_v2(pointer)
        if context.value:
            cuda.cuDevicePrimaryCtxRelease_v2(device)


# ---------------------------------------------------------------- a set


class Samples:
    """What the rounds gave for one metric of one engine."""

    def __init__(self):
        self.values = []

    def fields(self):
        return {"median": round(statistics.median(self.values), 3),
                "range": [round(min(self.values), 3), round(max(self.values), 3)], "runs": len(self.values)}


class Measurement:
    def __init__(self, options, measured, model):
        self.options, self.measured, self.model = options, measured, str(model)
        self.threads = options.threads or len(os.sched_getaffinity(0))
        self.ours, self.peers = {}, {}  # (command's index, metric's name) -> Samples
        self.read_gb_s, self.bytes_per_token, self.isa, self.peer_version = [], None, None, None
        self.prefill_limits, self.copy_gb_s = {}, None
        self.load = os.getloadavg()[0]  # of others, before ours comes into it

    # The commands.

    def bench_command(self, command):
        threads = ["--threads", str(self.threads)] if self.measured.device == "cpu" else []
        arguments = command.arguments(self.measured.device)
        return [str(self.options.millrace), "bench", self.model, *arguments, *threads]

    def roofline_command(self, command):
        return [str(self.options.millrace), "bench", self.model, "-p", str(command.prompt), "-n", "8",
                "--device", "cpu", "--threads", str(self.threads), "--roofline", "--json"]

    def peer_command(self, command):
        layers = "0" if self.measured.device == "cpu" else "99"
        return [str(self.options.llama_bench), "-m", self.model, "-p", str(command.prompt), "-n", str(command.generate),
                "-d", str(command.depth), "-r", "1", "-t", str(self.threads), "-ngl", layers, "-fa", "1", "-o", "json"]

    def has_peer(self, command):
        return bool(self.options.llama_bench) and not command.clients  # llama-bench has no sequences side by side

    def wants_roofline(self, command):
        return (self.measured.device == "cpu" and not command.depth and not command.clients
                and any(metric.phase == "prefill" for metric in command.metrics))

    def all_commands(self):
        """Every command line of one round, for --dry-run."""
        for command in self.measured.commands:
            yield self.bench_command(command)
            if self.has_peer(command):
                yield self.peer_command(command)
            if self.wants_roofline(command):
                yield self.roofline_command(command)

    # One process of each.

    def run_ours(self, idx, command):
        words = self.bench_command(command)
        answer = run_json(words)
        for metric in command.metrics:
            self.ours.setdefault((idx, metric.name), Samples()).values.append(number_in(answer, metric.key, words))
        if not command.clients:
            self.isa = answer.get("isa")
            self.bytes_per_token = number_in(answer, "bytes_per_token", words)
            if answer.get("read_gb_s") is not None:
                self.read_gb_s.append(float(answer["read_gb_s"]))

    def run_peer(self, idx, command):
        words = self.peer_command(command)
        answer = run_json(words)
        for metric in command.metrics:
            rows = [row for row in answer if (row.get("n_gen", 0) > 0) == (metric.phase == "decode")]
            if len(rows) != 1:
                raise MeasureError(f"{shlex.join(words)}: found {len(rows)} rows for {metric.name}, expected one")
            self.peers.setdefault((idx, metric.name), Samples()).values.append(number_in(rows[0], "avg_ts", words))
            self.peer_version = rows[0].get("build_commit")

    def run_roofline(self, idx, command):
        words = self.roofline_command(command)
        answer = run_json(words)
        try:
            operations = answer["prefill"]["operations"]
            seconds = sum(op["seconds"] - op["lost_seconds"] for op in operations)
            self.prefill_limits[idx] = answer["prefill"]["tokens"] / seconds
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise MeasureError(f"{shlex.join(words)}: found no times of operations in its answer") from error

    def run(self):
        commands = list(enumerate(self.measured.commands))
        rounds = self.options.rounds
        total = sum(rounds * (1 + self.has_peer(c)) + self.wants_roofline(c) for _, c in commands)
        total += self.measured.device == "cuda"
        progress = Progress(total)
        try:
            if self.measured.device == "cuda":
                progress.show("copies within the GPU's memory")
                self.copy_gb_s = gpu_copy_gb_s()
                progress.step()
            for turn in range(rounds):
                for idx, command in commands:
                    steps = [("millrace", self.run_ours)]
                    if self.has_peer(command):
                        steps.insert(turn % 2, ("llama-bench", self.run_peer))
                    for name, step in steps:
                        what = ", ".join(metric.name for metric in command.metrics)
                        progress.show(f"round {turn + 1} of {rounds}: {name}: {what}")
                        step(idx, command)
                        progress.step()
            for idx, command in commands:
                if self.wants_roofline(command):
                    progress.show("the machine's peaks: millrace bench --roofline")
                    self.run_roofline(idx, command)
                    progress.step()
        finally:
            progress.clear()

    # What is recorded.

    def limit_of(self, idx, command, metric):
        if command.depth or command.clients or metric.unit != "tok/s":
            return None  # keys and values, or experts that sequences share, are not in bytes_per_token
        if metric.phase == "decode":
            gb_s = statistics.median(self.read_gb_s) if self.read_gb_s else self.copy_gb_s
            if not gb_s or not self.bytes_per_token:
                return None
            what = "read by the same threads" if self.read_gb_s else "moved by copies on the GPU"
            return {"value": round(gb_s * 1e9 / self.bytes_per_token, 3), "same_run": True,
                    "by": f"{gb_s:.1f} GB/s {what}, {self.bytes_per_token * 1e-6:,.0f} MB of weights a token"}
        if idx in self.prefill_limits:
            return {"value": round(self.prefill_limits[idx], 3), "same_run": True,
                    "by": "reading and arithmetic of each operation at the machine's measured peaks (--roofline)"}
        return None

    def portable(self, words):
        """A command line without this machine's folders."""
        short = {str(self.options.millrace): "millrace", str(self.options.llama_bench): "llama-bench",
                 self.model: Path(self.model).name}
        return shlex.join(short.get(word, word) for word in words)

    def note(self):
        """What --note says, and that the machine was busy, if it was."""
        busy = f"load average {self.load:.1f} at the start" if self.load > 0.1 * len(os.sched_getaffinity(0)) else None
        return "; ".join(part for part in (self.options.note, busy) if part) or None

    def make_records(self):
        machine = describe_machine(self.options, self.measured, self.isa)
        found = []
        for idx, command in enumerate(self.measured.commands):
            for metric in command.metrics:
                peers = []
                if (idx, metric.name) in self.peers:
                    peers.append({"name": "llama.cpp", "version": self.peer_version,
                                  **self.peers[idx, metric.name].fields(),
                                  "command": self.portable(self.peer_command(command))})
                found.append({
                    "topic": "speed", "set": self.options.set, "commit": self.options.commit or commit_of_tree(),
                    "date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine,
                    "model": self.measured.model.title, "metric": metric.name, "phase": metric.phase,
                    "unit": metric.unit, **self.ours[idx, metric.name].fields(),
                    "command": self.portable(self.bench_command(command)),
                    "limit": self.limit_of(idx, command, metric), "peers": peers, "note": self.note()})
        return found


# ---------------------------------------------------------------- the command line


def list_sets():
    lines = []
    for name, measured in SETS.items():
        lines += [f"{name}", f"    {measured.about}",
                  f"    needs {measured.model.file} under --models, {measured.gibibytes:g} GiB of memory"
                  + (", a GPU and a build with CUDA" if measured.device == "cuda" else "")]
        making = measured.model.make.format(millrace="millrace", file=measured.model.file, folder=".")
        lines.append(f"    made by: {making}")
    return "\n".join(lines)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", nargs="?", help="which measurements; --list shows them")
    parser.add_argument("--list", action="store_true", help="the sets, and what each needs")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="processes of each engine (5)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of both engines on the CPU (all)")
    parser.add_argument("--millrace", type=Path, metavar="PATH", help="the binary (build/release/millrace; "
                        "build/cuda/millrace for the sets of a GPU)")
    parser.add_argument("--llama-bench", type=Path, metavar="PATH",
                        help="llama.cpp's llama-bench: runs in turn with ours")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", metavar="DIR",
                        help="where model files are (build/models)")
    parser.add_argument("--machine", metavar="NAME",
                        help="heading of its table (made of the processor's or the GPU's name)")
    parser.add_argument("--about", metavar="TEXT", help="a line about the machine (the processor's name)")
    parser.add_argument("--commit", metavar="HASH", help="what the binary was built from (this tree's HEAD)")
    parser.add_argument("--note", metavar="TEXT", help="what a reader should know of this run: other load, a slow disk")
    parser.add_argument("--results", type=Path, default=records.RESULTS, metavar="DIR", help="where records are kept "
                        "(bench/results)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands of a round; run and write nothing")
    options = parser.parse_args(arguments)
    if options.list:
        return options
    if options.set is None:
        parser.error("which set? " + ", ".join(SETS) + " (--list says what each needs)")
    if options.set not in SETS:
        parser.error(f"found the set '{options.set}', expected one of {', '.join(SETS)}")
    for name, least in (("rounds", 1), ("threads", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: found {getattr(options, name)}, expected at least {least}")
    if options.millrace is None:
        build = "cuda" if SETS[options.set].device == "cuda" else "release"
        options.millrace = ROOT / "build" / build / "millrace"
    return options


def check_needs(options, measured, model):
    if not os.access(options.millrace, os.X_OK):
        made = "make cuda" if measured.device == "cuda" else "make build"
        raise MeasureError(f"{options.millrace}: found no program; `{made}` makes it, --millrace names another")
    if options.llama_bench and not os.access(options.llama_bench, os.X_OK):
        raise MeasureError(f"{options.llama_bench}: found no program, expected llama.cpp's llama-bench")
    if not model.is_file():
        making = measured.model.make.format(millrace=options.millrace, file=model, folder=model.parent)
        raise MeasureError(f"{model}: found no such file; make it with: {making}")


def slug(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def summary(record):
    text = f"  {record['metric']}: {record['median']:,.6g} {record['unit']} ({record['range'][0]:,.6g} to " \
           f"{record['range'][1]:,.6g}, {record['runs']} runs)"
    share = records.share_of_limit(record)
    if share is not None:
        text += f", {100 * share:.0f}% of {record['limit']['value']:,.6g}"
    for peer in record["peers"]:
        text += f"; {peer['name']} {peer['median']:,.6g}"
    return text


def main():
    options = parse(sys.argv[1:])
    if options.list:
        print(list_sets())
        return 0
    measured = SETS[options.set]
    model = options.models / measured.model.file
    measurement = Measurement(options, measured, model)
    if options.dry_run:
        for words in measurement.all_commands():
            print(shlex.join(words))
        return 0
    try:
        check_needs(options, measured, model)
        measurement.run()
        found = measurement.make_records()
        path = options.results / f"{slug(found[0]['machine']['name'])}.json"
        records.append(path, found)
    except (MeasureError, RecordError) as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("record: interrupted, nothing is written", file=sys.stderr)
        return 130
    print(f"{options.set} on {found[0]['machine']['name']}, {measured.model.title}:")
    print("\n".join(summary(record) for record in found))
    print(f"{len(found)} records appended to {path}; now: bench/render.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Millrace beside llama.cpp: the same file, the same threads, in turn, and the ratio of their speeds.

  bench/vs_llama_cpp.py MODEL.gguf                        prompt 512, decode 64, 5 rounds
  bench/vs_llama_cpp.py MODEL.gguf -p 128 -n 32 --rounds 3 --threads 2 --json

The first use makes a Python environment (build/llama-venv, or --venv) and installs llama.cpp into it from PyPI
(package llama-cpp-python, compiled here for this processor: many minutes). Nothing else is fetched. Where there is no
network, --package names a folder that holds the package llama_cpp with its libraries, built elsewhere.

How it is kept fair. A round is one process of each engine; who goes first alternates. Each process maps the file,
reads a short prompt and decodes a few tokens untimed, then measures each phase --repeat times and reports its best;
both count from the first token fed to the logits of the last. llama.cpp gets flash attention on or off, whichever a
probe before the first round finds faster for it, phase by phase, and its own repacking of weights. A ratio is taken
within a round, so that a neighbour's noise touches both sides; the median over rounds is printed with its range.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llama-cpp-python"
PHASES = ("prefill", "decode")
PROBE_PROMPT, PROBE_DECODE = 128, 16  # at most; enough to tell flash attention from none


class BenchError(Exception):
    """One line: what went wrong and what to do."""


def say(text):
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- llama.cpp, inside the environment


def some_tokens(count, vocab):
    """The tokens `millrace bench` feeds, so that experts and embedding rows are the same."""
    tokens, state = [], 12345
    for _ in range(count):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        tokens.append(state * vocab >> 32)
    return tokens


class Peer:
    def __init__(self, job):
        import llama_cpp

        self.api, self.job = llama_cpp, job
        if not job["verbose"]:
            # Kept: a callback that is collected while the library holds it ends the process.
            self.silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
            llama_cpp.llama_log_set(self.silence, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = True
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(job["model"].encode(), params)
        if not self.model:
            raise BenchError(f"{job['model']}: llama.cpp cannot load it (--verbose shows why)")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def context(self, flash):
        job, params = self.job, self.api.llama_context_default_params()
        params.n_ctx = job["depth"] + max(job["prompt"], job["generate"]) + 64
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = job["threads"]
        params.no_perf = True
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = 1 if flash else 0
        else:
            params.flash_attn = flash
        context = self.api.llama_init_from_model(self.model, params)
        if not context:
            raise BenchError(f"{job['model']}: llama.cpp cannot make a context of {params.n_ctx} tokens")
        return context

    def feed(self, context, tokens):
        array = (self.api.llama_token * len(tokens))(*tokens)
        for begin in range(0, len(tokens), 512):
            count = min(512, len(tokens) - begin)
            piece = (self.api.llama_token * count).from_buffer(array, begin * 4)
            status = self.api.llama_decode(context, self.api.llama_batch_get_one(piece, count))
            if status != 0:
                raise BenchError(f"{self.job['model']}: llama_decode failed with status {status}")

    def fresh(self, context):
        self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
        if self.job["depth"]:
            self.feed(context, some_tokens(self.job["depth"], self.vocab))

    def prefill(self, context, count):
        tokens = some_tokens(count, self.vocab)
        self.fresh(context)
        start = time.perf_counter()
        self.feed(context, tokens)
        self.argmax(context)
        return count / (time.perf_counter() - start)

    def decode(self, context, count):
        token = some_tokens(1, self.vocab)[0]
        self.fresh(context)
        start = time.perf_counter()
        for _ in range(count):
            self.feed(context, [token])
            token = self.argmax(context)
        return count / (time.perf_counter() - start)

    def argmax(self, context):
        import numpy

        logits = self.api.llama_get_logits_ith(context, -1)
        return int(numpy.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())

    def measure(self, flash, prompt, generate, repeat):
        """Best of `repeat` for each phase, after a warm-up."""
        speeds = {}
        for phase, count in (("prefill", prompt), ("decode", generate)):
            context = self.context(flash[phase])
            self.prefill(context, min(prompt, 32))
            self.decode(context, min(generate, 4))
            speeds[phase] = max(getattr(self, phase)(context, count) for _ in range(repeat))
            self.api.llama_free(context)
        return speeds


def peer_main(text):
    try:
        job = json.loads(text)
        peer = Peer(job)
        if job["probe"]:
            prompt, generate = min(job["prompt"], PROBE_PROMPT), min(job["generate"], PROBE_DECODE)
            speeds = [peer.measure(dict.fromkeys(PHASES, flash), prompt, generate, 2) for flash in (False, True)]
            answer = {phase: speeds[1][phase] > speeds[0][phase] for phase in PHASES}
        else:
            answer = peer.measure(job["flash"], job["prompt"], job["generate"], job["repeat"])
        print(json.dumps(answer))
    except BenchError as error:
        print(json.dumps({"error": str(error)}))
    return 0


# ---------------------------------------------------------------- the environment


def can_import(python):
    check = subprocess.run([python, "-c", "import llama_cpp, numpy"], capture_output=True)
    return check.returncode == 0


def use_package(folder):
    """This Python, with the package in `folder`; for every process from now on."""
    for name, path in (("PYTHONPATH", folder), ("LD_LIBRARY_PATH", folder / "llama_cpp" / "lib")):
        os.environ[name] = os.pathsep.join(filter(None, [str(path.resolve()), os.environ.get(name)]))
    check = subprocess.run([sys.executable, "-c", "import llama_cpp, numpy"], capture_output=True, text=True)
    if check.returncode != 0:
        raise BenchError(f"--package {folder}: cannot import llama_cpp and numpy from there: "
                         f"{(check.stderr.strip().splitlines() or ['no message'])[-1]}")
    return sys.executable


def ensure_venv(folder, jobs):
    """A Python with llama.cpp in it; made on first use. Its path."""
    python = folder / "bin" / "python"
    if python.exists() and can_import(python):
        return python
    say(f"installing {PACKAGE} into {folder}: it is compiled for this processor, which takes many minutes")
    folder.parent.mkdir(parents=True, exist_ok=True)
    log_path = folder.parent / f"{folder.name}.log"
    environment = dict(os.environ, CMAKE_ARGS=os.environ.get("CMAKE_ARGS", "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"),
                       CMAKE_BUILD_PARALLEL_LEVEL=str(jobs))
    with open(log_path, "w") as log:
        for command in ([sys.executable, "-m", "venv", folder],
                        [python, "-m", "pip", "install", "--no-binary", PACKAGE, PACKAGE]):
            try:
                status = subprocess.run(command, stdout=log, stderr=log, env=environment).returncode
            except OSError as error:
                raise BenchError(f"{command[0]}: {error.strerror}; see {log_path}")
            if status != 0:
                raise BenchError(f"cannot install {PACKAGE}: {Path(command[0]).name} {command[2]} failed; "
                                 f"see {log_path} (a C++ compiler, cmake and python3-venv are needed, and PyPI)")
    if not can_import(python):
        raise BenchError(f"{PACKAGE} was installed into {folder} but cannot be imported; see {log_path}")
    return python


# ---------------------------------------------------------------- a process of each


def last_json(text, what, errors):
    for line in reversed(text.strip().splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise BenchError(f"{what} gave no result: {(errors.strip().splitlines() or ['no message'])[-1]}")


def run_peer(python, job):
    done = subprocess.run([python, __file__, "--peer", json.dumps(job)], stdout=subprocess.PIPE, text=True,
                          stderr=None if job["verbose"] else subprocess.PIPE)
    answer = last_json(done.stdout, f"llama.cpp (status {done.returncode})", done.stderr or "")
    if "error" in answer:
        raise BenchError(answer["error"])
    return answer


def run_ours(binary, options):
    command = [binary, "bench", options.model, "-p", options.prompt, "-n", options.generate, "--threads",
               options.threads, "--depth", options.depth, "--repeat", options.repeat, "--warm-up", "--json"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError((done.stderr.strip().splitlines() or [f"{binary} bench failed"])[-1])
    answer = json.loads(done.stdout)
    return {"prefill": answer["prefill_tok_s_range"][1], "decode": answer["decode_tok_s_range"][1],
            "isa": answer["isa"], "bandwidth": answer["decode_bandwidth_fraction"]}


def peer_version(python):
    code = "import llama_cpp; print(llama_cpp.__version__)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


# ---------------------------------------------------------------- rounds and ratios


def spread(values):
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def compare(python, binary, options):
    busy = os.getloadavg()[0]
    if busy > 0.5:
        say(f"this machine is busy (load {busy:.1f}): its own threads wait for others', llama.cpp's most of all, as they "
            "spin; ratios measured now are not those of a quiet machine")
    job = {"model": options.model, "threads": options.threads, "prompt": options.prompt, "depth": options.depth,
           "generate": options.generate, "repeat": options.repeat, "verbose": options.verbose, "probe": True}
    flash = run_peer(python, job)
    job.update(probe=False, flash=flash)
    ours, theirs = [], []
    for number in range(options.rounds):
        turns = [lambda: ours.append(run_ours(binary, options)), lambda: theirs.append(run_peer(python, job))]
        for turn in turns if number % 2 == 0 else reversed(turns):
            turn()
        say(f"round {number + 1} of {options.rounds}: " + ", ".join(
            f"{phase} {ours[-1][phase]:.2f} against {theirs[-1][phase]:.2f} tok/s" for phase in PHASES))
    result = {"model": Path(options.model).name, "threads": options.threads, "isa": ours[0]["isa"],
              "prompt_tokens": options.prompt, "decode_tokens": options.generate, "depth": options.depth,
              "rounds": options.rounds, "repeat": options.repeat, "peer": f"{PACKAGE} {peer_version(python)}",
              "load_average_before": busy,
              "peer_flash_attention": flash,
              "decode_bandwidth_fraction": statistics.median(o["bandwidth"] or 0.0 for o in ours)}
    for phase in PHASES:
        result[phase] = {"millrace_tok_s": spread([o[phase] for o in ours]),
                         "llama_cpp_tok_s": spread([t[phase] for t in theirs]),
                         "ratio": spread([o[phase] / t[phase] for o, t in zip(ours, theirs)])}
    return result


def to_text(result):
    lines = [f"{result['model']}, {result['threads']} threads, {result['isa']}, against {result['peer']}; "
             f"{result['rounds']} rounds, the best of {result['repeat']} in each"]
    for phase in PHASES:
        r = result[phase]
        count = result["prompt_tokens"] if phase == "prefill" else result["decode_tokens"]
        lines.append(
            f"  {phase:8}{count:5}  millrace {r['millrace_tok_s']['median']:9.2f} tok/s   llama.cpp "
            f"{r['llama_cpp_tok_s']['median']:9.2f} tok/s   ratio {r['ratio']['median']:.2f} "
            f"({r['ratio']['low']:.2f} to {r['ratio']['high']:.2f})   "
            f"[its flash attention {'on' if result['peer_flash_attention'][phase] else 'off'}]")
    lines.append(f"  millrace's decode uses {100 * result['decode_bandwidth_fraction']:.0f}% of the read bandwidth")
    return "\n".join(lines)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("-p", "--prompt", type=int, default=512, help="prompt tokens (512)")
    parser.add_argument("-n", "--generate", type=int, default=64, help="decoded tokens (64)")
    parser.add_argument("--depth", type=int, default=0, help="tokens of context before either phase (0)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both (all)")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each (5)")
    parser.add_argument("--repeat", type=int, default=2, help="measurements in a process; the best counts (2)")
    parser.add_argument("--venv", type=Path, default=ROOT / "build" / "llama-venv", help="Python with llama.cpp")
    parser.add_argument("--package", type=Path, help="folder with the package llama_cpp; nothing is installed")
    parser.add_argument("--millrace", type=Path, default=ROOT / "build" / "release" / "millrace")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers while installing (all)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--verbose", action="store_true", help="llama.cpp's own messages, on standard error")
    options = parser.parse_args(arguments)
    for name, least in (("prompt", 1), ("generate", 1), ("depth", 0), ("threads", 1), ("rounds", 1), ("repeat", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: found {getattr(options, name)}, expected at least {least}")
    return options


def main():
    if sys.argv[1:2] == ["--peer"]:
        return peer_main(sys.argv[2])
    options = parse(sys.argv[1:])
    try:
        if not os.path.isfile(options.model):
            raise BenchError(f"{options.model}: found no such file, expected a GGUF file (llama.cpp reads no other)")
        if not os.access(options.millrace, os.X_OK):
            raise BenchError(f"{options.millrace}: found no program; `make build` makes it, --millrace names another")
        python = use_package(options.package) if options.package else ensure_venv(options.venv, options.jobs)
        result = compare(python, options.millrace, options)
    except BenchError as error:
        print(f"vs_llama_cpp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(json.dumps(result, indent=2) if options.json else to_text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

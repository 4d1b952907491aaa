#!/usr/bin/env python3
"""One model over ranks of one machine, beside one process of all its threads, and over a slow link beside the formula.

  bench/ranks.py                                    gpt-oss-20b's shape, 12 layers, 16 threads, in /dev/shm
  bench/ranks.py --threads 4 --preset tiny-gpt-oss --link 50,1000

Four figures, each as a ratio of runs that follow one another:
  2 x T/2 and 4 x T/4 ranks against one process of T threads, prefill and decode (links by shared memory);
  2 x T/2 ranks over a link of --link (microseconds, Mbit/s; messages wait, MILLRACE_RANK_DELAY) against what
  `millrace inspect --ranks 2 --alone` expects of it.

`--alone` is what T/2 threads decode while as many decode elsewhere: two processes at the same time, since two hosts
would not share this machine's memory and two ranks here do. Needs mpirun and the program (--millrace).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def say(text):
    print(text, flush=True)


class Machine:
    def __init__(self, options, model):
        self.options, self.model = options, model
        # Containers often forbid one process to read another's memory.
        self.environment = dict(os.environ, OMPI_MCA_btl_vader_single_copy_mechanism="none")

    def bench(self, threads, decode, prompt, *more):
        return [str(self.options.millrace), "bench", self.model, "--device", "cpu", "--threads", str(threads),
                "-p", str(prompt), "-n", str(decode), "--repeat", "3", "--warm-up", "--ctx", "1024", "--json", *more]

    def cores(self, part, parts):
        """The part-th of `parts` even parts of this process's processors."""
        all_cores = sorted(os.sched_getaffinity(0))
        each = len(all_cores) // parts
        return ",".join(str(core) for core in all_cores[part * each:(part + 1) * each])

    def start(self, command, **environment):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**self.environment, **environment})

    def figures(self, process):
        try:
            out, errors = process.communicate(timeout=140)
        except subprocess.TimeoutExpired:
            process.kill()
            raise SystemExit(f"bench/ranks.py: {' '.join(process.args)}: not done within 140 s") from None
        if process.returncode != 0:
            raise SystemExit(f"bench/ranks.py: {' '.join(process.args)}: {errors.strip()}")
        found = json.loads(out[out.index("{"):])
        return {phase: found[f"{phase}_tok_s"] for phase in ("prefill", "decode")}

    def alone(self, threads, decode, prompt):
        return self.figures(self.start(self.bench(threads, decode, prompt)))

    def beside_another(self, threads, decode):
        """Decoding of each of two processes, tokens per second, at the same time on cores of their own."""
        both = [self.start(["taskset", "-c", self.cores(i, 2), *self.bench(threads, decode, 8)]) for i in range(2)]
        try:
            return statistics.mean(self.figures(process)["decode"] for process in both)
        finally:
            for process in both:
                process.kill()
                process.wait()

    def ranks(self, count, threads, decode, prompt, **environment):
        # Each rank on cores of its own, as hosts would have them.
        sets = ["sh", "-c", 'exec taskset -c "$(echo "$RANK_CORES" | cut -d: -f$((OMPI_COMM_WORLD_RANK + 1)))" "$@"', "ranks"]
        cores = ":".join(self.cores(r, count) for r in range(count))
        command = [*MPIRUN, "-n", str(count), *sets, *self.bench(threads, decode, prompt, "--tensor-parallel", str(count))]
        return self.figures(self.start(command, RANK_CORES=cores, **environment))

    def expected(self, alone, us, mbit):
        told = subprocess.run([str(self.options.millrace), "inspect", self.model, "--device", "cpu", "--ranks", "2", "--alone",
                               str(alone), "--link-us", str(us), "--link-mbit", str(mbit), "--json"],
                              capture_output=True, text=True, check=True)
        return json.loads(told.stdout)["expected"]


def run(options, model):
    machine = Machine(options, model)
    threads, decode, prompt = options.threads, options.decode, options.prompt
    ratios = {count: {"prefill": [], "decode": []} for count in (2, 4) if threads >= count}
    for _ in range(options.rounds):
        one = machine.alone(threads, decode, prompt)
        for count, of_count in ratios.items():
            several = machine.ranks(count, threads // count, decode, prompt)
            for phase, of_phase in of_count.items():
                of_phase.append(several[phase] / one[phase])
                say(f"{count} x {threads // count:<3} {phase:<8} {several[phase]:10.2f} tok/s, one process of {threads}: "
                    f"{one[phase]:10.2f}, ratio {of_phase[-1]:.3f}")
    us, mbit = options.link
    links = []
    for _ in range(options.rounds):
        alone = machine.beside_another(threads // 2, decode)
        expected = machine.expected(alone, us, mbit)
        measured = machine.ranks(2, threads // 2, decode, 8, MILLRACE_RANK_DELAY=f"{us:g},{mbit:g}")["decode"]
        links.append(measured / expected["tokens_per_s"])
        say(f"2 x {threads // 2:<3} at {us:g} us, {mbit:g} Mbit/s: {measured:.2f} tok/s, expected "
            f"{expected['tokens_per_s']:.2f} (alone {alone:.2f}; ms a token: computing {1e3 * expected['computing_s']:.2f}, "
            f"latencies {1e3 * expected['latency_s']:.2f}, bytes {1e3 * expected['moving_s']:.2f}; measured "
            f"{1e3 / measured:.2f}), ratio {links[-1]:.3f}")
    say("median ratios: " + ", ".join(f"{count} ranks {phase} {statistics.median(values):.3f}"
                                      for count, of in ratios.items() for phase, values in of.items())
        + f", slow link against the formula {statistics.median(links):.3f}")


def link_of(text):
    try:
        us, mbit = (float(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text}, expected microseconds and Mbit/s such as 50,1000") from None
    return us, mbit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millrace", type=Path, default=ROOT / "build/release/millrace")
    parser.add_argument("--preset", default="gpt-oss-20b")
    parser.add_argument("--layers", type=int, default=12, help="0: the preset's own")
    parser.add_argument("--threads", type=int, default=16, help="of one process; ranks share them")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--decode", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--link", type=link_of, default="50,1000", metavar="US,MBIT")
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else None, help="where the model is written")
    options = parser.parse_args()
    if (options.threads != 2 and options.threads % 4 != 0) or len(os.sched_getaffinity(0)) < options.threads:
        parser.error(f"--threads {options.threads}: expected 2 or a multiple of 4, of which this machine has as many")
    for program in (str(options.millrace), "mpirun", "taskset"):
        if shutil.which(program) is None:
            parser.error(f"{program}: not found")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected at least 1")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = str(Path(folder) / "model.gguf")
        began = time.monotonic()
        layers = ["--layers", str(options.layers)] if options.layers else []
        subprocess.run([str(options.millrace), "synth", options.preset, model, *layers], check=True, stdout=subprocess.DEVNULL)
        say(f"{options.preset}, {options.layers or 'all'} layers: {Path(model).stat().st_size / 1e9:.2f} GB, "
            f"written in {time.monotonic() - began:.1f} s")
        run(options, model)
    return 0


if __name__ == "__main__":
    sys.exit(main())

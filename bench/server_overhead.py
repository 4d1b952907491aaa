#!/usr/bin/env python3
"""What the server costs over the engine alone: the same requests through both, in turn, so that a machine that gets
slower or faster in between does so for both.

    bench/server_overhead.py BINARY MODEL [--pairs 5] [--clients 32] [--requests 2] [--prompt 64] [--tokens 64]

Each pair is one `millrace bench MODEL --clients` and one `bench/server_load.py --as-bench`; which goes first changes from
pair to pair. Printed are the processor time of the whole process for each generated token and the generated tokens per
second, of every run, and how much more the server takes, as the median over the pairs. Tokens per second include the
clients, who share the cores; processor time does not. Use a release build on a machine that does nothing else.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

LOAD = Path(__file__).resolve().parent / "server_load.py"


def run(command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def engine_alone(a):
    got = run([a.binary, "bench", a.model, "--clients", a.clients, "--requests", a.requests, "-p", a.prompt, "-n", a.tokens,
               "--ctx", 512, "--max-running", 64, "--json"])
    return {"tokens": got["generated_tokens"], "ms": 1e3 * got["cpu_s"] / got["generated_tokens"], "tok_s": got["generated_tok_s"]}


def through_http(a):
    got = run([sys.executable, LOAD, a.binary, a.model, "--clients", a.clients, "--requests", a.requests, "--as-bench", a.prompt,
               "--tokens", a.tokens, "--json"])
    tokens = round(got["generated_tok_s"] * got["seconds"])
    return {"tokens": tokens, "ms": got["cpu_ms_per_token"], "tok_s": got["generated_tok_s"], "http": got["http_cpu_part"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    for name, default in (("pairs", 5), ("clients", 32), ("requests", 2), ("prompt", 64), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    cpu, speed, own = [], [], []
    print(f"{'pair':>4} {'engine ms/token':>16} {'server ms/token':>16} {'more':>7} {'engine tok/s':>13} {'server tok/s':>13} {'less':>7}")
    for pair in range(a.pairs):
        if pair % 2 == 0:
            engine, server = engine_alone(a), through_http(a)
        else:
            server, engine = through_http(a), engine_alone(a)
        if abs(server["tokens"] / engine["tokens"] - 1) > 0.02:
            sys.exit(f"the engine generated {engine['tokens']} tokens and the server {server['tokens']}: not the same requests")
        cpu.append(server["ms"] / engine["ms"] - 1)
        speed.append(1 - server["tok_s"] / engine["tok_s"])
        own.append(server["http"])
        print(f"{pair + 1:>4} {engine['ms']:>16.3f} {server['ms']:>16.3f} {cpu[-1]:>7.2%} {engine['tok_s']:>13.1f} "
              f"{server['tok_s']:>13.1f} {speed[-1]:>7.2%}", flush=True)
    print(f"{a.clients} clients with {a.requests} requests each, {engine['tokens']} tokens generated in a run")
    print(f"processor time for a token: {statistics.median(cpu):+.2%} (median of {a.pairs} pairs; target: under 3%)")
    print(f"tokens per second, clients on the same cores: {-statistics.median(speed):+.2%}")
    print(f"of the server's processor time in its own threads: {statistics.median(own):.2%}")


if __name__ == "__main__":
    main()

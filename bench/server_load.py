#!/usr/bin/env python3
"""Many streaming clients of one server: is anything lost or mixed up, does memory stay flat, what do clients wait.

    bench/server_load.py BINARY MODEL [--clients 500] [--seconds 180] [--tokens 48] [--json] [-- options of serve]

Each client sends a completion with a prompt of its own, reads its stream, checks it and sends the next, until the time is
over. A stream is right when its id never changes, its tokens are counted right by the server, it ends with [DONE], and, since
sampling is greedy, the same prompt always gets the same text (every --repeat-th prompt is asked again).
Times are the client's: from sending to the first event with text, and between events. The server's overhead over the
engine alone is the ratio of two runs of the same load, taken one after the other on a quiet machine:
    millrace bench MODEL --clients N -p P -n T     (the engine alone)
    bench/server_load.py ...                        (the same through HTTP: "generated_tok_s")
and, without a second run, cpu_outside_engine: CPU seconds of the server's process not spent in the model, the scheduler or
the sampler, as a part of all (on the CPU backend, with as many threads as cores). Python's own library only; the clients run
in a process of their own, whose CPU time is printed too: on few cores it is part of what is measured.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "server"))
from harness import Server  # noqa: E402

WORDS = "river stone mill wheel water grain bread salt wind sail rope tide lamp road hill field".split()


def quantile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0


class Load:
    def __init__(self, port, arguments):
        self.port, self.arguments = port, arguments
        self.first, self.between, self.faults = [], [], []
        self.tokens = self.finished = 0
        self.known = {}
        self.end = time.monotonic() + arguments.seconds

    def prompt(self, rng):
        # One of a few prompts now and then, so that equal prompts meet under different loads.
        seed = rng.randrange(20) if rng.randrange(self.arguments.repeat) == 0 else rng.randrange(1 << 40)
        own = random.Random(seed)
        return " ".join(own.choice(WORDS) for _ in range(own.randrange(4, 40))), seed < 20

    async def ask(self, rng):
        prompt, repeated = self.prompt(rng)
        wanted = rng.randrange(self.arguments.tokens // 4, self.arguments.tokens + 1)
        if repeated:
            wanted = self.arguments.tokens
        body = json.dumps({"prompt": prompt, "max_tokens": wanted, "temperature": 0, "ignore_eos": True, "stream": True,
                           "stream_options": {"include_usage": True}}).encode()
        start = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                         + body)
            text, ids, usage, done, last = "", set(), None, False, None
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError(f"status {status!r}")
            while line := await reader.readline():
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                ids.add(event["id"])
                usage = event["usage"] or usage
                for choice in event["choices"]:
                    text += choice["text"]
                    now = time.monotonic()
                    if last is None:
                        self.first.append(now - start)
                    else:
                        self.between.append(now - last)
                    last = now
            if not done or len(ids) != 1 or usage is None or usage["completion_tokens"] != wanted:
                raise ValueError(f"broken stream: done {done}, ids {len(ids)}, usage {usage}, wanted {wanted}")
            if repeated and self.known.setdefault(prompt, text) != text:
                raise ValueError(f"another text for the same prompt: {prompt[:40]!r}")
            self.tokens += wanted
            self.finished += 1
        finally:
            writer.close()

    async def client(self, number):
        rng = random.Random(number)
        while time.monotonic() < self.end:
            try:
                await self.ask(rng)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.faults.append(f"client {number}: {error}")
                await asyncio.sleep(0.1)

    async def run(self, watch):
        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(self.client(i) for i in range(self.arguments.clients)))
        watcher.cancel()


def resident(pid):
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments, options = parser.parse_known_args()
    options = [o for o in options if o != "--"] or ["--ctx", "512", "--max-running", "64"]
    with Server(arguments.binary, arguments.model, "--quiet", *options) as server:
        pid, memory = server.process.pid, []
        load = Load(server.port, arguments)

        async def watch():
            while True:
                memory.append(resident(pid))
                await asyncio.sleep(1)

        before, mine, begin = server.stats(), time.process_time(), time.monotonic()
        cpu = cpu_seconds(pid)
        asyncio.run(load.run(watch))
        seconds = time.monotonic() - begin
        cpu = cpu_seconds(pid) - cpu
        after = server.stats()
        fourth = max(1, len(memory) // 4)
        result = {
            "clients": arguments.clients, "seconds": round(seconds, 1), "finished": load.finished, "faults": len(load.faults),
            "generated_tok_s": round(load.tokens / seconds, 1),
            "first_token_p50_s": round(quantile(load.first, 0.5), 4), "first_token_p99_s": round(quantile(load.first, 0.99), 4),
            "inter_token_p50_s": round(quantile(load.between, 0.5), 4), "inter_token_p99_s": round(quantile(load.between, 0.99), 4),
            "resident_second_quarter_mb": round(max(memory[fourth:2 * fourth + 1] or memory) / 1e6, 1),
            "resident_last_quarter_mb": round(max(memory[-fourth:]) / 1e6, 1),
            "server_cpu_s": round(cpu, 1), "client_cpu_s": round(time.process_time() - mine, 1),
            "engine_steps_s": round(sum(after["steps"][k] - before["steps"][k] for k in ("model_s", "schedule_s", "sample_s")), 1),
            "connections_left": after["server"]["connections"] - 1, "server_5xx": after["server"]["responses"]["5xx"],
        }
        threads = os.cpu_count() or 1
        result["cpu_outside_engine"] = round(max(0.0, 1 - min(1.0, threads * result["engine_steps_s"] / max(cpu, 1e-9))), 4)
    for fault in load.faults[:10]:
        print(fault, file=sys.stderr)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        for key, value in result.items():
            print(f"{key:<28} {value}")
    return 1 if load.faults or result["server_5xx"] else 0


if __name__ == "__main__":
    sys.exit(main())

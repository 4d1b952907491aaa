#!/usr/bin/env python3
"""Many streaming clients of one server: is anything lost or mixed up, does memory stay flat, what do clients wait.

    bench/server_load.py BINARY MODEL [--clients 500] [--seconds 180] [--tokens 48] [--json] [-- options of serve]
    bench/server_load.py BINARY MODEL --clients 2000 --requests 1 --words 2 --tokens 4     all open at once
    bench/server_load.py BINARY MODEL --clients 64 --requests 4 --as-bench 64              the load of `millrace bench`

Each client sends a completion with a prompt of its own, reads its stream, checks it and sends the next, until the time is
over or it has sent --requests. A stream is right when its id never changes, its tokens are counted right by the server, it
ends with [DONE], and, since sampling is greedy, equal prompts get texts of which one begins with the other (every
--repeat-th prompt is asked again, and short ones meet often). Times are the client's: from sending to the first event with
text, and between events.

What the server costs over the engine alone: --as-bench P sends the very requests of
    millrace bench MODEL --clients N --requests R -p P -n TOKENS --ctx 512 --max-running 64 --json
so that generated_tok_s and cpu_ms_per_token of the two can be compared (taken alternately); and, in one run, http_cpu_part
is the processor time of the server's own threads (sockets, reading requests) as a part of the whole process's. Python's own
library only; the clients run in a process of their own, whose CPU time is printed too: on few cores it is part of what
is measured.
"""

import argparse
import asyncio
import json
import os
import random
import resource
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
        self.state, self.vocab = 42, 0
        self.end = time.monotonic() + arguments.seconds

    def draw(self, rng):
        """(prompt, number of tokens to generate)"""
        options = self.arguments
        if options.as_bench:
            # As apps/cli/bench_clients.cpp draws them, one after another whoever sends.
            low, high = max(1, options.as_bench // 4), options.as_bench
            tokens = [self.drawn(0, self.vocab - 1) for _ in range(self.drawn(low, high))]
            return tokens, self.drawn(max(1, options.tokens // 4), options.tokens)
        # One of a few prompts now and then, so that equal prompts meet under different loads.
        repeated = rng.randrange(options.repeat) == 0
        own = random.Random(rng.randrange(20 if repeated else 1 << 40))
        words = " ".join(own.choice(WORDS) for _ in range(own.randrange(min(4, options.words), options.words + 1)))
        return words, options.tokens if repeated else rng.randrange(max(1, options.tokens // 4), options.tokens + 1)

    def drawn(self, low, high):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return low + (self.state >> 33) % (high - low + 1)

    def check_text(self, prompt, text):
        text = text.rstrip("\ufffd")  # a character that the last token cut
        known = self.known.setdefault(str(prompt), text)
        if not known.startswith(text) and not text.startswith(known):
            raise ValueError(f"another text for the same prompt: {prompt[:40]!r}")
        if len(text) > len(known):
            self.known[str(prompt)] = text

    async def ask(self, rng):
        prompt, wanted = self.draw(rng)
        body = json.dumps({"prompt": prompt, "max_tokens": wanted, "temperature": 0, "ignore_eos": True, "stream": True,
                           "stream_options": {"include_usage": True}}).encode()
        start = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                         b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
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
            self.check_text(prompt, text)
            self.tokens += wanted
            self.finished += 1
        finally:
            writer.close()

    async def client(self, number):
        rng = random.Random(number)
        sent = 0
        while time.monotonic() < self.end if self.arguments.requests == 0 else sent < self.arguments.requests:
            sent += 1
            try:
                await self.ask(rng)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.faults.append(f"client {number}: {error}")
                await asyncio.sleep(0.1)

    async def open_streams(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /stats HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        _, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return json.loads(body)["server"]["streams"]

    async def run(self, watch):
        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(self.client(i) for i in range(self.arguments.clients)))
        watcher.cancel()


def resident(pid):
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid):
    """(of all threads, of those that serve HTTP: the first, and those that are named so)"""
    total = http = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        seconds = int((task / "schedstat").read_text().split()[0]) * 1e-9
        total += seconds
        if task.name == str(pid) or (task / "comm").read_text().startswith("http"):
            http += seconds
    return total, http


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--requests", type=int, default=0, help="of each client; 0: until --seconds are over")
    parser.add_argument("--words", type=int, default=39, help="of the longest prompt")
    parser.add_argument("--as-bench", type=int, default=0, metavar="P", help="the requests of millrace bench -p P")
    parser.add_argument("--json", action="store_true")
    arguments, options = parser.parse_known_args()
    options = [o for o in options if o != "--"] or ["--ctx", "512", "--max-running", "64"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with Server(arguments.binary, arguments.model, "--quiet", *options) as server:
        pid, memory, files, streams = server.process.pid, [], [0], [0]
        load = Load(server.port, arguments)
        load.vocab = server.stats()["model"]["vocab"]

        async def watch():
            while True:
                memory.append(resident(pid))
                files.append(len(os.listdir(f"/proc/{pid}/fd")))
                streams.append(await load.open_streams())
                await asyncio.sleep(1)

        before, mine, begin = server.stats(), time.process_time(), time.monotonic()
        cpu_before, http_before = cpu_seconds(pid)
        asyncio.run(load.run(watch))
        seconds = time.monotonic() - begin
        cpu, http_cpu = cpu_seconds(pid)
        cpu, http_cpu = cpu - cpu_before, http_cpu - http_before
        after = server.stats()
        fourth = max(1, len(memory) // 4)
        result = {
            "clients": arguments.clients, "seconds": round(seconds, 1), "finished": load.finished, "faults": len(load.faults),
            "generated_tok_s": round(load.tokens / seconds, 1),
            "first_token_p50_s": round(quantile(load.first, 0.5), 4), "first_token_p99_s": round(quantile(load.first, 0.99), 4),
            "inter_token_p50_s": round(quantile(load.between, 0.5), 4), "inter_token_p99_s": round(quantile(load.between, 0.99), 4),
            "resident_second_quarter_mb": round(max(memory[fourth:2 * fourth + 1] or memory) / 1e6, 1),
            "resident_last_quarter_mb": round(max(memory[-fourth:]) / 1e6, 1),
            "most_streams": max(streams), "most_files": max(files), "server_cpu_s": round(cpu, 1), "http_cpu_s": round(http_cpu, 3),
            "http_cpu_part": round(http_cpu / max(cpu, 1e-9), 4),
            "cpu_ms_per_token": round(1e3 * cpu / max(1, load.tokens), 3), "client_cpu_s": round(time.process_time() - mine, 1),
            "engine_steps_s": round(sum(after["steps"][k] - before["steps"][k] for k in ("model_s", "schedule_s", "sample_s")), 1),
            "connections_left": after["server"]["connections"] - 1, "server_5xx": after["server"]["responses"]["5xx"],
        }
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

#!/usr/bin/env python3
"""Two hundred clients and attackers on one server for a while: nobody is silenced, nothing breaks, nothing grows.

    tests/server/soak.py PATH/TO/millrace [--seconds 3600] [--clients 200]

First the clients alone, then with attackers: every shape of attacks.py at full size, trickled requests, bytes that are no
HTTP, and clients that leave in the middle. It fails when
  - a client is answered anything but 200, or an attacker 5xx other than 503 with Retry-After,
  - the clients' p99 is more than 3 times what it was without attackers,
  - the server's memory still grows in the second half.
`make soak` runs an hour (SOAK_SECONDS), `make check` three minutes. The attackers are a process of low priority that sends
at most RATE bytes a second: what is measured is the server, not two programs that fight for two cores.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import pathlib
import random
import socket
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from attacks import FULL, attacks  # noqa: E402
from harness import ROOT, Server, post  # noqa: E402

MODEL = ROOT / "tests/golden/models/llama3/model.gguf"
OPTIONS = ("--ctx", 1024, "--kv-tokens", 65536, "--max-running", 64, "--quiet", "--header-timeout", 5)
RATE = 32 << 20  # of all attackers together
THINK_S = 2.0  # between two requests of a client, on average
LARGE, SLOWLORIS, LEAVERS, NOISE = 4, 30, 4, 2  # attackers of each kind


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def read_response(reader):
    """(status, headers, body), by content-length or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict((line.partition(":")[0].lower(), line.partition(":")[2].strip()) for line in head[1:] if line)
    if headers.get("transfer-encoding") != "chunked":
        return int(head[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while True:
        size = int(await reader.readline(), 16)
        body += await reader.readexactly(size)
        await reader.readline()
        if size == 0:
            return int(head[0].split()[1]), headers, body


class Clients:
    """Many that ask a little, wait, and ask again on the same connection."""

    def __init__(self, port, count):
        self.port, self.count = port, count
        self.times, self.wrong = [], []

    async def client(self, number, end):
        rng = random.Random(number)
        await asyncio.sleep(rng.random() * THINK_S)
        reader = writer = None
        while time.monotonic() < end:
            body = json.dumps({"messages": [{"role": "user", "content": f"Client {number} says {rng.random()}"}], "max_tokens": 4,
                               "temperature": 0, "stream": rng.random() < 0.5}).encode()
            start = time.monotonic()
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
                             b"content-length: %d\r\n\r\n" % len(body) + body)
                status, _, answer = await asyncio.wait_for(read_response(reader), 60)
                self.times.append(time.monotonic() - start)
                if status != 200:
                    self.wrong.append(f"{status}: {answer[:200]}")
            except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
                self.wrong.append(repr(error))
                writer = None
            await asyncio.sleep(rng.random() * 2 * THINK_S)
        if writer:
            writer.close()

    async def run(self, seconds):
        self.times, self.wrong = [], []
        end = time.monotonic() + seconds
        await asyncio.gather(*(self.client(i, end) for i in range(self.count)))
        return percentile(self.times, 0.99)


class Attackers:
    """In a process of their own; run() returns {status: count} and what was not to be."""

    def __init__(self, port, files):
        self.port, self.files = port, files
        self.statuses, self.wrong = {}, []
        self.sent, self.begin = 0, time.monotonic()

    async def paid(self, count):
        """Waits until so many bytes more may be sent."""
        self.sent += count
        ahead = self.sent / RATE - (time.monotonic() - self.begin)
        if ahead > 0:
            await asyncio.sleep(ahead)

    def took(self, status, headers, body, name):
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status >= 500 and not (status == 503 and "retry-after" in headers):
            self.wrong.append(f"{name}: {status} {body[:200]}")

    async def send(self, path, file, part=1.0):
        """A request as far as `part` of its bytes; its connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        size = os.path.getsize(file)
        head = post(path, b"").replace(b"content-length: 0", b"content-length: %d" % size)
        writer.write(head)
        with open(file, "rb") as body:
            left = int(size * part)
            while left > 0 and (piece := body.read(min(left, 1 << 18))):
                left -= len(piece)
                await self.paid(len(piece))
                writer.write(piece)
                await writer.drain()
        return reader, writer

    async def large(self, rng):
        name, path, file = rng.choice(self.files)
        reader, writer = await self.send(path, file)
        try:
            self.took(*await asyncio.wait_for(read_response(reader), 120), name)
        finally:
            writer.close()

    async def leaver(self, rng):
        _, path, file = rng.choice(self.files)
        _, writer = await self.send(path, file, rng.choice((rng.random(), 1.0)))
        await asyncio.sleep(rng.random())
        writer.close()

    async def slowloris(self, rng):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n")
            for _ in range(60):
                writer.write(rng.choice((b"x", b"x: y\r\n")))
                await writer.drain()
                await asyncio.sleep(0.3)
        finally:
            writer.close()

    async def noise(self, rng):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            begin = rng.choice((b"", b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999999999\r\n\r\n",
                                b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\n"))
            writer.write(begin + rng.randbytes(2000))
            await writer.drain()
            await asyncio.wait_for(reader.read(4096), 10)
        finally:
            writer.close()
        await asyncio.sleep(0.2)

    async def run(self, seconds):
        end = time.monotonic() + seconds

        async def again(kind, number):
            rng = random.Random(number)
            while time.monotonic() < end:
                try:
                    await kind(rng)
                except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
                    await asyncio.sleep(0.1)  # cut off, as they deserve

        kinds = [(self.large, LARGE), (self.slowloris, SLOWLORIS), (self.leaver, LEAVERS), (self.noise, NOISE)]
        await asyncio.gather(*(again(kind, 1000 * k + i) for k, (kind, count) in enumerate(kinds) for i in range(count)))


def attack(port, files, seconds, queue):
    os.nice(10)
    attackers = Attackers(port, files)
    asyncio.run(attackers.run(seconds))
    queue.put((attackers.statuses, attackers.wrong, attackers.sent))


def resident_mib(pid):
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


async def watch(pid, seconds, samples):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        samples.append(resident_mib(pid))
        await asyncio.sleep(1)


def memory_growth(samples):
    """MiB from the third quarter to the fourth, by their medians: the first half fills caches and pools."""
    quarter = max(1, len(samples) // 4)
    return percentile(samples[-quarter:], 0.5) - percentile(samples[-2 * quarter:-quarter], 0.5)


def soak(binary, seconds, clients, folder):
    files = []
    for number, (name, path, body, _) in enumerate(attacks(FULL)):
        file = pathlib.Path(folder) / str(number)
        file.write_bytes(body)
        files.append((name, path, str(file)))
    quiet_s = max(15, min(120, seconds // 6))
    with Server(binary, MODEL, *OPTIONS) as server:
        crowd = Clients(server.port, clients)
        asyncio.run(crowd.run(5))  # masks, caches and pages for the first time
        quiet = asyncio.run(crowd.run(quiet_s))
        problems = [f"alone, a client got {wrong}" for wrong in crowd.wrong]
        print(f"quiet: {len(crowd.times)} requests in {quiet_s} s, p50 {percentile(crowd.times, 0.5) * 1e3:.0f} ms, "
              f"p99 {quiet * 1e3:.0f} ms, {resident_mib(server.process.pid):.0f} MiB", flush=True)
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        rest = seconds - quiet_s
        attackers = context.Process(target=attack, args=(server.port, files, rest, queue))
        attackers.start()
        samples = []

        async def both():
            return (await asyncio.gather(crowd.run(rest), watch(server.process.pid, rest, samples)))[0]

        busy = asyncio.run(both())
        statuses, wrong, sent = queue.get(timeout=300)
        attackers.join()
        growth = memory_growth(samples)
        print(f"under attack: {len(crowd.times)} requests in {rest} s, p50 {percentile(crowd.times, 0.5) * 1e3:.0f} ms, "
              f"p99 {busy * 1e3:.0f} ms ({busy / quiet:.1f} times), {sent >> 20} MiB of attacks answered {statuses}, "
              f"{samples[0]:.0f} to at most {max(samples):.0f} MiB, {growth:+.0f} MiB in the last quarter", flush=True)
        problems += [f"under attack, a client got {w}" for w in crowd.wrong] + [f"an attacker got {w}" for w in wrong]
        if busy > 3 * quiet + 0.02:  # the clock of a busy machine is no better than that
            problems.append(f"p99 is {busy / quiet:.1f} times that without attackers, expected at most 3")
        # Some bodies of 16 MiB, and the trees that are made of them, more or less are no growth.
        if growth > max(64, 0.15 * max(samples)):
            problems.append(f"memory grew by {growth:.0f} MiB in the last quarter")
        if server.request("GET", "/health")[0] != 200:
            problems.append("it is not healthy afterwards")
    if server.process.returncode != 0:
        problems.append(f"it ended with status {server.process.returncode}")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--clients", type=int, default=200)
    arguments = parser.parse_args()
    socket.setdefaulttimeout(60)
    with tempfile.TemporaryDirectory(prefix="millrace-soak-") as folder:
        problems = soak(arguments.binary, arguments.seconds, arguments.clients, folder)
    for problem in problems[:20]:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

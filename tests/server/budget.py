"""What a request may cost: attacks one by one, what others notice of them, and how work for nobody ends.

A tiny model: here it is the reading of requests that takes time, not the answers.
"""

import json
import pathlib
import signal
import socket
import threading
import time
import unittest

import harness
import shared
from attacks import FULL, attacks
from harness import ROOT, Server, post
from shared import wait_for

MODEL = ROOT / "tests/golden/models/llama3/model.gguf"
# Small, and some ten seconds of compiling: strings that several patterns hold at once.
SLOW = json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "response_format": {
    "type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": {
        f"p{i}": {"allOf": [{"type": "string", "pattern": f"^(a|b|ab){{1,{i + n}}}$"} for n in (80, 81, 82)], "maxLength": 900}
        for i in range(12)}}}}}).encode()
CHAT = "/v1/chat/completions"


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def slow_thread_seconds(pid):
    """Processor time of the threads that read large requests."""
    ticks = 0
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        if name == "http-slow":
            ticks += sum(int(field) for field in rest.split()[11:13])
    return ticks / 100


def ask_small(server):
    """A request as others send it; how long it took."""
    start = time.monotonic()
    status, _, body = server.request("POST", "/v1/completions", {"prompt": "a b c", "max_tokens": 1})
    assert status == 200, body
    return time.monotonic() - start


class Budget(unittest.TestCase):
    def start(self, *options):
        server = Server(shared.BINARY, MODEL, "--ctx", 2048, "--kv-tokens", 8192, "--quiet", *options)
        server.__enter__()
        self.addCleanup(server.__exit__)
        return server

    def send_and_keep(self, server, path, body):
        s = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self.addCleanup(s.close)
        s.sendall(post(path, body))
        return s

    def test_attacks_one_by_one(self):
        server, slowest, worked = self.start("--alias", "m"), [], {}
        for name, path, body, statuses in attacks(FULL):
            start, work = time.monotonic(), slow_thread_seconds(server.process.pid)
            status, _, answer = server.request("POST", path, body, timeout=120)
            slowest.append((time.monotonic() - start, name))
            worked[name] = slow_thread_seconds(server.process.pid) - work
            self.assertIn(status, statuses, (name, answer[:300]))
        slowest.sort(reverse=True)
        print("slowest attacks:", ", ".join(f"{name} {seconds:.2f} s" for seconds, name in slowest[:6]))
        # The limit on work is 10 s; this is for what a busy machine adds to it.
        self.assertLess(slowest[0][0], 60, slowest[:3])
        # Processor time: a busy machine lets them wait.
        for name in ("one letter", "one letter in a chat", "one letter, what is too much left out",
                     "one letter to embed", "arguments of a call", "calls", "to count", "to count as a response", "allOf of anyOf", "logit_bias 300000", "to render", "messages to render", "one letter to rank"):
            self.assertLess(worked[name], 8, f"{name}: should be refused by a look at its size")

    def test_others_hardly_notice_two_large_bodies(self):
        server = self.start()
        bodies = [(path, body) for _, path, body, _ in attacks(FULL) if len(body) > 8 << 20]
        quiet = [ask_small(server) for _ in range(100)]
        ending, sent = threading.Event(), [0, 0]

        def attack(which):
            while not ending.is_set():
                path, body = bodies[(which * len(bodies) // 2 + sent[which]) % len(bodies)]
                server.request("POST", path, body, timeout=120)
                sent[which] += 1

        threads = [threading.Thread(target=attack, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        busy = []
        while (sum(sent) < 12 or len(busy) < 100) and len(busy) < 5000:
            busy.append(ask_small(server))
        ending.set()
        for thread in threads:
            thread.join()
        before, after = percentile(quiet, 0.99), percentile(busy, 0.99)
        print(f"small requests: p50 {percentile(quiet, 0.5) * 1e3:.1f} -> {percentile(busy, 0.5) * 1e3:.1f} ms, "
              f"p99 {before * 1e3:.1f} -> {after * 1e3:.1f} ms over {len(busy)}, beside {sum(sent)} large bodies")
        # 50 ms are promised on a machine with a core for them; this one also makes the bodies and may be busy.
        self.assertLess(after, 10 * before + 1)

    def test_who_leaves_stops_the_work(self):
        server = self.start("--request-work-timeout", 600)
        pid = server.process.pid
        gone = self.send_and_keep(server, CHAT, SLOW)
        self.assertTrue(wait_for(lambda: slow_thread_seconds(pid) > 0.3))
        gone.close()
        status, answer = server.json("POST", "/tokenize", {"content": "a " * 50_000})  # waits for the thread
        self.assertEqual(status, 200, answer)
        used = slow_thread_seconds(pid)
        time.sleep(0.5)
        self.assertLess(slow_thread_seconds(pid) - used, 0.1)

    def test_time_is_up(self):
        server = self.start("--request-work-timeout", 0.3)
        status, answer = server.json("POST", CHAT, SLOW)
        self.assertEqual((status, answer["error"]["code"]), (400, "request_too_expensive"), answer)
        self.assertIn("--request-work-timeout", answer["error"]["message"])

    def test_a_full_queue_is_said_and_a_signal_ends_it(self):
        server = self.start("--slow-queue", 1, "--request-work-timeout", 600, "--drain-timeout", 0)
        waiting = [self.send_and_keep(server, CHAT, SLOW)]
        metric = "millrace:http_queued_work{"

        def queued():
            text = server.request("GET", "/metrics")[2].decode()
            return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(metric))

        def another_waits():  # two may want the one place at the same time: one of them is refused then
            waiting.append(self.send_and_keep(server, CHAT, SLOW))
            time.sleep(0.5)
            return queued() == 1

        self.assertTrue(any(another_waits() for _ in range(60)))
        status, health = server.json("GET", "/health")
        self.assertEqual((status, health["status"]), (503, "overloaded"))
        self.assertEqual([server.request("GET", path)[0] for path in ("/ready", "/live")], [200, 200])
        status, headers, answer = server.request("POST", CHAT, SLOW)
        self.assertEqual(status, 503, answer[:300])
        self.assertGreaterEqual(int(headers["retry-after"]), 1)
        ask_small(server)
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(server.process.wait(30), 0)
        answers = [harness.read_all(s) for s in waiting]
        self.assertEqual(answers.count(b""), 2, answers)  # the one at work and the one that waited

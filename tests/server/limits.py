"""Servers started for one test each: keys, rates, connections, time limits, signals, TLS, bad options."""

import json
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

import harness
import shared
from harness import SMOLLM2, Server, post
from shared import LONG, MESSAGES, wait_for

LONGER = {**LONG, "max_tokens": 8000}  # still running when others have been asked and answered, on any machine


class Limits(unittest.TestCase):
    """Servers of their own: keys, rates, connections, signals."""

    def start(self, *options, ctx=2048):
        server = Server(shared.BINARY, SMOLLM2, "--ctx", ctx, *options)
        server.__enter__()
        self.addCleanup(server.__exit__)
        return server

    def test_keys_rate_and_reload(self):
        with tempfile.TemporaryDirectory() as folder:
            keys = pathlib.Path(folder) / "keys"
            keys.write_text("# people\nada sk-ada\nsk-second\n")
            server = self.start("--keys", keys, "--rate", 4, "--cors", "https://app.example")
            ask = {"prompt": "x", "max_tokens": 1}

            def status(key, **options):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                return server.request("POST", "/v1/completions", ask, headers=headers, **options)

            self.assertEqual(server.request("GET", "/health")[0], 200)
            self.assertEqual(server.request("GET", "/stats")[0], 401)
            for wrong in (None, "sk-ad", "sk-adaa", "sk-adasomething", ""):
                self.assertEqual(status(wrong)[0], 401)
            # Four at once, then one in 15 s. On a slow machine some come back while the first ones are answered.
            start, answered = time.monotonic(), 0
            while (refused := status("sk-ada"))[0] == 200:
                answered += 1
            self.assertEqual(refused[0], 429)
            self.assertGreaterEqual(int(refused[1]["retry-after"]), 1)
            self.assertTrue(4 <= answered <= 4 + (time.monotonic() - start) / 15, answered)
            self.assertEqual(status("sk-second")[0], 200)  # a bucket of its own
            keys.write_text("sk-third\n")
            server.process.send_signal(signal.SIGHUP)
            self.assertTrue(wait_for(lambda: status("sk-third")[0] in (200, 429)))
            self.assertEqual(status("sk-second")[0], 401)
            keys.write_text("one two three\n")
            server.process.send_signal(signal.SIGHUP)
            self.assertTrue(wait_for(lambda: "old ones stay" in server.log()))
            self.assertIn(status("sk-third")[0], (200, 429))
            _, headers, _ = server.request("OPTIONS", "/v1/completions", headers={"origin": "https://app.example"})
            self.assertEqual(headers["access-control-allow-origin"], "https://app.example")
            self.assertNotIn("sk-ada", server.log())
            self.assertIn("ada", server.log())

    def test_who_guesses_keys_has_to_wait(self):
        with tempfile.TemporaryDirectory() as folder:
            keys = pathlib.Path(folder) / "keys"
            keys.write_text("sk-right\n")
            server = self.start("--keys", keys)

            def status(key):
                return server.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})

            answers = [status(f"sk-{i}") for i in range(200)]
            self.assertEqual({answer[0] for answer in answers[:60]}, {401})
            self.assertEqual(answers[-1][0], 429)
            self.assertGreaterEqual(int(answers[-1][1]["retry-after"]), 1)
            self.assertEqual(status("sk-right")[0], 200)

    def test_all_bodies_together_have_a_limit(self):
        server = self.start("--body-memory", 1)
        head = post("/tokenize", b"").replace(b"content-length: 0", b"content-length: 2000000")
        held = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self.addCleanup(held.close)
        held.sendall(head + b" " * 900_000)  # and no more
        metric = "millrace:http_body_bytes"

        def received():
            text = server.request("GET", "/metrics")[2].decode()
            return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(metric))

        self.assertTrue(wait_for(lambda: received() == 900_000), received())
        answer = server.raw(head + b" " * 400_000)
        self.assertIn(b"HTTP/1.1 503 ", answer)
        self.assertIn(b"retry-after: 1", answer)
        self.assertEqual(server.request("POST", "/tokenize", {"content": "small ones are taken"})[0], 200)
        held.close()
        self.assertTrue(wait_for(lambda: received() == 0), received())

    def test_sizes_queue_and_idle_time(self):
        server = self.start("--max-running", 1, "--max-queue", 1, "--max-body", 1, "--max-header", 1, "--idle-timeout", 2, ctx=8192)
        with open("/proc/net/tcp") as table:
            listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
        self.assertIn(f"0100007F:{server.port:04X}", listening)  # 127.0.0.1, and nothing wider
        for length, status in ((1 << 20, 200), ((1 << 20) + 1, 413)):
            data = '{"content": "' + "mill " * (length // 5)
            data = data[:length - 2] + '"}'
            self.assertEqual(len(data), length)
            self.assertIn(f"HTTP/1.1 {status} ".encode(), server.raw(post("/tokenize", data)))
        self.assertIn(b"HTTP/1.1 431 ", server.raw(post("/tokenize", "{}", f"x: {'y' * 2000}\r\n")))
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as idle:
            self.assertEqual(idle.recv(1), b"")  # nothing is sent: closed by the server, or this raises

        streams = []
        for state in ("running", "waiting"):
            s = socket.create_connection(("127.0.0.1", server.port))
            self.addCleanup(s.close)
            streams.append(s)
            s.sendall(post("/v1/chat/completions", json.dumps(LONGER)))
            self.assertTrue(wait_for(lambda name=state: server.stats()["requests"][name] == 1), state)
        status, headers, body = server.request("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
        self.assertEqual(status, 503, body)
        self.assertGreaterEqual(int(headers["retry-after"]), 1)
        for s in streams:
            s.close()
        self.assertTrue(wait_for(lambda: server.stats()["requests"]["running"] + server.stats()["requests"]["waiting"] == 0))
        self.assertEqual(server.request("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})[0], 200)

    def test_priority_goes_first(self):
        server = self.start("--max-running", 1, ctx=8192)
        first = socket.create_connection(("127.0.0.1", server.port))
        self.addCleanup(first.close)
        first.sendall(post("/v1/chat/completions", json.dumps(LONGER)))
        self.assertTrue(wait_for(lambda: server.stats()["requests"]["running"] == 1))
        waiting = []
        for number, priority in enumerate((-5, 0)):  # above that of the first, the second would take its place
            s = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            self.addCleanup(s.close)
            s.sendall(post("/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True, "priority": priority})))
            self.assertTrue(wait_for(lambda n=number: server.stats()["requests"]["waiting"] == n + 1))
            waiting.append(s)
        first.close()
        for s in waiting:
            self.assertIn(b"200 OK", harness.read_all(s))
        high, low = [entry["start"] + entry["queue_s"] for entry in server.stats()["timeline"][:2]]  # newest first
        self.assertLess(high, low)

    def test_an_answer_s_time_and_one_key_s_cache(self):
        with tempfile.TemporaryDirectory() as folder:
            keys = pathlib.Path(folder) / "keys"
            keys.write_text("ada sk-ada\nbob sk-bob\n")
            server = self.start("--keys", keys)

            def ask(key, **fields):
                status, answer = server.json("POST", "/v1/completions", {"ignore_eos": True, **fields},
                                             headers={"authorization": f"Bearer {key}"})
                self.assertEqual(status, 200, answer)
                return answer["choices"][0]["finish_reason"], answer["usage"]

            prompt = "The mill stands at the river and has two wheels. " * 4
            cached = [ask(key, prompt=prompt, max_tokens=1)[1]["prompt_tokens_details"]["cached_tokens"]
                      for key in ("sk-ada", "sk-bob", "sk-ada", "sk-bob")]
            self.assertEqual(cached[:2], [0, 0])
            self.assertTrue(cached[2] > 0 and cached[3] > 0, cached)
        server = self.start("--request-timeout", 1)
        finish, usage = ask("nobody's", prompt="Once", max_tokens=2000)
        self.assertEqual(finish, "length")
        self.assertLess(usage["completion_tokens"], 2000)

    def test_connection_limit_and_slow_reader(self):
        server = self.start("--max-connections", 8, "--max-connections-per-address", 8, "--write-timeout", 1, "--max-running", 4)
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        ask = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        self.assertTrue(wait_for(lambda: b" 503 " in server.raw(ask)))
        for s in idle:
            s.close()
        self.assertTrue(wait_for(lambda: b" 200 " in server.raw(ask)))
        # A reader that never reads is given up; others go on meanwhile.
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", server.port))
        wide = {"prompt": "x", "max_tokens": 1900, "n": 4, "ignore_eos": True, "stream": True, "logprobs": 20}
        slow.sendall(post("/v1/completions", json.dumps(wide)))
        self.assertEqual(server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0], 200)
        self.assertTrue(wait_for(lambda: server.stats()["requests"]["cancelled"] == 1, 120), server.stats()["requests"])
        slow.close()

    @unittest.skipUnless(shutil.which("prlimit"), "no prlimit; apt-get install util-linux")
    def test_more_connections_than_files(self):
        server = Server(shared.BINARY, SMOLLM2, "--ctx", 256, "--max-running", 2)
        server.command = ["prlimit", "--nofile=32:100", *server.command]
        with server:
            self.assertIn("the limit of open files leaves fewer connections", server.log())
            most = server.stats()["server"]["max_connections"]
            self.assertTrue(32 < most < 100, most)  # the soft limit was raised
            idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(150)]
            # The first of those that are too many is told so at once, and nothing but connections is refused.
            idle[most + 1].settimeout(60)
            self.assertIn(b"too many connections", idle[most + 1].recv(4096))
            for s in idle:
                s.close()
            self.assertTrue(wait_for(lambda: b" 200 " in server.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")))
            self.assertNotIn("accept failed", server.log())

    def test_sigterm_drains(self):
        server = self.start("--idle-timeout", 30)
        idle = socket.create_connection(("127.0.0.1", server.port))
        self.addCleanup(idle.close)
        stream = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self.addCleanup(stream.close)
        body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
        stream.sendall(post("/v1/completions", json.dumps(body)))
        first = stream.recv(4096)
        self.assertIn(b"200 OK", first)
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(harness.read_all(idle), b"")
        rest = first + harness.read_all(stream)
        self.assertIn(b"data: [DONE]", rest)
        self.assertEqual(server.process.wait(60), 0)
        with self.assertRaises(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=60)

    def test_second_signal_ends_at_once(self):
        server = self.start("--drain-timeout", 600, ctx=8192)
        stream = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self.addCleanup(stream.close)
        stream.sendall(post("/v1/chat/completions", json.dumps(LONGER)))
        begin = stream.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        # Signals of one kind that come together are one.
        self.assertTrue(wait_for(lambda: "draining" in server.log()))
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(server.process.wait(60), 0)
        self.assertIn("second signal", server.log())
        self.assertNotIn(b"[DONE]", begin + harness.read_all(stream))

    def test_tls(self):
        import shutil
        import ssl
        if shutil.which("openssl") is None:
            self.skipTest("SKIPPED: no openssl program to make a certificate with; apt-get install openssl")
        with tempfile.TemporaryDirectory() as folder:
            cert, key = f"{folder}/cert.pem", f"{folder}/key.pem"
            subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1",
                            "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
            server = self.start("--tls-cert", cert, "--tls-key", key)
            self.assertEqual(server.scheme, "https")
            context = ssl.create_default_context(cafile=cert)
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain:
                with context.wrap_socket(plain, server_hostname="127.0.0.1") as s:
                    body = {"prompt": "x", "max_tokens": 5, "stream": True}
                    s.sendall(post("/v1/completions", json.dumps(body)))
                    self.assertIn(b"data: [DONE]", harness.read_all(s))
            self.assertEqual(server.raw(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", timeout=5)[:5] in (b"", b"\x15\x03\x01\x00\x02"), True)

    def test_bad_options(self):
        for options, says in ((["--host", "999.1.1.1"], "--host"), (["--keys", "/nonexistent"], "/nonexistent"),
                              (["--tls-cert", "/nonexistent", "--tls-key", "/nonexistent"], "--tls-cert")):
            done = subprocess.run([shared.BINARY, "serve", SMOLLM2, "--port", "0", *options], capture_output=True, timeout=60, cwd=harness.ROOT)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertRegex(done.stderr.decode(), r"\Amillrace: [^\n]*" + says)

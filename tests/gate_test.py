"""What stands at the server's door, through its own socket: requests within requests, hostile bytes, names and origins, limits
of clients, what answers give away, and the end.

    tests/gate_test.py PATH/TO/millrace [unittest options]

The cases are data: server/smuggling.py and server/adversarial.py. haproxy_test.py sends the first behind HAProxy. The
model of the tests that need some time for an answer is build/models/SmolLM2-135M-Instruct.Q4_1.gguf
(tools/fetch_model.py smollm2); without it they are skipped and said.
"""

import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "server"))
import adversarial  # noqa: E402
import harness  # noqa: E402
import shared  # noqa: E402
import smuggling  # noqa: E402
from harness import ROOT, SMOLLM2, Server, in_threads, post, read_all  # noqa: E402
from shared import wait_for  # noqa: E402

TINY = ROOT / "tests/golden/models/llama3/model.gguf"
THREADS = 8
ASK = {"prompt": "a", "max_tokens": 1}
LONG = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}


def status_of(reply):
    """Of the last response but those of 1xx; None when nothing came."""
    return smuggling.statuses_of(reply)[0] if reply else None


class Started(unittest.TestCase):
    def start(self, *options, model=TINY):
        server = Server(shared.BINARY, model, *options)
        server.__enter__()
        self.addCleanup(server.__exit__)
        return server

    def keys(self, text):
        folder = tempfile.TemporaryDirectory(prefix="millrace-gate-")
        self.addCleanup(folder.cleanup)
        path = pathlib.Path(folder.name) / "keys"
        path.write_text(text)
        return path


class HostileBytes(Started):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(shared.BINARY, TINY, "--header-timeout", 2, "--max-body", 1, "--log-json")
        cls.server.__enter__()
        cls.addClassCleanup(cls.server.__exit__)

    def healthy(self):
        return self.server.request("GET", "/health", timeout=10)[0] == 200

    def paths(self):
        return {json.loads(line).get("path") for line in self.server.log().split("\n")[:-1] if line.startswith("{")}

    def send_all(self, cases, judge):
        """What `judge` finds wrong with the answers; `timeout` is far beyond what any may take."""
        def some(i):
            wrong = []
            for number in range(i, len(cases), THREADS):
                name, data, statuses = cases[number]
                start = time.monotonic()
                reply = self.server.raw(data, timeout=30)
                if time.monotonic() - start > 20:
                    wrong.append((name, "took too long"))
                complaint = judge(number, reply, statuses)
                if complaint:
                    wrong.append((name, complaint, reply[:300]))
                if not self.healthy():
                    wrong.append((name, "/health"))
            return wrong
        return [one for part in in_threads(THREADS, some) for one in part]

    def test_nothing_is_smuggled(self):
        rows = smuggling.rows()
        self.assertGreaterEqual(len(rows), 200)

        def judge(number, reply, statuses):
            found = smuggling.statuses_of(reply)
            if statuses != smuggling.ANY_ONE and len(found) != 1:
                return f"{len(found)} responses"
            if len(found) not in (1, 2) or found[1:] not in ([], [404]):
                return f"answered {found}"
            return None if found[0] in statuses else f"{found[0]}, expected one of {statuses}"

        # What is no attack leaves the connection open: a request of our own, which is the second, closes it.
        last = b"GET /last HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        rows = [(name, data + last if statuses == smuggling.ANY_ONE else data, statuses) for name, data, statuses in rows]
        self.assertEqual(self.send_all(rows, judge), [])
        self.assertIn("/last", self.paths())
        self.assertFalse({path for path in self.paths() if path and "smuggled" in path})

    def test_hostile_bytes(self):
        cases = adversarial.cases()
        self.assertGreaterEqual(len(cases), 200)

        def judge(number, reply, statuses):
            status = status_of(reply)
            if status not in statuses:
                return f"{status}, expected one of {statuses}"
            if status and status >= 400 and b"HEAD" not in cases[number][1][:4] and b'{"error":{"message":' not in reply:
                return "no error object"
            return None

        self.assertEqual(self.send_all(cases, judge), [])
        failed = {json.loads(line).get("status", 0) for line in self.server.log().split("\n")[:-1] if line.startswith("{")}
        self.assertEqual({status for status in failed if status >= 500} - {501, 505}, set())

    def test_an_oracle_that_others_wrote(self):
        """What h11 refuses is refused here as well: of no case do we expect a good answer only."""
        missing = harness.package("openai")  # brings h11
        if missing:
            self.skipTest(f"SKIPPED: {missing}")
        import h11
        refused = 0
        for name, data, statuses in smuggling.rows() + adversarial.cases():
            connection = h11.Connection(h11.SERVER, max_incomplete_event_size=16 << 10)
            try:
                connection.receive_data(data)
                while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
                    pass
            except h11.RemoteProtocolError:
                refused += 1
                self.assertTrue(any(status is None or status >= 400 for status in statuses), name)
        self.assertGreater(refused, 150)

    def test_cut_anywhere(self):
        whole = adversarial.chunked(adversarial.GOOD_CHUNK, b"0\r\nx: y\r\n\r\n")
        places = range(0, len(whole), 7)
        server = self.start()  # one that waits for the rest, as long as a busy machine may take to send it

        def some(i):
            for at in places[i::THREADS]:
                reply = server.raw(whole[:at], timeout=30, half_close=True)
                self.assertIn(status_of(reply), (None, 200))
                with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:  # and byte by byte around it
                    s.sendall(whole[:at])
                    time.sleep(0.002)
                    s.sendall(whole[at:])
                    self.assertEqual(status_of(read_all(s)), 200)
        in_threads(THREADS, some)
        self.assertEqual(server.request("GET", "/health")[0], 200)

    def test_slow_clients_are_cut_off(self):
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        starts = [b"G", b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: ", head + b"Content-Length: 5000\r\n\r\n",
                  head + b"Transfer-Encoding: chunked\r\n\r\n", head + b"Transfer-Encoding: chunked\r\n\r\n1;",
                  head + b"Transfer-Encoding: chunked\r\n\r\n0\r\nx: ", b"\r\n"]

        def one(i):
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as s:
                s.sendall(starts[i])
                begin = time.monotonic()
                while time.monotonic() - begin < 20:
                    try:
                        s.sendall(b"1")
                        s.settimeout(0.05)
                        if s.recv(100) == b"":
                            return True
                        return True  # told so
                    except TimeoutError:
                        continue
                    except OSError:
                        return True
            return False
        self.assertEqual(in_threads(len(starts), one), [True] * len(starts))
        self.assertTrue(self.healthy())

    def test_pipelined(self):
        one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        bad = b"GET /health HTTP/1.1\r\n\r\n"
        reply = self.server.raw(one * 300 + bad + one * 10)
        self.assertEqual(smuggling.statuses_of(reply), [200] * 300 + [400])


class Sites(Started):
    def test_names_that_were_given(self):
        def status(server, host, headers=None, path="/v1/models"):
            return server.request("GET", path, headers={"host": host, **(headers or {})})

        server = self.start("--allow-host", "chat.example", "--allow-host", "Other.Example")
        self.assertEqual([status(server, host)[0] for host in ("chat.example", "CHAT.EXAMPLE:443", "other.example", "evil.example")],
                         [200, 200, 200, 403])
        told = json.loads(status(server, "evil.example")[2])["error"]
        self.assertIn("--allow-host evil.example", told["message"])
        self.assertEqual(status(server, "evil.example", path="/ready")[0], 200)  # those who watch the server
        server = self.start("--allow-host", "*")
        self.assertEqual(status(server, "evil.example")[0], 200)
        self.assertEqual(server.request("POST", "/tokenize", {"content": "a"}, headers={"origin": "https://evil.example"})[0], 403)
        server = self.start("--keys", self.keys("sk-1\n"), "--cors", "https://app.example")
        authorization = {"authorization": "Bearer sk-1"}
        self.assertEqual(status(server, "evil.example", authorization)[0], 200)  # a page there has no key
        self.assertEqual(status(server, "evil.example")[0], 401)
        for origin, expected in (("https://app.example", 200), ("https://evil.example", 403)):
            self.assertEqual(server.request("POST", "/tokenize", {"content": "a"}, headers={"origin": origin, **authorization})[0], expected)
        self.assertEqual(server.request("GET", "/v1/models", headers={"x-api-key": "sk-1"})[0], 200)

    def test_every_address(self):
        server = self.start("--host", "0.0.0.0")
        for host, expected in (("10.1.2.3:80", 200), ("[2001:db8::1]", 200), ("evil.example", 403)):
            self.assertEqual(server.request("GET", "/v1/models", headers={"host": host})[0], expected)

    def test_curl_s_form_is_told_what_to_say(self):
        server = self.start()
        status, _, body = server.request("POST", "/tokenize", {"content": "a"}, headers={"content-type": "application/x-www-form-urlencoded"})
        self.assertEqual(status, 415)
        self.assertIn("-H 'content-type: application/json'", json.loads(body)["error"]["message"])


class Clients(Started):
    """Limits of each client, with the tiny model."""

    def test_prompts_count_as_requests(self):
        server = self.start("--rate", 50)
        status, headers, body = server.request("POST", "/v1/completions", {**ASK, "prompt": ["a"] * 30})
        self.assertEqual((status, headers["x-ratelimit-limit-requests"]), (200, "50"), body)
        status, headers, body = server.request("POST", "/v1/completions", {**ASK, "prompt": ["a"] * 30})
        self.assertEqual(status, 429, body)
        self.assertGreaterEqual(int(headers["retry-after"]), 1)
        self.assertEqual(json.loads(body)["error"]["code"], "rate_limit_exceeded")
        self.assertEqual(server.request("POST", "/v1/embeddings", {"input": ["a"] * 30})[0], 429)
        self.assertEqual(server.request("POST", "/v1/completions", {**ASK, "prompt": ["a"] * 10})[0], 200)

    def test_tokens_a_minute(self):
        server = self.start("--tokens-per-minute", 60)
        answered = 0
        while True:
            status, headers, body = server.request("POST", "/v1/completions", {"prompt": [[5] * 20], "max_tokens": 10, "ignore_eos": True})
            if status != 200:
                break
            answered += 1
            self.assertLess(answered, 20)
        self.assertEqual((status, headers["x-ratelimit-remaining-tokens"]), (429, "0"), body)
        self.assertGreaterEqual(int(headers["retry-after"]), 1)
        self.assertIn(answered, (2, 3))
        self.assertEqual(server.request("GET", "/v1/models")[0], 200)

    def test_priority(self):
        keys = self.keys("ada sk-a priority=10\nbob sk-b\ncy sk-c priority=-5\n")
        server = self.start("--keys", keys)

        def ask(key, **fields):
            return server.json("POST", "/v1/completions", {**ASK, **fields}, headers={"authorization": f"Bearer {key}"})

        self.assertEqual([ask("sk-a", priority=10)[0], ask("sk-a", priority=11)[0], ask("sk-b", priority=0)[0], ask("sk-b", priority=-9)[0],
                          ask("sk-b", priority=1)[0], ask("sk-c")[0], ask("sk-c", priority=0)[0]], [200, 400, 200, 200, 400, 200, 400])
        error = ask("sk-b", priority=1)[1]["error"]
        self.assertEqual(error["param"], "priority")
        self.assertIn("--max-priority", error["message"])
        server = self.start("--max-priority", 7)
        self.assertEqual([server.request("POST", "/v1/completions", {**ASK, "priority": n})[0] for n in (7, 8)], [200, 400])

    def test_keys_have_limits_of_their_own(self):
        server = self.start("--keys", self.keys("ada sk-a rate=2\nbob sk-b rate=0\n"), "--rate", 4)

        def answered(key):
            return sum(server.request("POST", "/v1/completions", ASK, headers={"authorization": f"Bearer {key}"})[0] == 200 for _ in range(8))

        self.assertEqual((answered("sk-a"), answered("sk-b")), (2, 8))

    def test_connections_of_one_address(self):
        server = self.start("--max-connections", 20, "--max-connections-per-address", 3)
        ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        self.assertTrue(wait_for(lambda: status_of(server.raw(ask)) == 429))

        def from_another():
            with socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0), timeout=30) as s:
                s.sendall(ask)
                return status_of(read_all(s))
        self.assertEqual(from_another(), 200)
        for s in idle:
            s.close()
        self.assertTrue(wait_for(lambda: status_of(server.raw(ask)) == 200))

    def test_a_proxy_tells_who_asks(self):
        def ask(server, address):
            return server.request("POST", "/v1/completions", ASK, headers={"x-forwarded-for": address} if address else {})[0]

        server = self.start("--rate", 2, "--trust-proxy", "--log-json")
        self.assertEqual([ask(server, "6.6.6.6, 1.2.3.4") for _ in range(3)], [200, 200, 429])
        self.assertEqual([ask(server, "1.2.3.4, 5.6.7.8"), ask(server, None), ask(server, "nobody")], [200, 200, 200])
        self.assertIn('"remote":"1.2.3.4"', server.log())
        server = self.start("--rate", 2)
        self.assertEqual([ask(server, f"1.2.3.{i}") for i in range(3)], [200, 200, 429])


@unittest.skipUnless(SMOLLM2.is_file(), "SKIPPED: SmolLM2 is not there; run tools/fetch_model.py smollm2")
class Longer(Started):
    """With a model that needs some time."""

    def stream(self, server, body, headers=""):
        s = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self.addCleanup(s.close)
        s.sendall(post("/v1/completions", json.dumps(body), headers))
        return s

    def taken(self, ask):
        """What `ask` gives, asked again while it is a 429: who was answered before is counted for a moment longer."""
        answers = []
        self.assertTrue(wait_for(lambda: answers.append(ask()) or answers[-1][0] != 429), answers[-1:])
        return answers[-1]

    def test_requests_at_the_same_time(self):
        keys = self.keys("ada sk-a running=2\nbob sk-b\n")
        server = self.start("--ctx", 2048, "--keys", keys, "--max-requests-per-client", 1, model=SMOLLM2)
        bearer = {name: {"authorization": f"Bearer sk-{name}"} for name in "ab"}

        def ask(name):
            return server.request("POST", "/v1/completions", ASK, headers=bearer[name])

        def begin():
            s = self.stream(server, LONG, "authorization: Bearer sk-a\r\n")
            return status_of(s.recv(4096)), s

        streams = []
        for count in (1, 2):
            status, stream = self.taken(begin)
            self.assertEqual(status, 200)
            streams.append(stream)
            self.assertEqual(ask("a")[0], 200 if count == 1 else 429)
        self.assertEqual(ask("a")[1]["retry-after"], "1")
        self.assertEqual(ask("b")[0], 200)
        many = {**ASK, "prompt": ["a"] * 5}
        # Nothing else is under way.
        self.assertEqual(self.taken(lambda: server.request("POST", "/v1/completions", many, headers=bearer["b"]))[0], 200)
        background = {"input": "Hi", "background": True, "ignore_eos": True}
        made = self.taken(lambda: server.json("POST", "/v1/responses", background, headers=bearer["b"]))[1]
        self.assertEqual(ask("b")[0], 429)  # it counts without a connection
        self.assertEqual(server.request("POST", f"/v1/responses/{made['id']}/cancel", headers=bearer["b"])[0], 429)
        self.assertEqual(server.request("DELETE", f"/v1/responses/{made['id']}", headers=bearer["b"])[0], 200)
        self.assertTrue(wait_for(lambda: ask("b")[0] == 200))
        for s in streams:
            s.close()
        self.assertTrue(wait_for(lambda: ask("a")[0] == 200))

    def test_caches_of_keys_are_apart(self):
        prompt = {"prompt": "The mill stands at the river and has two wheels. " * 4, "max_tokens": 1}
        for options, shared_ones in (((), 0), (("--share-cache",), 1)):
            server = self.start("--ctx", 512, "--keys", self.keys("ada sk-a\nbob sk-b\n"), *options, model=SMOLLM2)
            cached = [server.json("POST", "/v1/completions", prompt, headers={"authorization": f"Bearer {key}"})[1]
                      ["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for key in ("sk-a", "sk-b", "sk-a")]
            self.assertEqual(cached, [False, bool(shared_ones), True])

    def test_the_end_comes_in_time(self):
        server = self.start("--ctx", 2048, "--drain-timeout", 3, model=SMOLLM2)
        # Requests that take long to read, as many as there are threads for it and more.
        large = json.dumps({"content": "a" * (15 << 20)}).encode()
        busy = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(4)]

        def send(s):
            try:
                s.sendall(post("/tokenize", large))
            except OSError:
                pass  # the server has gone

        senders = [threading.Thread(target=send, args=(s,)) for s in busy]
        for thread in senders:
            thread.start()
        stream = self.stream(server, LONG)
        self.assertIn(b"200 OK", stream.recv(4096))
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        told = []

        def drains():
            told.append(server.raw(ask, timeout=5))
            return b"shutting down" in told[-1]

        self.assertTrue(wait_for(drains, 3))
        self.assertEqual(status_of(told[-1]), 503)
        self.assertEqual(server.process.wait(60), 0)  # the three seconds of the option, the cut, threads, engine
        print(f"[  figure  ] SIGTERM to exit: {time.monotonic() - begin:.1f} s (goal 6)", file=sys.stderr)
        for thread in senders:
            thread.join()
        for s in busy:
            s.close()

    def test_a_second_signal_while_requests_are_read(self):
        server = self.start("--ctx", 2048, "--drain-timeout", 600, model=SMOLLM2)
        large = json.dumps({"content": "a" * (15 << 20)}).encode()
        busy = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(4)]
        for s in busy:
            self.addCleanup(s.close)
            s.sendall(post("/tokenize", large))
        server.process.send_signal(signal.SIGTERM)
        self.assertTrue(wait_for(lambda: "draining" in server.log()))
        server.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        self.assertEqual(server.process.wait(60), 0)  # and not the ten minutes of the option
        print(f"[  figure  ] second SIGTERM to exit: {time.monotonic() - begin:.1f} s (goal 5)", file=sys.stderr)


class GivenAway(Started):
    def test_stored_answers_are_their_owner_s(self):
        server = self.start("--keys", self.keys("ada sk-a\nbob sk-b\n"))
        ada, bob = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
        made = server.json("POST", "/v1/responses", {"input": "A secret", "max_output_tokens": 2}, headers=ada)[1]
        self.assertRegex(made["id"], r"\Aresp_[0-9a-f]{32}\Z")
        path = f"/v1/responses/{made['id']}"
        for method, where, body in (("GET", path, None), ("GET", path + "/input_items", None), ("DELETE", path, None), ("POST", path + "/cancel", None),
                                    ("POST", "/v1/responses", {"input": "x", "previous_response_id": made["id"]})):
            self.assertIn(server.request(method, where, body, headers=bob)[0], (400, 404), (method, where))
            self.assertEqual(server.request(method, where, body)[0], 401)
        self.assertEqual(server.request("GET", path, headers=ada)[0], 200)

    def test_statistics_name_no_answer(self):
        server = self.start()
        ids = [server.json("POST", "/v1/responses", {"input": "A secret", "max_output_tokens": 2})[1]["id"],
               server.json("POST", "/v1/completions", ASK)[1]["id"]]
        stats = server.stats()
        shown = json.dumps(stats) + server.request("GET", "/metrics")[2].decode()
        for one in ids:
            self.assertNotIn(one.split("_")[-1].split("-")[-1], shown)
        self.assertEqual([entry["id"] for entry in stats["timeline"][:2]], ["cmpl-2", "resp_1"])

    def test_no_answer_says_where_files_are(self):
        with tempfile.TemporaryDirectory(prefix="millrace-secret-place-") as folder:
            model = pathlib.Path(folder) / "mill.gguf"
            model.write_bytes(TINY.read_bytes())
            keys = pathlib.Path(folder) / "keys"
            keys.write_text("sk-1\n")
            server = self.start("--kv-dir", folder + "/kv", "--keys", keys, model=model)
            asked = [("GET", path, None) for path in ("/", "/v1/models", "/v1/models/mill", "/v1/models/x", "/stats", "/metrics", "/health", "/ready", "/live",
                                                      "/nowhere", "/openapi.json")]
            asked += [("POST", path, body) for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize",
                                                        "/detokenize", "/apply-template")
                      for body in ({}, {"model": "x"}, {"model": str(model)}, {"prompt": "a" * 9999}, {"prompt": [[1] * 9999]}, {"input": "a" * 9999},
                                   {"content": 1}, {"messages": []}, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "max_output_tokens": 1},
                                   {"input": "hi"}, {"prompt": "hi", "grammar": "root ::= x"}, {"prompt": "hi", "regex": "("})]
            for method, path, body in asked:
                for headers in ({"authorization": "Bearer sk-1"}, {}):
                    _, fields, text = server.request(method, path, body, headers=headers)
                    said = text.decode(errors="replace") + str(fields)
                    if body != {"model": str(model)}:
                        self.assertNotIn("secret-place", said, (method, path, body))
                    self.assertNotIn(str(ROOT), said, (method, path, body))


if __name__ == "__main__":
    shared.BINARY = os.path.abspath(sys.argv[1])
    unittest.main(argv=sys.argv[1:], verbosity=2)

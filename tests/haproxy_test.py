"""Two real servers behind HAProxy with deploy/haproxy.cfg: conversations find their cache, and a server that is killed
under load takes no answer with it. Then the other files of deploy/, each with the tool that reads it.

    tests/haproxy_test.py PATH/TO/millrace [unittest options]

Needs Debian's haproxy; without it the test skips and says so.
"""

import collections
import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "server"))
import smuggling  # noqa: E402
from harness import in_threads, post, read_all  # noqa: E402
from served import ROOT, Server, fetch_model, free_port, need_command, venv_python  # noqa: E402

WHAT = "the test of several servers"
BINARY = ""
HAPROXY = need_command(WHAT, "haproxy")
DEPLOY = ROOT / "deploy"
CLIENTS = 12
TOKENS = 16
TIMEOUT_S = 120  # for machines that are busy or stalled

Outcome = collections.namedtuple("Outcome", "kind server at status detail")


class Proxy:
    """HAProxy with the configuration as it is shipped, less the user it changes to."""

    def __init__(self, servers):
        self.port = free_port()
        self.directory = tempfile.TemporaryDirectory(prefix="millrace-haproxy-")
        lines = (DEPLOY / "haproxy.cfg").read_text().splitlines(keepends=True)
        self.file = pathlib.Path(self.directory.name) / "haproxy.cfg"
        self.file.write_text("".join(line for line in lines if line.split()[:1] not in (["user"], ["group"])))
        environment = {"MILLRACE_BIND": f"127.0.0.1:{self.port}", "MILLRACE_STATISTICS": f"127.0.0.1:{free_port()}",
                       **{f"MILLRACE_{i + 1}": f"127.0.0.1:{server.port}" for i, server in enumerate(servers)}}
        self.log = open(pathlib.Path(self.directory.name) / "log", "w+")
        self.process = subprocess.Popen([HAPROXY, "-db", "-f", self.file], env=os.environ | environment,
                                        stdout=self.log, stderr=subprocess.STDOUT)

    def request(self, method, path, body=None, headers=None):
        """An open connection and its answer's beginning."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        connection.request(method, path, json.dumps(body) if body is not None else None,
                           {"Content-Type": "application/json", **(headers or {})})
        return connection, connection.getresponse()

    def ask(self, path, body=None, headers=None):
        """(the server that answered, status, JSON)"""
        connection, answer = self.request("POST" if body is not None else "GET", path, body, headers)
        with contextlib.closing(connection):
            data = answer.read()
        return answer.getheader("X-Served-By"), answer.status, json.loads(data)

    def redispatched(self):
        """How many requests were sent to a second server: HAProxy logs their number of retries as +N."""
        return len(re.findall(r" \d+/\d+/\d+/\d+/\+\d+ ", pathlib.Path(self.log.name).read_text()))

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()
        self.directory.cleanup()


class Load:
    """Clients that ask until told to stop, half of them for streams, and write down how each request ended."""

    def __init__(self, proxy):
        self.proxy = proxy
        self.stopping = threading.Event()
        self.outcomes = []
        self.threads = [threading.Thread(target=self.client, args=(i,)) for i in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def client(self, number):
        count = 0
        while not self.stopping.is_set():
            count += 1
            body = {"prompt": f"Client {number}, story {count}: once upon a time", "max_tokens": TOKENS, "temperature": 0.8,
                    "seed": count, "stream": number % 2 == 0}
            kind = "stream" if body["stream"] else "whole"
            begin = time.monotonic()
            try:
                self.outcomes.append(Outcome(kind, *self.one(body, begin)))
            except Exception as error:  # each is an outcome that the test judges
                self.outcomes.append(Outcome(kind, None, begin, None, f"{type(error).__name__}: {error}"))

    def one(self, body, begin):
        connection, answer = self.proxy.request("POST", "/v1/completions", body)
        with contextlib.closing(connection):
            server = answer.getheader("X-Served-By")
            data = answer.read()  # raises IncompleteRead when the connection breaks inside
        if answer.status != 200:
            return server, begin, answer.status, json.loads(data)["error"]["message"]
        if body["stream"]:
            return server, begin, 200, "whole" if data.rstrip().endswith(b"data: [DONE]") else "cut without a word"
        return server, begin, 200, json.loads(data)["usage"]["completion_tokens"]

    def finish(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()
        return self.outcomes


class HaproxyTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = fetch_model("smollm2", WHAT)
        cls.servers = [cls.start(), cls.start()]
        for server in cls.servers:
            server.wait_ready()
        cls.proxy = Proxy(cls.servers)
        cls.addClassCleanup(cls.proxy.stop)
        cls.addClassCleanup(lambda: [server.stop() for server in cls.servers])
        cls.wait_for(lambda: cls.proxy.ask("/ready")[1] == 200)

    @classmethod
    def start(cls, port=None):
        return Server(BINARY, cls.model, "--threads", 1, "--quiet", "--kv-tokens", 16384, port=port)

    @staticmethod
    def wait_for(condition, seconds=TIMEOUT_S):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except (OSError, http.client.HTTPException, ValueError):
                pass
            time.sleep(0.1)
        raise AssertionError(f"not within {seconds} s")

    def test_a_conversation_stays_where_its_cache_is(self):
        served = set()
        for topic in ("mills", "rivers", "bread", "wheat", "wheels", "stones"):
            messages = [{"role": "system", "content": "You tell stories. " * 10}, {"role": "user", "content": f"About {topic}."}]
            by = set()
            for turn in range(2):
                server, status, answer = self.proxy.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 4})
                self.assertEqual(status, 200, answer)
                by.add(server)
                if turn:
                    self.assertGreater(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            self.assertEqual(len(by), 1, f"{topic} was moved")
            served |= by
        self.assertEqual(served, {"one", "two"})

    def test_what_routes_a_request(self):
        def servers(path, make, headers=None):
            return {self.proxy.ask(path, make(i), headers and headers(i))[0] for i in range(8)}

        def chat(text, **more):
            return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}

        path = "/v1/chat/completions"
        self.assertEqual(len(servers(path, lambda i: chat(f"{i}", prompt_cache_key="a"))), 1)
        self.assertEqual(len(servers(path, lambda i: chat(f"{i}"), lambda i: {"X-Session-Id": "b"})), 1)
        self.assertEqual(len(servers(path, lambda i: chat(f"{i}"))), 2)
        self.assertEqual(len(servers(path, lambda i: chat([{"type": "text", "text": f"{i}"}]))), 2)
        start = "a" * 256
        self.assertEqual(len(servers("/v1/completions", lambda i: {"prompt": f"{start}{i}", "max_tokens": 1})), 1)
        self.assertEqual(len(servers("/v1/completions", lambda i: {"prompt": f"{i}{start}", "max_tokens": 1})), 2)
        self.assertEqual({self.proxy.ask("/stats")[0] for _ in range(4)} & {"one", "two"}, {self.proxy.ask("/stats")[0]})
        self.assertEqual(self.proxy.ask("/metrics")[1], 404)

    def test_z_a_killed_server_takes_no_answer_with_it(self):
        load = Load(self.proxy)
        victim = self.servers[0]
        try:
            self.wait_for(lambda: len(load.outcomes) >= CLIENTS and victim.get("/stats")[1]["requests"]["running"] >= 2)
            victim.kill()
            killed = time.monotonic()  # the process is gone, and with it its sockets
            self.wait_for(lambda: sum(outcome.at > killed for outcome in load.outcomes) >= CLIENTS)
        finally:
            outcomes = load.finish()
        whole = [outcome for outcome in outcomes if outcome.kind == "whole"]
        streams = [outcome for outcome in outcomes if outcome.kind == "stream"]
        summary = collections.Counter((o.kind, o.status, o.detail if isinstance(o.detail, str) else "") for o in outcomes)
        print(f"\n{len(outcomes)} requests, {self.proxy.redispatched()} moved: {dict(summary)}", flush=True)

        # Not streamed: an answer, or an error with a status and a message. Never silence. Those the victim had were
        # asked of the other server, so that in fact all are answered.
        for outcome in whole:
            self.assertIsNotNone(outcome.status, outcome)
            self.assertTrue(outcome.detail, outcome)
        self.assertEqual({outcome.status for outcome in whole}, {200})
        self.assertGreater(self.proxy.redispatched(), 0)
        # Streams: whole, or visibly broken. A stream that ends well without its last word would be a lie.
        self.assertFalse([outcome for outcome in streams if outcome.detail == "cut without a word"])
        broken = [outcome for outcome in streams if outcome.status != 200]
        for outcome in broken:
            self.assertLessEqual(outcome.at, killed, outcome)
        self.assertTrue([o for o in streams if o.detail == "whole"])
        # Traffic moves over: what was asked after the kill came from the other.
        late = [outcome for outcome in outcomes if outcome.at > killed]
        self.assertTrue(late)
        self.assertEqual({(outcome.server, outcome.status) for outcome in late}, {("two", 200)})

        # ... and comes back with the server.
        self.servers[0] = self.start(port=victim.port).wait_ready()
        asked = iter(range(10000))
        self.wait_for(lambda: self.proxy.ask("/v1/completions", {"prompt": f"{next(asked)} mills", "max_tokens": 1})[0] == "one")

        # With nobody left the error says so, in the API's own shape.
        for server in self.servers:
            server.kill()
        self.wait_for(lambda: self.proxy.ask("/ready")[1] == 503)
        _, status, answer = self.proxy.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})
        self.assertEqual((status, answer["error"]["type"]), (503, "server_error"))


class SmugglingTest(unittest.TestCase):
    """Requests that hold a second one, through HAProxy: what it did not see itself, no server may see."""

    def start(self, *options):
        model = ROOT / "tests/golden/models/llama3/model.gguf"
        self.server = Server(BINARY, model, "--log-json", "--header-timeout", 1, "--trust-proxy", *options).wait_ready()
        self.addCleanup(self.server.stop)
        self.proxy = Proxy([self.server, self.server])
        self.addCleanup(self.proxy.stop)
        HaproxyTest.wait_for(lambda: self.proxy.ask("/ready")[1] == 200)

    def send(self, data):
        """All that comes back, until the connection is closed or nothing comes for a while."""
        with socket.create_connection(("127.0.0.1", self.proxy.port), timeout=TIMEOUT_S) as s:
            s.sendall(data)
            s.settimeout(1)  # HAProxy keeps a connection; a second answer comes at once or never
            return read_all(s)

    def test_what_the_proxy_did_not_see_no_server_sees(self):
        self.start()
        rows = smuggling.rows()
        replies = in_threads(24, lambda i: {number: self.send(rows[number][1]) for number in range(i, len(rows), 24)})
        replies = {number: reply for part in replies for number, reply in part.items()}
        self.proxy.log.flush()
        seen = pathlib.Path(self.proxy.log.name).read_text(errors="replace")
        served = self.server.output()
        passed = refused = 0
        for number, (name, _, _) in enumerate(rows):
            spoke_http2 = replies[number].startswith(b"\0\0")  # HAProxy takes its preface for what it is
            statuses = [] if spoke_http2 else smuggling.statuses_of(replies[number])
            self.assertFalse([status for status in statuses if status in (500, 502, 503, 504)], name)
            second = re.compile(re.escape(smuggling.SMUGGLED.format(number)) + r"\b")
            if second.search(served):  # then HAProxy read two requests where we would have refused the first
                self.assertTrue(second.search(seen), f"{name}: smuggled past the proxy")
                passed += 1
            else:
                self.assertLessEqual(set(statuses[1:]), {400}, name)  # what follows is no request to HAProxy either
                refused += 1
        print(f"\n{len(rows)} requests that hold another: {passed} are two to HAProxy, {refused} never reached a server as two")
        self.assertGreater(refused, len(rows) * 3 // 4)

    def test_each_client_has_its_own_limit(self):
        def statuses(source):
            found = []
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", self.proxy.port), source_address=(source, 0), timeout=TIMEOUT_S) as s:
                    s.sendall(post("/v1/completions", '{"prompt": "a", "max_tokens": 1}', "x-forwarded-for: 9.9.9.9\r\n"))
                    found += smuggling.statuses_of(read_all(s))
            return found

        self.start("--rate", 3)
        for source in ("127.0.0.5", "127.0.0.6"):
            self.assertEqual(statuses(source), [200, 200, 200, 429, 429])


class DeployFilesTest(unittest.TestCase):
    def test_haproxy_reads_its_configuration_without_a_warning(self):
        done = subprocess.run([HAPROXY, "-c", "-f", DEPLOY / "haproxy.cfg"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("WARNING", done.stderr)

    def test_grafana_asks_for_metrics_that_exist(self):
        server = Server(BINARY, fetch_model("smollm2", WHAT), "--threads", 1, "--kv-tokens", 8192).wait_ready()
        self.addCleanup(server.stop)
        metrics = server.get("/metrics")[1].decode()
        names = set(re.findall(r"^(millrace:\w+)", metrics, re.MULTILINE))
        dashboard = json.loads((DEPLOY / "grafana.json").read_text())
        asked = set()
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                asked |= set(re.findall(r"millrace:\w+", target["expr"]))
        self.assertGreater(len(asked), 20)
        self.assertEqual(asked - names, set())

    def test_kubernetes_manifests_are_whole(self):
        python = venv_python(WHAT, "pyyaml")
        read = "import json, sys, yaml; print(json.dumps([d for f in sys.argv[1:] for d in yaml.safe_load_all(open(f)) if d]))"
        files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        done = subprocess.run([python, "-c", read, *files], capture_output=True, text=True, check=True)
        objects = {(one["kind"], one["metadata"]["name"]): one for one in json.loads(done.stdout)}
        for (kind, name), one in objects.items():
            self.assertTrue(one["apiVersion"], (kind, name))
            if kind == "Service":
                self.assertTrue(any(other["spec"]["template"]["metadata"]["labels"].items() >= one["spec"]["selector"].items()
                                    for (k, _), other in objects.items() if k in ("StatefulSet", "Deployment")), name)
            if kind in ("StatefulSet", "Deployment"):
                pod = one["spec"]["template"]["spec"]
                volumes = {v["name"] for v in pod["volumes"]} | {
                    v["metadata"]["name"] for v in one["spec"].get("volumeClaimTemplates", [])}
                for container in pod["containers"]:
                    self.assertLessEqual({mount["name"] for mount in container["volumeMounts"]}, volumes)
                    self.assertIn("readinessProbe", container)
                for volume in pod["volumes"]:
                    claim = volume.get("persistentVolumeClaim")
                    self.assertTrue(not claim or ("PersistentVolumeClaim", claim["claimName"]) in objects)
        servers = objects["StatefulSet", "millrace"]["spec"]
        self.assertIn(("Service", servers["serviceName"]), objects)

    @unittest.skipUnless(shutil.which("systemd-analyze"), "SKIPPED: the unit is not checked because systemd-analyze is not installed")
    def test_systemd_reads_its_unit(self):
        with tempfile.TemporaryDirectory(prefix="millrace-unit-") as directory:
            unit = pathlib.Path(directory) / "millrace.service"
            text = (DEPLOY / "millrace.service").read_text()
            unit.write_text(text.replace("/usr/local/bin/millrace", BINARY))  # verify wants the program to be there
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr.strip()), (0, ""))

    def test_commands_in_the_files_are_ones_the_binary_knows(self):
        known = set(re.findall(r"--[\w-]+", subprocess.run([BINARY, "serve", "--help"], capture_output=True, text=True).stdout))
        unit = re.search(r"^ExecStart=(.*)$", (DEPLOY / "millrace.service").read_text(), re.MULTILINE)[1]
        entry = re.search(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[1]
        args = re.search(r"args: (.*)$", (DEPLOY / "kubernetes/millrace.yaml").read_text(), re.MULTILINE)[1]
        for text in (unit, entry, args):
            used = set(re.findall(r"--[\w-]+", text))
            self.assertTrue(used)
            self.assertEqual(used - known, set())


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)

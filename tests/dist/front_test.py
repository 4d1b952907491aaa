#!/usr/bin/env python3
"""`millrace serve` with ranks that it starts itself: a rank is killed, or stopped, and clients get their tokens all the
same; ranks that are not what they should be are refused by name. Replicas, with and without ranks.

    front_test.py MILLRACE

Without Open MPI, or in a build without it, what needs it is skipped, and the last line says so (status 77).
"""

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "tests/golden/models"
LLAMA = str(MODELS / "llama3/model.gguf")
IMAGES = str(ROOT / "tests/golden/images/gemma3")
NAMESPACES = Path(__file__).resolve().parent / "namespaces.sh"
FAKE = Path(__file__).resolve().parent / "fake_ranks.py"
MILLRACE = ""
ENVIRONMENT = {**{k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}, "MILLRACE_CONFIG": "/dev/null",
               "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
NOTICED_S = 5  # within which a rank that is lost must be
TOKENS = 300
HAS_MPI = True


def runs(pid):
    """Whether a process is there and not only to be waited for by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Server:
    def __init__(self, test, *arguments, model=LLAMA):
        self.log = tempfile.TemporaryFile("w+")
        command = [MILLRACE, "serve", model, "--port", "0", "--ctx", "512", "--model-id", "m", "--quiet", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=ENVIRONMENT, cwd=ROOT)
        test.addCleanup(self.end)
        line = self.process.stdout.readline()
        found = re.search(r"listening on (http://\S+)", line)
        self.url = found.group(1) if found else None

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.stdout.close()
        self.log.close()

    def get(self, path):
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, **body):
        body = {"model": "m", "prompt": "abc", "max_tokens": TOKENS, "ignore_eos": True, **body}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=60)

    def ask(self, **body):
        with self.post(**body) as answer:
            return json.load(answer)

    def groups(self):
        return json.loads(self.get("/stats")[1])["rank_groups"]

    def stream(self, after=None, action=None, **body):
        """The pieces of text, or the error that they end with. After so many tokens `action` is done."""
        pieces = []
        with self.post(stream=True, **body) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return pieces, event["error"]["message"]
                pieces.append(event["choices"][0]["text"])
                if len(pieces) == after:
                    action()
        return pieces, None

    def wait_healthy(self):
        for _ in range(300):
            status, body = self.get("/health")
            if status == 200:
                return json.loads(body)
            time.sleep(0.1)
        raise AssertionError(f"not healthy again: {body}")


# Greedy and seeded: what is computed again has to be what it was.
WAYS = ({"temperature": 0}, {"temperature": 1, "seed": 5})


class Faults(unittest.TestCase):
    def setUp(self):
        if not HAS_MPI:
            self.skipTest("no Open MPI")

    def test_streams_go_on_when_a_rank_is_killed_or_stopped(self):
        alone = Server(self, "--threads", "1")
        wanted = [alone.stream(**way)[0] for way in WAYS]
        alone.end()
        server = Server(self, "--tensor-parallel", "3", "--restart", "--threads", "1")
        self.assertEqual(server.stream(**WAYS[0]), (wanted[0], None), "ranks have the bits of one process")
        for number, (how, way, text) in enumerate(zip((signal.SIGKILL, signal.SIGSTOP), WAYS, wanted)):
            victim = server.groups()[0]["ranks"][number]["pid"]
            began = []

            def lose():
                began.append(time.monotonic())
                os.kill(victim, how)

            pieces, error = server.stream(after=40, action=lose, **way)
            self.assertIsNone(error)
            self.assertEqual(pieces, text, how)
            self.assertEqual(server.wait_healthy()["ranks"], {"up": 3, "wanted": 3, "restarts": number + 1})
        group = server.groups()[0]
        self.assertRegex(group["last_loss"], r"rank 1 \(process \d+ on .*\) was not heard of for [\d.]+ s")
        metrics = server.get("/metrics")[1]
        self.assertIn('millrace:rank_restarts_total{model_name="m",replica="0"} 2', metrics)
        # Ranks keep their parts of the logits unless logprobs are wanted.
        sent = []
        for way in ({}, *WAYS, {**WAYS[1], "logprobs": 1}):
            if way:
                server.ask(max_tokens=64, **way)
            time.sleep(0.8)  # a beat later
            found = re.search(r'rank_link_bytes_total\{.*from="2",to="0"\} (\d+)', server.get("/metrics")[1])
            sent.append(int(found.group(1)))
        greedy, drawn, gathered = (after - before for before, after in zip(sent, sent[1:]))
        self.assertGreater(greedy, 0)
        half = 32 * 273 // 3 * 4  # of the steps' logits of a third of the vocabulary
        self.assertLess(drawn - greedy, half)
        self.assertGreater(gathered - greedy, half)
        stats = json.loads(server.get("/stats")[1])
        self.assertGreaterEqual(stats["rank_sampling"]["gathered_rows"], 64)
        self.assertGreaterEqual(stats["rank_sampling"]["picked_rows"], 128)
        self.assertRegex(server.get("/metrics")[1], r"millrace:rank_gathered_rows_total\{.*\} \d\d")
        for one in stats["rank_groups"][0]["ranks"]:
            for other in range(3):
                self.assertEqual(one["latency_s"][other] > 0, other != one["rank"])
                self.assertEqual(one["bytes_per_s"][other] > 0, other != one["rank"])

    def test_ranks_of_a_context_are_started_and_started_again(self):
        alone = Server(self, "--threads", "1")
        wanted = alone.stream(**WAYS[0])[0]
        alone.end()
        server = Server(self, "--context-parallel", "2", "--restart", "--threads", "1")
        victim = server.groups()[0]["ranks"][1]["pid"]
        pieces, error = server.stream(after=40, action=lambda: os.kill(victim, signal.SIGKILL), **WAYS[0])
        self.assertIsNone(error)
        self.assertEqual(pieces, wanted, "ranks have the bits of one process")
        self.assertEqual(server.wait_healthy()["ranks"], {"up": 2, "wanted": 2, "restarts": 1})

    def test_without_restart_who_ran_gets_an_error_in_time_and_the_rest_goes_on(self):
        server = Server(self, "--pipeline-parallel", "2", "--threads", "1")
        ranks = server.groups()[0]["ranks"]
        began = []

        def lose():
            began.append(time.monotonic())
            os.kill(ranks[1]["pid"], signal.SIGSTOP)

        pieces, error = server.stream(after=30, action=lose, **WAYS[0])
        self.assertLess(time.monotonic() - began[0], NOTICED_S)
        self.assertIn("rank 1", error)
        self.assertGreaterEqual(len(pieces), 30)
        status, _ = server.get("/ready")
        self.assertEqual(status, 503)
        self.assertEqual(len(server.stream(**WAYS[0])[0]), len(server.stream(**WAYS[0])[0]))  # it waits, and is answered
        self.assertEqual(server.get("/health")[0], 200)
        server.end()
        until = time.monotonic() + 5  # whoever is killed takes a moment to be gone
        while any(runs(rank["pid"]) for rank in ranks) and time.monotonic() < until:
            time.sleep(0.05)
        self.assertEqual([rank["pid"] for rank in ranks if runs(rank["pid"])], [], "a rank has outlived its group")

    def test_ranks_that_share_contexts_answer_as_one_process(self):
        ways = (*WAYS, {**WAYS[1], "top_k": 9, "logprobs": 2, "n": 2})
        alone = Server(self, "--threads", "1")
        wanted = [alone.ask(max_tokens=24, **way)["choices"] for way in ways]
        alone.end()
        server = Server(self, "--context-parallel", "2", "--threads", "1")
        self.assertEqual([server.ask(max_tokens=24, **way)["choices"] for way in ways], wanted)

    def test_ranks_of_one_machine_listen_to_nobody_else(self):
        server = Server(self, "--tensor-parallel", "2", "--threads", "1")
        pids = [server.process.pid, *(rank["pid"] for rank in server.groups()[0]["ranks"])]
        for pid in pids:
            sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            for table, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().split("\n")[1:-1]:
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == "0A" and f"socket:[{inode}]" in sockets:  # it listens
                        self.assertEqual(local.split(":")[0], loopback, f"process {pid}")

    def test_images_are_refused(self):
        # Ranks would compute the prompt without what is in them.
        image = base64.b64encode((ROOT / "tests/golden/images/mill.png").read_bytes()).decode()
        content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        for ranks in ("--tensor-parallel", "--pipeline-parallel"):
            server = Server(self, ranks, "2", "--threads", "1", model=IMAGES)
            request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(),
                                             {"content-type": "application/json"})
            with self.assertRaises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            self.assertIn("ranks take no images yet", refused.exception.read().decode())
            server.end()

    def test_another_file_is_refused_by_name(self):
        # A launcher that gives the second rank another model.
        with tempfile.TemporaryDirectory() as folder:
            launcher = Path(folder) / "launch.sh"
            other = MODELS / "qwen3/model.gguf"
            launcher.write_text('#!/bin/sh\nexport OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n'
                                'shift 2\nprogram=$1; shift 2; model=$1; shift\n'
                                'exec mpirun --oversubscribe -n 1 "$program" rank "$model" "$@" : '
                                f'-n 1 "$program" rank {other} "$@"\n')
            launcher.chmod(0o755)
            server = Server(self, "--tensor-parallel", "2", "--launcher", str(launcher))
            self.assertIsNone(server.url)
            self.assertEqual(server.process.wait(timeout=30), 2)
            self.assertRegex(server.said(), r"millrace: model: rank 1 \(.*\) has '.*', the front has '.*'")


class Hosts(unittest.TestCase):
    """Three hosts as docs/distribution.md has them, each a network namespace; links are cut."""

    def setUp(self):
        if os.environ.get("MILLRACE_TEST_INSIDE"):
            return
        tools = all(shutil.which(tool) for tool in ("ip", "bridge", "unshare"))
        alone = tools and subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode == 0
        if not HAS_MPI or not alone:
            self.skipTest("no Open MPI, or no right to make network namespaces")

    def test_links_are_cut(self):
        if not os.environ.get("MILLRACE_TEST_INSIDE"):
            again = [sys.executable, __file__, MILLRACE, "Hosts.test_links_are_cut"]
            done = subprocess.run([NAMESPACES, *again], env={**os.environ, "MILLRACE_TEST_INSIDE": "1"}, capture_output=True,
                                  text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            return
        ENVIRONMENT.update(OMPI_MCA_plm_rsh_agent=f"{NAMESPACES} ssh", OMPI_MCA_btl="self,tcp",
                           OMPI_MCA_btl_tcp_if_include="10.77.0.0/24", OMPI_MCA_oob_tcp_if_include="10.77.0.0/24",
                           OMPI_MCA_mpi_yield_when_idle="1")
        server = Server(self, "--tensor-parallel", "3", "--rank-hosts", "node1,node2,node3", "--front-address", "10.77.0.254",
                        "--restart", "--shrink", "--threads", "1")
        ask = lambda: server.ask(max_tokens=3, temperature=0)["choices"]
        text = ask()
        self.assertEqual([rank["host"] for rank in server.groups()[0]["ranks"]], ["node1", "node2", "node3"])
        # node1 and node2 do not reach one another; both reach the front.
        self.isolate("on")
        timer = threading.Timer(NOTICED_S, self.isolate, ["off"])
        timer.start()
        self.assertEqual(ask(), text)
        timer.join()
        self.assertIn("a link between ranks is down", server.groups()[0]["last_loss"])
        # node2 is gone: the others go on.
        subprocess.run(["ip", "-n", "node2", "link", "set", "eth0", "down"], check=True)
        self.assertEqual(ask(), text)
        self.assertEqual([rank["host"] for rank in server.groups()[0]["ranks"]], ["node1", "node3"])
        self.assertRegex(server.said(), r"rank 1 \(process \d+ on node2\) was not heard of for [\d.]+ s")

    @staticmethod
    def isolate(how):
        for port in ("port1", "port2"):
            subprocess.run(["bridge", "link", "set", "dev", port, "isolated", how], check=True)


class PretendedRanks(unittest.TestCase):
    """The front alone: its ranks are a script."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.plan = Path(self.folder.name) / "plan.json"

    def start(self, **plan):
        self.plan.write_text(json.dumps(plan))
        return Server(self, "--tensor-parallel", "2", "--launcher", f"{sys.executable} {FAKE} {self.plan}", "--kv-type", "bf16")

    def refusal(self, **plan):
        server = self.start(**plan)
        if server.url:
            return server, None
        self.assertEqual(server.process.wait(timeout=30), 2)
        return server, server.said()

    def test_what_a_rank_has_must_be_what_the_front_has_and_links_must_work(self):
        claims = {}
        for _ in range(10):
            server, said = self.refusal(claims=list(claims.items()), block_bytes=self.block_bytes())
            if said is None:
                break
            name, value = re.search(r"millrace: (.*): rank \d .* has 'none', the front has '(.*)'\n", said).groups()
            claims[name] = value
        self.assertEqual(list(claims), ["version of the program", "model", "--tensor-parallel", "--pipeline-parallel",
                                        "--context-parallel", "--context-schedule", "--expert-parallel", "--rank-speeds",
                                        "processor"])
        # They are taken now, and never answer: all of them wait.
        began = time.monotonic()
        _, error = server.stream()
        self.assertLess(time.monotonic() - began, NOTICED_S)
        self.assertIn("a link between ranks is down", error)
        server.end()
        for name, wrong in (("version of the program", "0.0.1"), ("--tensor-parallel", "3")):
            _, said = self.refusal(claims=list({**claims, name: wrong}.items()), block_bytes=1)
            self.assertRegex(said, rf"{name}: rank 0 .* has '{wrong}', the front has '{re.escape(claims[name])}'")

    def block_bytes(self):
        told = subprocess.run([MILLRACE, "inspect", LLAMA, "--json"], capture_output=True, text=True, env=ENVIRONMENT)
        config = json.loads(told.stdout)["config"]
        return config["layers"] * 2 * config["kv_heads"] * 16 * config["head_dim"] * 2

    def test_without_the_key_nobody_is_a_rank(self):
        server, said = self.refusal(claims=[], key="0" * 64)
        self.assertIsNone(server.url)
        self.assertIn("launcher ended with status 3", said)

    def test_a_launcher_that_is_not_there(self):
        server = Server(self, "--tensor-parallel", "2", "--launcher", "/no/such/mpirun")
        self.assertEqual(server.process.wait(timeout=30), 2)
        self.assertIn("/no/such/mpirun: cannot be started", server.said())


class Deployment(unittest.TestCase):
    """What deploy/ tells the front, held to what it takes."""

    FILES = ("slurm/millrace.sbatch", "kubernetes/mpi/millrace-mpijob.yaml", "compose/compose.yaml")

    def test_options_are_there(self):
        told = subprocess.run([MILLRACE, "serve", "--help"], capture_output=True, text=True, env=ENVIRONMENT).stdout
        known = set(re.findall(r"--[a-z][a-z-]+", told))
        mpirun = {"--map-by", "--bind-to"}
        for name in self.FILES:
            text = (ROOT / "deploy" / name).read_text()
            begin = list(re.finditer(r"millrace,? serve[ ,]", text))[-1].end()
            command = re.match(r".*?(?=\n\n|\n +(?:env|ports):|\Z)", text[begin:], re.DOTALL).group(0)
            used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", command))
            self.assertIn("--front-address", used, name)
            self.assertLessEqual(used, known | mpirun, name)

    def test_the_image_is_built_with_mpi(self):
        # Its ranks would end at once, and say that this build has no MPI.
        build = (ROOT / "deploy/Dockerfile").read_text().split("FROM debian:bookworm-slim\n")[0]
        self.assertLess(build.index("libopenmpi-dev"), build.index("make build"))
        ranks = (ROOT / "deploy/compose/Dockerfile").read_text()
        self.assertRegex(ranks, r"(?s)FROM millrace\n.*openmpi-bin")

    def test_files_can_be_read(self):
        subprocess.run(["bash", "-n", ROOT / "deploy" / self.FILES[0]], check=True)
        try:
            import yaml
        except ImportError:
            self.skipTest("no yaml module")
        for name in self.FILES[1:]:
            self.assertTrue(list(yaml.safe_load_all((ROOT / "deploy" / name).read_text())), name)


class Replicas(unittest.TestCase):
    def check(self, *arguments):
        server = Server(self, "--threads", "1", "--data-parallel", "2", *arguments)
        prompts = [f"{letter * 40} and so on" for letter in "abcd"]
        first = [server.ask(prompt=p, max_tokens=8, temperature=0) for p in prompts]
        again = [server.ask(prompt=p, max_tokens=8, temperature=0) for p in prompts]
        self.assertEqual([a["choices"] for a in first], [a["choices"] for a in again])
        for answer in again:  # each came where its prompt was
            self.assertGreaterEqual(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 32)
        return server, first

    def test_a_prompt_comes_where_its_prefix_is(self):
        _, answers = self.check()
        alone = Server(self, "--threads", "1")
        self.assertEqual(alone.ask(prompt="a" * 40 + " and so on", max_tokens=8, temperature=0)["choices"],
                         answers[0]["choices"])

    def test_replicas_of_ranks(self):
        if not HAS_MPI:
            self.skipTest("no Open MPI")
        server, _ = self.check("--tensor-parallel", "2")
        groups = server.groups()
        self.assertEqual([len(group["ranks"]) for group in groups], [2, 2])
        self.assertEqual(server.wait_healthy()["ranks"], {"up": 4, "wanted": 4, "restarts": 0})


def main():
    global MILLRACE, HAS_MPI
    MILLRACE = os.path.abspath(sys.argv.pop(1))
    devices = subprocess.run([MILLRACE, "devices"], capture_output=True, text=True, env=ENVIRONMENT).stdout
    HAS_MPI = shutil.which("mpirun") is not None and "this build has no MPI" not in devices
    good = unittest.main(exit=False).result.wasSuccessful()
    if good and not HAS_MPI:
        print("SKIPPED: there is no Open MPI (openmpi-bin, libopenmpi-dev): no ranks were started")
        return 77
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

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
IMAGES_IN_GRIDS = str(ROOT / "tests/golden/qwen_images/qwen3vl")
NAMESPACES = Path(__file__).resolve().parent / "namespaces.sh"
FAKE = Path(__file__).resolve().parent / "fake_ranks.py"
MILLRACE = ""
ENVIRONMENT = {**{k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}, "MILLRACE_CONFIG": "/dev/null",
               "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
NOTICED_S = 30  # within which a rank that is lost must be, on the busiest machine; 5 is the goal, a figure
TOKENS = 300
HAS_MPI = True


def runs(pid):
    """Whether a process is there and not only to be waited for by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def noticed(test, began):
    took = time.monotonic() - began
    print(f"[  figure  ] noticed after {took:.1f} s (goal 5)")
    test.assertLess(took, NOTICED_S)


class Server:
    def __init__(self, test, *arguments, model=LLAMA, context=512, command=None, key="none", environment=None):
        self.log = tempfile.TemporaryFile("w+")
        command = [*(command or [MILLRACE, "serve", model, "--port", "0"]), "--ctx", str(context), "--model-id", "m", "--quiet",
                   *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True,
                                        env={**ENVIRONMENT, **(environment or {})}, cwd=ROOT)
        test.addCleanup(self.end)
        found = None
        for line in self.process.stdout:
            if found := re.search(r"listening on (http://\S+)", line):
                break
        self.url = found.group(1) if found else None
        self.headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

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
            with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=self.headers), timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, **body):
        body = {"model": "m", "prompt": "abc", "max_tokens": TOKENS, "ignore_eos": True, **body}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(), self.headers)
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

    def wait_healthy(self, condition):
        """What it says of its ranks once it is healthy, and `condition` of that holds: a loss may not be noticed yet."""
        until = time.monotonic() + 2 * NOTICED_S
        while True:
            status, body = self.get("/health")
            if status == 200 and condition(json.loads(body)["ranks"]):
                return json.loads(body)["ranks"]
            if time.monotonic() > until:
                raise AssertionError(f"not healthy again: {body}")
            time.sleep(0.1)

    def wait_for_beat(self, rank):
        """Until a rank was heard of that had time to count what was done before this call: it beats every 0.5 s."""
        began = time.monotonic()
        while time.monotonic() - began - self.groups()[0]["ranks"][rank]["heard_s"] < 0.8:
            if time.monotonic() > began + 2 * NOTICED_S:
                raise AssertionError(f"rank {rank} is not heard of")
            time.sleep(0.1)

    def wait_restarted(self, ranks, restarts):
        self.wait_healthy(lambda found: found == {"up": ranks, "wanted": ranks, "restarts": restarts})


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
            server.wait_restarted(3, number + 1)
        group = server.groups()[0]
        self.assertRegex(group["last_loss"], r"rank 1 \(process \d+ on .*\) was not heard of for [\d.]+ s")
        metrics = server.get("/metrics")[1]
        self.assertIn('millrace:rank_restarts_total{model_name="m",replica="0"} 2', metrics)
        # Ranks keep their parts of the logits unless logprobs are wanted.
        sent = []
        for way in ({}, *WAYS, {**WAYS[1], "logprobs": 1}):
            if way:
                server.ask(max_tokens=64, **way)
            server.wait_for_beat(2)
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
        pieces, error = server.stream(after=40, action=lambda: os.kill(victim, signal.SIGTERM), **WAYS[0])
        self.assertIsNone(error)
        self.assertEqual(pieces, wanted, "ranks have the bits of one process")
        server.wait_restarted(2, 1)
        self.assertIn(f"rank 1 (process {victim} on ", server.groups()[0]["last_loss"])

    def test_who_reads_what_is_said_may_go(self):
        # Standard error is a pipe that nobody reads any more: what is said of a lost rank is lost, and nothing else.
        broken = ["bash", "-c", 'exec "$@" 2> >(exec true)', "bash", MILLRACE, "serve", LLAMA, "--port", "0"]
        server = Server(self, "--tensor-parallel", "2", "--restart", "--threads", "1", command=broken)
        wanted = server.stream(max_tokens=60, **WAYS[0])
        victim = server.groups()[0]["ranks"][0]["pid"]
        lose = lambda: os.kill(victim, signal.SIGKILL)
        self.assertEqual(server.stream(after=20, action=lose, max_tokens=60, **WAYS[0]), wanted)
        server.wait_restarted(2, 1)

    def test_settings_of_a_rank_s_host_are_not_asked(self):
        with tempfile.TemporaryDirectory() as folder:
            settings = Path(folder) / "millrace/config.toml"
            settings.parent.mkdir()
            settings.write_text("no-such-option = 1\n")
            server = Server(self, "--pipeline-parallel", "2", "--threads", "1", "--config", "/dev/null",
                            environment={"XDG_CONFIG_HOME": folder, "MILLRACE_CONFIG": ""})
            self.assertIsNotNone(server.url, server.said())

    def test_without_restart_who_ran_gets_an_error_in_time_and_the_rest_goes_on(self):
        server = Server(self, "--pipeline-parallel", "2", "--threads", "1", context=8192)
        ranks = server.groups()[0]["ranks"]
        began = []

        def lose():
            began.append(time.monotonic())
            os.kill(ranks[1]["pid"], signal.SIGSTOP)

        # So long an answer is not whole before the rank is stopped, on any machine.
        pieces, error = server.stream(after=30, action=lose, max_tokens=8000, **WAYS[0])
        noticed(self, began[0])
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

    def test_images_are_seen_as_by_one_process(self):
        image = base64.b64encode((ROOT / "tests/golden/images/mill.png").read_bytes()).decode()
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}

        def see(model, *options, content=(picture,), context=512):
            server = Server(self, *options, "--threads", "1", model=model, context=context)
            body = {"model": "m", "messages": [{"role": "user", "content": list(content)}], "max_tokens": 6,
                    "temperature": 0, "logprobs": True, "top_logprobs": 5}
            request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(),
                                             {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                choices = json.load(answer)["choices"]
            server.end()
            return choices

        for model in (IMAGES, IMAGES_IN_GRIDS):
            wanted = see(model)
            self.assertEqual(len(wanted[0]["logprobs"]["content"]), 6)
            self.assertEqual(see(model, "--tensor-parallel", "2", "--pipeline-parallel", "2"), wanted)
        self.assertEqual(see(IMAGES, "--tensor-parallel", "2"), see(IMAGES))
        self.assertEqual(see(IMAGES, "--pipeline-parallel", "2"), see(IMAGES))
        # A context over ranks: some of these images lie where the first rank's positions end (512), and the
        # prompt is cut elsewhere than by one process.
        text = {"type": "text", "text": "The mill stands at the river. " * 15}
        spread = {"content": [text, *(4 * [picture]), text], "context": 1024}
        for model in (IMAGES, IMAGES_IN_GRIDS):
            wanted = see(model, **spread)
            self.assertEqual(see(model, "--context-parallel", "2", **spread), wanted)
            self.assertEqual(see(model, "--context-parallel", "3", "--context-schedule", "mesh", "--step-tokens", "150",
                                 **spread), wanted)

    def test_adapters_and_stages_of_ranks(self):
        adapter = ["--adapter", f"a={MODELS.parent / 'adapters/llama3/peft'}"]
        model = str(MODELS / "llama3/hf")
        ask = lambda server: [server.ask(max_tokens=12, temperature=0, model=name)["choices"][0]["text"] for name in ("m", "m:a")]
        alone = Server(self, "--threads", "1", *adapter, model=model)
        wanted = ask(alone)
        self.assertNotEqual(wanted[0], wanted[1])
        alone.end()
        server = Server(self, "--context-parallel", "2", "--threads", "1", *adapter, model=model)
        self.assertEqual(ask(server), wanted)
        server.end()
        server = Server(self, "--tensor-parallel", "2", "--pipeline-parallel", "2", "--restart", "--threads", "1", *adapter,
                        model=model)
        self.assertEqual(ask(server), wanted)
        ranks = server.groups()[0]["ranks"]
        self.assertEqual(len(ranks), 4)
        os.kill(ranks[3]["pid"], signal.SIGKILL)
        self.assertEqual(ask(server), wanted)
        self.assertIn("rank 3", server.groups()[0]["last_loss"])

    @unittest.skipIf(os.environ.get("MILLRACE_SANITIZED"), "sanitizers need the address space")
    def test_a_rank_that_fails_says_why(self):
        # The second one has too little memory for its part of the cache, and who is asked to end ends at once.
        with tempfile.TemporaryDirectory() as folder:
            launcher = Path(folder) / "launch.sh"
            launcher.write_text('#!/bin/sh\nshift 2\nmpirun --oversubscribe --allow-run-as-root --bind-to none -n 1 "$@" : '
                                '-n 1 sh -c \'ulimit -v 1000000; exec "$0" "$@"\' "$@" &\n'
                                'mpirun=$!\ntrap "kill -9 $mpirun" TERM\nwait $mpirun\n')
            launcher.chmod(0o755)
            for _ in range(3):  # on a busy machine what was said may not come through mpirun in time
                server = Server(self, "--tensor-parallel", "2", "--threads", "1", "--kv-tokens", "8000000", "--launcher",
                                str(launcher))
                self.assertIsNone(server.url)
                self.assertEqual(server.process.wait(timeout=30), 2)
                said = server.said()
                if "cannot reserve" in said:
                    break
            self.assertRegex(said, r"millrace: rank 1 on \S+: KV cache: cannot reserve \d+ bytes")
            self.assertRegex(said, r"millrace: rank \d \(process \d+ on \S+\) has gone|launcher ended with status 2")

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
        tools = all(shutil.which(tool) for tool in ("ip", "bridge", "tc", "unshare"))
        alone = tools and subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode == 0
        if not HAS_MPI or not alone:
            self.skipTest("no Open MPI, or no right to make network namespaces")

    def inside(self):
        """Whether this process is in a network of three hosts. If not, the test is run there, by another one."""
        if os.environ.get("MILLRACE_TEST_INSIDE"):
            ENVIRONMENT.update(OMPI_MCA_plm_rsh_agent=f"{NAMESPACES} ssh", OMPI_MCA_btl="self,tcp",
                               OMPI_MCA_btl_tcp_if_include="10.77.0.0/24", OMPI_MCA_oob_tcp_if_include="10.77.0.0/24",
                               OMPI_MCA_mpi_yield_when_idle="1")
            return True
        again = [sys.executable, __file__, MILLRACE, self.id().partition(".")[2]]
        done = subprocess.run([NAMESPACES, *again], env={**os.environ, "MILLRACE_TEST_INSIDE": "1"}, capture_output=True,
                              text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("skipped", done.stderr)
        return False

    def test_what_is_deployed_starts_three_ranks(self):
        # The commands of the Slurm script and of the MPIJob, where a batch system has named hosts to mpirun.
        if not self.inside():
            return
        with tempfile.TemporaryDirectory() as folder:
            hosts, keys, program = (Path(folder) / name for name in ("hosts", "keys", "millrace"))
            hosts.write_text("node1 slots=1\nnode2 slots=1\nnode3 slots=1\n")
            keys.write_text("somebody's-key\n")
            program.symlink_to(MILLRACE)
            given = {"OMPI_MCA_orte_default_hostfile": str(hosts), "PATH": f"{folder}:{os.environ['PATH']}"}
            slurm = {"SLURM_NTASKS": "3", "SLURM_CPUS_PER_TASK": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                     "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            script = ["bash", ROOT / "deploy/slurm/millrace.sbatch", LLAMA, keys]
            words = re.search(r"command: \[(millrace, serve.*?)\]\n", (ROOT / "deploy/kubernetes/mpi/millrace-mpijob.yaml").read_text(),
                              re.DOTALL).group(1)
            job = [word.strip().strip('"') for word in words.split(",")]
            for was, now in (("/models/model.gguf", LLAMA), ("/etc/millrace/keys", str(keys)), ("$(POD_IP)", "10.77.0.254")):
                job[job.index(was)] = now
            for command, environment in ((script, slurm), ([*job, "--threads", "1"], {})):
                server = Server(self, command=command, key="somebody's-key", environment={**given, **environment})
                self.assertIsNotNone(server.url, server.said())
                server.url = "http://10.77.0.254:8080"
                ranks = server.groups()[0]["ranks"]
                self.assertEqual([rank["host"] for rank in ranks], ["node1", "node2", "node3"])
                self.assertEqual(len(server.ask(max_tokens=3)["choices"]), 1)
                server.headers.pop("authorization")
                with self.assertRaises(urllib.error.HTTPError) as refused:
                    server.ask(max_tokens=3)
                self.assertEqual(refused.exception.code, 401)
                server.end()

    def test_slow_links_are_seen_and_change_no_token(self):
        if not self.inside():
            return
        texts, rates = [], []
        for slow in (False, True):
            for node in ("node1", "node2", "node3") if slow else ():
                subprocess.run(["tc", "-n", node, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "100mbit", "burst", "32kb",
                                "latency", "50ms"], check=True)
            server = Server(self, "--tensor-parallel", "3", "--rank-hosts", "node1,node2,node3", "--front-address",
                            "10.77.0.254", "--threads", "1")
            texts.append([server.ask(max_tokens=8, **way)["choices"] for way in WAYS])
            until = time.monotonic() + NOTICED_S  # the next beat says what was measured
            while not all(server.groups()[0]["ranks"][1]["bytes_per_s"][other] for other in (0, 2)):
                self.assertLess(time.monotonic(), until)
                time.sleep(0.1)
            rates.append(server.groups()[0]["ranks"][1]["bytes_per_s"][0])
            server.end()
        self.assertEqual(texts[0], texts[1])
        self.assertLess(rates[1], 20e6)  # 12.5, and what of a message the bucket lets pass at once
        self.assertGreater(rates[0], rates[1])

    def test_links_are_cut(self):
        if not self.inside():
            return
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
        # node2 is gone: the others go on, and what runs there ends by itself.
        cut_off = server.groups()[0]["ranks"][1]["pid"]
        cut = time.monotonic()
        subprocess.run(["ip", "-n", "node2", "link", "set", "eth0", "down"], check=True)
        self.assertEqual(ask(), text)
        self.assertEqual([rank["host"] for rank in server.groups()[0]["ranks"]], ["node1", "node3"])
        self.assertRegex(server.said(), r"rank 1 \(process \d+ on node2\) was not heard of for [\d.]+ s")
        while runs(cut_off) and time.monotonic() < cut + 2 * NOTICED_S:
            time.sleep(0.1)
        self.assertFalse(runs(cut_off), "a rank that nobody reaches lingers")

    @staticmethod
    def isolate(how):
        for port in ("port1", "port2"):
            subprocess.run(["bridge", "link", "set", "dev", port, "isolated", how], check=True)


class PretendedRanks(unittest.TestCase):
    """The front alone: its ranks are a script."""

    wanted = {}  # by claims(), once

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.plan = Path(self.folder.name) / "plan.json"

    def start(self, *arguments, **plan):
        self.plan.write_text(json.dumps(plan))
        return Server(self, *self.options(self.launcher()), *arguments)

    def launcher(self):
        return f"{sys.executable} {FAKE} {self.plan}"

    @staticmethod
    def options(launcher):
        return "--tensor-parallel", "2", "--launcher", launcher, "--kv-type", "bf16"

    def refusal(self, **plan):
        server = self.start(**plan)
        if server.url:
            return server, None
        self.assertEqual(server.process.wait(timeout=30), 2)
        return server, server.said()

    def claims(self):
        """What the front wants of its ranks, as it says one after the other."""
        claims = PretendedRanks.wanted
        for _ in range(0 if claims else 20):
            server, said = self.refusal(claims=list(claims.items()))
            if said is None:
                server.end()
                break
            name, value = re.search(r"millrace: (.*): rank \d .* has 'none', the front has '(.*)'\n", said).groups()
            claims[name] = value
        return claims

    def starting(self, launcher):
        """A server whose ranks are not there yet, and what it says: it listens to no client."""
        log = open(Path(self.folder.name) / "log", "w+")
        self.addCleanup(log.close)
        command = [MILLRACE, "serve", LLAMA, "--port", "0", "--ctx", "512", "--model-id", "m", *self.options(launcher)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=ENVIRONMENT, cwd=ROOT)
        self.addCleanup(lambda: server.poll() is None and (server.kill(), server.wait()))
        return server, lambda: Path(log.name).read_text()

    def end(self, server):
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        self.assertEqual(server.wait(timeout=30), 128 + signal.SIGTERM)
        noticed(self, began)

    def test_a_server_that_waits_for_its_ranks_can_be_ended(self):
        # They do not come; who is missing is said, and the launcher ends too, with what it has started.
        pid = Path(self.folder.name) / "pid"
        script = Path(self.folder.name) / "launch.sh"
        script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {pid}\nwait\n")
        script.chmod(0o755)
        server, said = self.starting(str(script))
        until = time.monotonic() + 30
        while "waiting for rank 0, rank 1, of 2 ranks" not in said():
            self.assertLess(time.monotonic(), until, said())
            self.assertIsNone(server.poll(), said())
            time.sleep(0.1)
        self.end(server)
        self.assertFalse(runs(int(pid.read_text())), "what the launcher has started has outlived the server")

    def test_a_server_whose_ranks_load_can_be_ended(self):
        claims = self.claims()
        self.plan.write_text(json.dumps({"claims": claims, "loads": True}))
        server, said = self.starting(self.launcher())
        time.sleep(2)
        self.assertIsNone(server.poll(), said())
        self.end(server)

    def test_a_request_that_ranks_do_not_survive_is_given_up(self):
        claims = self.claims()
        server = self.start("--restart", claims=claims, dies=("step", 2))
        _, error = server.stream()
        self.assertIn("ranks were lost 3 times while they computed the same token of this request", error)
        server.wait_restarted(2, 3)

    def test_without_a_rank_that_comes_but_cannot_load(self):
        # Every group of two is lost before it computes: one of one is tried.
        claims = self.claims()
        server = self.start("--restart", "--shrink", claims=claims, any_number=True)
        self.plan.write_text(json.dumps({"claims": claims, "any_number": True, "dies": ("make", 2)}))
        for children in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
            for launcher in children.read_text().split():
                os.kill(int(launcher), signal.SIGKILL)
        server.wait_healthy(lambda ranks: ranks["up"] == 1)

    def test_strangers_keep_no_rank_out(self):
        claims = self.claims()
        self.assertIsNotNone(self.start(claims=claims, strangers=100).url)

    def test_a_launcher_that_ends_is_seen_by_who_ignores_its_children(self):
        began = time.monotonic()
        server = Server(self, command=["env", "--ignore-signal=CHLD", MILLRACE, "serve", LLAMA, "--port", "0", "--tensor-parallel",
                                       "2", "--launcher", "false"])
        self.assertEqual(server.process.wait(timeout=30), 2)
        self.assertLess(time.monotonic() - began, 30)
        self.assertIn("the ranks' launcher ended", server.said())

    def test_what_a_rank_has_must_be_what_the_front_has_and_links_must_work(self):
        claims = self.claims()
        self.assertEqual(list(claims), ["version of the program", "model", "--tensor-parallel", "--pipeline-parallel",
                                        "--context-parallel", "--context-schedule", "--expert-parallel", "--rank-speeds",
                                        "--adapter", "processor"])
        # They are taken now, and never answer: all of them wait.
        server = self.start(claims=claims, block_bytes=self.block_bytes())
        began = time.monotonic()
        _, error = server.stream()
        noticed(self, began)
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

    def test_what_is_refused_before_anything_starts(self):
        experts = f"a={MODELS.parent / 'adapters/qwen3moe-experts/peft'}"
        for arguments, said in ((("--context-parallel", "2", "--device", "cuda"), "device cuda: found 2 ranks that share contexts"),
                                (("--data-parallel", "2", "--device", "cuda"), "found 2 replicas on cuda, expected them on CPUs"),
                                (("--context-parallel", "2", "--shrink"), "--shrink: found --context-parallel 2, expected none"),
                                (("--tensor-parallel", "2", "--device", "reference"), "device reference: found 2 ranks"),
                                (("--tensor-parallel", "2", "--front-address", "0.0.0.0"),
                                 "--front-address: found 0.0.0.0, which is every address of this machine"),
                                (("--tensor-parallel", "2", "--front-address", "192.0.2.1"),
                                 "--front-address: cannot listen on 192.0.2.1"),
                                (("--context-parallel", "2", "--attention", "sparse"), "contexts are spread over ranks"),
                                (("--tensor-parallel", "2", "--pipeline-parallel", "9"), "expected at most 16 ranks together"),
                                (("--tensor-parallel", "2", "--expert-parallel", "--adapter", experts), "adapter of experts")):
            model = str(MODELS / "qwen3moe/hf") if "--expert-parallel" in arguments else LLAMA
            server = Server(self, *arguments, model=model)
            self.assertEqual(server.process.wait(timeout=30), 2, arguments)
            self.assertIn(said, server.said())
            self.assertEqual(server.said().count("\n"), 1, server.said())

    def test_what_auto_chooses(self):
        # Before anything starts: hosts that are named twice are stages of two ranks, others share rows.
        for hosts, more, chosen in (("a,b,c", (), "--tensor-parallel 3"), ("a,a,b,b", (), "--tensor-parallel 2 --pipeline-parallel 2"),
                                    ("a,b,a,b", (), "--tensor-parallel 4"), ("a,a", (), "--tensor-parallel 2"),
                                    ("a,a,b,b,c,c,d,d", ("--data-parallel", "2"), "--tensor-parallel 2 --pipeline-parallel 2")):
            server = Server(self, "--parallel", "auto", "--rank-hosts", hosts, "--launcher", "/no/such/mpirun", *more)
            self.assertEqual(server.process.wait(timeout=30), 2)
            self.assertIn(f"--parallel auto: {chosen}\n", server.said())


class Deployment(unittest.TestCase):
    """What deploy/ tells the front, held to what it takes."""

    FILES = ("slurm/millrace.sbatch", "kubernetes/mpi/millrace-mpijob.yaml", "compose/compose.yaml")

    def test_options_are_there(self):
        told = subprocess.run([MILLRACE, "serve", "--help"], capture_output=True, text=True, env=ENVIRONMENT).stdout
        known = set(re.findall(r"--[a-z][a-z-]+", told))
        mpirun = {"--allow-run-as-root", "--map-by", "--bind-to"}
        for name in self.FILES:
            text = (ROOT / "deploy" / name).read_text()
            begin = list(re.finditer(r"millrace,? serve[ ,]", text))[-1].end()
            command = re.match(r".*?(?=\n\n|\n +(?:env|ports):|\Z)", text[begin:], re.DOTALL).group(0)
            used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", command))
            self.assertIn("--front-address", used, name)
            self.assertLessEqual(used, known | mpirun, name)

    def test_the_image_has_what_the_operator_needs(self):
        # Its keys are mounted over root's folder: settings must lie elsewhere, and sshd must take such keys. Without an
        # operator nodes need keys of their own. mpirun runs as root there.
        image = (ROOT / "deploy/compose/Dockerfile").read_text()
        self.assertIn("/etc/ssh/ssh_config.d/", image)
        self.assertRegex(image, r"StrictModes no' > /etc/ssh/sshd_config\.d/")
        self.assertIn("/root/.ssh/authorized_keys", image)
        self.assertIn("USER root", image)
        self.assertIn('"mpirun --allow-run-as-root ', (ROOT / "deploy/kubernetes/mpi/millrace-mpijob.yaml").read_text())

    def test_who_listens_to_others_wants_keys(self):
        for name in self.FILES[:2]:
            text = (ROOT / "deploy" / name).read_text()
            self.assertRegex(text, r"--host[ ,]+0\.0\.0\.0.*--keys", name)
        self.assertIn("127.0.0.1:8080:8080", (ROOT / "deploy" / self.FILES[2]).read_text())

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
        server.wait_restarted(4, 0)

    def test_a_replica_whose_ranks_are_lost_gets_nothing(self):
        if not HAS_MPI:
            self.skipTest("no Open MPI")
        with tempfile.TemporaryDirectory() as folder:
            launcher, none = (Path(folder) / name for name in ("launch.sh", "none"))
            launcher.write_text(f'#!/bin/sh\n[ -e {none} ] && exit 1\n'
                                'exec mpirun --oversubscribe --allow-run-as-root --bind-to none "$@"\n')
            launcher.chmod(0o755)
            server, _ = self.check("--tensor-parallel", "2", "--restart", "--launcher", str(launcher))
            none.touch()
            os.kill(server.groups()[0]["ranks"][1]["pid"], signal.SIGKILL)
            server.wait_healthy(lambda found: found == {"up": 2, "wanted": 4, "restarts": 0})
            self.assertEqual(server.get("/ready")[0], 200)
            for letter in "abcdefgh":  # prompts that the lost one had are among them
                self.assertEqual(len(server.ask(prompt=f"{letter * 40} and so on", max_tokens=4)["choices"]), 1)
            none.unlink()
            server.wait_healthy(lambda found: found["up"] == 4)


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

#!/usr/bin/env python3
"""Three real processes under mpirun: the bits, answers and errors of one.

    mpi_test.py MILLRACE

Without Open MPI, or in a build without it, everything is skipped, and the last line says so (status 77).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "tests/golden/models"
LLAMA = str(MODELS / "llama3/model.gguf")
GPT_OSS = str(MODELS / "gpt-oss-w32/model.gguf")
MILLRACE = ""
# Ranks of one machine, more of them than cores, also as root in a container.
MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
ENVIRONMENT = dict(os.environ, OMPI_MCA_btl_vader_single_copy_mechanism="none", OMPI_MCA_rmaps_base_oversubscribe="1")


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=ROOT, **options)


def ranks(count, *arguments):
    return run([*MPIRUN, "-n", str(count), MILLRACE, *arguments])


def children_of(pid):
    """Processes below `pid` that are millrace's."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found.append(int(child))
    return found


class Mpi(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def test_logits_have_the_bits_of_one_process(self):
        for model in (LLAMA, GPT_OSS):
            alone, shared = (os.path.join(self.folder.name, name) for name in ("alone.npy", "shared.npy"))
            arguments = ["logits", model, "--tokens", "5,9,20,7,3,50,8", "--all", "--threads", "1", "--device", "cpu"]
            one = run([MILLRACE, *arguments, "--out", alone])
            self.assertEqual(one.returncode, 0, one.stderr)
            three = ranks(3, *arguments, "--out", shared, "--tensor-parallel", "3")
            self.assertEqual(three.returncode, 0, three.stderr)
            self.assertEqual(Path(alone).read_bytes(), Path(shared).read_bytes())
            os.unlink(shared)
            stages = ranks(2, *arguments, "--out", shared, "--pipeline-parallel", "2")
            self.assertEqual(stages.returncode, 0, stages.stderr)
            self.assertEqual(Path(alone).read_bytes(), Path(shared).read_bytes())

    def test_a_context_over_processes_has_the_bits_of_one(self):
        # 1,100 tokens: three processes have a part of them each.
        tokens = ",".join(str(3 + i * i % 240) for i in range(1100))
        alone, spread = (os.path.join(self.folder.name, name) for name in ("alone.npy", "spread.npy"))
        arguments = ["logits", GPT_OSS, "--tokens", tokens, "--threads", "1", "--device", "cpu", "--ctx", "1536"]
        one = run([MILLRACE, *arguments, "--out", alone])
        self.assertEqual(one.returncode, 0, one.stderr)
        three = ranks(3, *arguments, "--out", spread, "--context-parallel", "3", "--context-schedule", "mesh")
        self.assertEqual(three.returncode, 0, three.stderr)
        self.assertEqual(Path(alone).read_bytes(), Path(spread).read_bytes())

    def test_run_answers_once_and_alike(self):
        arguments = ["run", LLAMA, "--raw", "-p", "abc", "-n", "12", "--seed", "3", "--threads", "1", "-q"]
        one = run([MILLRACE, *arguments])
        self.assertEqual(one.returncode, 0, one.stderr)
        three = ranks(3, *arguments, "--tensor-parallel", "3", "--rank-speeds", "2,1,1")
        self.assertEqual(three.returncode, 0, three.stderr)
        self.assertEqual(one.stdout, three.stdout)

    def test_whole_experts(self):
        arguments = ["run", str(MODELS / "qwen3moe/model.gguf"), "--raw", "-p", "abc", "-n", "8", "--seed", "3", "--top-p", "0.9",
                     "--threads", "1", "-q"]
        one = run([MILLRACE, *arguments])
        self.assertEqual(one.returncode, 0, one.stderr)
        two = ranks(2, *arguments, "--tensor-parallel", "2", "--expert-parallel")
        self.assertEqual(two.returncode, 0, two.stderr)
        self.assertEqual(one.stdout, two.stdout)

    def test_bench(self):
        result = ranks(2, "bench", LLAMA, "-p", "8", "-n", "4", "--repeat", "1", "--threads", "1",
                       "--tensor-parallel", "2", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("decode", result.stdout)

    def test_devices_measures_links(self):
        result = ranks(3, "devices", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        links = json.loads(result.stdout)["links"]
        self.assertEqual([(link["from"], link["to"]) for link in links], [(0, 1), (0, 2), (1, 2)])
        for link in links:
            self.assertGreater(link["latency_s"], 0)
            self.assertGreater(link["bytes_per_s"], 0)

    def test_wrong_numbers_of_processes(self):
        alone = run([MILLRACE, "run", LLAMA, "-p", "a", "--tensor-parallel", "3"])
        self.assertEqual(alone.returncode, 2)
        self.assertEqual(alone.stderr.strip(),
                         "millrace: --tensor-parallel 3: found one process, expected 3: start it with mpirun -n 3")
        two = ranks(2, "run", LLAMA, "-p", "a", "--tensor-parallel", "3")
        self.assertNotEqual(two.returncode, 0)
        self.assertIn("--tensor-parallel 3: mpirun started 2 processes, expected 3", two.stderr)

    def test_another_model_is_refused_by_name(self):
        other = str(MODELS / "qwen3/model.gguf")
        arguments = ["run", "-p", "a", "--tensor-parallel", "2"]
        result = run([*MPIRUN, "-n", "1", MILLRACE, *arguments, LLAMA, ":", "-n", "1", MILLRACE, *arguments, other])
        self.assertNotEqual(result.returncode, 0)
        self.assertRegex(result.stderr, r"millrace: model: rank 1 of 2 has '.*', rank 0 has '.*'")

    def serve(self):
        server = subprocess.Popen([*MPIRUN, "-n", "3", MILLRACE, "serve", LLAMA, "--port", "0", "--threads", "1",
                                   "--tensor-parallel", "3", "--ctx", "256", "--model-id", "m"],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT)
        self.addCleanup(server.stderr.close)
        self.addCleanup(server.stdout.close)
        self.addCleanup(lambda: server.poll() is None and server.kill())
        line = server.stdout.readline()
        found = re.search(r"listening on (http://\S+)", line)
        self.assertTrue(found, line)
        return server, found.group(1)

    def ask(self, url):
        body = json.dumps({"model": "m", "prompt": "abc", "max_tokens": 5, "seed": 1}).encode()
        request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["text"]

    def test_serve_answers_and_ends(self):
        server, url = self.serve()
        self.assertEqual(self.ask(url), self.ask(url))
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)

    def test_a_rank_that_dies_ends_the_group(self):
        server, url = self.serve()
        self.ask(url)
        victims = [pid for pid in children_of(server.pid) if "millrace" in Path(f"/proc/{pid}/cmdline").read_text()]
        self.assertEqual(len(victims), 3)
        began = time.monotonic()
        os.kill(victims[-1], signal.SIGKILL)
        server.wait(timeout=30)
        self.assertLess(time.monotonic() - began, 30)
        self.assertNotEqual(server.returncode, 0)
        self.assertRegex(server.stderr.read(), r"rank|signal")


def main():
    global MILLRACE
    MILLRACE = os.path.abspath(sys.argv.pop(1))
    if shutil.which("mpirun") is None:
        print("SKIPPED: mpirun is not installed (openmpi-bin): nothing over MPI was tested")
        return 77
    if "this build has no MPI" in run([MILLRACE, "devices"]).stdout:
        print("SKIPPED: this build has no MPI (libopenmpi-dev): nothing over MPI was tested")
        return 77
    return 0 if unittest.main(exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Processes under mpirun that share a model on this machine's GPU: the bits and answers of one process.

    tests/gpu/ranks_test.py MILLRACE [unittest options]

Without a GPU, Open MPI or a build with both everything is skipped, and the last line says so (status 77).
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "tests/golden/models"
LLAMA = str(MODELS / "llama3/model.gguf")
GPT_OSS = str(MODELS / "gpt-oss-w32/model.gguf")
MILLRACE = ""
MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
ENVIRONMENT = {**os.environ, "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


def run(*command, **environment):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**ENVIRONMENT, **environment},
                          cwd=ROOT)


def ranks(count, *arguments, **environment):
    return run(*MPIRUN, "-n", str(count), MILLRACE, *arguments, **environment)


class Ranks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="millrace-gpu-ranks-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def logits(self, model, *arguments, count=1):
        out = self.folder / "logits.npy"
        command = ["logits", model, "--tokens", "5,9,20,7,3,50,8", "--all", "--device", "cuda", "--ctx", "512", "--out",
                   str(out), *arguments]
        done = ranks(count, *command) if count > 1 else run(MILLRACE, *command)
        self.assertEqual(done.returncode, 0, done.stderr)
        return out.read_bytes()

    def test_rows_layers_and_experts_have_the_bits_of_one_process(self):
        for model in (LLAMA, GPT_OSS):
            alone = self.logits(model)
            for options in (["--tensor-parallel", "2"], ["--pipeline-parallel", "2"],
                            ["--tensor-parallel", "2", "--expert-parallel"]):
                if model == LLAMA and "--expert-parallel" in options:
                    continue
                with self.subTest(model=model, options=options):
                    self.assertEqual(self.logits(model, *options, count=2), alone)

    def test_run_answers_once_and_alike(self):
        arguments = ["run", LLAMA, "--raw", "-p", "abc", "-n", "12", "--seed", "3", "--device", "cuda", "--ctx", "512",
                     "--gpu-memory", "8G", "-q"]
        one = run(MILLRACE, *arguments)
        self.assertEqual(one.returncode, 0, one.stderr)
        two = ranks(2, *arguments, "--tensor-parallel", "2")
        self.assertEqual(two.returncode, 0, two.stderr)
        self.assertEqual(one.stdout, two.stdout)

    def test_devices_measures_the_links(self):
        for count in (1, 2):
            done = ranks(count, "devices", "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            links = json.loads(done.stdout)["gpu_links"]
            self.assertEqual(links[0]["name"], "staged over mpi")
            for link in links:
                self.assertGreater(link["latency_s"], 0)
                self.assertGreater(link["bytes_per_s"], 0)
                print(f"[  figure  ] cuda link of {count}: {link['name']} {1e6 * link['latency_s']:.1f} us, "
                      f"{1e-9 * link['bytes_per_s']:.2f} GB/s")

    def test_nccl_between_ranks_of_one_gpu_is_refused(self):
        done = ranks(2, "run", LLAMA, "-p", "a", "--device", "cuda:0", "--tensor-parallel", "2", "--ctx", "512",
                     "--gpu-memory", "8G", MILLRACE_RANK_LINK="nccl")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"MILLRACE_RANK_LINK: found nccl, but (ranks share a GPU|rank \d finds no NCCL)")

    def test_contexts_are_refused(self):
        done = ranks(2, "run", LLAMA, "-p", "a", "--device", "cuda", "--context-parallel", "2", "--ctx", "512")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("device cuda: found 2 ranks that share contexts", done.stderr)

    def test_a_server_starts_its_ranks(self):
        arguments = [MILLRACE, "serve", LLAMA, "--port", "0", "--ctx", "512", "--model-id", "m", "--quiet", "--device", "cuda",
                     "--gpu-memory", "8G"]
        texts = []
        for options in ([], ["--tensor-parallel", "2"], ["--pipeline-parallel", "2"]):
            with tempfile.TemporaryFile("w+") as log:
                server = subprocess.Popen([*arguments, *options], stdout=subprocess.PIPE, stderr=log, text=True,
                                          env={**ENVIRONMENT, "MILLRACE_CONFIG": "/dev/null"}, cwd=ROOT)
                try:
                    found = re.search(r"listening on (http://\S+)", server.stdout.readline())
                    if found is None:
                        log.seek(0)
                        said = log.read()
                        if "this build has no server" in said:
                            self.skipTest(said.strip())
                        self.fail(said)
                    body = json.dumps({"model": "m", "prompt": "abc", "max_tokens": 20, "ignore_eos": True, "seed": 7}).encode()
                    request = urllib.request.Request(found.group(1) + "/v1/completions", body,
                                                     {"content-type": "application/json"})
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        texts.append(json.load(answer)["choices"][0]["text"])
                finally:
                    server.send_signal(signal.SIGTERM)
                    try:
                        server.wait(timeout=30)
                    except subprocess.TimeoutExpired:
                        server.kill()
                        server.wait()
                    server.stdout.close()
        self.assertEqual(texts[1:], texts[:1] * 2)


def main():
    global MILLRACE
    MILLRACE = os.path.abspath(sys.argv.pop(1))
    said = run(MILLRACE, "devices").stdout
    why = None
    if shutil.which("mpirun") is None:
        why = "mpirun is not installed (openmpi-bin)"
    elif "this build has no MPI" in said:
        why = "this build has no MPI (libopenmpi-dev)"
    elif "no GPU" in said:
        why = "there is no GPU"
    if why is not None:
        print(f"SKIPPED: {why}: ranks with GPUs were not tested")
        return 77
    return 0 if unittest.main(exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())

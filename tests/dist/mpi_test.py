#!/usr/bin/env python3
"""Three real processes under mpirun: the bits, answers and errors of one.

    mpi_test.py MILLRACE

Without Open MPI, or in a build without it, everything is skipped, and the last line says so (status 77).
"""

import ctypes
import json
import mmap
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


def forget(paths):
    """Has the system drop these files from memory, where it can."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes(path):
    """How much of a file is in memory, whoever has read it."""
    page = mmap.PAGESIZE
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * ((len(mapped) + page - 1) // page))()
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), pages)
        del first  # the mapping is closed
        assert failed == 0
    return page * sum(entry & 1 for entry in pages)


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
            os.unlink(shared)
            both = ranks(4, *arguments, "--out", shared, "--tensor-parallel", "2", "--pipeline-parallel", "2")
            self.assertEqual(both.returncode, 0, both.stderr)
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

    def test_speeds_are_measured(self):
        result = ranks(2, "run", LLAMA, "--raw", "-p", "abc", "-n", "4", "--threads", "1", "--tensor-parallel", "2",
                       "--rank-speeds", "auto")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stderr, r"--rank-speeds auto: [\d.]+,[\d.]+ \(ranks read [\d.]+, [\d.]+ GB/s\)")

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
        self.assertEqual(two.stderr.count("--tensor-parallel 3: mpirun started 2 processes, expected 3"), 1, two.stderr)

    def test_what_all_ranks_refuse_is_said_once(self):
        for arguments, said in ((["--tensor-parallel", "3", "--expert-parallel"], "llama has no experts"),
                                (["--context-parallel", "3", "--rank-speeds", "1,2,3"], "--rank-speeds does nothing"),
                                (["--tensor-parallel", "3", "--device", "reference"], "device reference: found 3 ranks"),
                                (["--context-parallel", "3", "--device", "cuda"],
                                 "device cuda: found 3 ranks that share contexts")):
            for _ in range(3):  # a busy machine may take longer to end the others than these wait for it
                refused = ranks(3, "run", LLAMA, "-p", "a", *arguments)
                self.assertEqual(refused.returncode, 2, refused.stderr)
                if refused.stderr.count(said) == 1:
                    break
            self.assertEqual(refused.stderr.count(said), 1, refused.stderr)

    def test_a_server_that_mpirun_started_has_no_front(self):
        for arguments in (["--front-address", "10.0.0.1"], ["--restart"], ["--rank-hosts", "a,b"]):
            refused = ranks(2, "serve", LLAMA, "--tensor-parallel", "2", *arguments)
            self.assertEqual(refused.returncode, 2, refused.stderr)
            self.assertEqual(refused.stderr.count("found a process that mpirun has started"), 1, refused.stderr)

    def test_a_rank_reads_its_own_part_of_the_file(self):
        # Each rank has a copy of the file that was in no memory before: what of it is there afterwards is what the
        # rank has read, and what the system has read around that.
        shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 8192,
                 "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
                 "vocab_size": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                 "hidden_act": "silu", "tie_word_embeddings": False}
        config, *copies = (Path(self.folder.name) / name for name in ("config.json", "a.gguf", "b.gguf"))
        config.write_text(json.dumps(shape))
        made = run([MILLRACE, "synth", str(config), str(copies[0]), "--type", "q8_0"])
        self.assertEqual(made.returncode, 0, made.stderr)
        shutil.copyfile(copies[0], copies[1])
        words = ["logits", "--tokens", "5,9,20,7", "--threads", "1", "--device", "cpu", "--ctx", "256", "--out"]
        out = str(Path(self.folder.name) / "out.npy")

        forget(copies)
        if any(resident_bytes(copy) for copy in copies):
            self.skipTest("files of this file system stay in memory")
        one = run([MILLRACE, *words, out, str(copies[0])])
        self.assertEqual(one.returncode, 0, one.stderr)
        whole = resident_bytes(copies[0])
        self.assertGreater(whole, 0.9 * copies[0].stat().st_size)
        # Besides its part a rank looks rows up in the embedding, and reads the file's head, with what the system reads
        # behind it (4 MiB of a mapping in huge pages, or what the disk is told).
        besides = 4096 * 1024 * 34 // 32 + (8 << 20)
        for options, told in ((["--tensor-parallel", "2", "--rank-speeds", "3,1"], ["--rank-speeds", "3,1"]),
                              (["--pipeline-parallel", "2"], ["--pipeline-parallel"])):
            plan = run([MILLRACE, "inspect", str(copies[0]), "--ranks", "2", *told, "--json"])
            self.assertEqual(plan.returncode, 0, plan.stderr)
            parts = [rank["weight_bytes"] for rank in json.loads(plan.stdout)[options[0][2:].replace("-", "_")]["ranks"]]
            forget(copies)
            command = [MILLRACE, *words, out, *options]
            two = run([*MPIRUN, "-n", "1", *command, str(copies[0]), ":", "-n", "1", *command, str(copies[1])])
            self.assertEqual(two.returncode, 0, two.stderr)
            read = [resident_bytes(copy) for copy in copies]
            for rank, (part, bytes_read) in enumerate(zip(parts, read)):
                self.assertGreater(bytes_read, 0.9 * part, (options, rank))
                self.assertLess(bytes_read, part + besides, (options, rank))
            self.assertLess(read[1], 0.7 * whole)

    def test_another_model_is_refused_by_name(self):
        other = str(MODELS / "qwen3/model.gguf")
        arguments = ["run", "-p", "a", "--tensor-parallel", "2"]
        result = run([*MPIRUN, "-n", "1", MILLRACE, *arguments, LLAMA, ":", "-n", "1", MILLRACE, *arguments, other])
        self.assertNotEqual(result.returncode, 0)
        self.assertRegex(result.stderr, r"millrace: model: rank 1 of 2 has '.*', rank 0 has '.*'")

    def test_a_rank_that_does_not_reach_its_front_says_so(self):
        result = run(["env", "MILLRACE_RANK_KEY=0", *MPIRUN, "-n", "1", MILLRACE, "rank", LLAMA, "--front", "127.0.0.1:1"])
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertRegex(result.stderr, r"millrace: rank 0 on \S+: cannot connect to 127.0.0.1 port 1: Connection refused; "
                                        r"--front-address names an address that all hosts reach the front by\n")

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

    def test_a_rank_that_hangs_ends_the_group(self):
        # While nothing is asked, so that nobody waits for it, and while the others wait for it.
        for number, asks in ((0, False), (2, True)):
            server, url = self.serve()
            victims = [pid for pid in children_of(server.pid) if "millrace" in Path(f"/proc/{pid}/cmdline").read_text()]
            self.ask(url)
            os.kill(victims[number], signal.SIGSTOP)
            began = time.monotonic()
            if asks:
                with self.assertRaises(OSError):
                    self.ask(url)
            server.wait(timeout=60)
            print(f"[  figure  ] noticed after {time.monotonic() - began:.1f} s (goal 5)")
            self.assertEqual(server.returncode, 2)
            self.assertRegex(server.stderr.read(), rf"millrace: rank {number} \(process {victims[number]} on \S+\) was not heard of "
                                                   r"for 3 s: it hangs, or a link to it is down; the job ends\n")
            until = time.monotonic() + 30  # whoever is killed takes a moment to be gone
            while any(Path(f"/proc/{pid}").exists() for pid in victims):
                self.assertLess(time.monotonic(), until, "a rank has outlived its group")
                time.sleep(0.05)


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

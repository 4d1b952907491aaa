"""Drives the real binary: every command, every kind of bad input, signals and full disks.

    tests/cli_test.py PATH/TO/millrace [unittest options]

Models are tiny random ones that the binary writes itself (millrace synth). Needs only Python's own library.
"""

import ast
import fcntl
import json
import math
import os
import pathlib
import pty
import re
import resource
import select
import signal
import struct
import subprocess
import termios
import time
import unittest

import command
from command import TIMEOUT, CommandTest, millrace

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
LINE_EDITING = os.environ.get("MILLRACE_LINE_EDITOR") != "plain"  # tests/CMakeLists.txt: what the binary was built with


def read_npy(path):
    """The rows of a float32 .npy file, parsed as the format says."""
    data = pathlib.Path(path).read_bytes()
    assert data[:8] == b"\x93NUMPY\x01\x00", data[:8]
    length = struct.unpack("<H", data[8:10])[0]
    header = ast.literal_eval(data[10 : 10 + length].decode())
    assert header["descr"] == "<f4" and header["fortran_order"] is False, header
    rows, cols = header["shape"]
    values = struct.unpack(f"<{rows * cols}f", data[10 + length :])
    return [values[r * cols : (r + 1) * cols] for r in range(rows)]


def nll(logits, token):
    top = max(logits)
    return math.log(sum(math.exp(x - top) for x in logits)) + top - logits[token]


class CliTest(CommandTest):
    families = ("llama", "gpt-oss", "qwen2", "qwen3", "qwen3moe", "gemma3", "gemma4", "gpt2", "phi")

    def good_json(self, *args, **options):
        return json.loads(self.good(*args, "--json", **options))


class Help(CliTest):
    def test_help_and_version(self):
        self.assertRegex(self.good("--version"), r"^millrace \d+\.\d+\.\d+\n$")
        self.assertIn("millrace chat", self.good("--help"))
        for command in ("run", "chat", "pull", "list", "rm", "inspect", "tokenize", "logits", "perplexity", "bench",
                        "synth"):
            self.assertIn("Examples:", self.good(command, "--help"))

    def test_bad_options(self):
        self.bad(says=["--help"])
        self.bad("fly", says=["fly", "--help"])
        self.bad("run", says=["MODEL"])
        self.bad("run", self.model, says=["-p TEXT"])
        self.bad("run", self.model, "-p", "a", "--no-such-option", says=["--no-such-option"])
        self.bad("run", self.model, "-p", "a", "--threads", "-1", says=["--threads"])
        self.bad("run", self.model, "-p", "a", "--logprobs", "2", says=["--json"])
        self.bad("run", self.model, "-p", "a", "--kv-type", "int7", says=["--kv-type", "int7", "int8"])
        self.bad("bench", self.model, "--clients", 2, "--roofline", says=["--roofline", "--clients"])
        self.bad("bench", self.model, "--energy", "--roofline", says=["--energy", "--roofline"])
        self.bad("bench", self.model, "--kv-dir", "x", says=["--kv-dir", "--clients"])
        self.bad("tokenize", self.model, says=["TEXT"])

    def test_numbers_that_are_none_or_too_large(self):
        largest = 2**64 - 1
        self.bad("run", self.model, "-p", "x", "--seed=-1", says=["--seed", "-1", f"0 to {largest}"])
        self.bad("synth", "tiny-llama", self.path / "x", "--seed", largest + 1, says=["--seed", f"0 to {largest}"])
        for option in ("--ram-tier", "--models-memory", "--kv-dir-size"):  # MiB, which are counted in bytes
            for value in (-1, 2**44, 10**23):
                self.bad("serve", self.model, f"{option}={value}", says=[option, value, f"0 to {2**44 - 1}"])
        for option in ("--rate", "--header-timeout", "--drain-timeout", "--unload-after"):
            self.bad("serve", self.model, option, "nan", says=[option, "nan not in range"])
        self.bad("bench", self.model, "--top-p", "nan", says=["--top-p", "nan not in range"])


class Clients(CliTest):
    def test_many_clients_finish(self):
        out = self.good_json("bench", self.model, "--clients", 3, "-p", 16, "-n", 4, "--kv-type", "f16")
        self.assertEqual((out["clients"], out["failed"]), (3, 0))
        self.assertGreater(out["generated_tokens"], out["requests"])


class Run(CliTest):
    def test_streams_text_and_statistics(self):
        done = millrace("run", self.model, "-p", "hello", "-n", 20, "--ignore-end")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.decode("utf-8").endswith("\n"))
        self.assertRegex(done.stderr.decode(), r"generated 20 tokens, [\d.]+ tok/s")
        quiet = millrace("run", self.model, "-p", "hello", "-n", 2, "-q")
        self.assertEqual(quiet.stderr, b"")

    def test_same_seed_same_text(self):
        for name, model in self.models.items():
            with self.subTest(name):
                args = ("run", model, "-p", "the sky", "-n", 24, "--temp", 1.5, "--ignore-end")
                first = self.good(*args, "--seed", 7)
                self.assertEqual(first, self.good(*args, "--seed", 7, "--threads", 1))
                self.assertNotEqual(first, self.good(*args, "--seed", 8))

    def test_json_holds_what_was_sampled(self):
        out = self.good_json("run", self.model, "-p", "hello", "-n", 5, "--logprobs", 3, "--ignore-end", "--seed", 3)
        self.assertEqual(len(out["tokens"]), out["generated_tokens"])
        self.assertEqual((out["finish_reason"], out["seed"]), ("length", 3))
        for token in out["tokens"]:
            self.assertLess(token["logprob"], 0)
            self.assertEqual(len(token["top"]), 3)
            self.assertGreaterEqual(token["top"][0]["logprob"], token["logprob"] - 1e-9)

    def test_greedy_is_the_argmax_of_logits(self):
        ids = self.good_json("tokenize", self.model, "hello")["ids"]
        out = self.good_json("run", self.model, "--raw", "-p", "hello", "-n", 3, "--temp", 0, "--ignore-end")
        for token in out["tokens"]:
            self.good("logits", self.model, "--tokens", ",".join(map(str, ids)), "--out", self.path / "g.npy")
            row = read_npy(self.path / "g.npy")[0]
            self.assertEqual(token["id"], row.index(max(row)))
            ids.append(token["id"])

    def test_prompt_from_file_and_stdin(self):
        prompt = self.path / "prompt.txt"
        prompt.write_text("hello there")
        args = ("-n", 8, "--temp", 0, "-q")
        wanted = self.good("run", self.model, "-p", "hello there", *args)
        self.assertEqual(wanted, self.good("run", self.model, "-f", prompt, *args))
        self.assertEqual(wanted, self.good("run", self.model, "-f", "-", *args, stdin=b"hello there"))

    def test_template_and_raw_differ(self):
        raw = self.good_json("run", self.model, "-p", "hello", "-n", 1, "--raw")
        chat = self.good_json("run", self.model, "-p", "hello", "-n", 1)
        system = self.good_json("run", self.model, "-p", "hello", "-n", 1, "--system", "be kind")
        self.assertLess(raw["prompt_tokens"], chat["prompt_tokens"])
        self.assertLess(chat["prompt_tokens"], system["prompt_tokens"])

    def test_logit_bias_and_penalties_act(self):
        args = ("run", self.model, "-p", "hello", "-n", 6, "--temp", 0, "--ignore-end")
        out = self.good_json(*args, "--logit-bias", "65=1000")
        self.assertEqual([t["id"] for t in out["tokens"]], [65] * 6)
        out = self.good_json(*args, "--logit-bias", "65=1000", "--presence-penalty", 100, "--logit-bias", "66=950")
        self.assertEqual([t["id"] for t in out["tokens"]], [65, 66, 65, 65, 65, 65])

    def test_stop_string_does_not_show(self):
        args = ("run", self.model, "-p", "x", "-n", 6, "--temp", 0, "--ignore-end", "--logit-bias", "65=1000")
        letter = self.good_json(*args)["text"]
        out = self.good_json(*args, "--stop", letter[:2])
        self.assertEqual((out["text"], out["finish_reason"]), ("", "stop_string"))

    def test_only_the_final_channel_is_the_answer(self):
        """A bias and the presence penalty force a turn of two messages, each token once, on the random model."""
        model = self.models["gpt-oss"]
        ids = lambda text: self.good_json("tokenize", model, text)["ids"]
        turn = ids("<|channel|>") + ids("q") + ids("<|message|>") + ids("w") + ids("<|end|>")
        seconds = ids("<|start|>") + ids("<|constrain|>") + ids("e")
        args = ["run", model, "-p", "x", "--temp", 0, "--presence-penalty", 100]
        biases = [x for rank, token in enumerate(turn + seconds) for x in ("--logit-bias", f"{token}={2000 - 10 * rank}")]
        out = self.good_json(*args, "-n", len(turn + seconds), *biases)
        self.assertEqual([t["id"] for t in out["tokens"]], turn + seconds)
        self.assertEqual((out["text"], out["thinking"]), ("", "w"))
        turn = ids("<|channel|>") + [i for c in "final" for i in ids(c)] + ids("<|message|>") + ids("y") + ids("<|return|>")
        biases = [x for rank, token in enumerate(turn) for x in ("--logit-bias", f"{token}={2000 - 10 * rank}")]
        out = self.good_json(*args, "-n", 50, *biases)
        self.assertEqual((out["text"], out["thinking"], out["finish_reason"]), ("y", "", "stop"))
        shown = self.good_json(*args, "-n", 50, *biases, "--special")
        self.assertIn("<|channel|>final<|message|>y", shown["text"])

    def test_devices_agree(self):
        for name, model in self.models.items():
            with self.subTest(name):
                if name == "gemma4":  # its scores are not scaled: with random weights softmax is as steep as a choice
                    model = self.path / "bf16.gguf"
                    self.good("synth", "tiny-gemma4", model, "--type", "bf16")
                tokens = ",".join(str(i * 7 % 600) for i in range(40))
                for device in ("cpu", "reference"):
                    self.good("logits", model, "--tokens", tokens, "--device", device, "--out", self.path / f"{device}.npy")
                cpu, reference = (read_npy(self.path / f"{d}.npy")[0] for d in ("cpu", "reference"))
                scale = math.sqrt(sum(x * x for x in reference))
                self.assertLess(math.dist(cpu, reference), 0.05 * scale)

    def test_device_auto(self):
        done = millrace("run", self.model, "-p", "a", "-n", 2, "--device", "auto")
        self.assertEqual(done.returncode, 0, done.stderr)
        cuda = millrace("run", self.model, "-p", "a", "-n", 2, "--device", "cuda")
        said = re.findall(rb"using the CPU: device cuda: [^\n]+\n", done.stderr)
        silent = cuda.returncode == 0 or b"built without CUDA" in cuda.stderr
        self.assertEqual(len(said), 0 if silent else 1, done.stderr)
        if cuda.returncode != 0:  # one clear line
            self.assertRegex(cuda.stderr, rb"\Amillrace: device cuda: [^\n]+\n\Z")
            self.assertEqual(cuda.stdout, b"")

    def test_bad_input(self):
        self.bad("run", self.model, "-p", "a", "--device", "tpu", says=["tpu", "cpu"])
        self.bad("run", self.model, "-p", "a", "--gpu-memory", "1.5", says=["--gpu-memory", "1.5"])
        self.bad("run", self.model, "-p", "a", "--gpu-memory", "16X", says=["--gpu-memory", "16X", "16G"])
        two = ("run", self.model, "-p", "a", "--device", "cpu+reference")
        self.bad(*two, "--gpu-layers", 999, says=["gpu layers", "999"])
        self.bad(*two, "--gpu-layers", -2, says=["--gpu-layers", "-2"])
        self.bad(*two, "--cpu-experts", "1", says=["cpu experts", "no experts"])
        self.bad("run", self.model, "-p", "a", "--device", "cpu+tpu", says=["tpu", "cuda"])
        self.bad("serve", self.model, "--fallback", "tpu", "--device", "auto", says=["--fallback", "tpu"])
        self.bad("run", self.model, "-p", "a", "--gpu-memory", "0.5", "--device", "cpu", says=["--gpu-memory", "--device cpu"])
        self.bad("run", self.model, "-p", "a", "--tensor-parallel", 17, says=["--tensor-parallel", "17"])
        self.bad("run", self.model, "-p", "a", "--pipeline-parallel", 0, says=["--pipeline-parallel", "0"])
        self.bad("run", self.model, "-p", "a", "--tensor-parallel", 2, "--pipeline-parallel", 9,
                 says=["--pipeline-parallel", "--tensor-parallel 2", "16"])
        self.bad("run", self.model, "-p", "a", "--context-parallel", 17, says=["--context-parallel", "17"])
        self.bad("run", self.model, "-p", "a", "--context-parallel", 2, "--pipeline-parallel", 2,
                 says=["--context-parallel", "--pipeline-parallel 2"])
        self.bad("run", self.model, "-p", "a", "--context-parallel", 2, "--rank-speeds", "1,2", says=["--rank-speeds"])
        self.bad("serve", self.model, "--context-parallel", 2, "--shrink", says=["--shrink", "--context-parallel 2"])
        self.bad("run", self.model, "-p", "a", "--tensor-parallel", 2, "--rank-speeds", "1,x", says=["--rank-speeds", "1,x"])
        self.bad("run", self.model, "-p", "a", "--tensor-parallel", 2, "--rank-speeds", "1,2,3", says=["--rank-speeds", "3"])
        self.bad("serve", self.model, "--tensor-parallel", 2, "--rank-hosts", "a,b,c", says=["--rank-hosts", "3", "2"])
        self.bad("serve", self.model, "--tensor-parallel", 2, "--launcher", " ", says=["--launcher", "mpirun"])
        self.bad("serve", self.model, "--tensor-parallel", 2, "--front-address", "", says=["--front-address"])
        self.bad("serve", self.model, "--data-parallel", 17, says=["--data-parallel", "17"])
        self.bad("serve", self.model, "--data-parallel", 2, "--device", "cuda", says=["--data-parallel", "cuda"])
        self.bad("serve", self.model, "--parallel", "most", says=["--parallel", "auto"])
        self.bad("serve", self.model, "--parallel", "auto", "--tensor-parallel", 2, says=["--parallel auto"])
        self.bad("serve", self.model, "--parallel", "auto", "--rank-hosts", "a,b", "--data-parallel", 2,
                 says=["--rank-hosts", "found 2", "at least 4"])
        self.bad("rank", self.model, "--front", "here", says=["MILLRACE_RANK_KEY"])
        self.bad("rank", self.model, "--front", "here", env={"MILLRACE_RANK_KEY": "k"}, says=["--front", "here"])
        self.bad("run", self.model, "-p", "a", "--tensor-parallel", 2, "--quantize", "q8_0", says=["--quantize", "2"])
        self.bad("inspect", self.model, "--ranks", 17, says=["--ranks", "17"])
        self.bad("inspect", self.model, "--ranks", 2, "--expert-parallel", says=["--expert-parallel", "has no experts"])
        self.bad("inspect", self.model, "--ranks", 2, "--rank-speeds", "1,0", says=["--rank-speeds", "1,0"])
        self.bad("tune", self.path / "none.gguf", says=["none.gguf"])
        self.bad("tune", self.model, "--device", "cpu", says=["cpu", "cuda"])
        self.bad("tune", self.model, "--print", says=["--print", "MODEL"])
        self.bad("run", self.model, "-p", "a", "--temp", -1, says=["temperature is -1"])
        self.bad("run", self.model, "-p", "a", "--top-p", 0, says=["top_p is 0"])
        self.bad("run", self.model, "-p", "a", "--logit-bias", "x=1", says=["--logit-bias", "ID=BIAS"])
        self.bad("run", self.model, "-p", "a", "--logit-bias", "100000=1", says=["100000"])
        self.bad("run", self.model, "-p", "a", "--kv-type", "q9", says=["--kv-type", "q9"])
        self.bad("run", self.model, "-p", "a", "--attention", "thin", says=["--attention", "thin", "sparse"])
        self.bad("run", self.model, "-p", "a", "--attention", "sparse", "--attention-budget", 63,
                 says=["--attention-budget", "64"])
        self.bad("logits", self.model, "--tokens", "1,2", "--out", self.path / "x.npy", "--attention", "request",
                 says=["attention", "full or sparse"])
        self.bad("serve", self.model, "--states-apart", 100, says=["--states-apart", "100", "multiple of 16"])
        self.bad("serve", self.model, "--states-apart", 512, says=["states_apart", "512", "no layer"])
        self.bad("run", self.model, "-p", "a", "--kv-type", "int8", "--device", "reference",
                 says=["found int8", "device reference has f32"])
        self.bad("run", self.model, "-p", "a", "--compute", "fp4", says=["--compute", "fp4", "fp8"])
        self.bad("run", self.model, "-p", "a", "--compute", "fp8", "--device", "cpu", says=["compute", "fp8 on device cpu"])
        self.bad("run", self.model, "-p", "a", "--compute", "fp8", "--device", "reference", "--adapter", "x=y",
                 says=["--compute", "fp8 with --adapter"])
        self.bad("run", self.model, "-f", self.path / "none.txt", says=["none.txt"])
        self.bad("run", self.model, "-f", self.path, says=[self.path])
        self.bad("run", self.model, "-p", "word " * 100, "--ctx", 64, says=["64", "tokens", "context"])
        self.bad("run", self.model, "--raw", "-p", "", says=["no tokens"])

    def test_interrupt_ends_the_answer(self):
        process = subprocess.Popen(
            [command.BINARY, "run", self.model, "-p", "go", "--ctx", "400000", "--ignore-end"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 130, error)
        out.decode("utf-8")
        self.assertTrue(out.endswith(b"\n"))
        self.assertIn(b"cancelled", error)

    def test_reader_that_leaves(self):
        process = subprocess.Popen(
            [command.BINARY, "run", self.model, "-p", "go", "--ctx", "400000", "--ignore-end"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.read(1)
        process.stdout.close()
        error = process.stderr.read()
        process.stderr.close()
        self.assertEqual(process.wait(timeout=TIMEOUT), 128 + signal.SIGPIPE)
        self.assertEqual(error, b"")

    def test_full_disk_behind_stdout(self):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([command.BINARY, "tokenize", self.model, "hello"], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr.decode(), r"\Amillrace: standard output: [^\n]*No space left[^\n]*\n\Z")


class Tokenize(CliTest):
    def test_round_trip(self):
        text = "Hello, wörld! 你好 🙂\n\tba baba bababa  42"
        for name, model in self.models.items():
            with self.subTest(name):
                ids = self.good("tokenize", model, text).split()
                self.assertEqual(self.good("tokenize", model, "--decode", *ids), text + "\n")
                self.assertEqual(self.good("tokenize", model, "--decode", ",".join(ids)), text + "\n")
                out = self.good_json("tokenize", model, text)
                self.assertEqual([str(i) for i in out["ids"]], ids)
                self.assertEqual(out["count"], len(ids))
                self.assertEqual(int(self.good("tokenize", model, text, "--count")), len(ids))

    def test_files_and_raw_bytes(self):
        path = self.path / "bytes.bin"
        path.write_bytes(b"abc\xff\xfe\x00def")
        ids = self.good("tokenize", self.model, "-f", path)
        self.assertEqual(ids, self.good("tokenize", self.model, "-f", "-", stdin=path.read_bytes()))
        listed = self.path / "ids.txt"
        listed.write_text(ids)
        decoded = self.good("tokenize", self.model, "--decode", "-f", listed)
        self.assertEqual(decoded, b"abc\xff\xfe\x00def\n".decode("utf-8", "replace"))

    def test_special_tokens(self):
        with_special = self.good_json("tokenize", self.model, "<|im_start|>")["ids"]
        letters = self.good_json("tokenize", self.model, "<|im_start|>", "--no-special")["ids"]
        self.assertEqual(len(with_special), 1)
        self.assertGreater(len(letters), 4)
        self.assertEqual(self.good("tokenize", self.model, "--decode", *with_special), "<|im_start|>\n")
        self.assertEqual(self.good("tokenize", self.model, "--decode", "--no-special", *with_special), "\n")

    def test_bad_input(self):
        self.bad("tokenize", self.model, "--decode", "12", "x4", says=["token 1", "'x4'"])
        self.bad("tokenize", self.model, "--decode", "100000", says=["100000"])
        self.bad("tokenize", self.model, "-f", self.path / "none", says=["none"])


class Numbers(CliTest):
    def test_logits_rows(self):
        tokens = [5, 300, 17, 620, 9] * 20
        listed = self.path / "tokens.txt"
        listed.write_text(json.dumps(tokens))
        for model in self.models.values():
            self.good("logits", model, "--tokens", f"@{listed}", "--all", "--out", self.path / "all.npy")
            self.good("logits", model, "--tokens", ",".join(map(str, tokens)), "--out", self.path / "last.npy")
            rows = read_npy(self.path / "all.npy")
            self.assertEqual((len(rows), len(rows[0])), (100, 640))
            self.assertEqual(rows[-1], read_npy(self.path / "last.npy")[0], "chunks must not change bits")

    def test_perplexity_is_that_of_the_logits(self):
        tokens = [(i * i * 31 + 7) % 640 for i in range(150)]
        text = ",".join(map(str, tokens))
        for ctx, stride in ((150, 150), (64, 64), (64, 20)):
            scores, end = [], 0
            for begin in range(0, len(tokens), stride):
                window = tokens[begin : begin + ctx]
                if end == len(tokens) or len(window) < 2:
                    break
                self.good("logits", self.model, "--tokens", ",".join(map(str, window)), "--all", "--out", self.path / "w.npy")
                rows = read_npy(self.path / "w.npy")
                for position in range(max(end, begin + 1), begin + len(window)):
                    scores.append(nll(rows[position - begin - 1], tokens[position]))
                end = begin + len(window)
            out = self.good_json("perplexity", self.model, "--tokens", text, "--ctx", ctx, "--stride", stride)
            self.assertEqual(out["scored_tokens"], len(scores))
            self.assertAlmostEqual(out["nll"], sum(scores) / len(scores), places=5)
            self.assertAlmostEqual(out["perplexity"], math.exp(out["nll"]), places=3)

    def test_perplexity_of_a_file(self):
        text = self.path / "text.txt"
        text.write_text("ba be bi bo bu " * 40)
        count = int(self.good("tokenize", self.model, "-f", text, "--count"))
        out = self.good("perplexity", self.model, "-f", text, "--ctx", 50)
        self.assertIn(f"tokens     {count}", out)
        self.bad("perplexity", self.model, "-f", "/dev/null", says=["/dev/null"])
        self.bad("perplexity", self.model, "--tokens", "1", says=["at least 2"])
        self.bad("perplexity", self.model, "--tokens", "1,2", "--ctx", 8, "--stride", 9, says=["--stride is 9"])

    def test_bench(self):
        out = self.good_json("bench", self.model, "-p", 40, "-n", 10, "--depth", 20, "--repeat", 2)
        for key in ("decode_tok_s", "prefill_tok_s", "bytes_per_token", "read_gb_s", "decode_bandwidth_fraction", "load_s",
                    "first_token_s", "peak_rss_bytes", "anonymous_bytes", "threads"):
            self.assertGreater(out[key], 0, key)
        self.assertTrue(out["isa"])
        self.assertTrue(out["stolen_fraction"] is None or 0 <= out["stolen_fraction"] <= 1, out["stolen_fraction"])
        fraction = out["decode_tok_s"] * out["bytes_per_token"] / (out["read_gb_s"] * 1e9)
        self.assertAlmostEqual(out["decode_bandwidth_fraction"], fraction, places=9)
        self.assertEqual((out["prompt_tokens"], out["decode_tokens"], out["depth"]), (40, 10, 20))
        self.assertIn("tok/s", self.good("bench", self.model, "-p", 8, "-n", 2, "--repeat", 1, "--threads", 1))
        self.bad("bench", self.model, "--ctx", 8, says=["--ctx is 8"])

    def test_bad_tokens(self):
        out = self.path / "bad.npy"
        self.bad("logits", self.model, "--tokens", "1,2,99999", "--out", out, says=["99999"])
        self.bad("logits", self.model, "--tokens", "1,-2", "--out", out, says=["'-2'"])
        self.bad("logits", self.model, "--tokens", "", "--out", out, says=["no token ids"])
        self.bad("logits", self.model, "--tokens", f"@{self.path}/none", "--out", out, says=["none"])
        self.bad("logits", self.model, "--tokens", "1,2,3", "--ctx", 2, "--out", out, says=["3 tokens"])
        self.assertFalse(out.exists())


class Adapters(CliTest):
    def test_changes_the_logits(self):
        model, adapter = GOLDEN / "models/llama3/hf", GOLDEN / "adapters/llama3/peft"
        rows = {}
        for name, words in {"plain": (), "whole": ("--adapter", f"a={adapter}"), "none": ("--adapter", f"a={adapter}:0"),
                            "half": ("--adapter", f"a={adapter}:0.5")}.items():
            self.good("logits", model, "--tokens", "5,6,7,8", "--out", self.path / "l.npy", *words)
            rows[name] = read_npy(self.path / "l.npy")
        self.assertEqual(rows["plain"], rows["none"], "a scale of zero adds zeros")
        self.assertEqual(len({str(r) for r in rows.values()}), 3)

    def test_bad_input(self):
        for given in ("x", "=x", "a=", "a b=x", "a:b=x"):
            self.bad("run", self.model, "-p", "a", "--adapter", given, says=["--adapter", "NAME=PATH"])
        self.bad("run", self.model, "-p", "a", "--adapter", "a=x:1e9", says=["--adapter", "1e9"])
        self.bad("run", self.model, "-p", "a", "--adapter", "a=x:nan", says=["--adapter"])
        self.bad("run", self.model, "-p", "a", "--adapter", f"a={self.path}/none", says=["none"])
        self.bad("serve", self.model, "--adapter", "a=x", "--adapter", "a=y", says=["--adapter", "twice"])
        self.bad("serve", "--models", self.path, "--adapter", "a=x", says=["--adapter", "--models"])
        self.bad("serve", GOLDEN / "images/gemma3", "--device", "cpu", "--mmproj", f"{self.path}/none", says=["none"])
        self.bad("serve", self.model, "--device", "cpu", "--mmproj", GOLDEN / "images/mmproj.gguf", says=["--mmproj", "images"])
        for command in (("run", "-p", "a"), ("bench",), ("logits", "--tokens", "1", "--out", "o")):
            self.bad(command[0], self.model, *command[1:], "--adapter", "a=x", "--adapter", "b=y", says=["--adapter", "one"])


class Inspect(CliTest):
    def test_every_model(self):
        for name, model in self.models.items():
            with self.subTest(name):
                out = self.good_json("inspect", model, "--tensors", "--ctx", 500)
                self.assertEqual(out["config"]["architecture"], {"phi": "phi2"}.get(name, name))
                self.assertEqual(out["tensors"]["count"], len(out["tensors"]["list"]))
                self.assertEqual(out["memory"]["context"], 500)
                self.assertGreater(out["memory"]["total_bytes"], 0)
                self.assertGreater(out["memory"]["users_at_context"], 0)
                self.assertEqual(out["metadata"]["general.architecture"], {"phi": "phi2"}.get(name, name))
                text = self.good("inspect", model)
                self.assertIn("longest context that fits", text)

    def test_states(self):
        model = self.path / "hybrid.gguf"
        self.good("synth", "tiny-qwen3next", model)
        states, keys = sorted(self.good_json("inspect", model)["memory"]["kv_groups"], key=lambda g: "states_apart" not in g)
        self.assertNotIn("states_apart", keys)
        self.assertIn(states["states_apart"], range(512, 8193, 512))
        self.assertLessEqual(states["kv_bytes_per_1k_tokens"], keys["kv_bytes_per_1k_tokens"])
        self.assertIn(f"one kept every {states['states_apart']} tokens", self.good("inspect", model))

    def test_ranks(self):
        plan = self.good_json("inspect", self.model, "--ranks", 3, "--rank-speeds", "2,1,1")["tensor_parallel"]
        self.assertEqual(len(plan["ranks"]), 3)
        for parts in zip(*(rank["weights"] for rank in plan["ranks"])):
            if "attn_output" in parts[0]["weight"] or "ffn_down" in parts[0]["weight"]:
                bounds = [0] + [part["end"] for part in parts]
                self.assertEqual([part["begin"] for part in parts], bounds[:-1])
                self.assertEqual(bounds[-1], parts[0]["of"])
        self.assertIn("received per token", self.good("inspect", self.model, "--ranks", 3, "--tensors"))
        # Of each rank its weights, workspace and one context: less than one process has.
        whole = self.good_json("inspect", self.model, "--device", "cpu", "--ctx", 4096)["memory"]["total_bytes"]
        shared = self.good_json("inspect", self.model, "--device", "cpu", "--ctx", 4096, "--ranks", 2)["tensor_parallel"]
        for rank in shared["ranks"]:
            self.assertLess(rank["memory_bytes"], whole)
            self.assertGreater(rank["memory_bytes"], rank["weight_bytes"])
        stages = self.good_json("inspect", self.model, "--ranks", 2, "--pipeline-parallel", "--rank-speeds",
                                "3,1")["pipeline_parallel"]["ranks"]
        layers = self.good_json("inspect", self.model)["config"]["layers"]
        self.assertEqual([stages[0]["layers"][0], stages[1]["layers"][0], stages[1]["layers"][1]],
                         [0, stages[0]["layers"][1], layers])
        self.assertIn("stages of a pipeline", self.good("inspect", self.model, "--ranks", 2, "--pipeline-parallel"))
        both = self.good_json("inspect", self.model, "--ranks", 4, "--stages", 2)["tensor_and_pipeline_parallel"]
        self.assertEqual((both["stages"], both["ranks_of_stage"], len(both["ranks"])), (2, 2, 4))
        self.assertEqual([rank["layers"] for rank in both["ranks"]],
                         [[0, layers // 2]] * 2 + [[layers // 2, layers]] * 2)
        for rank in both["ranks"]:
            self.assertGreater(rank["memory_bytes"], rank["weight_bytes"])
        self.assertIn("share its rows", self.good("inspect", self.model, "--ranks", 4, "--stages", 2, "--alone", 9))
        self.bad("inspect", self.model, "--ranks", 3, "--stages", 2, says=["--stages", "--ranks"])
        # Without a link's cost it is the largest rank's part of the time; with one, latencies and bytes are added.
        alone = ("inspect", self.model, "--ranks", 2, "--alone", 10)
        free = self.good_json(*alone)["expected"]
        self.assertEqual((free["latency_s"], free["moving_s"]), (0, 0))
        self.assertTrue(0.05 <= free["computing_s"] < 0.1, free)
        slow = self.good_json(*alone, "--link-us", 100, "--link-mbit", 8)["expected"]
        plan = self.good_json("inspect", self.model, "--ranks", 2)["tensor_parallel"]
        self.assertAlmostEqual(slow["latency_s"], 1e-4 * (plan["exchanges_per_step"] + 2), places=9)
        most = max(max(r["received_bytes_per_token"], r["sent_bytes_per_token"]) for r in plan["ranks"])
        self.assertAlmostEqual(slow["moving_s"], most / 1e6, places=9)
        self.assertIn("tokens per second", self.good(*alone, "--pipeline-parallel"))
        self.bad("inspect", self.model, "--alone", 10, says=["--alone", "--ranks"])
        self.bad("inspect", self.model, "--ranks", 2, "--link-us", 10, says=["--link-us", "--alone"])
        self.bad("inspect", GOLDEN / "models/olmo2/model.gguf", "--ranks", 2, says=["--pipeline-parallel"])
        plan = self.good_json("inspect", self.models["gpt-oss"], "--ranks", 3, "--expert-parallel")["tensor_parallel"]
        bounds = [bound for rank in plan["ranks"] for bound in rank["experts"]]
        self.assertEqual(bounds[0], 0)
        self.assertEqual(bounds[1:-1:2], bounds[2::2])
        for rank in plan["ranks"]:
            parts = [part for part in rank["weights"] if "_exps" in part["weight"]]
            self.assertTrue(parts)
            self.assertTrue(all([part["begin"], part["end"], part["of"]] == [*rank["experts"], bounds[-1]] for part in parts))
        self.assertIn("whole experts", self.good("inspect", self.models["gpt-oss"], "--ranks", 3, "--expert-parallel"))

    def test_ranks_of_a_context(self):
        one = self.good_json("inspect", self.model, "--ctx", 6144)["memory"]
        plan = self.good_json("inspect", self.model, "--ctx", 6144, "--ranks", 3, "--context-parallel")
        self.assertEqual(plan["context_parallel"]["ranks"], 3)
        self.assertEqual(plan["context_parallel"]["kv_bytes_at_context"] * 3,
                         sum(group["kv_bytes_at_context"] for group in one["kv_groups"]))
        self.assertGreater(plan["context_parallel"]["received_bytes_per_token_at_context"], 0)
        self.assertEqual(plan["context_parallel"]["schedule"], "ring")
        self.assertIn("Over 3 ranks", self.good("inspect", self.model, "--ranks", 3, "--context-parallel"))
        mesh = self.good_json("inspect", self.model, "--ctx", 6144, "--ranks", 4, "--context-parallel",
                              "--context-schedule", "mesh")["context_parallel"]
        self.assertRegex(mesh["schedule"], "mesh [24] x [12]")
        self.assertGreater(mesh["received_bytes_per_prompt_of_context"], 0)
        self.bad("inspect", self.model, "--ranks", 4, "--context-schedule", "mesh", says=["--context-parallel"])

    def test_bad_input(self):
        self.bad("inspect", self.path / "none.gguf", says=["none.gguf"])
        self.bad("inspect", self.path, says=[self.path])


class Files(CliTest):
    """Damaged models, through the binary."""

    def variant(self, change, source=None):
        path = self.fresh() / "model.gguf"
        path.write_bytes(change((source or self.model).read_bytes()))
        return path

    def test_truncated_anywhere(self):
        size = self.model.stat().st_size
        for cut in [0, 3, 4, 7, 8, 15, 16, 23, 24, 31, 40, 60, 100, 1000, 5000, size // 2, size - 1]:
            path = self.variant(lambda data: data[:cut])
            self.bad("run", path, "-p", "a", says=[path])
            path.unlink()

    def test_wrong_header(self):
        path = self.variant(lambda data: b"GGML" + data[4:])
        self.bad("inspect", path, says=[path])
        path = self.variant(lambda data: data[:4] + struct.pack("<I", 99) + data[8:])
        self.bad("inspect", path, says=["99"])
        for field in (8, 16):
            path = self.variant(lambda data: data[:field] + b"\xff" * 8 + data[field + 8 :])
            self.bad("inspect", path, says=[path])

    def test_unknown_architecture(self):
        path = self.variant(lambda data: data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mambo", 1))
        self.bad("run", path, "-p", "a", says=["mambo", "llama", "gpt-oss"])

    def test_missing_tokenizer(self):
        path = self.variant(lambda data: data.replace(b"tokenizer.ggml.model", b"tokenizer.ggml.mobel", 1))
        self.bad("tokenize", path, "a", says=["tokenizer.ggml.model"])
        self.bad("run", path, "-p", "a", says=["tokenizer.ggml.model"])
        self.good("logits", path, "--tokens", "1,2", "--out", self.path / "without.npy")

    def test_nan_scales(self):
        # The end of this file is a quantized output matrix.
        path = self.variant(lambda data: data[:-340] + b"\xff" * 340, self.models["gpt-oss"])
        self.bad("run", path, "-p", "a", says=["output.weight", "NaN"])

    def test_missing_shard_and_files(self):
        directory = self.fresh()
        self.bad("inspect", directory, says=[directory])
        (directory / "config.json").write_text('{"model_type": "llama"')
        self.bad("inspect", directory, says=["config.json"])
        (directory / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
        self.bad("inspect", directory, says=[directory])
        index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        self.bad("inspect", directory, says=["model-00001-of-00002.safetensors"])

    @unittest.skipIf(os.environ.get("MILLRACE_SANITIZED"), "sanitizers need the address space")
    def test_no_memory_for_the_context(self):
        # Two threads: each has a stack of its own, and some machines have many.
        error = self.bad("run", self.model, "-p", "a", "--ctx", 1 << 28, "--threads", 2,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31)))
        self.assertRegex(error, r"cannot reserve \d+ bytes|GiB more than there is room for; \d+ tokens would fit")

    def test_more_than_any_machine_has(self):
        # Pages are promised and given later: what cannot be kept is not promised. 32 KiB a token.
        config, model = self.path / "wide.json", self.path / "wide.gguf"
        config.write_text(json.dumps({
            "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 320,
            "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128, "max_position_embeddings": 4096}))
        self.good("synth", config, model)
        huge = 1 << 28
        for command in (("run", model, "-p", "a"), ("logits", model, "--tokens", "1,2", "--out", self.path / "far.npy"),
                        ("bench", model, "-p", 4, "-n", 1), ("perplexity", model, "--tokens", "1,2")):
            error = self.bad(*command, "--ctx", huge, "--device", "cpu")
            found = re.search(rf"device cpu: a context of {huge} tokens takes \S+ GiB of KV cache, \S+ GiB more than there is "
                              r"room for; (\d+) tokens would fit \(--ctx\)", error)
            self.assertTrue(found and 1000 < int(found[1]) < huge, error)
        self.bad("serve", model, "--port", 0, "--kv-tokens", 1 << 30, says=["a pool of", "would fit (--kv-tokens)"])
        self.bad("bench", model, "--clients", 2, "--kv-tokens", 64, "--ctx", 128, says=["64 tokens, expected at least 144"])


class Synth(CliTest):
    def test_same_seed_same_bytes(self):
        a, b, c = (self.path / f"{n}.gguf" for n in "abc")
        self.good("synth", "tiny-gpt-oss", a, "--threads", 1)
        self.good("synth", "tiny-gpt-oss", b, "--threads", 2)
        self.good("synth", "tiny-gpt-oss", c, "--seed", 2)
        self.assertEqual(a.read_bytes(), b.read_bytes())
        self.assertNotEqual(a.read_bytes(), c.read_bytes())

    def test_every_type_runs(self):
        config = self.path / "config.json"
        config.write_text(json.dumps({
            "model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256,
            "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 400, "max_position_embeddings": 512}))
        for name in "f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q4_k q5_k q6_k mxfp4".split():
            with self.subTest(name):
                model = self.path / "type.gguf"
                self.good("synth", config, model, "--type", name)
                self.assertIn(name, self.good_json("inspect", model)["tensors"]["by_type"])
                self.good("run", model, "-p", "a", "-n", 2)
                self.good("logits", model, "--tokens", "1,2,3", "--out", self.path / "t.npy")
                row = read_npy(self.path / "t.npy")[0]
                spread = math.sqrt(sum(x * x for x in row) / len(row))
                self.assertTrue(0.3 < spread < 3.0, spread)

    def test_layers(self):
        model = self.path / "layers.gguf"
        self.good("synth", "tiny-llama", model, "--layers", 3)
        self.assertEqual(self.good_json("inspect", model)["config"]["layers"], 3)
        # Kinds of layers that a config lists are cut with them.
        for preset, layers in (("tiny-granitehybrid", 1), ("tiny-nemotron-h", 7), ("tiny-kimi-linear", 2),
                               ("tiny-gemma4", 8)):
            self.good("synth", preset, model, "--layers", layers)
            self.assertEqual(self.good_json("inspect", model)["config"]["layers"], layers)

    def test_bad_input(self):
        out = self.path / "never.gguf"
        self.bad("synth", "no-such-preset", out, says=["no-such-preset", "gpt-oss-20b"])
        self.bad("synth", "tiny-llama", out, "--type", "q9", says=["--type", "'q9'"])
        self.bad("synth", "tiny-llama", self.path / "none" / "out.gguf", says=["out.gguf"])
        config = self.path / "bad.json"
        for text, piece in (('{"model_type": "rwkv"}', "rwkv"), ("{", "bad.json"), ('{"model_type": "llama"}', "vocab_size"),
                            ("[1]", "bad.json"), ('{"model_type": "llama", "hidden_size": "x"}', "hidden_size")):
            config.write_text(text)
            self.bad("synth", config, out, says=[piece])
        self.assertFalse(out.exists())

    def test_full_disk_leaves_nothing(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))

        directory = self.fresh()
        self.bad("synth", "tiny-llama", directory / "m.gguf", says=["m.gguf"], preexec_fn=limit)
        self.bad("logits", self.model, "--tokens", ",".join(["1"] * 100), "--all", "--out", directory / "l.npy",
                 says=["l.npy"], preexec_fn=limit)
        self.assertEqual(list(directory.iterdir()), [])

    def test_interrupt_leaves_nothing(self):
        directory = self.fresh()
        process = subprocess.Popen([command.BINARY, "synth", "llama-3.2-1b", directory / "m.gguf"], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        # Once it has a file of that directory open (with a name or without) it is at work.
        links = pathlib.Path(f"/proc/{process.pid}/fd")

        def opened():
            try:
                return any(str(directory) in os.readlink(link) for link in links.iterdir())
            except FileNotFoundError:  # closed meanwhile
                return False

        while process.poll() is None and not opened():
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=TIMEOUT)
        self.assertEqual(process.returncode, 130, error)
        self.assertEqual(list(directory.iterdir()), [])


class Terminal:
    """The binary on a pseudo-terminal of its own."""

    def __init__(self, *args, env=None):
        self.master, slave = pty.openpty()

        def take_terminal():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen([command.BINARY, *map(str, args)], stdin=slave, stdout=slave, stderr=slave,
                                        preexec_fn=take_terminal, env={**os.environ, "TERM": "xterm", **(env or {})})
        os.close(slave)
        self.seen = ""

    def read_until(self, condition, what):
        deadline = time.time() + TIMEOUT
        while not condition():
            if not select.select([self.master], [], [], max(0, deadline - time.time()))[0]:
                raise AssertionError(f"waited for {what!r}, saw {self.seen!r}")
            try:
                data = os.read(self.master, 4096)
            except OSError:
                data = b""
            if not data:
                raise AssertionError(f"ended before {what!r}, saw {self.seen!r}")
            self.seen += data.decode("utf-8", "replace")

    def expect(self, text):
        """Reads until `text` has come, and forgets everything up to its end."""
        self.read_until(lambda: text in self.seen, text)
        before, self.seen = self.seen.split(text, 1)
        return before

    def expect_answer(self):
        """Some text behind the line that was sent, and not only what a line editor says to a terminal."""
        self.read_until(lambda: len(re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.seen).strip()) >= 10, "an answer")

    def expect_prompt(self):
        """The prompt, and the line editor's terminal mode, which it sets a moment later."""
        self.expect("> ")
        deadline = time.time() + (TIMEOUT if LINE_EDITING else 0)
        while termios.tcgetattr(self.master)[3] & termios.ICANON and time.time() < deadline:
            time.sleep(0.001)

    def send(self, text):
        os.write(self.master, text.encode())

    def wait(self):
        deadline = time.time() + TIMEOUT
        while self.process.poll() is None and time.time() < deadline:
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    os.read(self.master, 4096)
                except OSError:
                    pass
        os.close(self.master)
        return self.process.wait(timeout=1)


class Chat(CliTest):
    def test_conversation_from_a_pipe(self):
        saved = self.path / "saved.json"
        script = f'hello\n"""\ntwo\nlines\n"""\none \\\nmore\n/save {saved}\n/reset\n/nonsense\n/system be brief\nhi\n'
        done = millrace("chat", self.model, "-n", 5, "--temp", 0, stdin=script.encode())
        self.assertEqual(done.returncode, 0, done.stderr)
        done.stdout.decode("utf-8")
        messages = json.loads(saved.read_text())["messages"]
        self.assertEqual([m["role"] for m in messages], ["user", "assistant"] * 3)
        self.assertEqual([m["content"] for m in messages[::2]], ["hello", "two\nlines", "one \nmore"])
        self.assertIn(b"/nonsense", done.stderr)

    def test_cached_turns_give_the_same_answers(self):
        """A later turn, fed on top of the cache, answers as the whole conversation does from nothing."""
        saved = self.path / "turns.json"
        millrace("chat", self.model, "-n", 6, "--temp", 0, stdin=f"ba\nbe\nbi\n/save {saved}\n".encode())
        messages = json.loads(saved.read_text())["messages"]
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[:-1])
        raw = self.good_json("run", self.model, "--raw", "-p", text + "<|im_start|>assistant\n", "-n", 6, "--temp", 0)
        self.assertEqual(raw["text"], messages[-1]["content"])

    def test_interrupt_stops_the_answer_and_not_the_program(self):
        # The end token is made unlikely: answers go on until they are stopped.
        terminal = Terminal("chat", self.model, "--ctx", 400000, "--logit-bias", "639=-1000", "--logit-bias", "637=-1000",
                            env={"XDG_STATE_HOME": str(self.path)})
        terminal.expect_prompt()
        terminal.send("hello\n")
        terminal.expect("hello")
        terminal.expect_answer()
        terminal.send("\x03")
        terminal.expect("cancelled")
        terminal.expect_prompt()
        terminal.send("half a line\x03")
        terminal.expect_prompt()
        terminal.send("/help\n")
        terminal.expect("/save FILE")
        terminal.expect_prompt()
        terminal.send("\x04")
        self.assertEqual(terminal.wait(), 0)
        if LINE_EDITING:
            self.assertIn("hello", (self.path / "millrace" / "history").read_text())

    def test_quit(self):
        terminal = Terminal("chat", self.model, env={"XDG_STATE_HOME": str(self.path)})
        terminal.expect_prompt()
        terminal.send("/quit\n")
        self.assertEqual(terminal.wait(), 0)

    def test_needs_a_template(self):
        path = self.fresh() / "plain.gguf"
        path.write_bytes(self.model.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.cat_template_", 1))
        self.bad("chat", path, says=["chat template"])
        self.good("run", path, "-p", "a", "-n", 2)


if __name__ == "__main__":
    command.begin()
    unittest.main()

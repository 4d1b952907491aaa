#!/usr/bin/env python3
"""A new architecture is one file and a line: tests/new_architecture/macaron.cpp through the real binary.

    tests/new_architecture_test.py PATH/TO/millrace_macaron PATH/TO/millrace [unittest options]

The first program is the second one's objects linked with that file and a list that names it. What the model
computes is written out once more below, in plain Python, and every way to its weights must come to the same: a GGUF
file from `synth`, a Hugging Face directory, and GGUF files that `quantize` makes of that. Needs only Python's own
library.
"""

import ast
import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

BINARY, PLAIN_BINARY = "", ""
TOKENS = [5, 300, 17, 17, 250, 9, 101]
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
EPS, THETA, SCALE = 1e-5, 1000.0, 0.6
CONFIG = {"model_type": "macaron_text", "num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 64,
          "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": 320,
          "max_position_embeddings": 512, "rms_norm_eps": EPS, "rope_theta": THETA, "attention_multiplier": SCALE,
          "tie_word_embeddings": False}
HF_NAMES = {"token_embd.weight": "transformer.wte.weight", "output_norm.weight": "transformer.ln_f.weight",
            "output.weight": "head.weight"}
HF_LAYER_NAMES = {"ffn_first_norm": "first.norm", "ffn_first_gate": "first.gate", "ffn_first_up": "first.up",
                  "ffn_first_down": "first.down", "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
                  "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
                  "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
                  "ffn_down": "mlp.down_proj"}


def read_npy(path):
    data = pathlib.Path(path).read_bytes()
    length = struct.unpack("<H", data[8:10])[0]
    rows, cols = ast.literal_eval(data[10:10 + length].decode())["shape"]
    values = struct.unpack(f"<{rows * cols}f", data[10 + length:])
    return [values[r * cols:(r + 1) * cols] for r in range(rows)]


class GgufReader:
    """Keys that are numbers or strings, and the f32 tensors as lists of rows, read as the format says."""

    SIZES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    STRING, ARRAY, F32 = 8, 9, 0

    def __init__(self, path):
        self.data, self.at, self.keys, self.tensors = pathlib.Path(path).read_bytes(), 0, {}, {}
        assert self.data[:4] == b"GGUF"
        self.at = 4
        _, num_tensors, num_keys = self.take("I"), self.take("Q"), self.take("Q")
        for _ in range(num_keys):
            name = self.string()
            self.keys[name] = self.value(self.take("I"))
        infos = [self.tensor_info() for _ in range(num_tensors)]
        start = (self.at + 31) // 32 * 32
        for name, shape, kind, offset in infos:
            self.tensors[name] = self.rows(shape, start + offset) if kind == self.F32 else None

    def take(self, code):
        value, = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self):
        length = self.take("Q")
        self.at += length
        return self.data[self.at - length:self.at].decode()

    def value(self, kind):
        if kind == self.STRING:
            return self.string()
        if kind == self.ARRAY:
            of, count = self.take("I"), self.take("Q")
            return [self.value(of) for _ in range(count)]
        return self.take(self.SIZES[kind])

    def tensor_info(self):
        name, rank = self.string(), self.take("I")
        shape = [self.take("Q") for _ in range(rank)]  # fastest first
        return name, shape, self.take("I"), self.take("Q")

    def rows(self, shape, offset):
        cols, count = shape[0], math.prod(shape[1:])
        return [struct.unpack_from(f"<{cols}f", self.data, offset + 4 * cols * r) for r in range(count)]


def times(matrix, x):
    return [sum(a * b for a, b in zip(row, x)) for row in matrix]


def add(x, y):
    return [a + b for a, b in zip(x, y)]


def norm(x, weight):
    scale = 1 / math.sqrt(sum(a * a for a in x) / len(x) + EPS)
    return [a * scale * w for a, w in zip(x, weight[0])]


def feed_forward(x, weight, before):
    n = norm(x, weight(before + "norm"))
    gate, up = times(weight(before + "gate"), n), times(weight(before + "up"), n)
    return add(x, times(weight(before + "down"), [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)]))


def rotated(x, position):
    """Pairs of neighbours, as GGUF's rows are."""
    out = []
    for i in range(0, len(x), 2):
        angle = position * THETA ** (-(i % HEAD_DIM) / HEAD_DIM)
        c, s = math.cos(angle), math.sin(angle)
        out += [x[i] * c - x[i + 1] * s, x[i] * s + x[i + 1] * c]
    return out


def attend(q, keys, values, scale):
    out = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS) * HEAD_DIM
        mine = q[head * HEAD_DIM:(head + 1) * HEAD_DIM]
        scores = [scale * sum(a * b for a, b in zip(mine, k[kv:kv + HEAD_DIM])) for k in keys]
        weights = [math.exp(s - max(scores)) for s in scores]
        out += [sum(w * v[kv + d] for w, v in zip(weights, values)) / sum(weights) for d in range(HEAD_DIM)]
    return out


def expected_logits(tensors, sandwich=True, scale=SCALE):
    """The model as its paper would have it: feed-forward, attention, feed-forward."""
    rows = []
    cache = [([], []) for _ in range(LAYERS)]
    for position, token in enumerate(TOKENS):
        x = tensors["token_embd.weight"][token]
        for layer, (keys, values) in enumerate(cache):
            def weight(role):
                return tensors[f"blk.{layer}.{role}.weight"]

            if sandwich:
                x = feed_forward(x, weight, "ffn_first_")
            n = norm(x, weight("attn_norm"))
            keys.append(rotated(times(weight("attn_k"), n), position))
            values.append(times(weight("attn_v"), n))
            attended = attend(rotated(times(weight("attn_q"), n), position), keys, values, scale)
            x = add(x, times(weight("attn_output"), attended))
            x = feed_forward(x, weight, "ffn_")
        rows.append(times(tensors["output.weight"], norm(x, tensors["output_norm.weight"])))
    return rows


def hf_name(name):
    if not name.startswith("blk."):
        return HF_NAMES[name]
    _, layer, role, suffix = name.split(".")
    return f"transformer.h.{layer}.{HF_LAYER_NAMES[role]}.{suffix}"


def halves_apart(rows):
    """GGUF's rows of q or k as Hugging Face has them: those of each head's even places, then the odd ones."""
    heads = [rows[i:i + HEAD_DIM] for i in range(0, len(rows), HEAD_DIM)]
    return [row for head in heads for row in head[0::2] + head[1::2]]


def write_hf(directory, tensors, config):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, rows in tensors.items():
        if ".attn_q." in name or ".attn_k." in name:
            rows = halves_apart(rows)
        part = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
        shape = [len(rows[0])] if "norm" in name else [len(rows), len(rows[0])]
        header[hf_name(name)] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def relative_error(rows, expected):
    difference = sum((a - b) ** 2 for r, e in zip(rows, expected) for a, b in zip(r, e))
    return math.sqrt(difference / sum(b * b for e in expected for b in e))


class NewArchitecture(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="millrace-new-architecture-")
        cls.path = pathlib.Path(cls.directory.name)
        cls.model = cls.path / "synth.gguf"
        done = cls.run_binary("synth", "tiny-macaron", cls.model, "--type", "f32")
        assert done.returncode == 0, done.stderr
        cls.gguf = GgufReader(cls.model)
        cls.expected = expected_logits(cls.gguf.tensors)
        cls.hf = cls.path / "hf"
        write_hf(cls.hf, cls.gguf.tensors, CONFIG)

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    @staticmethod
    def run_binary(*args, binary=None):
        return subprocess.run([binary or BINARY, *map(str, args)], capture_output=True, timeout=120)

    def good(self, *args):
        done = self.run_binary(*args)
        self.assertEqual(done.returncode, 0, (args, done.stderr))
        return done.stdout.decode()

    def bad(self, *args, says, binary=None):
        done = self.run_binary(*args, binary=binary)
        self.assertEqual(done.returncode, 2, (args, done.stderr))
        for piece in says:
            self.assertIn(piece, done.stderr.decode())

    def logits(self, model, device):
        out = self.path / "logits.npy"
        self.good("logits", model, "--tokens", ",".join(map(str, TOKENS)), "--all", "--out", out, "--device", device,
                  "--kv-type", "f32")
        return read_npy(out)

    # float32 sums of some hundred terms, ten products deep.
    TOLERANCE = 2e-5

    def test_forward_pass_of_both_file_formats(self):
        for model in (self.model, self.hf):
            for device in ("reference", "cpu"):
                with self.subTest(model=model.name, device=device):
                    self.assertLess(relative_error(self.logits(model, device), self.expected), self.TOLERANCE)

    def test_the_expectation_sees_what_is_its_own(self):
        for other in ({"sandwich": False}, {"scale": 1 / math.sqrt(HEAD_DIM)}):
            self.assertGreater(relative_error(expected_logits(self.gguf.tensors, **other), self.expected), 1e-2, other)

    def test_one_row_of_logits_is_the_last_of_all(self):
        out = self.path / "last.npy"
        self.good("logits", self.model, "--tokens", ",".join(map(str, TOKENS)), "--out", out, "--device", "cpu",
                  "--kv-type", "f32")
        self.assertEqual(read_npy(out)[0], self.logits(self.model, "cpu")[-1])

    def test_synthetic_plan(self):
        keys = self.gguf.keys
        self.assertEqual(keys["general.architecture"], "macaron")
        self.assertAlmostEqual(keys["macaron.attention.scale"], SCALE, places=6)
        self.assertEqual(keys["macaron.feed_forward_length"], 64)
        self.assertEqual(len(self.gguf.tensors), 3 + LAYERS * len(HF_LAYER_NAMES))
        self.assertEqual(set(self.gguf.tensors["blk.0.ffn_first_norm.weight"][0]), {1.0})
        self.assertIn("tiny-macaron", self.good("synth", "--help"))

    def test_quantize_maps_names_and_rows(self):
        plain = self.path / "plain.gguf"
        self.good("quantize", self.hf, plain, "--type", "f32")
        again = GgufReader(plain)
        self.assertEqual(again.tensors, self.gguf.tensors)  # q and k interleaved again, every value the same
        for key, value in self.gguf.keys.items():
            if key.startswith("macaron."):
                self.assertEqual(again.keys[key], value, key)
        small = self.path / "small.gguf"
        self.good("quantize", self.hf, small, "--type", "q8_0")
        self.assertLess(relative_error(self.logits(small, "reference"), self.expected), 0.05)

    def test_inspect(self):
        for model in (self.model, self.hf):
            told = json.loads(self.good("inspect", model, "--json"))
            self.assertEqual(told["config"]["architecture"], "macaron")
            self.assertEqual(told["config"]["layers"], LAYERS)

    def test_it_generates(self):
        self.assertTrue(self.good("run", self.model, "-p", "badefi", "-n", 4, "--device", "cpu"))

    def test_what_is_missing_is_named(self):
        directory = self.path / "no_scale"
        write_hf(directory, self.gguf.tensors, {k: v for k, v in CONFIG.items() if k != "attention_multiplier"})
        self.bad("inspect", directory, says=["attention_multiplier", "above 0"])
        directory = self.path / "no_first"
        tensors = {k: v for k, v in self.gguf.tensors.items() if k != "blk.1.ffn_first_up.weight"}
        write_hf(directory, tensors, CONFIG)
        self.bad("inspect", directory, says=["transformer.h.1.first.up.weight", "found nothing", "macaron"])
        directory = self.path / "no_output"
        write_hf(directory, {**self.gguf.tensors, "output.weight": self.gguf.tensors["output.weight"][:300]}, CONFIG)
        self.bad("inspect", directory, says=["head.weight", "[300, 32]", "[320, 32]"])

    def test_without_its_line_it_is_unknown(self):
        for model, where in ((self.model, "general.architecture"), (self.hf, "model_type")):
            self.bad("inspect", model, says=[where, "macaron", "llama"], binary=PLAIN_BINARY)


if __name__ == "__main__":
    BINARY, PLAIN_BINARY = sys.argv.pop(1), sys.argv.pop(1)
    unittest.main()

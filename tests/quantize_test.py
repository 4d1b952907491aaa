"""Quantization and measurement through the real binary: every type, both kinds of input, what it costs a real model.

    tests/quantize_test.py PATH/TO/millrace [unittest options]

Run from the repository root. Needs only Python's own library; the real model is build/models/SmolLM2-135M-Instruct.
Q4_1.gguf (tools/fetch_model.py smollm2), and where the package gguf is there the files are read with it too.
"""

import json
import os
import pathlib
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

BINARY = ""
TIMEOUT = 600  # of a command, on a machine that is busy with other things
TYPES = ("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "mxfp4", "iq4_nl", "iq4_xs", "nvfp4",
         "q3_k", "q2_k", "f16", "bf16", "f32")  # that others read too
OUR_TYPES = ("q4_z",)
SMOLLM2 = pathlib.Path("build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
TEXT = pathlib.Path("tests/golden/text/mill.txt")
GOLDEN = pathlib.Path("tests/golden/models")
# What a GGUF file cannot say, or is not written yet: refused in a line.
NOT_WRITTEN = {"gpt2-scaled": "GGUF's keys for gpt2 cannot say", "granitehybrid-groups": "mamba_n_groups: found 2, expected 1",
               "mamba2-groups": "time_step_limit: found limits", "falcon-h1": "multipliers: found",
               "falcon-h1-norm": "multipliers: found", "kimi-linear-odd": "linear_num_heads: found 3, expected 4",
               "rwkv7-odd": "norm_eps: found"}


def millrace(*args, **options):
    return subprocess.run([BINARY, *map(str, args)], capture_output=True, timeout=TIMEOUT, **options)


def floats(path):
    data = pathlib.Path(path).read_bytes()
    length = struct.unpack("<H", data[8:10])[0]
    return struct.unpack(f"<{(len(data) - 10 - length) // 4}f", data[10 + length :])


class QuantizeCase(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="millrace-quantize-test-")
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name)

    def good(self, *args, **options):
        done = millrace(*args, **options)
        self.assertEqual(done.returncode, 0, (args, done.stderr))
        return done.stdout.decode()

    def good_json(self, *args):
        return json.loads(self.good(*args, "--json"))

    def bad(self, *args, says=(), **options):
        done = millrace(*args, **options)
        error = done.stderr.decode()
        self.assertEqual(done.returncode, 2, (args, error))
        self.assertRegex(error, r"\Amillrace: [^\n]+\n\Z", args)
        for piece in says:
            self.assertIn(piece, error)

    def synth(self, shape, *options):
        path = self.path / f"{shape}{''.join(options)}.gguf"
        self.good("synth", shape, path, *options)
        return path

    def logits(self, model, *options, tokens="1,5,9,2,77,30"):
        out = self.path / "logits.npy"
        self.good("logits", model, "--tokens", tokens, "--kv-type", "f32", "--out", out, *options)
        return floats(out)


class Quantize(QuantizeCase):
    def test_every_type_gives_a_file_of_it_and_the_same_model_as_on_load(self):
        model = self.synth("tiny-llama", "--type", "f32")
        for name in TYPES + OUR_TYPES + ("int8", "int4"):
            out = self.path / "out.gguf"
            report = self.good_json("quantize", model, out, "--type", name)
            self.assertEqual(out.stat().st_size, report["file_bytes"])
            self.assertIn(report["limit"], ("reading", "encoding", "writing"))
            self.assertLess(report["waited_to_read_seconds"] + report["waited_to_write_seconds"], report["seconds"])
            for tensor in report["tensors"]:
                if "norm" in tensor["name"]:
                    self.assertEqual((tensor["to"], tensor["relative_rms"]), ("f32", 0.0))
                else:
                    # Three and two bits: a step is an eighth and a quarter of the range of 16 values.
                    self.assertLess(tensor["relative_rms"], {"q3_k": 0.2, "q2_k": 0.35}.get(tensor["to"], 0.13), tensor)
            # The encoder is the same, and so is every bit of the result.
            self.assertEqual(self.logits(out), self.logits(model, "--quantize", name), name)

    def test_experts_of_gpt_oss(self):
        model = self.synth("tiny-gpt-oss")
        out = self.path / "out.gguf"
        report = self.good_json("quantize", model, out, "--type", "int4")
        types = {t["name"]: (t["from"], t["to"]) for t in report["tensors"]}
        self.assertEqual(types["blk.0.ffn_up_exps.weight"], ("mxfp4", "mxfp4"))  # already in 4 bits: kept, exactly
        self.assertEqual(types["blk.0.ffn_gate_inp.weight"][1], "f32")
        self.assertEqual(types["blk.0.attn_sinks.weight"][1], "f32")
        self.assertEqual(self.logits(out), self.logits(model, "--quantize", "int4"))

    def test_hugging_face_directories_become_the_same_model(self):
        for directory in sorted(GOLDEN.glob("*/hf")):
            with self.subTest(model=directory.parent.name):
                out = self.path / "out.gguf"
                if refusal := NOT_WRITTEN.get(directory.parent.name):
                    self.bad("quantize", directory, out, "--type", "f32", says=[refusal])
                    continue
                # Logits of the file and of the directory, on the reference where a file's type is no difference.
                self.assertIn("verified on", self.good("quantize", directory, out, "--type", "f32", "--verify"))
                text = "A mill, 3 wheels\nand 1847 stones."
                self.assertEqual(self.good("tokenize", out, text), self.good("tokenize", directory, text))

    def test_packed_weights_say_what_they_became_and_are_planned(self):
        done = millrace("logits", GOLDEN / "gptq/hf", "--tokens", "1,2", "--out", self.path / "logits.npy")
        self.assertEqual(done.returncode, 0, done.stderr)
        for piece in ("gptq, 4 bits: 2 matrices read as f32", "2 as q4_0, 1 as q5_0; gptq, 8 bits", "millrace quantize"):
            self.assertIn(piece, done.stderr.decode())
        memory = self.good_json("inspect", GOLDEN / "gptq/hf")["memory"]
        floats = 4 * (64 * 64 + 2 * 128 * 64)  # o_proj, gate_proj and up_proj, as float32
        self.assertGreater(memory["weights_repacked_bytes"], floats)
        self.assertLess(memory["weights_repacked_bytes"], 2 * floats)

    def test_exact_types_are_copied_to_the_file(self):
        out = self.path / "out.gguf"
        report = self.good_json("quantize", GOLDEN / "awq/hf", out, "--type", "q5_0", "--output-type", "bf16")
        of = {t["name"]: t for t in report["tensors"]}
        self.assertEqual((of["blk.0.attn_q.weight"]["from"], of["blk.0.attn_q.weight"]["relative_rms"]), ("q5_0", 0.0))

    def test_weights_split_over_a_hundred_files(self):
        source = GOLDEN / "compressed-moe/hf"
        data = (source / "model.safetensors").read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        tensors = {k: v for k, v in json.loads(data[8:start]).items() if k != "__metadata__"}
        parts = [(n, t, data[start + t["data_offsets"][0] : start + t["data_offsets"][1]]) for n, t in tensors.items()]
        parts += [(f"stray.{i}", {"dtype": "I64", "shape": [1]}, bytes(8)) for i in range(100 - len(parts))]
        self.assertEqual(len(parts), 100)
        for file in source.iterdir():
            if file.suffix != ".safetensors":
                (self.path / file.name).write_bytes(file.read_bytes())
        weight_map = {}
        for i, (name, tensor, values) in enumerate(parts):
            file = f"model-{i + 1:05d}-of-00100.safetensors"
            header = json.dumps({name: tensor | {"data_offsets": [0, len(values)]}}).encode()
            (self.path / file).write_bytes(struct.pack("<Q", len(header)) + header + values)
            weight_map[name] = file
        (self.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        self.assertEqual(self.logits(self.path), self.logits(source))

    def rewritten(self, source, change):
        """A copy of a directory whose tensors `change` has had: their descriptions by name, and all their bytes."""
        for file in source.iterdir():
            (self.path / file.name).write_bytes(file.read_bytes())
        data = (source / "model.safetensors").read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = {k: v for k, v in json.loads(data[8:start]).items() if k != "__metadata__"}
        body = bytearray(data[start:])
        header = change(header, body)
        text = json.dumps(header).encode()
        (self.path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
        return self.path

    def test_a_bias_that_the_architecture_has_no_place_for(self):
        name = "model.layers.1.mlp.shared_experts.down_proj.bias"

        def add(header, body):
            at = len(body)
            body += bytes(192)
            return header | {name: {"dtype": "F32", "shape": [48], "data_offsets": [at, at + 192]}}

        model = self.rewritten(GOLDEN / "deepseek-v2/hf", add)
        self.bad("quantize", model, self.path / "out.gguf", "--type", "q8_0", says=[name, "found a bias", "deepseek2"])
        self.bad("logits", model, "--tokens", "1,2", "--out", self.path / "logits.npy", says=[name])

    def test_language_models_within_larger_ones(self):
        """Llama 4 has language_model.lm_head.weight, and packed models of the kind name all weights so."""
        for name in ("llama2", "gptq", "compressed", "nf4", "qwen3-fp8"):
            with self.subTest(name):
                source = GOLDEN / name / "hf"
                model = self.rewritten(source, lambda header, _: {"language_model." + k: v for k, v in header.items()})
                text = json.loads((source / "config.json").read_text())
                around = {"model_type": "mistral3", "text_config": text}
                if "quantization_config" in text:
                    around["quantization_config"] = text.pop("quantization_config")
                (model / "config.json").write_text(json.dumps(around))
                self.assertEqual(self.logits(model), self.logits(source))

    def test_a_larger_model_ties_the_embeddings_of_the_one_within(self):
        model = self.rewritten(GOLDEN / "llama3/hf", lambda header, _: {"language_model." + k: v for k, v in header.items()})
        text = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
        (model / "config.json").write_text(json.dumps({"model_type": "mistral3", "tie_word_embeddings": True, "text_config": text}))
        self.assertEqual(self.logits(model), self.logits(GOLDEN / "llama3/hf"))

    def test_an_adapter_with_the_embeddings_of_a_tied_model(self):
        """PEFT adds lm_head's own weights to an adapter of it; where they are the model's they are of no use."""

        def tensors(path):
            data = path.read_bytes()
            start = 8 + struct.unpack("<Q", data[:8])[0]
            return {k: v for k, v in json.loads(data[8:start]).items() if k != "__metadata__"}, data[start:]

        source = pathlib.Path("tests/golden/adapters/llama3/peft")
        header, body = tensors(source / "adapter_model.safetensors")
        own, weights = tensors(GOLDEN / "llama3/hf/model.safetensors")
        table = own["model.embed_tokens.weight"]
        begin, end = table["data_offsets"]
        added = {"base_model.model.lm_head.base_layer.weight": table | {"data_offsets": [len(body), len(body) + end - begin]}}
        text = json.dumps(header | added).encode()
        text += b" " * (-len(text) % 8)
        (self.path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
        both = lambda rows: struct.pack("<Q", len(text)) + text + body + rows
        (self.path / "adapter_model.safetensors").write_bytes(both(weights[begin:end]))
        model = GOLDEN / "llama3/hf"
        self.assertEqual(self.logits(model, "--adapter", f"a={self.path}"), self.logits(model, "--adapter", f"a={source}"))
        (self.path / "adapter_model.safetensors").write_bytes(both(bytes(end - begin)))
        self.bad("logits", model, "--tokens", "1,2", "--out", self.path / "l.npy", "--adapter", f"a={self.path}",
                 says=["lm_head.base_layer.weight"])

    def test_norms_have_the_names_that_llama_cpp_looks_for(self):
        for name, norm in (("gpt-oss-w128", "blk.0.post_attention_norm.weight"), ("glm4moe", "blk.0.post_attention_norm.weight")):
            self.good("quantize", GOLDEN / name / "hf", self.path / f"{name}.gguf", "--type", "f32")
            found = self.good("inspect", self.path / f"{name}.gguf", "--tensors")
            self.assertIn(norm, found)
            self.assertNotIn("blk.0.ffn_norm.weight", found)

    def test_nvfp4_as_modelopt_names_it(self):
        def rename(header, body):
            out = {}
            for name, tensor in header.items():
                if name.endswith(".weight_global_scale"):  # divides there, multiplies here
                    begin, end = tensor["data_offsets"]
                    body[begin:end] = struct.pack("<f", 1 / struct.unpack("<f", body[begin:end])[0])
                    name = name.replace("weight_global_scale", "weight_scale_2")
                elif "gate_proj.weight_packed" in name:
                    name = name.replace("weight_packed", "weight")
                out[name] = tensor
            return out

        source = GOLDEN / "compressed/hf"
        expected, found = self.logits(source), self.logits(self.rewritten(source, rename))
        self.assertLess(max(abs(a - b) for a, b in zip(expected, found, strict=True)), 1e-5 * max(map(abs, expected)))

    def test_quantizing_in_place_and_twice_changes_nothing_more(self):
        model = self.synth("tiny-llama", "--type", "f32")
        self.good("quantize", model, model, "--type", "q8_0")
        once = model.read_bytes()
        self.good("quantize", model, model, "--type", "q8_0")
        self.assertEqual(model.read_bytes(), once)

    def test_auto_stays_within_its_budget(self):
        model = self.synth("tiny-llama", "--type", "f32")
        for budget, most in (("6bpw", None), ("500K", 500_000)):
            out = self.path / "auto.gguf"
            report = self.good_json("quantize", model, out, "--type", "auto", "--budget", budget)
            if most:
                self.assertLessEqual(out.stat().st_size, most)
            else:
                self.assertLessEqual(report["bits_per_weight"], 6.0)
            self.good("run", out, "-p", "a", "-n", 2)

    def test_auto_on_load_gives_the_file_it_would_write(self):
        model = self.synth("tiny-llama", "--type", "f32")
        out = self.path / "auto.gguf"
        report = self.good_json("quantize", model, out, "--type", "auto", "--budget", "5bpw")
        options = ("--quantize", "auto", "--budget", "5bpw")
        self.assertEqual(self.logits(out), self.logits(model, *options))
        done = millrace("run", model, "-p", "a", "-n", 2, *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        told = f"auto: {report['bits_per_weight']:.3f} bits per weight, expected divergence"
        self.assertIn(told, done.stderr.decode())
        memory = self.good_json("inspect", model, *options)["memory"]
        weights = sum(t["bytes"] for t in report["tensors"] if t["to"] != "f32")
        self.assertGreaterEqual(memory["weights_repacked_bytes"], weights)

    def test_auto_that_others_can_read(self):
        model = self.synth("tiny-llama", "--type", "f32")
        for options, expected in (((), True), (("--portable",), False)):
            report = self.good_json("quantize", model, self.path / "auto.gguf", "--type", "auto", "--budget", "4.5bpw",
                                    *options)
            self.assertEqual(any(t["to"] in OUR_TYPES for t in report["tensors"]), expected)

    def test_memory_plan_counts_what_is_quantized_on_load(self):
        model = self.synth("tiny-llama", "--type", "f32")
        plain = self.good_json("inspect", model)["memory"]
        small = self.good_json("inspect", model, "--quantize", "q8_0")["memory"]
        self.assertLess(small["weights_mapped_bytes"], plain["weights_mapped_bytes"] / 10)
        self.assertGreater(small["weights_repacked_bytes"], plain["weights_mapped_bytes"] / 5)

    def test_bad_input(self):
        model = self.synth("tiny-llama")
        out = self.path / "out.gguf"
        self.bad("quantize", model, out, "--type", "q3_l", says=["--type", "q3_l", "q8_0 q6_k", "int4 auto"])
        self.bad("run", model, "-p", "a", "--quantize", "nope", says=["--quantize", "nope", "q8_0 q6_k"])
        self.bad("quantize", model, out, "--type", "auto", says=["--budget"])
        self.bad("quantize", model, out, "--type", "q4_0", "--budget", "1G", says=["--budget", "auto"])
        for option in (("--sample", TEXT), ("--portable",), ("--device", "cpu")):
            self.bad("quantize", model, out, "--type", "q4_0", *option, says=[option[0], "auto"])
        self.bad("quantize", model, out, "--type", "auto", "--budget", "5bpw", "--output-type", "q8_0", says=["--output-type"])
        self.bad("run", model, "-p", "a", "--quantize", "q4_0", "--sample", TEXT, says=["--sample", "--quantize auto"])
        self.bad("run", model, "-p", "a", "--quantize", "auto", says=["--budget", "none", "4.5bpw"])
        self.bad("run", model, "-p", "a", "--budget", "4.5bpw", says=["--budget", "--quantize auto"])
        self.bad("run", model, "-p", "a", "--quantize", "auto", "--budget", "1bpw", says=["--budget", "at least"])
        for budget in ("many", "-1", "4.5", "1e30", "nan", ""):
            self.bad("quantize", model, out, "--type", "auto", "--budget", budget, says=["--budget"])
        self.bad("quantize", model, out, "--type", "auto", "--budget", "1bpw", says=["--budget", "at least"])
        self.bad("quantize", self.path / "none.gguf", out, says=["none.gguf"])
        self.bad("quantize", model, self.path / "no" / "dir.gguf", says=["dir.gguf"])
        self.assertFalse(out.exists())

    def test_a_full_disk_leaves_nothing(self):
        model = self.synth("tiny-llama", "--type", "f32")
        folder = self.path / "folder"
        folder.mkdir()

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))

        self.bad("quantize", model, folder / "out.gguf", says=["out.gguf"], preexec_fn=limit)
        self.assertEqual(list(folder.iterdir()), [])

    def test_values_that_are_not_finite_are_named(self):
        model = self.synth("tiny-llama", "--type", "f32")
        data = bytearray(model.read_bytes())
        data[-4:] = struct.pack("<f", float("nan"))  # the last tensor's last value
        model.write_bytes(data)
        out = self.path / "out.gguf"
        self.bad("quantize", model, out, "--type", "q4_0", says=["tensor", "row", "NaN"])
        self.assertFalse(out.exists())

    def test_files_read_by_gguf_py_hold_the_same_values(self):
        try:
            import gguf
        except ImportError:
            self.skipTest("the Python package gguf is not installed")
        model = self.synth("tiny-llama", "--type", "f32")
        for name in TYPES:
            out, plain = self.path / "out.gguf", self.path / "plain.gguf"
            self.good("quantize", model, out, "--type", name)
            self.good("quantize", out, plain, "--type", "f32")  # our reading of it
            expected = {t.name: t for t in gguf.GGUFReader(plain).tensors}
            for tensor in gguf.GGUFReader(out).tensors:
                theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type).ravel()
                self.assertTrue((theirs == expected[tensor.name].data.ravel()).all(), (name, tensor.name))


class Measure(QuantizeCase):
    def perplexity(self, model, *options):
        return self.good_json("perplexity", model, "--tokens", "1,5,9,2,77,30,8,8,120,7,300,41", *options)

    def test_divergence(self):
        model = self.synth("tiny-llama", "--type", "f32")
        out = self.path / "out.gguf"
        self.good("quantize", model, out, "--type", "q4_0")
        same = self.perplexity(model, "--kv-type", "f32", "--kl")["kl"]
        self.assertEqual((same["mean"], same["top1_agreement"], same["perplexity_ratio"]), (0.0, 1.0, 1.0))
        cache = self.perplexity(model, "--kv-type", "bf16", "--kl")["kl"]
        coded = self.perplexity(out, "--kv-type", "f32", "--kl", model)
        self.assertGreater(cache["mean"], 0.0)
        self.assertGreater(coded["kl"]["mean"], 5 * cache["mean"])
        self.assertGreaterEqual(coded["kl"]["p99"], coded["kl"]["mean"])
        self.assertEqual(coded["kl"]["tokens"], coded["scored_tokens"])
        alone = self.perplexity(model, "--kv-type", "f32")["perplexity"]
        self.assertAlmostEqual(coded["perplexity"] / alone, coded["kl"]["perplexity_ratio"], places=5)
        # FP8 prompts of the coded file, beside its own full ones.
        fp8 = self.perplexity(out, "--device", "reference", "--compute", "fp8", "--kl")["kl"]
        self.assertGreater(fp8["mean"], 0.0)
        self.assertLess(fp8["mean"], coded["kl"]["mean"])
        # Windows that overlap: every token once, as without a baseline.
        strided = self.perplexity(out, "--ctx", 6, "--stride", 3, "--kl", model)
        self.assertEqual(strided["kl"]["tokens"], strided["scored_tokens"])
        self.bad("perplexity", model, "--tokens", "1,2,3", "--kl", GOLDEN / "llama2" / "model.gguf", says=["vocabulary"])
        self.bad("perplexity", model, "--tokens", "1,2,3", "--kl-device", "cpu", says=["--kl"])

    def test_roofline(self):
        for shape in ("tiny-llama", "tiny-gpt-oss"):
            model = self.synth(shape)
            plain = self.good_json("bench", model, "-p", 32, "-n", 4, "--repeat", 1)
            report = self.good_json("bench", model, "-p", 32, "-n", 4, "--repeat", 1, "--roofline")
            self.assertGreater(report["read_gb_s"], 0.0)
            for phase, tokens in (("prefill", 32), ("decode", 4)):
                rows = report[phase]["operations"]
                self.assertEqual(report[phase]["tokens"], tokens)
                self.assertLessEqual(sum(row["seconds"] for row in rows), report[phase]["seconds"])
                names = {row["operation"] for row in rows}
                self.assertLessEqual({"embed", "norm_qkv", "attend", "project_add", "norm_logits"}, names)
                self.assertIn("experts_add" if "oss" in shape else "ffn_add", names)
            # What decoding reads of the weights is what bench counts, without the embedding's rows and the vectors.
            weights = sum(row["bytes"] for row in report["decode"]["operations"]
                          if row["operation"] not in ("attend", "rope_append_kv")) / 4
            self.assertLess(weights, plain["bytes_per_token"])
            self.assertGreater(weights, 0.8 * plain["bytes_per_token"])
        self.assertIn("of peak", self.good("bench", model, "-p", 8, "-n", 2, "--repeat", 1, "--roofline"))


class ImportanceMatrix(QuantizeCase):
    def calibrated(self, model, *options):
        out = self.path / "imatrix.gguf"
        self.good("calibrate", model, "-f", TEXT, "-o", out, "--chunk", 64, "--chunks", 2, "--device", "cpu", *options)
        return out

    def test_weighs_the_errors_of_every_kind_of_model(self):
        for name in ("llama3", "qwen3moe", "gpt2", "deepseek-v3", "qwen35", "nemotron-h-moe", "rwkv7"):
            model = GOLDEN / name / "hf"
            imatrix = self.calibrated(model)
            for kind in ("q4_0", "iq4_nl"):
                with self.subTest(name, type=kind):
                    plain, weighed = self.path / "plain.gguf", self.path / "weighed.gguf"
                    self.good("quantize", model, plain, "--type", kind)
                    self.good("quantize", model, weighed, "--type", kind, "--imatrix", imatrix)
                    self.assertEqual(plain.stat().st_size, weighed.stat().st_size)
                    self.assertNotEqual(plain.read_bytes(), weighed.read_bytes())
                    plain.unlink()
                    weighed.unlink()

    def test_the_older_form(self):
        model, out = GOLDEN / "llama3" / "hf", self.path / "o.gguf"
        for form in ("gguf", "dat"):
            self.good("quantize", model, out, "--type", "q4_0", "--imatrix", f"tests/golden/imatrix/llama3.{form}")

    def test_refused(self):
        model, out = GOLDEN / "llama3" / "hf", self.path / "o.gguf"
        self.bad("quantize", model, out, "--type", "q4_0", "--imatrix", TEXT, says=["mill.txt", "importance matrix"])
        self.bad("quantize", model, out, "--type", "q4_0", "--imatrix", GOLDEN / "llama3" / "model.gguf", says=["imatrix"])
        self.bad("quantize", model, out, "--type", "q4_0", "--imatrix", "tests/golden/imatrix/gpt2.gguf",
                 says=["another model's"])
        self.bad("calibrate", model, "-f", TEXT, "-o", out, "--chunk", 100000, says=["tokens", "--chunk"])
        self.bad("calibrate", model, "-f", self.path / "none", "-o", out, says=["none"])
        self.bad("calibrate", model, "-f", TEXT, "-o", out, "--device", "tpu", says=["tpu"])
        self.assertFalse(out.exists())


class OutputAlone(QuantizeCase):
    """A directory whose embedding is its output, stored under the output's name: transformers reads it."""

    def directory(self, **config):
        source, to = GOLDEN / "llama3" / "hf", self.path / "alone"
        shutil.copytree(source, to)
        data = (source / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        tensors = json.loads(data[8 : 8 + length])
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        header = json.dumps(tensors).encode()
        (to / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
        (to / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
        return to

    def test_it_is_both(self):
        alone = self.directory()
        self.assertEqual(self.logits(alone), self.logits(GOLDEN / "llama3" / "hf"))
        files = [self.path / name for name in ("a.gguf", "b.gguf")]
        for model, out in zip((alone, GOLDEN / "llama3" / "hf"), files):
            self.good("quantize", model, out, "--type", "q4_0")
        self.assertEqual(*(self.logits(file) for file in files))
        self.assertEqual(*(file.stat().st_size // 64 for file in files))  # but for the directory's name in it

    def test_not_where_they_are_two(self):
        self.bad("logits", self.directory(tie_word_embeddings=False), "--tokens", "1", "--out", self.path / "l.npy",
                 says=["model.embed_tokens.weight: found nothing"])


class Fp8(QuantizeCase):
    """A directory as compressed-tensors writes it. transformers' reading of it: tests/golden/README.md."""

    def test_reads_what_it_writes(self):
        for name in ("llama3", "phi3", "qwen3moe"):
            with self.subTest(name):
                source, out = GOLDEN / name / "hf", self.path / name
                # A mixture of this size sends tokens to other experts for less.
                check = () if name == "qwen3moe" else ("--verify", "--device", "cpu")
                report = self.good_json("quantize", source, out, "--type", "fp8", *check)
                self.assertTrue(report.get("verified", {"good": True})["good"])
                data = (out / "model.safetensors").read_bytes()
                header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
                eights = [key for key, value in header.items() if value.get("dtype") == "F8_E4M3"]
                self.assertEqual(len(eights), report["quantized_tensors"])
                self.assertEqual(any(".experts." in key for key in eights), name == "qwen3moe")
                self.assertFalse(any(part in key for key in eights for part in ("norm", "embed", "lm_head", "mlp.gate.")))
                self.assertLess(report["relative_rms"], 0.03)  # three bits behind the point: 2^-4 / sqrt(3) at most
                config = json.loads((out / "config.json").read_text())["quantization_config"]
                self.assertEqual((config["quant_method"], config["format"]), ("compressed-tensors", "float-quantized"))
                self.assertIn("lm_head", config["ignore"])
                self.assertEqual({p.name for p in source.iterdir() if p.suffix != ".safetensors"} -
                                 {"model.safetensors.index.json"}, {p.name for p in out.iterdir()} - {"model.safetensors"})
                size = sum(p.stat().st_size for p in source.glob("*.safetensors"))
                self.assertLess((out / "model.safetensors").stat().st_size, 0.95 * size)

    def test_refused(self):
        out = self.path / "out"
        self.bad("quantize", GOLDEN / "llama3" / "model.gguf", out, "--type", "fp8", says=["fp8", "directory"])
        self.bad("quantize", GOLDEN / "gpt2" / "hf", out, "--type", "fp8", says=["transposed"])
        self.bad("quantize", GOLDEN / "gptq" / "hf", out, "--type", "fp8", says=["quantization_config"])
        self.bad("quantize", GOLDEN / "mixtral-stacked" / "hf", out, "--type", "fp8", says=["experts"])
        self.assertEqual(list(self.path.iterdir()), [])
        out.mkdir()
        self.bad("quantize", GOLDEN / "llama3" / "hf", out, "--type", "fp8", says=["there already"])


@unittest.skipUnless(SMOLLM2.exists(), f"{SMOLLM2} is not there; `python3 tools/fetch_model.py smollm2` fetches it")
class RealModel(QuantizeCase):
    """What a type costs SmolLM2-135M in perplexity, against the file it came from."""

    def cost(self, model, *options):
        text = self.path / "text.txt"
        text.write_text(TEXT.read_text()[:5000])
        report = self.good_json("perplexity", model, "-f", text, "--ctx", 1024, "--kl", SMOLLM2, *options)
        kl = report["kl"]
        print(f"[  figure  ] {pathlib.Path(model).name} {' '.join(options)}: perplexity "
              f"{100 * (kl['perplexity_ratio'] - 1):+.3f}%, KL {kl['mean']:.5f}, top-1 {100 * kl['top1_agreement']:.2f}%"
              f" of {kl['tokens']} tokens", file=sys.stderr)
        return kl["perplexity_ratio"] - 1

    def test_int8_costs_less_than_0_3_percent(self):
        # int8 keeps this file's 4-bit blocks as they are; q8_0 writes every matrix anew.
        self.assertLess(abs(self.cost(SMOLLM2, "--quantize", "q8_0")), 0.003)

    def test_auto_at_4_5_bits_costs_less_than_2_percent(self):
        # Chosen by the end of the text, judged by its beginning.
        sample = self.path / "sample.txt"
        sample.write_text(TEXT.read_text()[5000:])
        out = self.path / "auto.gguf"
        report = self.good_json("quantize", SMOLLM2, out, "--type", "auto", "--budget", "4.5bpw", "--sample", sample)
        self.assertLessEqual(report["bits_per_weight"], 4.5)
        self.assertLess(self.cost(out), 0.02)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: quantize_test.py PATH/TO/millrace [--real-model | unittest options]")
    BINARY = os.path.abspath(sys.argv.pop(1))
    if "--real-model" in sys.argv:  # a minute of both cores: make check
        sys.argv[sys.argv.index("--real-model")] = "RealModel"
    else:
        del RealModel
    unittest.main()

"""Several models in one server: loaded when asked for, once; unloaded by age, for others, by hand; never while one answers."""

import http.client
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import unittest

import shared
from harness import ROOT, SMOLLM2, Server, in_threads
from shared import LONG, describe, wait_for

GOLDEN = ROOT / "tests" / "golden" / "models"


def folder_of_models():
    """Two tiny models, one that takes its time, a folder of safetensors, and a file that is none."""
    folder = tempfile.TemporaryDirectory(prefix="millrace-models-test-")
    path = pathlib.Path(folder.name)
    for name in ("llama3", "qwen3"):
        os.symlink(GOLDEN / name / "model.gguf", path / f"{name}.gguf")
    os.symlink(GOLDEN / "mistral" / "hf", path / "mistral-hf")
    os.symlink(SMOLLM2, path / "smollm2.gguf")
    (path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    (path / "notes.txt").write_text("no model")
    return folder


class ModelsTest(unittest.TestCase):
    OPTIONS = ()

    @classmethod
    def setUpClass(cls):
        cls.folder = folder_of_models()
        cls.server = Server(shared.BINARY, f"--models={cls.folder.name}", *cls.OPTIONS)
        cls.server.__enter__()
        describe(cls.server)

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()
        cls.folder.cleanup()

    def complete(self, model, **fields):
        return self.server.json("POST", "/v1/completions", {"model": model, "prompt": "the mill", "max_tokens": 3, **fields})

    def answered(self, model, **fields):
        status, answer = self.complete(model, **fields)
        self.assertEqual((status, answer.get("model")), (200, model), answer)
        return answer

    def refused(self, status, code, model, **fields):
        found, answer = self.complete(model, **fields)
        self.assertEqual((found, answer["error"]["code"]), (status, code), answer)
        self.assertNotIn(self.folder.name, json.dumps(answer))
        return answer["error"]["message"]

    def meta(self, model):
        return self.server.json("GET", f"/v1/models/{model}")[1]["meta"]

    def loads(self, model):
        return next(m["loads"] for m in self.server.stats()["models"] if m["id"] == model)

    def stream(self, model):
        """An answer under way: its connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        connection.request("POST", "/v1/chat/completions", json.dumps({**LONG, "max_tokens": 8000, "model": model}),
                           {"content-type": "application/json"})
        answer = connection.getresponse()
        self.assertEqual(answer.status, 200)
        self.assertTrue(answer.fp.readline())
        return connection, answer


class Several(ModelsTest):
    OPTIONS = ("--ctx", 8192, "--log-json")

    def test_all_are_listed(self):
        models = {m["id"]: m["meta"] for m in self.server.json("GET", "/v1/models")[1]["data"]}
        self.assertEqual(list(models)[:5], ["broken", "llama3", "mistral-hf", "qwen3", "smollm2"])
        self.assertEqual(models["llama3"]["size"], (GOLDEN / "llama3" / "model.gguf").stat().st_size)
        self.assertEqual((models["smollm2"]["quantization"], models["smollm2"]["trained_context"]), ("q4_1", 8192))
        self.assertIsNone(models["llama3"]["error"])
        self.assertNotIn(self.folder.name, models["broken"]["error"])
        self.assertEqual(self.server.json("GET", "/health")[0], 200)

    def test_the_model_that_is_named_answers(self):
        # What transformers says these two go on with, each from its own file.
        for model in ("llama3", "qwen3"):
            golden = json.loads((GOLDEN / model / "golden.json").read_text())
            prompt = golden["prompts"][golden["greedy"]["prompt"]]["tokens"]
            close = next(i for i, gap in enumerate(golden["greedy"]["gaps"]) if gap < 0.2)  # the runner-up may win here
            want = golden["greedy"]["tokens"][:close]
            self.assertTrue(want)
            answer = self.answered(model, prompt=prompt, max_tokens=len(want), temperature=0, ignore_eos=True)
            text = self.server.json("POST", "/detokenize", {"model": model, "tokens": want})[1]["content"]
            self.assertEqual(answer["choices"][0]["text"], text)
            self.assertTrue(self.meta(model)["loaded"])
        self.answered("mistral-hf", prompt=[1, 5, 9])

    def test_who_asks_first_together_loads_once(self):
        self.server.json("POST", "/v1/models/unload", {"model": "qwen3"})
        self.assertTrue(wait_for(lambda: self.meta("qwen3")["state"] == "unloaded"))
        before = self.loads("qwen3")
        bodies = [{"stream": bool(i % 2)} for i in range(8)]
        answers = in_threads(8, lambda i: self.server.request("POST", "/v1/completions", {
            "model": "qwen3", "prompt": "the mill", "max_tokens": 3, "temperature": 0, **bodies[i]}))
        self.assertEqual([status for status, _, _ in answers], [200] * 8)
        texts = set()
        for (_, _, text), body in zip(answers, bodies):
            pieces = [json.loads(line[6:]) for line in text.decode().splitlines()
                      if line.startswith("data: {")] if body["stream"] else [json.loads(text)]
            texts.add("".join(c["text"] for piece in pieces for c in piece["choices"]))
        self.assertEqual(len(texts), 1)
        self.assertEqual(self.loads("qwen3"), before + 1)

    def test_a_bad_file_is_an_error_for_those_who_ask_for_it(self):
        for fields in ({}, {"stream": True}):
            message = self.refused(500, "model_load_failed", "broken", **fields)
            self.assertIn("broken", message)
            self.assertIn("found 0, expected 2 or 3", message)
        self.assertEqual(self.meta("broken")["state"], "unloaded")
        self.answered("llama3")

    def test_other_names_are_refused_with_those_there_are(self):
        message = self.refused(404, "model_not_found", "gpt-4")
        for name in ("llama3", "qwen3", "smollm2"):
            self.assertIn(f"'{name}'", message)
        status, answer = self.server.json("POST", "/v1/completions", {"prompt": "x"})
        self.assertEqual((status, answer["error"]["param"]), (400, "model"))

    def test_by_hand(self):
        status, model = self.server.json("POST", "/v1/models/load", {"model": "llama3"})
        self.assertEqual((status, model["meta"]["loaded"], model["max_model_len"]), (200, True, 8192))
        self.assertGreater(model["meta"]["memory"], 0)
        status, model = self.server.json("POST", "/v1/models/unload", {"model": "llama3"})
        self.assertEqual((status, model["meta"]["model"]), (200, "llama3"))
        self.assertTrue(wait_for(lambda: not self.meta("llama3")["loaded"]))
        self.assertEqual(self.server.json("POST", "/v1/models/load", {"model": "broken"})[0], 500)
        self.assertEqual(self.server.json("POST", "/v1/models/unload", {"model": "gpt-4"})[0], 404)

    def test_numbers_are_of_each_model(self):
        self.answered("llama3", max_tokens=5, ignore_eos=True)
        self.answered("qwen3", max_tokens=7, ignore_eos=True)

        def generated(model):
            return self.server.json("GET", f"/stats?model={model}")[1]["throughput"]["generated_tokens"]

        before = {m: generated(m) for m in ("llama3", "qwen3")}
        self.server.json("POST", "/v1/models/unload", {"model": "llama3"})
        self.assertTrue(wait_for(lambda: not self.meta("llama3")["loaded"]))
        self.assertEqual(generated("llama3"), before["llama3"])  # a counter goes on where it was
        self.answered("llama3", max_tokens=4, ignore_eos=True)
        self.assertEqual({m: generated(m) for m in before}, {**before, "llama3": before["llama3"] + 4})
        self.assertGreaterEqual(self.server.stats()["throughput"]["generated_tokens"], sum(before.values()) + 4)
        self.assertEqual(self.server.stats()["timeline"][0]["model"], "llama3")
        text = self.server.request("GET", "/metrics")[2].decode()
        for model, count in (("llama3", before["llama3"] + 4), ("qwen3", before["qwen3"])):
            self.assertIn(f'millrace:generation_tokens_total{{model_name="{model}"}} {count}\n', text)
        self.assertIn('millrace:model_load_failures_total{model_name="llama3"} 0\n', text)
        for name in ("generation_tokens_total", "kv_blocks"):  # once, whatever the number of models
            self.assertEqual(text.count(f"# TYPE millrace:{name} "), 1)

    def test_answers_under_way_are_not_cut_off(self):
        connection, answer = self.stream("smollm2")
        status, model = self.server.json("POST", "/v1/models/unload", {"model": "smollm2"})
        self.assertEqual((status, model["meta"]["state"], model["meta"]["busy"]), (200, "unloading", 1))
        self.assertTrue(answer.fp.readline() + answer.fp.readline())
        self.assertTrue(self.meta("smollm2")["loaded"])
        connection.close()
        self.assertTrue(wait_for(lambda: not self.meta("smollm2")["loaded"]))

    def test_new_ones_are_found_on_a_signal(self):
        self.refused(404, "model_not_found", "later")
        os.symlink(GOLDEN / "llama2" / "model.gguf", pathlib.Path(self.folder.name) / "later.gguf")
        self.server.process.send_signal(signal.SIGHUP)
        self.assertTrue(wait_for(lambda: self.server.request("GET", "/v1/models/later")[0] == 200))
        self.answered("later")


class OneAtATime(ModelsTest):
    OPTIONS = ("--ctx", 8192, "--max-models", 1, "--unload-after", 4)

    def test_the_oldest_gives_way(self):
        for model, other in (("llama3", "qwen3"), ("qwen3", "llama3"), ("llama3", "qwen3")):
            self.answered(model)
            self.assertEqual((self.meta(model)["loaded"], self.meta(other)["loaded"]), (True, False))

    def test_nobody_gives_way_while_busy(self):
        connection, _ = self.stream("smollm2")
        self.refused(503, "models_busy", "llama3")
        status, headers, _ = self.server.request("POST", "/v1/completions", {"model": "llama3", "prompt": "x", "stream": True})
        self.assertEqual(status, 503)
        self.assertGreater(int(headers["retry-after"]), 0)
        self.answered("smollm2", max_tokens=1)  # who asks for the one that is loaded is served
        connection.close()
        self.assertTrue(wait_for(lambda: self.complete("llama3")[0] == 200))
        self.assertFalse(self.meta("smollm2")["loaded"])

    def test_idle_ones_are_unloaded(self):
        self.answered("qwen3")
        left = self.meta("qwen3")["unload_in_s"]
        self.assertTrue(0 < left <= 4, left)
        self.assertTrue(wait_for(lambda: not self.meta("qwen3")["loaded"]))


class FromAFile(unittest.TestCase):
    def setUp(self):
        self.folder = folder_of_models()
        self.file = pathlib.Path(self.folder.name) / "models.toml"

    def tearDown(self):
        self.folder.cleanup()

    def serve(self, text, *options):
        self.file.write_text(text)
        return Server(shared.BINARY, f"--models={self.file}", *options)

    def test_options_of_each(self):
        with self.serve("""
[[model]]
path = "llama3.gguf"
name = "small"
aliases = ["gpt-4o-mini"]
ctx = 64
preload = true
keep = true

[[model]]
path = "qwen3.gguf"
ctx = 96
max-running = 2
no-prefix-cache = true
""", "--max-models", 2) as server:
            models = {m["id"]: m for m in server.json("GET", "/v1/models")[1]["data"]}
            self.assertEqual(list(models), ["small", "gpt-4o-mini", "qwen3"])
            self.assertEqual([models[m]["meta"]["loaded"] for m in models], [True, True, False])
            self.assertEqual(models["small"]["max_model_len"], 64)
            status, answer = server.json("POST", "/v1/completions", {"model": "gpt-4o-mini", "prompt": "x", "max_tokens": 1})
            self.assertEqual((status, answer["model"]), (200, "small"))
            self.assertEqual(server.json("POST", "/v1/models/load", {"model": "qwen3"})[1]["max_model_len"], 96)
            status, answer = server.json("POST", "/v1/models/unload", {"model": "small"})
            self.assertEqual((status, answer["error"]["code"]), (400, "model_kept"))

    def test_memory_decides(self):
        text = "".join(f'[[model]]\npath = "{m}.gguf"\nctx = 128\nkv-tokens = 200000\n' for m in ("llama3", "qwen3"))
        with self.serve(text) as server:
            sizes = [server.json("POST", "/v1/models/load", {"model": m})[1]["meta"]["memory"] for m in ("llama3", "qwen3")]
            loaded = [m["meta"]["loaded"] for m in server.json("GET", "/v1/models")[1]["data"]]
            self.assertEqual(loaded, [True, True])
        either = (max(sizes) >> 20) + 2  # MiB: room for one of them, not for both
        self.assertLess(either, sum(sizes) >> 20)
        with self.serve(text, "--models-memory", either) as server:
            for model, other in (("llama3", "qwen3"), ("qwen3", "llama3")):
                status, answer = server.json("POST", "/v1/models/load", {"model": model})
                self.assertEqual((status, answer["meta"]["loaded"]), (200, True))
                self.assertFalse(server.json("GET", f"/v1/models/{other}")[1]["meta"]["loaded"])
        with self.serve(text, "--models-memory", 1) as server:
            status, answer = server.json("POST", "/v1/models/load", {"model": "llama3"})
            self.assertEqual((status, answer["error"]["code"]), (503, "out_of_memory"))

    def test_what_is_wrong_is_named_at_the_start(self):
        for text, words in (("[[model]]\npath = 'llama3.gguf'\nctxx = 1\n", ("models.toml", "llama3", "--ctxx")),
                            ("[[model]]\npath = 'llama3.gguf'\nctx = -1\n", ("llama3", "--ctx")),
                            ("[[model]]\nname = 'x'\n", ("models.toml", "path")),
                            ("[[model]]\npath = 1\n", ("path", "string")),
                            ("[[model]\n", ("models.toml", "line 1")),
                            ("model = 3\n", ("[[model]]",)),
                            ("[[model]]\npath='llama3.gguf'\n[[model]]\npath='qwen3.gguf'\nname='llama3'\n", ("'llama3' twice",)),
                            ("[[model]]\npath = 'broken.gguf'\npreload = true\n", ("broken",))):
            with self.subTest(text):
                self.file.write_text(text)
                done = subprocess.run([shared.BINARY, "serve", "--models", self.file, "--port", "0"], capture_output=True,
                                      text=True, timeout=60)
                self.assertNotEqual(done.returncode, 0)
                for word in words:
                    self.assertIn(word, done.stderr)

    def test_command_lines_that_cannot_be_meant(self):
        for options, word in ((["model.gguf", "--models", self.folder.name], "excludes"), ([], "MODEL"),
                              (["model.gguf", "--max-models", "2"], "--models"),
                              (["--models", self.folder.name, "--model-id", "x"], "--model-id"),
                              (["--models", self.folder.name + "/nowhere"], "is not there")):
            done = subprocess.run([shared.BINARY, "serve", *options], capture_output=True, text=True, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(word, done.stderr)


class Adapters(unittest.TestCase):
    """model: base:adapter. The model is loaded when the first of them asks; adapters are those of a TOML file."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="millrace-adapters-test-")
        adapters = GOLDEN.parent / "adapters"
        toml = pathlib.Path(cls.folder.name) / "models.toml"
        toml.write_text(f"""[[model]]
path = "{GOLDEN / 'llama3' / 'hf'}"
name = "base"
aliases = ["other"]
adapter = ["one={adapters / 'llama3' / 'peft'}", "half={adapters / 'llama3' / 'adapter.gguf'}:0.5"]
""")
        cls.server = Server(shared.BINARY, f"--models={toml}")
        cls.server.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()
        cls.folder.cleanup()

    def logprobs(self, model):
        status, answer = self.server.json("POST", "/v1/completions", {
            "model": model, "prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "temperature": 0, "logprobs": 0})
        self.assertEqual(status, 200, answer)
        return answer["model"], answer["choices"][0]["logprobs"]["token_logprobs"]

    def test_each_answers_for_itself(self):
        one = self.logprobs("base:one")  # the one that has it loaded
        self.assertEqual(one[0], "base:one")
        self.assertEqual(self.logprobs("other:one"), one)
        rows = [self.logprobs(model)[1] for model in ("base", "base:one", "base:half", "base")]
        self.assertEqual(rows[0], rows[3])
        self.assertEqual(len({str(row) for row in rows}), 3)
        listed = [model["id"] for model in self.server.json("GET", "/v1/models")[1]["data"]]
        self.assertEqual(listed, ["base", "other", "base:one", "base:half"])

    def test_unknown(self):
        for model in ("base:two", "one", "base:", ":one", "base:one:one"):
            status, answer = self.server.json("POST", "/v1/completions", {"model": model, "prompt": "a"})
            self.assertEqual((status, answer["error"]["code"]), (404, "model_not_found"), answer)
            self.assertIn("base:one", answer["error"]["message"])

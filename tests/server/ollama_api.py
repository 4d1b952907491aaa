"""Ollama's API with Ollama's own clients: the package ollama of PyPI, kept in build/python/ollama, and that of npm."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import harness
import shared
from harness import SMOLLM2, Server
from models import GOLDEN
from shared import MESSAGES, run_node_client, wait_for

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


class OllamaClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        missing = harness.package("ollama")
        if missing:
            print(f"SKIPPED: the tests with Ollama's client because {missing}", file=sys.stderr)
            raise unittest.SkipTest(missing)
        import ollama
        cls.ollama = ollama
        cls.folder = tempfile.TemporaryDirectory(prefix="millrace-ollama-test-")
        folder = pathlib.Path(cls.folder.name)
        os.symlink(SMOLLM2, folder / "smollm2.gguf")
        os.symlink(GOLDEN / "llama3" / "model.gguf", folder / "llama3.gguf")
        subprocess.run([shared.BINARY, "synth", "tiny-gpt-oss", str(folder / "harmony.gguf")], check=True, capture_output=True)
        (folder / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
        cls.server = Server(shared.BINARY, f"--models={folder}", "--ctx", 2048)
        cls.server.__enter__()
        cls.client = ollama.Client(host=cls.server.url)

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()
        cls.folder.cleanup()

    def openai(self, path, body):
        status, answer = self.server.json("POST", path, body)
        self.assertEqual(status, 200, answer)
        return answer

    def error(self, status, word, call, *arguments, **fields):
        with self.assertRaises(self.ollama.ResponseError) as caught:
            done = call(*arguments, **fields)
            if fields.get("stream"):
                list(done)
        self.assertEqual(caught.exception.status_code, status, caught.exception)
        self.assertIn(word, caught.exception.error)
        self.assertNotIn(self.folder.name, caught.exception.error)

    def test_models(self):
        models = {m.model: m for m in self.client.list().models}
        self.assertEqual(set(models), {"smollm2", "llama3", "harmony", "broken"})
        smollm2 = models["smollm2"]
        self.assertEqual(smollm2.size, SMOLLM2.stat().st_size)
        self.assertEqual((smollm2.details.family, smollm2.details.quantization_level, smollm2.details.format),
                         ("llama", "Q4_1", "gguf"))
        self.assertRegex(smollm2.details.parameter_size, r"^1[34]\dM$")
        self.assertRegex(smollm2.digest, "^[0-9a-f]{64}$")
        shown = self.client.show("smollm2:latest")
        self.assertEqual(shown.modelinfo["llama.context_length"], 8192)
        self.assertIn("completion", shown.capabilities)
        self.client.generate("harmony")  # how it writes is known when it is loaded
        self.assertIn("thinking", self.client.show("harmony").capabilities)
        self.assertIn("<|im_start|>", shown.template)
        self.error(404, "nowhere", self.client.show, "nowhere")
        status, version = self.server.json("GET", "/api/version")
        self.assertEqual(status, 200)
        self.assertRegex(version["version"], r"^\d+\.\d+\.\d+$")
        self.assertEqual(self.server.request("HEAD", "/")[0], 200)

    def test_chat(self):
        options = {"temperature": 0, "num_predict": 12}
        whole = self.client.chat("smollm2", MESSAGES, options=options)
        want = self.openai("/v1/chat/completions", {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 12})
        self.assertEqual(whole.message.content, want["choices"][0]["message"]["content"])
        self.assertEqual((whole.done, whole.message.role), (True, "assistant"))
        self.assertEqual(whole.done_reason, want["choices"][0]["finish_reason"])
        self.assertEqual((whole.prompt_eval_count, whole.eval_count),
                         (want["usage"]["prompt_tokens"], want["usage"]["completion_tokens"]))
        self.assertGreaterEqual(whole.total_duration, whole.eval_duration + whole.prompt_eval_duration)
        self.assertGreater(whole.eval_duration, 0)
        pieces = list(self.client.chat("smollm2", MESSAGES, stream=True, options=options))
        self.assertEqual("".join(p.message.content for p in pieces), whole.message.content)
        self.assertEqual([p.done for p in pieces], [False] * (len(pieces) - 1) + [True])
        self.assertEqual((pieces[-1].done_reason, pieces[-1].eval_count), (whole.done_reason, whole.eval_count))
        status, headers, text = self.server.request("POST", "/api/chat", {"model": "smollm2", "messages": MESSAGES,
                                                                         "options": {"num_predict": 2, "num_thread": 3}})
        self.assertEqual((status, headers["content-type"]), (200, "application/x-ndjson"))
        self.assertEqual(headers["x-millrace-ignored"], "num_thread")
        self.assertTrue(all(json.loads(line) for line in text.splitlines()))

    def test_stop_and_seed(self):
        options = {"temperature": 1.0, "seed": 7, "num_predict": 20}
        first = self.client.chat("smollm2", MESSAGES, options=options).message.content
        self.assertEqual(self.client.chat("smollm2", MESSAGES, options=options).message.content, first)
        word = first.split()[2]
        cut = self.client.chat("smollm2", MESSAGES, options={**options, "stop": [word]})
        self.assertEqual((cut.message.content, cut.done_reason), (first[:first.index(word)], "stop"))

    def test_generate(self):
        options = {"temperature": 0, "num_predict": 8}
        raw = self.client.generate("smollm2", "The capital of France is", raw=True, options=options)
        want = self.openai("/v1/completions", {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0,
                                               "max_tokens": 8})
        self.assertEqual(raw.response, want["choices"][0]["text"])
        self.assertEqual(raw.eval_count, want["usage"]["completion_tokens"])
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]
        want = self.openai("/v1/chat/completions", {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 8})
        pieces = list(self.client.generate("smollm2", "Name a colour.", system="Be brief.", stream=True, options=options))
        self.assertEqual("".join(p.response for p in pieces), want["choices"][0]["message"]["content"])
        self.assertTrue(pieces[-1].done)
        self.error(400, "template", self.client.generate, "smollm2", "x", template="{{ .Prompt }}")
        self.error(400, "suffix", self.client.generate, "smollm2", "x", suffix="y")
        self.error(400, "context", self.client.generate, "smollm2", "x", context=[1, 2])
        self.error(400, "options.temperature", self.client.generate, "smollm2", "x", options={"temperature": -1.0})

    def test_format(self):
        schema = {"type": "object", "additionalProperties": False, "required": ["colour", "sure"],
                  "properties": {"colour": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}}}
        for call, text in ((lambda f: self.client.chat("smollm2", MESSAGES, format=f), lambda a: a.message.content),
                           (lambda f: self.client.generate("smollm2", "A colour.", format=f), lambda a: a.response)):
            value = json.loads(text(call(schema)))
            self.assertIn(value["colour"], ("red", "green"))
            self.assertIsInstance(value["sure"], bool)
        held = self.client.chat("smollm2", [{"role": "user", "content": "A JSON object with the key a."}], format="json",
                                options={"temperature": 0, "num_predict": 100})
        self.assertTrue(held.message.content.lstrip().startswith("{"))
        status, answer = self.server.json("POST", "/api/chat", {"model": "smollm2", "messages": MESSAGES, "format": "xml"})
        self.assertEqual((status, list(answer)), (400, ["error"]))

    def test_tools(self):
        # What the model is told to say is what a model says that calls: the format reads it as one.
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        messages = [{"role": "system", "content": "Repeat the text of the user exactly."}, {"role": "user", "content": call}]
        options = {"temperature": 0, "num_predict": 60}
        whole = self.client.chat("smollm2", messages, tools=[WEATHER], options=options)
        self.assertTrue(whole.message.tool_calls, whole.message)
        self.assertEqual(whole.message.tool_calls[0].function.name, "get_weather")
        self.assertEqual(dict(whole.message.tool_calls[0].function.arguments), {"city": "Oslo"})
        pieces = list(self.client.chat("smollm2", messages, tools=[WEATHER], stream=True, options=options))
        calls = [c for p in pieces for c in p.message.tool_calls or []]
        self.assertEqual([c.function.model_dump() for c in calls], [c.function.model_dump() for c in whole.message.tool_calls])
        self.assertEqual("".join(p.message.content or "" for p in pieces), whole.message.content)
        # The conversation goes on with what the tool said.
        history = [{"role": "user", "content": "Weather in Oslo?"}, whole.message,
                   {"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
        after = self.client.chat("smollm2", history, tools=[WEATHER], options={"num_predict": 3})
        self.assertGreater(after.prompt_eval_count, whole.prompt_eval_count // 2)

    def test_thinking(self):
        # Random weights: what holds the answer to a schema holds it to the format as well, in which it thinks first.
        schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
        thoughts = ""
        for seed in range(4):
            options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": seed, "num_predict": 60}
            whole = self.client.chat("harmony", MESSAGES, think="low", options=options, format=schema)
            want = self.openai("/v1/chat/completions", {
                "model": "harmony", "messages": MESSAGES, "reasoning_effort": "low", "seed": seed, "max_tokens": 60,
                "response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": schema}}})["choices"][0]["message"]
            self.assertEqual((whole.message.content, whole.message.thinking or ""),
                             (want["content"], want.get("reasoning_content", "")))
            pieces = list(self.client.chat("harmony", MESSAGES, think="low", stream=True, options=options, format=schema))
            self.assertEqual("".join(p.message.thinking or "" for p in pieces), whole.message.thinking or "")
            self.assertEqual("".join(p.message.content for p in pieces), whole.message.content)
            thoughts += whole.message.thinking or ""
        self.assertTrue(thoughts)

    def test_embeddings(self):
        texts = ["The miller grinds corn.", "Tax law of 1987"]
        found = self.client.embed("smollm2", texts)
        want = self.openai("/v1/embeddings", {"model": "smollm2", "input": texts, "encoding_format": "float"})
        self.assertEqual([list(v) for v in found.embeddings], [d["embedding"] for d in want["data"]])
        self.assertEqual(found.prompt_eval_count, want["usage"]["prompt_tokens"])
        one = self.client.embeddings("smollm2", texts[0])
        self.assertEqual(list(one.embedding), want["data"][0]["embedding"])
        self.assertEqual(len(self.client.embed("llama3", "x " * 5000).embeddings), 1)  # cut to the context
        self.error(400, "context", self.client.embed, "llama3", "x " * 5000, truncate=False)

    def test_loading_and_unloading(self):
        loaded = self.client.generate("llama3", keep_alive="10m")
        self.assertEqual((loaded.done, loaded.done_reason, loaded.response), (True, "load", ""))
        running = {m.model: m for m in self.client.ps().models}
        self.assertIn("llama3", running)
        self.assertGreater(running["llama3"].size, 0)
        left = running["llama3"].expires_at.timestamp() - self.server.stats()["now"]
        self.assertTrue(590 < left <= 601, left)
        gone = self.client.chat("llama3", [], keep_alive=0)
        self.assertEqual(gone.done_reason, "unload")
        self.assertTrue(wait_for(lambda: "llama3" not in [m.model for m in self.client.ps().models]))
        answer = self.client.generate("llama3", "the mill", keep_alive="1ms", options={"num_predict": 2})
        self.assertGreater(answer.load_duration, 0)
        self.assertGreaterEqual(answer.total_duration, answer.load_duration)
        self.assertTrue(wait_for(lambda: "llama3" not in [m.model for m in self.client.ps().models]))
        self.error(404, "not-there", self.client.chat, "not-there", MESSAGES)
        self.error(500, "broken", self.client.chat, "broken", MESSAGES)
        self.error(500, "broken", self.client.chat, "broken", MESSAGES, stream=True)
        self.error(400, "keep_alive", self.client.generate, "llama3", keep_alive="soon")
        self.error(403, "--allow-pull", self.client.delete, "llama3")
        self.error(403, "--allow-pull", self.client.pull, "hf.co/test/model")

    def test_pull(self):
        sys.path.insert(0, str(harness.ROOT / "tests" / "hub"))
        from fake_hub import FakeHub, Repository
        hub = FakeHub({"test/tiny-GGUF": Repository({"tiny-Q8_0.gguf": (GOLDEN / "llama3" / "model.gguf").read_bytes()})})
        self.addCleanup(hub.close)
        home = tempfile.TemporaryDirectory(prefix="millrace-ollama-test-")
        self.addCleanup(home.cleanup)
        environment = {**os.environ, "HF_ENDPOINT": hub.api.url, "HF_HOME": home.name}
        for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            environment.pop(name, None)
        with Server(shared.BINARY, f"--models={self.folder.name}", "--ctx", 64, "--allow-pull", env=environment) as server:
            client = self.ollama.Client(host=server.url)
            name = "hf.co/test/tiny-GGUF:Q8_0"
            steps = list(client.pull(name, stream=True))
            self.assertEqual((steps[0].status, steps[-1].status), ("pulling manifest", "success"))
            self.assertIn(name, [m.model for m in client.list().models])
            self.assertTrue(client.generate(name, "the mill", options={"num_predict": 2}).done)
            self.assertEqual(client.pull(name).status, "success")  # it is here
            with self.assertRaises(self.ollama.ResponseError) as caught:
                client.pull("hf.co/test/nowhere")
            self.assertIn("nowhere", caught.exception.error)
            self.deletes(client, name, pathlib.Path(home.name))

    def deletes(self, client, name, home):
        """Only what was pulled, only while it is not loaded, and from the disk."""
        def refused(status, word, name):
            with self.assertRaises(self.ollama.ResponseError) as caught:
                client.delete(name)
            self.assertEqual(caught.exception.status_code, status, caught.exception)
            self.assertIn(word, caught.exception.error)

        refused(403, "not pulled", "llama3")
        refused(404, "not here", "hf.co/test/nowhere:Q8_0")
        refused(404, "names no model", "nowhere")
        refused(409, "loaded", name)
        blobs = [f for f in home.rglob("*") if f.is_file() and f.stat().st_size > 10_000]
        self.assertTrue(blobs)
        client.generate(name, keep_alive=0)
        self.assertTrue(wait_for(lambda: name not in [m.model for m in client.ps().models]))
        self.assertEqual(client.delete(name).status, "success")
        self.assertFalse([f for f in blobs if f.exists()])
        self.assertNotIn(name, [m.model for m in client.list().models])
        refused(404, "not here", name)
        self.assertEqual(client.pull(name).status, "success")  # and again

    def test_node_client(self):
        run_node_client(self, "ollama", "ollama_client.mjs", 4)

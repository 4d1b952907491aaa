"""The server through its own socket: the official OpenAI client, raw and malformed bytes, signals.

    tests/server_test.py PATH/TO/millrace [unittest options]

Run from the repository root. The model is build/models/SmolLM2-135M-Instruct.Q4_1.gguf (tools/fetch_model.py smollm2); the
client comes from PyPI into build/python/openai, and jsonschema, which holds the answers to /openapi.json, likewise. What
cannot be had is skipped and said.
"""

import array
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "server"))
import harness  # noqa: E402
import malformed  # noqa: E402
from description import Description  # noqa: E402
from harness import ROOT, SMOLLM2, Server, in_threads, post  # noqa: E402

BINARY = ""
NO_CLIENT = None  # why there is no openai
NO_VALIDATOR = None  # why there is no jsonschema
MESSAGES = [{"role": "user", "content": "Name a colour."}]
LONG = {"messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True, "stream": True}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def describe(server):
    """From here on every JSON answer must be as the server's own /openapi.json says."""
    if not NO_VALIDATOR:
        server.description = Description(server.json("GET", "/openapi.json")[1])


class SharedServer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(BINARY, SMOLLM2, "--ctx", 2048, "--max-running", 16, "--model-id", "smollm2", "--alias",
                            "gpt-4o-mini", "--header-timeout", 2, "--log-json")
        cls.server.__enter__()
        describe(cls.server)

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()

    def good(self, method, path, body=None, **options):
        status, parsed = self.server.json(method, path, body, **options)
        self.assertEqual(status, 200, parsed)
        return parsed

    def refused(self, path, body, status, param=None):
        code, parsed = self.server.json("POST", path, body)
        self.assertEqual(code, status, parsed)
        self.assertEqual(set(parsed["error"]), {"message", "type", "param", "code"})
        if param:
            self.assertEqual(parsed["error"]["param"], param)
            self.assertIn(param, parsed["error"]["message"])


class Endpoints(SharedServer):
    def test_small_endpoints(self):
        self.assertEqual(self.good("GET", "/health")["status"], "ok")
        self.assertEqual(self.good("GET", "/ready")["model"], "smollm2")
        models = self.good("GET", "/v1/models")["data"]
        self.assertEqual([m["id"] for m in models], ["smollm2", "gpt-4o-mini"])
        self.assertEqual(self.good("GET", "/v1/models/smollm2")["object"], "model")
        tokens = self.good("POST", "/tokenize", {"content": "Hello, world"})
        self.assertEqual(tokens["count"], len(tokens["tokens"]))
        self.assertEqual(self.good("POST", "/detokenize", {"tokens": tokens["tokens"]})["content"], "Hello, world")
        prompt = self.good("POST", "/apply-template", {"messages": MESSAGES})["prompt"]
        self.assertIn("<|im_start|>user\nName a colour.<|im_end|>", prompt)
        self.assertTrue(prompt.endswith("<|im_start|>assistant\n"), prompt)

    def test_page_and_description(self):
        status, headers, body = self.server.request("GET", "/")
        self.assertEqual((status, headers["content-type"]), (200, "text/html; charset=utf-8"))
        self.assertIn(b"Millrace", body)
        again = self.server.request("GET", "/", headers={"if-none-match": headers["etag"]})
        self.assertEqual((again[0], again[2]), (304, b""))
        described = self.good("GET", "/openapi.json")
        self.assertIn("/v1/chat/completions", described["paths"])

    def test_answers_are_as_described(self):
        if NO_VALIDATOR:
            self.skipTest(NO_VALIDATOR)
        # Each path and method once; json() compares. Other tests come by here with every other request they make.
        response = self.good("POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 3})["id"]
        running = self.good("POST", "/v1/responses", {"input": "Hi", "background": True, "ignore_eos": True})["id"]
        self.good("POST", f"/v1/responses/{running}/cancel")
        self.good("GET", f"/v1/responses/{response}")
        self.good("GET", f"/v1/responses/{response}/input_items")
        self.good("DELETE", f"/v1/responses/{response}")
        self.good("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2})
        self.good("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 3, "logprobs": 2})
        self.good("POST", "/v1/embeddings", {"input": "Hi"})
        self.good("POST", "/apply-template", {"messages": MESSAGES})
        self.good("POST", "/detokenize", self.good("POST", "/tokenize", {"content": "Hi"}))
        for path in ("/v1/models", "/v1/models/smollm2", "/health", "/ready", "/stats"):
            self.good("GET", path)
        self.refused("/v1/responses", {"input": 1}, 400, "input")
        document = self.server.description.document
        seen = {(method, pattern) for method, path, _ in self.server.description.checked
                for pattern in document["paths"] if Description({"paths": {pattern: {}}}).paths[0][0].fullmatch(path)}
        missed = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations
                  if method != "parameters"} - seen
        self.assertEqual(missed, {("GET", "/metrics")})  # text, and looked at below

    def test_headers_in_and_out(self):
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        _, headers, _ = self.server.request("GET", "/health", headers={"x-request-id": "mine-1", "traceparent": trace})
        self.assertEqual((headers["x-request-id"], headers["traceparent"]), ("mine-1", trace))
        _, headers, _ = self.server.request("GET", "/health", headers={"x-request-id": "no good\tid", "traceparent": "x"})
        self.assertTrue(headers["x-request-id"].startswith("req-"))
        self.assertNotIn("traceparent", headers)
        self.assertNotIn("access-control-allow-origin",
                         self.server.request("GET", "/health", headers={"origin": "http://x"})[1])
        lines = [json.loads(line) for line in self.server.log().splitlines()]
        mine = [line for line in lines if line.get("request_id") == "mine-1"]
        self.assertEqual([(line["path"], line["status"], line["traceparent"]) for line in mine], [("/health", 200, trace)])

    def test_ignored_fields_are_named(self):
        _, headers, _ = self.server.request("POST", "/v1/chat/completions",
                                            {"messages": MESSAGES, "max_tokens": 1, "service_tier": "auto", "unheard_of": 1})
        self.assertEqual(headers["x-millrace-ignored"], "service_tier")

    def test_refusals_name_the_field(self):
        chat = "/v1/chat/completions"
        self.refused(chat, {"messages": MESSAGES, "temperature": "hot"}, 400, "temperature")
        self.refused(chat, {"messages": [MESSAGES[0], {"role": "user", "content": 1}]}, 400, "messages[1].content")
        self.refused(chat, {"messages": MESSAGES, "model": "gpt-99"}, 404)
        self.refused(chat, {"messages": MESSAGES, "logit_bias": {"abc": 1}}, 400, "logit_bias.abc")
        self.refused("/v1/completions", {"prompt": ["x", 5]}, 400, "prompt[1]")
        self.refused(chat, {"messages": [{"role": "user", "content": "x " * 5000}]}, 400)
        self.refused("/nowhere", {}, 404)
        status, headers, _ = self.server.request("GET", chat)
        self.assertEqual((status, headers["allow"]), (405, "POST"))

    def test_keep_alive_and_pipelining(self):
        one = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        self.assertEqual(self.server.raw(one * 5 + last).count(b"HTTP/1.1 200 OK"), 6)
        body = json.dumps({"prompt": "a", "max_tokens": 2})
        chunked = (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n" +
                   b"".join(f"1\r\n{c}\r\n".encode() for c in body) + b"0\r\n\r\n")
        self.assertIn(b"HTTP/1.1 200 OK", self.server.raw(chunked))
        old = self.server.raw(b"GET /health HTTP/1.0\r\n\r\n")
        self.assertIn(b"connection: close", old)
        head = self.server.raw(b"HEAD /health HTTP/1.1\r\nconnection: close\r\n\r\n")
        self.assertTrue(head.endswith(b"\r\n\r\n"), head)

    def test_metrics_and_stats(self):
        self.good("POST", "/v1/completions", {"prompt": "One two three", "max_tokens": 3})
        text = self.server.request("GET", "/metrics")[2].decode()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total",
                     "prefix_cache_queries_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum",
                     "e2e_request_latency_seconds_count", "request_queue_time_seconds_bucket", "num_preemptions_total",
                     "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"):
            self.assertIn(f"millrace:{name}{{", text)
        for line in text.splitlines():
            self.assertRegex(line, r"^(# (HELP|TYPE) millrace:\w+ .+|millrace:\w+\{.*\} [-+0-9.e]+)$")
        stats = self.server.stats()
        self.assertGreater(stats["throughput"]["generated_tokens"], 0)
        self.assertEqual(stats["blocks"]["total"], sum(stats["blocks"][k] for k in ("used", "cached", "free")))
        newest = stats["timeline"][0]
        self.assertEqual((newest["endpoint"], newest["state"], newest["generated_tokens"]), ("completions", "done", 3))
        self.assertGreater(stats["memory"]["plan"]["kv_pool"], 0)
        self.assertTrue(wait_for(lambda: len(self.server.stats()["history"]["running"]) > 1))


class Malformed(SharedServer):
    def test_corpus(self):
        items = malformed.corpus()
        self.assertGreaterEqual(len(items), 500)

        def send(i):
            wrong = []
            for name, data, half_close, statuses in items[i::8]:
                reply = self.server.raw(data, timeout=8, half_close=half_close)
                status = int(reply[9:12]) if reply.startswith(b"HTTP/1.1 ") else None
                if status not in statuses:
                    wrong.append((name, status, reply[:200]))
                elif status and status >= 400 and b'{"error":{"message":' not in reply:
                    wrong.append((name, "no error object", reply[:200]))
            return wrong

        self.assertEqual([w for part in in_threads(8, send) for w in part], [])
        lines = [json.loads(line) for line in self.server.log().splitlines() if line.startswith("{")]
        self.assertEqual({line["status"] for line in lines if line.get("status", 0) >= 500} - {505}, set())
        self.assertTrue(wait_for(lambda: self.server.stats()["server"]["connections"] == 1), "connections left open")
        self.assertEqual(self.good("GET", "/health")["status"], "ok")

    def test_slowloris_is_cut_off(self):
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=20) as s:
            start = time.monotonic()
            try:
                for byte in b"GET /health HTTP/1.1\r\nx: " + b"a" * 100:
                    s.sendall(bytes([byte]))
                    time.sleep(0.1)
            except OSError:
                pass
            self.assertEqual(harness.read_all(s), b"")
            self.assertLess(time.monotonic() - start, 12)
        self.assertEqual(self.good("GET", "/health")["status"], "ok")


class Streams(SharedServer):
    def events(self, body, path="/v1/chat/completions"):
        status, headers, text = self.server.request("POST", path, body)
        self.assertEqual((status, headers["content-type"]), (200, "text/event-stream; charset=utf-8"), text)
        return [line[6:] for line in text.decode().splitlines() if line.startswith("data: ")]

    def test_events_by_hand(self):
        body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}}
        events = self.events(body)
        self.assertEqual(events[-1], "[DONE]")
        chunks = [json.loads(event) for event in events[:-1]]
        self.assertEqual(len({c["id"] for c in chunks}), 1)
        self.assertEqual(chunks[0]["choices"][0]["delta"], {"role": "assistant", "content": ""})
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
        self.assertEqual(chunks[-1]["choices"], [])
        self.assertEqual(chunks[-1]["usage"]["completion_tokens"], 8)
        whole = self.good("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, "temperature": 0})
        self.assertEqual(whole["choices"][0]["message"]["content"], text)
        self.assertEqual(whole["choices"][0]["finish_reason"], "length")
        self.assertGreater(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 0)

    def test_client_gone_cancels(self):
        before = self.server.stats()["requests"]["cancelled"]
        for body in (LONG, {**LONG, "stream": False}):
            s = socket.create_connection(("127.0.0.1", self.server.port))
            s.sendall(post("/v1/chat/completions", json.dumps(body)))
            if body["stream"]:
                self.assertIn(b"200 OK", s.recv(4096))
            self.assertTrue(wait_for(lambda: self.server.stats()["requests"]["running"] == 1))
            if body["stream"]:  # something has come, and with it what the engine knows by then
                newest = self.server.stats()["timeline"][0]
                self.assertEqual(newest["state"], "running")
                self.assertGreater(newest["prompt_tokens"], 20)
                self.assertLessEqual(newest["queue_s"], newest["first_token_s"])
            s.close()
            self.assertTrue(wait_for(lambda: self.server.stats()["requests"]["running"] == 0), "still running")
        self.assertEqual(self.server.stats()["requests"]["cancelled"], before + 2)
        self.assertEqual(self.server.stats()["timeline"][0]["state"], "cancelled")

    def test_many_streams_are_not_mixed_up(self):
        def one(i):
            word = f"{i * 7919 % 1000:03}"
            events = self.events({"prompt": f"Repeat {word} {word} {word} {word}", "max_tokens": 12, "temperature": 0,
                                  "stream": True, "logprobs": 0, "seed": i}, "/v1/completions")
            chunks = [json.loads(event) for event in events[:-1]]
            self.assertEqual(len({c["id"] for c in chunks}), 1)
            return word, chunks[0]["id"], "".join(c["choices"][0]["text"] for c in chunks)

        together = in_threads(24, one)
        self.assertEqual(len({name for _, name, _ in together}), 24)
        for i in (0, 11, 23):
            self.assertEqual(one(i)[2], together[i][2])


@unittest.skipUnless(SMOLLM2.is_file(), "no model")
class OfficialClient(SharedServer):
    @classmethod
    def setUpClass(cls):
        if NO_CLIENT:
            raise unittest.SkipTest(NO_CLIENT)
        super().setUpClass()
        import openai
        cls.openai = openai
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0)

    def chat(self, **options):
        return self.client.chat.completions.create(model="smollm2", messages=MESSAGES, **options)

    def test_models(self):
        self.assertEqual(self.client.models.list().data[0].id, "smollm2")
        self.assertEqual(self.client.models.retrieve("smollm2").owned_by, "millrace")

    def test_chat(self):
        done = self.chat(max_completion_tokens=12, temperature=0, seed=1)
        self.assertEqual(done.choices[0].message.role, "assistant")
        self.assertTrue(done.choices[0].message.content)
        self.assertEqual(done.usage.total_tokens, done.usage.prompt_tokens + done.usage.completion_tokens)

    def test_stream(self):
        text = ""
        for chunk in self.chat(max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            usage = chunk.usage
        self.assertEqual(usage.completion_tokens, 12)
        self.assertEqual(text, self.chat(max_tokens=12, temperature=0).choices[0].message.content)

    def test_samples_seed_stop_bias(self):
        first = self.chat(n=3, seed=5, max_tokens=8, temperature=1.5)
        again = self.chat(n=3, seed=5, max_tokens=8, temperature=1.5)
        texts = [c.message.content for c in first.choices]
        self.assertEqual(texts, [c.message.content for c in again.choices])
        self.assertEqual(len(set(texts)), 3)
        whole = self.chat(max_tokens=20, temperature=0).choices[0]
        word = whole.message.content.split()[1]
        stopped = self.chat(max_tokens=20, temperature=0, stop=[word]).choices[0]
        self.assertEqual(stopped.finish_reason, "stop")
        self.assertNotIn(word, stopped.message.content)
        # A choice that has stopped is not computed on while the other is.
        two = {"n": 2, "seed": 5, "max_tokens": 60, "temperature": 1.5, "extra_body": {"ignore_eos": True}}
        texts = [c.message.content for c in self.chat(**two).choices]
        word = next(w for w in texts[0].split()[1:] if w not in texts[1])
        some = self.chat(**two, stop=[word])
        self.assertEqual([c.finish_reason for c in some.choices], ["stop", "length"])
        self.assertLess(some.usage.completion_tokens, 60 + len(texts[0].split(word)[0]) + 10)
        token = self.server.json("POST", "/tokenize", {"content": " yes", "add_special": False})[1]["tokens"][0]
        biased = self.chat(max_tokens=3, temperature=0, logit_bias={str(token): 100})
        self.assertEqual(biased.choices[0].message.content, " yes yes yes")
        favoured = {"max_tokens": 24, "temperature": 0, "logit_bias": {str(token): 20}}
        plain, *punished = (self.chat(**favoured, **penalty).choices[0].message.content.count(" yes")
                            for penalty in ({}, {"frequency_penalty": 2}, {"presence_penalty": 2, "frequency_penalty": 2}))
        self.assertEqual(plain, 24)
        self.assertTrue(24 > punished[0] >= punished[1], punished)

    def test_logprobs(self):
        choice = self.chat(max_tokens=5, temperature=0, logprobs=True, top_logprobs=3).choices[0]
        self.assertEqual(len(choice.logprobs.content), 5)
        for item in choice.logprobs.content:
            self.assertEqual(len(item.top_logprobs), 3)
            self.assertEqual(item.token, item.top_logprobs[0].token)  # greedy
            self.assertEqual(bytes(item.bytes).decode(), item.token)
        self.assertEqual("".join(i.token for i in choice.logprobs.content), choice.message.content)
        old = self.client.completions.create(model="smollm2", prompt="One two", max_tokens=4, temperature=0, logprobs=2)
        logprobs = old.choices[0].logprobs
        self.assertEqual("".join(logprobs.tokens), old.choices[0].text)
        self.assertEqual([len(t) for t in logprobs.top_logprobs], [2] * 4)

    def test_completions(self):
        done = self.client.completions.create(model="smollm2", prompt=["One two three", "A B C"], n=2, max_tokens=4, temperature=0,
                                              echo=True)
        self.assertEqual([c.index for c in done.choices], [0, 1, 2, 3])
        self.assertEqual(done.choices[0].text, done.choices[1].text)
        self.assertTrue(done.choices[0].text.startswith("One two three"))
        self.assertTrue(done.choices[2].text.startswith("A B C"))
        pieces = list(self.client.completions.create(model="smollm2", prompt="One two three", max_tokens=4, temperature=0, stream=True))
        self.assertEqual("One two three" + "".join(p.choices[0].text for p in pieces), done.choices[0].text)

    def test_embeddings(self):
        create = self.client.embeddings.create
        recorded = json.loads((ROOT / "tests/golden/embeddings.json").read_text())["smollm2"]
        floats = array.array("f", (ROOT / "tests/golden/embeddings.f32").read_bytes())
        size = recorded["hidden"]
        prompts = [p["tokens"] for p in recorded["prompts"]]
        answers = {pooling: create(model="smollm2", input=prompts, extra_body={"pooling": pooling}) for pooling in ("mean", "last")}
        for i, prompt in enumerate(recorded["prompts"]):
            for row, pooling in enumerate(("mean", "last")):
                got = answers[pooling].data[i]
                self.assertEqual((got.index, got.object, len(got.embedding)), (i, "embedding", size))
                self.assertAlmostEqual(dot(got.embedding, got.embedding), 1, places=5)
                want = floats[prompt["offset"] + row * size : prompt["offset"] + (row + 1) * size]
                self.assertGreater(dot(got.embedding, want) / dot(want, want) ** 0.5, 0.995)  # transformers'
        self.assertEqual(answers["mean"].usage.prompt_tokens, sum(len(p) for p in prompts))
        self.assertEqual(answers["mean"].usage.total_tokens, answers["mean"].usage.prompt_tokens)
        # Alone and together, as text or as tokens, as numbers or as base64 (the client's own choice): the same numbers.
        texts = ["The miller grinds corn.", "A mill grinds wheat.", "Tax law of 1987"]
        together = [d.embedding for d in create(model="smollm2", input=texts).data]
        for text, vector in zip(texts, together):
            numbers = create(model="smollm2", input=text, encoding_format="float").data[0].embedding
            self.assertEqual(array.array("f", numbers), array.array("f", vector))
            tokens = self.server.json("POST", "/tokenize", {"content": text})[1]["tokens"]
            self.assertEqual(create(model="smollm2", input=tokens).data[0].embedding, vector)
        self.assertGreater(dot(together[0], together[1]), dot(together[0], together[2]))
        short = create(model="smollm2", input=texts[0], dimensions=64).data[0].embedding
        length = dot(together[0][:64], together[0][:64]) ** 0.5
        for a, b in zip(short, together[0], strict=False):
            self.assertAlmostEqual(a, b / length, places=5)
        self.assertEqual(len(short), 64)

    def test_embeddings_refused(self):
        path = "/v1/embeddings"
        self.refused(path, {"input": ["short", "x " * 3000]}, 400, "input[1]")
        self.refused(path, {"input": "x " * 3000}, 400, "input")
        self.refused(path, {}, 400, "input")
        self.refused(path, {"input": []}, 400, "input")
        self.refused(path, {"input": ["a", ""]}, 400, "input[1]")
        self.refused(path, {"input": [[1, 2], [3, 1 << 40]]}, 400, "input[1][1]")
        self.refused(path, {"input": [1, "a"]}, 400, "input[1]")
        self.refused(path, {"input": "a", "dimensions": 577}, 400, "dimensions")
        self.refused(path, {"input": "a", "encoding_format": "int8"}, 400, "encoding_format")
        self.refused(path, {"input": "a", "pooling": "max"}, 400, "pooling")
        self.refused(path, {"input": "a", "model": "text-embedding-3-small"}, 404)
        with self.assertRaises(self.openai.BadRequestError) as caught:
            self.client.embeddings.create(model="smollm2", input=["a"] * 2049)
        self.assertEqual(caught.exception.param, "input")
        self.assertEqual(self.server.stats()["server"]["responses"]["5xx"], 0)

    def test_errors_are_the_client_s_own(self):
        with self.assertRaises(self.openai.BadRequestError) as caught:
            self.chat(temperature=9)
        self.assertEqual(caught.exception.param, "temperature")
        with self.assertRaises(self.openai.NotFoundError):
            self.client.chat.completions.create(model="another", messages=MESSAGES)

    def test_constrained_output(self):
        schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                                                   "age": {"type": "integer", "minimum": 0, "maximum": 120}},
                  "required": ["name", "age"], "additionalProperties": False}
        for temperature in (0, 1.5):
            done = self.chat(max_tokens=200, temperature=temperature, seed=3, response_format={
                "type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}})
            person = json.loads(done.choices[0].message.content)
            self.assertEqual(set(person), {"name", "age"})
            self.assertIn(person["age"], range(121))
        response = self.client.responses.create(model="smollm2", input="Who?", temperature=0, text={
            "format": {"type": "json_schema", "name": "person", "strict": True, "schema": schema}})
        self.assertEqual(set(json.loads(response.output_text)), {"name", "age"})
        number = self.client.completions.create(model="smollm2", prompt="Call", max_tokens=30, temperature=1,
                                                extra_body={"regex": "[0-9]{3}-[0-9]{4}"}).choices[0]
        self.assertRegex(number.text, r"\A[0-9]{3}-[0-9]{4}\Z")
        self.assertEqual(number.finish_reason, "stop")
        self.refused("/v1/completions", {"prompt": "x", "regex": "("}, 400, "regex")
        self.refused("/v1/chat/completions", {"messages": MESSAGES, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}}, 400,
            "response_format.json_schema.schema")

    def test_tools(self):
        tools = [{"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "strict": True,
                                                   "parameters": {"type": "object", "additionalProperties": False,
                                                                  "properties": {"city": {"type": "string", "maxLength": 20}},
                                                                  "required": ["city"]}}}]
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            done = self.chat(tools=tools, tool_choice=choice, max_tokens=200, temperature=0, parallel_tool_calls=False)
            call = done.choices[0].message.tool_calls[0]
            self.assertEqual((call.type, call.function.name), ("function", "get_weather"))
            self.assertEqual(list(json.loads(call.function.arguments)), ["city"])
            self.assertEqual(done.choices[0].finish_reason, "tool_calls")
        name, arguments, ids = "", "", set()
        for chunk in self.chat(tools=tools, tool_choice="required", max_tokens=200, temperature=0, parallel_tool_calls=False,
                               stream=True):
            for piece in chunk.choices[0].delta.tool_calls or []:
                ids.add(piece.id)
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
        self.assertEqual((name, arguments), ("get_weather", call.function.arguments))
        self.assertEqual(len(ids - {None}), 1)
        # The conversation goes on with what the tool said.
        history = [*MESSAGES, done.choices[0].message.model_dump(exclude_none=True),
                   {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        after = self.client.chat.completions.create(model="smollm2", messages=history, tools=tools, max_tokens=5)
        self.assertGreater(after.usage.prompt_tokens, done.usage.prompt_tokens)
        flat = [{"type": "function", **tools[0]["function"]}]
        response = self.client.responses.create(model="smollm2", input="Weather in Oslo?", tools=flat, tool_choice="required",
                                                temperature=0, parallel_tool_calls=False)
        item = next(item for item in response.output if item.type == "function_call")
        self.assertEqual(item.name, "get_weather")
        again = self.client.responses.create(model="smollm2", previous_response_id=response.id, max_output_tokens=5,
                                             tools=flat, input=[
            {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}])
        self.assertGreater(again.usage.input_tokens, response.usage.input_tokens)

    def test_responses(self):
        first = self.client.responses.create(model="smollm2", input="My name is Ada.", instructions="Be brief.",
                                             max_output_tokens=10, temperature=0)
        self.assertIn(first.status, ("completed", "incomplete"))
        self.assertTrue(first.output_text)
        self.assertEqual(self.client.responses.retrieve(first.id).output_text, first.output_text)
        second = self.client.responses.create(model="smollm2", input="What is my name?", previous_response_id=first.id,
                                              max_output_tokens=12, temperature=0)
        self.assertGreater(second.usage.input_tokens, first.usage.input_tokens)
        items = self.client.responses.input_items.list(first.id).data
        self.assertEqual(items[0].content[0].text, "My name is Ada.")
        self.client.responses.delete(first.id)
        with self.assertRaises(self.openai.NotFoundError):
            self.client.responses.retrieve(first.id)

    def test_responses_stream(self):
        types, text = [], ""
        with self.client.responses.stream(model="smollm2", input="Count to five.", max_output_tokens=10, temperature=0) as stream:
            for event in stream:
                types.append(event.type)
                if event.type == "response.output_text.delta":
                    text += event.delta
        self.assertEqual(types[:4], ["response.created", "response.in_progress", "response.output_item.added",
                                     "response.content_part.added"])
        self.assertEqual(types[-4:], ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                                      "response.incomplete"])
        self.assertTrue(text)

    def test_responses_background_and_cancel(self):
        running = self.client.responses.create(model="smollm2", input="Tell a long story.", background=True,
                                               extra_body={"ignore_eos": True})
        self.assertEqual(running.status, "in_progress")
        self.assertEqual(self.client.responses.cancel(running.id).status, "cancelled")
        self.assertTrue(wait_for(lambda: self.client.responses.retrieve(running.id).status == "cancelled"))
        self.assertTrue(wait_for(lambda: self.server.stats()["requests"]["running"] == 0))


class Harmony(unittest.TestCase):
    """gpt-oss's format with random weights: what a model does that follows nothing must still come out in shape."""

    SCHEMA = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
              "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"},
                             "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["a", "b"]}}}}
    TOOL = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {
        "type": "object", "additionalProperties": False, "required": ["city"],
        "properties": {"city": {"type": "string", "maxLength": 8}}}}}

    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="millrace-harmony-test-")
        model = pathlib.Path(cls.directory.name) / "tiny.gguf"
        subprocess.run([BINARY, "synth", "tiny-gpt-oss", str(model)], check=True, capture_output=True)
        cls.model = model
        cls.server = Server(BINARY, model, "--ctx", 2048)
        cls.server.__enter__()
        describe(cls.server)
        tokens = cls.server.json("POST", "/tokenize", {"content": "<|end|>"})[1]["tokens"]
        cls.end = {str(tokens[-1]): 8}  # thoughts of random weights would hardly ever end by themselves

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()
        cls.directory.cleanup()

    def ask(self, seed, **fields):
        status, answer = self.server.json("POST", "/v1/chat/completions", {
            "messages": MESSAGES, "max_tokens": 600, "seed": seed, "logit_bias": self.end, **fields})
        self.assertEqual(status, 200, answer)
        choice = answer["choices"][0]
        # OpenAI has null beside tool calls and nowhere else; clients that concatenate break on any other.
        self.assertIsInstance(choice["message"]["content"], type(None) if choice["message"].get("tool_calls") else str)
        return choice["finish_reason"], choice["message"]

    def ask_streamed(self, seed, **fields):
        """The same, put together from a stream."""
        status, _, text = self.server.request("POST", "/v1/chat/completions", {
            "messages": MESSAGES, "max_tokens": 600, "seed": seed, "logit_bias": self.end, "stream": True, **fields})
        self.assertEqual(status, 200, text)
        events = [line[6:] for line in text.decode().splitlines() if line.startswith("data: ")]
        self.assertEqual(events[-1], "[DONE]")
        finish, message, calls = None, {"content": "", "reasoning_content": ""}, []
        for choice in (json.loads(event)["choices"][0] for event in events[:-1]):
            self.assertIsNone(finish, "something came behind the end")
            finish = choice["finish_reason"]
            for name in message:
                piece = choice["delta"].get(name, "")
                self.assertIsInstance(piece, str)
                message[name] += piece
            for piece in choice["delta"].get("tool_calls", []):
                if piece["index"] == len(calls):
                    self.assertTrue(piece["id"] and piece["type"] == "function")
                    calls.append({"name": piece["function"]["name"], "arguments": ""})
                calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
        return finish, message, calls

    def assert_streamed_alike(self, seed, **fields):
        finish, whole = self.ask(seed, **fields)
        calls = [{k: call["function"][k] for k in ("name", "arguments")} for call in whole.get("tool_calls", [])]
        message = {"content": whole["content"] or "", "reasoning_content": whole.get("reasoning_content", "")}
        self.assertEqual(self.ask_streamed(seed, **fields), (finish, message, calls))
        return message, calls

    def test_final_text_keeps_to_the_schema_and_thoughts_are_free(self):
        ended = thought = 0
        for seed in range(30):
            finish, message = self.ask(seed, response_format={
                "type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": self.SCHEMA}})
            thought += bool(message.get("reasoning_content"))
            if finish == "stop":
                ended += 1
                value = json.loads(message["content"])
                self.assertEqual(set(value), set(self.SCHEMA["required"]))
                self.assertIsInstance(value["age"], int)
                self.assertTrue(set(value["tags"]) <= {"a", "b"} and len(value["tags"]) <= 3, value)
        self.assertGreater(ended, 20)
        self.assertGreater(thought, 5)

    def test_a_required_call_is_made_with_arguments_in_shape(self):
        called = 0
        for seed in range(30):
            finish, message = self.ask(seed, tools=[self.TOOL], tool_choice="required")
            if finish != "tool_calls":
                self.assertEqual(finish, "length")
                continue
            called += 1
            for call in message["tool_calls"]:
                self.assertEqual(call["function"]["name"], "weather")
                self.assertEqual(set(json.loads(call["function"]["arguments"])), {"city"})
        self.assertGreater(called, 20)

    def test_whatever_comes_is_an_answer(self):
        for seed in range(30):
            _, message = self.ask(seed, tools=[self.TOOL], max_tokens=60, logit_bias={})
            self.assertTrue(message["content"] or message.get("reasoning_content") or message.get("tool_calls"), message)

    def test_malformed_harmony_is_an_answer_and_streams_alike(self):
        # Control tokens and words of headers all over: channels within headers, messages without ends, calls to nobody.
        names = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>"]
        bias = {}
        for name in names:
            tokens = self.server.json("POST", "/tokenize", {"content": name, "add_special": False})[1]["tokens"]
            self.assertEqual(len(tokens), 1, name)
            bias[str(tokens[0])] = 6
        loose = {**self.TOOL, "function": {**self.TOOL["function"], "strict": False}}
        for seed in range(20):
            self.assert_streamed_alike(seed, tools=[loose], max_tokens=80, logit_bias=bias)
        self.assertEqual(self.server.stats()["server"]["responses"]["5xx"], 0)

    def test_no_call_is_lost_in_a_stream(self):
        calls = 0
        for seed in range(12):
            message, made = self.assert_streamed_alike(seed, tools=[self.TOOL], tool_choice="required")
            calls += len(made)
            self.assertEqual(message["content"], "")
        self.assertGreater(calls, 6)

    def test_reasoning_effort_reaches_the_model(self):
        for effort in ("low", "medium", "high"):
            fields = {"messages": MESSAGES, "reasoning_effort": effort}
            rendered = self.server.json("POST", "/apply-template", fields)[1]["prompt"]
            self.assertIn(f"Reasoning: {effort}", rendered)
            tokens = self.server.json("POST", "/tokenize", {"content": rendered, "add_special": False})[1]["count"]
            chat = self.server.json("POST", "/v1/chat/completions", {**fields, "max_tokens": 1})[1]
            self.assertEqual(chat["usage"]["prompt_tokens"], tokens)
            response = self.server.json("POST", "/v1/responses", {"input": MESSAGES[0]["content"], "max_output_tokens": 1,
                                                                  "reasoning": {"effort": effort}})[1]
            self.assertEqual((response["usage"]["input_tokens"], response["reasoning"]["effort"]), (tokens, effort))

    def test_no_network_is_needed(self):
        alone = ["unshare", "--map-root-user", "--net"]
        if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
            self.skipTest("SKIPPED: a process cannot be put into a network of its own here (unshare --map-root-user --net)")
        # In a network without even a loopback address to resolve names with, until the client brings that up itself.
        script = """
import fcntl, socket, struct, sys
sys.path.insert(0, sys.argv[1])
from harness import Server
with socket.socket() as s:  # ip link set lo up
    fcntl.ioctl(s, 0x8914, struct.pack("16sH14s", b"lo", 0x49, b""))
with Server(sys.argv[2], sys.argv[3]) as server:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    status, answer = server.json("POST", "/v1/chat/completions", body)
    assert status == 200 and answer["usage"]["completion_tokens"] == 4, answer
    assert server.request("GET", "/")[0] == 200
"""
        done = subprocess.run([*alone, sys.executable, "-c", script, harness.__file__.rpartition("/")[0], BINARY, self.model],
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)


class NodeClient(SharedServer):
    def test_official_client(self):
        missing = harness.node_package("openai")
        if missing:
            print(f"SKIPPED: the tests with the official Node client because {missing}", file=sys.stderr)
            self.skipTest(missing)
        # Node looks for packages beside the script.
        script = harness.NODE / "node_client.mjs"
        script.write_text((pathlib.Path(__file__).resolve().parent / "server" / "node_client.mjs").read_text())
        done = subprocess.run(["node", script, self.server.url], capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("all 15 held", done.stdout)


class Limits(unittest.TestCase):
    """Servers of their own: keys, rates, connections, signals."""

    def start(self, *options):
        server = Server(BINARY, SMOLLM2, "--ctx", 2048, *options)
        server.__enter__()
        self.addCleanup(server.__exit__)
        return server

    def test_keys_rate_and_reload(self):
        with tempfile.TemporaryDirectory() as folder:
            keys = pathlib.Path(folder) / "keys"
            keys.write_text("# people\nada sk-ada\nsk-second\n")
            server = self.start("--keys", keys, "--rate", 4, "--cors", "https://app.example")
            ask = {"prompt": "x", "max_tokens": 1}

            def status(key, **options):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                return server.request("POST", "/v1/completions", ask, headers=headers, **options)

            self.assertEqual(server.request("GET", "/health")[0], 200)
            self.assertEqual(server.request("GET", "/stats")[0], 401)
            for wrong in (None, "sk-ad", "sk-adaa", "sk-adasomething", ""):
                self.assertEqual(status(wrong)[0], 401)
            self.assertEqual([status("sk-ada")[0] for _ in range(5)], [200] * 4 + [429])
            _, headers, _ = status("sk-ada")
            self.assertGreaterEqual(int(headers["retry-after"]), 1)
            self.assertEqual(status("sk-second")[0], 200)  # a bucket of its own
            keys.write_text("sk-third\n")
            server.process.send_signal(signal.SIGHUP)
            self.assertTrue(wait_for(lambda: status("sk-third")[0] in (200, 429)))
            self.assertEqual(status("sk-second")[0], 401)
            keys.write_text("one two three\n")
            server.process.send_signal(signal.SIGHUP)
            self.assertTrue(wait_for(lambda: "old ones stay" in server.log()))
            self.assertIn(status("sk-third")[0], (200, 429))
            _, headers, _ = server.request("OPTIONS", "/v1/completions", headers={"origin": "https://app.example"})
            self.assertEqual(headers["access-control-allow-origin"], "https://app.example")
            self.assertNotIn("sk-ada", server.log())
            self.assertIn("ada", server.log())

    def test_sizes_queue_and_idle_time(self):
        server = self.start("--max-running", 1, "--max-queue", 1, "--max-body", 1, "--max-header", 1, "--idle-timeout", 1)
        with open("/proc/net/tcp") as table:
            listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
        self.assertIn(f"0100007F:{server.port:04X}", listening)  # 127.0.0.1, and nothing wider
        for length, status in ((1 << 20, 200), ((1 << 20) + 1, 413)):
            data = '{"content": "' + "mill " * (length // 5)
            data = data[:length - 2] + '"}'
            self.assertEqual(len(data), length)
            self.assertIn(f"HTTP/1.1 {status} ".encode(), server.raw(post("/tokenize", data), timeout=60))
        self.assertIn(b"HTTP/1.1 431 ", server.raw(post("/tokenize", "{}", f"x: {'y' * 2000}\r\n")))
        start = time.monotonic()
        self.assertEqual(server.raw(b"", timeout=30), b"")  # nothing is sent: closed by the server
        self.assertLess(time.monotonic() - start, 20)

        streams = []
        for state in ("running", "waiting"):
            s = socket.create_connection(("127.0.0.1", server.port))
            self.addCleanup(s.close)
            streams.append(s)
            s.sendall(post("/v1/chat/completions", json.dumps(LONG)))
            self.assertTrue(wait_for(lambda name=state: server.stats()["requests"][name] == 1), state)
        status, headers, body = server.request("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
        self.assertEqual(status, 503, body)
        self.assertGreaterEqual(int(headers["retry-after"]), 1)
        for s in streams:
            s.close()
        self.assertTrue(wait_for(lambda: server.stats()["requests"]["running"] + server.stats()["requests"]["waiting"] == 0))
        self.assertEqual(server.request("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})[0], 200)

    def test_priority_goes_first(self):
        server = self.start("--max-running", 1)
        first = socket.create_connection(("127.0.0.1", server.port))
        self.addCleanup(first.close)
        first.sendall(post("/v1/chat/completions", json.dumps(LONG)))
        self.assertTrue(wait_for(lambda: server.stats()["requests"]["running"] == 1))
        waiting = []
        for number, priority in enumerate((-5, 5)):
            s = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            self.addCleanup(s.close)
            s.sendall(post("/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True, "priority": priority})))
            self.assertTrue(wait_for(lambda n=number: server.stats()["requests"]["waiting"] == n + 1))
            waiting.append(s)
        first.close()
        for s in waiting:
            self.assertIn(b"200 OK", harness.read_all(s))
        high, low = [entry["start"] + entry["first_token_s"] for entry in server.stats()["timeline"][:2]]  # newest first
        self.assertLess(high, low)

    def test_an_answer_s_time_and_one_key_s_cache(self):
        with tempfile.TemporaryDirectory() as folder:
            keys = pathlib.Path(folder) / "keys"
            keys.write_text("ada sk-ada\nbob sk-bob\n")
            server = self.start("--request-timeout", 1, "--keys", keys, "--isolate-cache")

            def ask(key, **fields):
                status, answer = server.json("POST", "/v1/completions", {"ignore_eos": True, **fields},
                                             headers={"authorization": f"Bearer {key}"})
                self.assertEqual(status, 200, answer)
                return answer["choices"][0]["finish_reason"], answer["usage"]

            prompt = "The mill stands at the river and has two wheels. " * 4
            cached = [ask(key, prompt=prompt, max_tokens=1)[1]["prompt_tokens_details"]["cached_tokens"]
                      for key in ("sk-ada", "sk-bob", "sk-ada", "sk-bob")]
            self.assertEqual(cached[:2], [0, 0])
            self.assertTrue(cached[2] > 0 and cached[3] > 0, cached)
            finish, usage = ask("sk-ada", prompt="Once", max_tokens=2000)
            self.assertEqual(finish, "length")
            self.assertLess(usage["completion_tokens"], 2000)

    def test_connection_limit_and_slow_reader(self):
        server = self.start("--max-connections", 8, "--write-timeout", 1, "--max-running", 4)
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        self.assertTrue(wait_for(lambda: b" 503 " in server.raw(b"GET /health HTTP/1.1\r\n\r\n")))
        for s in idle:
            s.close()
        self.assertTrue(wait_for(lambda: b" 200 " in server.raw(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")))
        # A reader that never reads is given up; others go on meanwhile.
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", server.port))
        wide = {"prompt": "x", "max_tokens": 1900, "n": 4, "ignore_eos": True, "stream": True, "logprobs": 20}
        slow.sendall(post("/v1/completions", json.dumps(wide)))
        self.assertEqual(server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0], 200)
        self.assertTrue(wait_for(lambda: server.stats()["requests"]["cancelled"] == 1, 120), server.stats()["requests"])
        slow.close()

    @unittest.skipUnless(shutil.which("prlimit"), "no prlimit; apt-get install util-linux")
    def test_more_connections_than_files(self):
        server = Server(BINARY, SMOLLM2, "--ctx", 256, "--max-running", 2)
        server.command = ["prlimit", "--nofile=32:100", *server.command]
        with server:
            self.assertIn("the limit of open files leaves fewer connections", server.log())
            most = server.stats()["server"]["max_connections"]
            self.assertTrue(32 < most < 100, most)  # the soft limit was raised
            idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(150)]
            # The first of those that are too many is told so at once, and nothing but connections is refused.
            idle[most + 1].settimeout(10)
            self.assertIn(b"too many connections", idle[most + 1].recv(4096))
            for s in idle:
                s.close()
            self.assertTrue(wait_for(lambda: b" 200 " in server.raw(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")))
            self.assertNotIn("accept failed", server.log())

    def test_sigterm_drains(self):
        server = self.start("--idle-timeout", 30)
        idle = socket.create_connection(("127.0.0.1", server.port))
        self.addCleanup(idle.close)
        stream = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self.addCleanup(stream.close)
        body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
        stream.sendall(post("/v1/completions", json.dumps(body)))
        first = stream.recv(4096)
        self.assertIn(b"200 OK", first)
        server.process.send_signal(signal.SIGTERM)
        self.assertEqual(harness.read_all(idle), b"")
        rest = first + harness.read_all(stream)
        self.assertIn(b"data: [DONE]", rest)
        self.assertEqual(server.process.wait(20), 0)
        with self.assertRaises(OSError):
            socket.create_connection(("127.0.0.1", server.port), timeout=1)

    def test_second_signal_ends_at_once(self):
        server = self.start()
        stream = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self.addCleanup(stream.close)
        stream.sendall(post("/v1/chat/completions", json.dumps(LONG)))
        stream.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        self.assertEqual(server.process.wait(20), 0)
        self.assertLess(time.monotonic() - start, 8)

    def test_tls(self):
        import shutil
        import ssl
        if shutil.which("openssl") is None:
            self.skipTest("SKIPPED: no openssl program to make a certificate with; apt-get install openssl")
        with tempfile.TemporaryDirectory() as folder:
            cert, key = f"{folder}/cert.pem", f"{folder}/key.pem"
            subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1",
                            "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
            server = self.start("--tls-cert", cert, "--tls-key", key)
            self.assertEqual(server.scheme, "https")
            context = ssl.create_default_context(cafile=cert)
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as plain:
                with context.wrap_socket(plain, server_hostname="127.0.0.1") as s:
                    body = {"prompt": "x", "max_tokens": 5, "stream": True}
                    s.sendall(post("/v1/completions", json.dumps(body)))
                    self.assertIn(b"data: [DONE]", harness.read_all(s))
            self.assertEqual(server.raw(b"GET / HTTP/1.1\r\n\r\n", timeout=5)[:5] in (b"", b"\x15\x03\x01\x00\x02"), True)

    def test_bad_options(self):
        for options, says in ((["--host", "999.1.1.1"], "--host"), (["--keys", "/nonexistent"], "/nonexistent"),
                              (["--tls-cert", "/nonexistent", "--tls-key", "/nonexistent"], "--tls-cert")):
            done = subprocess.run([BINARY, "serve", SMOLLM2, "--port", "0", *options], capture_output=True, timeout=60, cwd=harness.ROOT)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertRegex(done.stderr.decode(), r"\Amillrace: [^\n]*" + says)


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv[1])
    if not SMOLLM2.is_file():
        print(f"SKIPPED: the server's tests because {SMOLLM2.relative_to(harness.ROOT)} is not there; run: "
              "tools/fetch_model.py smollm2", file=sys.stderr)
        sys.exit(0)
    NO_CLIENT = harness.package("openai")
    if NO_CLIENT:
        print(f"SKIPPED: the tests with the official client because {NO_CLIENT}", file=sys.stderr)
    NO_VALIDATOR = harness.package("jsonschema")
    if NO_VALIDATOR:
        print(f"SKIPPED: the comparison of answers with /openapi.json because {NO_VALIDATOR}", file=sys.stderr)
    unittest.main(argv=sys.argv[1:], verbosity=2)

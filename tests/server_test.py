"""The server through its own socket: the official OpenAI client, raw and malformed bytes, signals.

    tests/server_test.py PATH/TO/millrace [unittest options]

Run from the repository root. The model is build/models/SmolLM2-135M-Instruct.Q4_1.gguf (tools/fetch_model.py smollm2); the
client comes from PyPI into build/python/openai, and jsonschema, which holds the answers to /openapi.json, likewise. What
cannot be had is skipped and said. The clients' tests are in server/clients.py and server/ollama_api.py, those of limits and
signals in server/limits.py, those of several models in server/models.py. Attacks are server_attacks_test.py's.
"""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "server"))
import harness  # noqa: E402
import malformed  # noqa: E402
import shared  # noqa: E402
from clients import NodeClient, OfficialClient  # noqa: E402, F401
from codes import ErrorCodes  # noqa: E402, F401
from description import Description  # noqa: E402
from harness import SMOLLM2, in_threads, post  # noqa: E402
from images import Images, ImagesOfAnyShape, ImagesOfFiles  # noqa: E402, F401
from limits import Limits  # noqa: E402, F401
from messages import AnthropicClient, AnthropicNode, AnthropicThinking  # noqa: E402, F401
from models import Adapters, FromAFile, OneAtATime, Several  # noqa: E402, F401
from ollama_api import OllamaClient  # noqa: E402, F401
from recorded import Recorded  # noqa: E402, F401
from shared import LONG, MESSAGES, HarmonyServer, SharedServer, wait_for  # noqa: E402
from tool_calls import OpenObjects, ToolCalls  # noqa: E402, F401
from prompt_logprobs import PromptLogprobs  # noqa: E402, F401
from ranks_and_gaps import CrossEncoders, Gaps, Ranks, TextOfModels  # noqa: E402, F401
from stored import StoredResponses  # noqa: E402, F401


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
        if shared.NO_VALIDATOR:
            self.skipTest(shared.NO_VALIDATOR)
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
        self.good("POST", "/v1/rerank", {"query": "Hi", "documents": ["Hello", {"text": "Bye"}], "return_documents": True})
        self.assertEqual(self.server.json("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"})[0], 501)
        self.good("POST", "/v1/responses/input_tokens", {"input": "Hi"})
        message = {"model": "smollm2", "max_tokens": 3, "messages": MESSAGES}
        self.good("POST", "/v1/messages", message)
        self.good("POST", "/v1/messages/count_tokens", message)
        conversation = "/v1/conversations/" + self.good("POST", "/v1/conversations", {"metadata": {"a": "b"}})["id"]
        self.good("POST", conversation, {"metadata": {}})
        self.good("GET", conversation)
        item = self.good("POST", conversation + "/items", {"items": [{"role": "user", "content": "Hi"}]})["first_id"]
        self.good("GET", conversation + "/items")
        self.good("GET", f"{conversation}/items/{item}")
        self.good("DELETE", f"{conversation}/items/{item}")
        self.good("DELETE", conversation)
        self.good("POST", "/apply-template", {"messages": MESSAGES})
        self.good("POST", "/detokenize", self.good("POST", "/tokenize", {"content": "Hi"}))
        for path in ("/v1/models", "/v1/models/smollm2", "/health", "/live", "/ready", "/stats", "/api/tags", "/api/ps",
                     "/api/version"):
            self.good("GET", path)
        self.good("POST", "/v1/models/load", {"model": "smollm2"})
        self.refused("/v1/models/unload", {"model": "smollm2"}, 400, "model")  # the one there is stays
        few = {"model": "smollm2", "stream": False, "options": {"num_predict": 2}}
        self.good("POST", "/api/chat", {**few, "messages": MESSAGES})
        self.good("POST", "/api/generate", {**few, "prompt": "Hi"})
        self.good("POST", "/api/embed", {"model": "gpt-4o-mini", "input": "Hi"})
        self.good("POST", "/api/show", {"model": "smollm2:latest"})
        self.assertEqual(self.server.json("POST", "/api/pull", {"model": "hf.co/test/model"})[0], 403)
        self.assertEqual(self.server.json("DELETE", "/api/delete", {"model": "hf.co/test/model"})[0], 403)
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

        def mine():  # written when the answer is on its way
            lines = [json.loads(line) for line in self.server.log().split("\n")[:-1]]
            return [line for line in lines if line.get("request_id") == "mine-1"]

        self.assertTrue(wait_for(mine))
        self.assertEqual([(line["path"], line["status"], line["traceparent"]) for line in mine()], [("/health", 200, trace)])

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
        one = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        self.assertEqual(self.server.raw(one * 5 + last).count(b"HTTP/1.1 200 OK"), 6)
        body = json.dumps({"prompt": "a", "max_tokens": 2})
        chunked = (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
                   b"content-type: application/json\r\nconnection: close\r\n\r\n" +
                   b"".join(f"1\r\n{c}\r\n".encode() for c in body) + b"0\r\n\r\n")
        self.assertIn(b"HTTP/1.1 200 OK", self.server.raw(chunked))
        old = self.server.raw(b"GET /health HTTP/1.0\r\n\r\n")
        self.assertIn(b"connection: close", old)
        head = self.server.raw(b"HEAD /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
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
                reply = self.server.raw(data, timeout=60, half_close=half_close)
                status = int(reply[9:12]) if reply.startswith(b"HTTP/1.1 ") else None
                if status not in statuses:
                    wrong.append((name, status, reply[:200]))
                elif status and status >= 400 and b'{"error":{"message":' not in reply:
                    wrong.append((name, "no error object", reply[:200]))
            return wrong

        self.assertEqual([w for part in in_threads(8, send) for w in part], [])
        self.assertTrue(wait_for(lambda: self.server.stats()["server"]["connections"] == 1), "connections left open")
        lines = [json.loads(line) for line in self.server.log().split("\n")[:-1] if line.startswith("{")]
        self.assertEqual({line["status"] for line in lines if line.get("status", 0) >= 500} - {501, 505}, set())
        self.assertEqual(self.good("GET", "/health")["status"], "ok")

    def test_slowloris_is_cut_off(self):
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=60) as s:
            s.sendall(b"GET /health HTTP/1.1\r\nx: ")

            def cut_off():  # one more byte of a head that never ends
                try:
                    s.sendall(b"a")
                except OSError:
                    return True
                return False

            self.assertTrue(wait_for(cut_off))
            self.assertEqual(harness.read_all(s), b"")
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

    def test_an_answer_may_not_end_by_itself(self):
        end = self.good("POST", "/tokenize", {"content": "<|im_end|>", "add_special": False})["tokens"]
        self.assertEqual(len(end), 1)
        likely = {"max_tokens": 6, "logit_bias": {str(end[0]): 100}}
        for ignore, finish, tokens in ((False, "stop", 1), (True, "length", 6)):
            answer = self.good("POST", "/v1/chat/completions", {"messages": MESSAGES, "ignore_eos": ignore, **likely})
            self.assertEqual((answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]), (finish, tokens))

    def test_client_gone_cancels(self):
        before = self.server.stats()["requests"]["cancelled"]
        for nth, body in enumerate((LONG, {**LONG, "stream": False}), start=1):
            s = socket.create_connection(("127.0.0.1", self.server.port))
            s.sendall(post("/v1/chat/completions", json.dumps(body)))
            if body["stream"]:
                self.assertIn(b"200 OK", s.recv(4096))
            self.assertTrue(wait_for(lambda: self.server.stats()["requests"]["running"] == 1))
            if body["stream"]:  # its head was sent before anything came; with the first token comes what the engine knows
                self.assertTrue(wait_for(lambda: self.server.stats()["timeline"][0]["state"] == "running"))
                newest = self.server.stats()["timeline"][0]
                self.assertGreater(newest["prompt_tokens"], 20)
                self.assertLessEqual(newest["queue_s"], newest["first_token_s"])
            s.close()
            self.assertTrue(wait_for(lambda: self.server.stats()["requests"]["cancelled"] == before + nth),
                            self.server.stats()["requests"])
            self.assertTrue(wait_for(lambda: self.server.stats()["requests"]["running"] == 0), "still running")
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


class Harmony(HarmonyServer):
    """gpt-oss's format with random weights: what a model does that follows nothing must still come out in shape."""

    SCHEMA = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
              "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"},
                             "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["a", "b"]}}}}
    TOOL = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {
        "type": "object", "additionalProperties": False, "required": ["city"],
        "properties": {"city": {"type": "string", "maxLength": 8}}}}}

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

    def test_named_allowed_and_custom_tools(self):
        other = {"type": "function", "function": {**self.TOOL["function"], "name": "other", "strict": False}}
        dial = {"type": "custom", "custom": {"name": "dial", "format": {
            "type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]{3}\n?"}}}}
        tools = [self.TOOL, other, dial]
        named = {"type": "function", "function": {"name": "other"}}
        choices = {"other": named, "dial": {"type": "custom", "custom": {"name": "dial"}}, "allowed": {
            "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}}
        called = dict.fromkeys(choices, 0)
        for name, choice in choices.items():
            for seed in range(8):
                finish, message = self.ask(seed, tools=tools, tool_choice=choice)
                if finish == "length":
                    continue
                (call,) = message["tool_calls"]
                called[name] += 1
                if name == "dial":
                    self.assertEqual((call["type"], call["custom"]["name"]), ("custom", "dial"))
                    self.assertRegex(call["custom"]["input"], r"\A[0-9]{3}\n?\Z")
                else:
                    self.assertEqual(call["function"]["name"], "other")
        self.assertGreater(min(called.values()), 3, called)

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
        done = subprocess.run([*alone, sys.executable, "-c", script, harness.__file__.rpartition("/")[0], shared.BINARY, self.model],
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    shared.BINARY = os.path.abspath(sys.argv[1])
    if not SMOLLM2.is_file():
        print(f"SKIPPED: the server's tests because {SMOLLM2.relative_to(harness.ROOT)} is not there; run: "
              "tools/fetch_model.py smollm2", file=sys.stderr)
        sys.exit(0)
    shared.NO_CLIENT = harness.package("openai")
    if shared.NO_CLIENT:
        print(f"SKIPPED: the tests with the official client because {shared.NO_CLIENT}", file=sys.stderr)
    shared.NO_VALIDATOR = harness.package("jsonschema")
    if shared.NO_VALIDATOR:
        print(f"SKIPPED: the comparison of answers with /openapi.json because {shared.NO_VALIDATOR}", file=sys.stderr)
    unittest.main(argv=sys.argv[1:], verbosity=2)

"""Anthropic's /v1/messages by its official packages: plain, events, tools, thinking, counting, errors.

They come from PyPI into build/python/anthropic and from npm into build/node.
"""

import json
import pathlib
import tempfile
import unittest

import harness
import shared
from harness import SMOLLM2, Server
from shared import MESSAGES, HarmonyServer, SharedServer, run_node_client

WEATHER = {"name": "get_weather", "description": "The weather of a city.", "strict": True, "input_schema": {
    "type": "object", "additionalProperties": False, "required": ["city"],
    "properties": {"city": {"type": "string", "maxLength": 20}}}}


def client_of(url, key="none"):
    import anthropic
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def raw_events(server, body):
    """[(event, data)] of a stream, as they came over the wire."""
    status, headers, text = server.request("POST", "/v1/messages", {**body, "stream": True})
    assert status == 200, text
    events = []
    for block in text.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            events.append((lines["event"], json.loads(lines["data"])))
    return events


@unittest.skipUnless(SMOLLM2.is_file(), "no model")
class AnthropicClient(SharedServer):
    @classmethod
    def setUpClass(cls):
        missing = harness.package("anthropic")
        if missing:
            raise unittest.SkipTest(missing)
        super().setUpClass()
        import anthropic
        cls.anthropic = anthropic
        cls.client = client_of(cls.server.url)

    @staticmethod
    def fields(**options):
        """With what the API still has and the package no longer does."""
        sampling = {"temperature": 0, **{k: options.pop(k) for k in ("temperature", "top_p", "top_k") if k in options}}
        return {"model": "smollm2", "max_tokens": 12, "messages": MESSAGES, "extra_body": sampling, **options}

    def create(self, **options):
        return self.client.messages.create(**self.fields(**options))

    def stream(self, **options):
        return self.client.messages.stream(**self.fields(**options))

    def chat(self, messages, **options):
        """The same by the other API: what the model is shown must not depend on who asks."""
        return self.good("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0, **options})

    def total(self, usage):
        return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens

    def test_plain(self):
        message = self.create(system="Be brief.")
        same = self.chat([{"role": "system", "content": "Be brief."}, *MESSAGES])
        self.assertEqual((message.type, message.role, message.model), ("message", "assistant", "smollm2"))
        self.assertEqual([b.type for b in message.content], ["text"])
        self.assertEqual(message.content[0].text, same["choices"][0]["message"]["content"])
        reason = {"stop": "end_turn", "length": "max_tokens"}[same["choices"][0]["finish_reason"]]
        self.assertEqual((message.stop_reason, message.stop_sequence), (reason, None))
        self.assertEqual(self.total(message.usage), same["usage"]["prompt_tokens"])
        self.assertEqual(message.usage.output_tokens, same["usage"]["completion_tokens"])
        self.assertTrue(message._request_id)
        # A prompt that was seen before is read from the cache, and said to be.
        long = [{"role": "user", "content": "word " * 200}]
        self.create(messages=long)
        again = self.create(messages=long).usage
        self.assertGreater(again.cache_read_input_tokens, 150)
        self.assertLess(again.input_tokens, 60)

    def test_models(self):
        listed = list(self.client.models.list())  # page by page
        self.assertIn("smollm2", [model.id for model in listed])
        for model in (*listed, self.client.models.retrieve("smollm2")):
            self.assertEqual((model.type, model.display_name), ("model", model.id))
            self.assertGreater(model.created_at.year, 2024)

    def test_blocks_and_history(self):
        message = self.create(
            system=[{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
                    {"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
            messages=[{"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
                      {"role": "assistant", "content": [{"type": "text", "text": "Three"}]},
                      {"role": "user", "content": [{"type": "document", "source": {
                          "type": "text", "media_type": "text/plain", "data": "Four"}}]},
                      {"role": "user", "content": "Five"}])
        same = self.chat([{"role": "system", "content": "Be brief.\n\nBe kind."}, {"role": "user", "content": "One\n\nTwo"},
                          {"role": "assistant", "content": "Three"}, {"role": "user", "content": "Four\n\nFive"}])
        self.assertEqual(self.total(message.usage), same["usage"]["prompt_tokens"])
        self.assertEqual(message.content[0].text, same["choices"][0]["message"]["content"])

    def test_stop_sequences_and_sampling(self):
        whole = self.create(max_tokens=40).content[0].text
        word = whole.split()[3]
        cut = self.create(max_tokens=40, stop_sequences=["\u0001never", word])
        self.assertEqual((cut.stop_reason, cut.stop_sequence), ("stop_sequence", word))
        self.assertEqual(cut.content[0].text, whole[: whole.index(word)])
        with self.stream(max_tokens=40, stop_sequences=[word]) as stream:
            final = stream.get_final_message()
        self.assertEqual((final.stop_reason, final.stop_sequence), ("stop_sequence", word))
        self.assertEqual(self.create(temperature=1.0, top_k=1).content[0].text, self.create().content[0].text)
        self.create(temperature=1.0, top_p=0.5, metadata={"user_id": "x"})

    def test_events(self):
        whole = self.create()
        with self.stream() as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(text, whole.content[0].text)
        self.assertEqual(final.content[0].text, text)
        self.assertEqual((final.stop_reason, final.usage.output_tokens), (whole.stop_reason, whole.usage.output_tokens))
        self.assertEqual(self.total(final.usage), self.total(whole.usage))
        events = raw_events(self.server, {"model": "smollm2", "max_tokens": 12, "messages": MESSAGES, "temperature": 0})
        for name, data in events:
            self.assertEqual(data["type"], name)
        names = [name for name, _ in events]
        deltas = len(names) - 6
        self.assertEqual(names, ["message_start", "content_block_start", "ping", *["content_block_delta"] * deltas,
                                 "content_block_stop", "message_delta", "message_stop"])
        start = events[0][1]["message"]
        self.assertEqual((start["content"], start["stop_reason"], start["role"]), ([], None, "assistant"))
        self.assertEqual(events[1][1], {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        self.assertEqual({(d["index"], d["delta"]["type"]) for n, d in events if n == "content_block_delta"}, {(0, "text_delta")})
        self.assertEqual(events[-2][1]["delta"], {"stop_reason": "max_tokens", "stop_sequence": None})
        self.assertEqual(events[-2][1]["usage"]["output_tokens"], 12)
        self.assertEqual(events[-1][1], {"type": "message_stop"})

    def test_tools(self):
        for choice in ({"type": "any", "disable_parallel_tool_use": True},
                       {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
            asked = {"max_tokens": 200, "tools": [WEATHER], "tool_choice": choice}
            message = self.create(**asked)
            self.assertEqual(message.stop_reason, "tool_use")
            call = message.content[-1]
            self.assertEqual((call.type, call.name, list(call.input)), ("tool_use", "get_weather", ["city"]))
            with self.stream(**asked) as stream:
                pieces = [e.partial_json for e in stream if e.type == "input_json"]
                final = stream.get_final_message()
            self.assertGreater(len(pieces), 1)
            self.assertEqual((final.stop_reason, final.content[-1].input), ("tool_use", call.input))
        # What the tool said goes back, and the conversation is the one of the other API.
        history = [*MESSAGES, {"role": "assistant", "content": message.content},
                   {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id,
                                                 "content": [{"type": "text", "text": "sunny"}]}]}]
        after = self.create(messages=history, tools=[WEATHER])
        function = {"type": "function", "function": {**{k: WEATHER[k] for k in ("name", "description", "strict")},
                                                     "parameters": WEATHER["input_schema"]}}
        same = self.chat([*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [{
            "id": call.id, "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps(call.input, separators=(",", ":"))}}]},
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"}], tools=[function])
        self.assertEqual(self.total(after.usage), same["usage"]["prompt_tokens"])
        refused = self.create(messages=history[:2] + [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": "no such city", "is_error": True}]}], tools=[WEATHER])
        self.assertGreater(self.total(refused.usage), 0)
        none = self.create(tools=[WEATHER], tool_choice={"type": "none"})
        self.assertEqual([b.type for b in none.content], ["text"])

    def test_structured_output(self):
        schema = {"type": "object", "additionalProperties": False, "required": ["age"],
                  "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}}}
        message = self.create(max_tokens=60, output_config={"format": {"type": "json_schema", "schema": schema}})
        self.assertIn(json.loads(message.content[0].text)["age"], range(121))

    def test_count_tokens(self):
        fields = {"system": "Be brief.", "messages": MESSAGES, "tools": [WEATHER]}
        counted = self.client.messages.count_tokens(model="smollm2", **fields)
        self.assertEqual(counted.input_tokens, self.total(self.create(**fields).usage))

    def test_errors(self):
        def error_of(kind, **options):
            with self.assertRaises(kind) as caught:
                self.create(**options)
            body = caught.exception.body
            self.assertEqual((body["type"], set(body["error"])), ("error", {"type", "message"}))
            self.assertTrue(caught.exception.request_id)
            return body["error"]["type"], body["error"]["message"]

        bad = self.anthropic.BadRequestError
        kind, message = error_of(self.anthropic.NotFoundError, model="claude-of-tomorrow")
        self.assertEqual(kind, "not_found_error")
        self.assertIn("--alias claude-of-tomorrow", message)
        kind, message = error_of(bad, messages=[{"role": "user", "content": "word " * 3000}])
        self.assertEqual(kind, "invalid_request_error")
        self.assertIn("prompt is too long", message)
        self.assertIn("maximum context length is 2048 tokens", message)
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        for options, word in (
                ({"messages": [{"role": "user", "content": [image]}]}, "images"),
                ({"messages": [*MESSAGES, {"role": "assistant", "content": "Re"}]}, "messages"),
                ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]}, "tool_use_id"),
                ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
                ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
                ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
                ({"tool_choice": {"type": "any"}}, "tool_choice"),
                ({"max_tokens": 0}, "max_tokens"),
                ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 1000}, "thinking.budget_tokens"),
                ({"messages": []}, "messages")):
            kind, message = error_of(bad, **options)
            self.assertEqual(kind, "invalid_request_error")
            self.assertIn(word, message)
        status, headers, body = self.server.request("POST", "/v1/messages", b"{", headers={"x-request-id": "mine-2"})
        self.assertEqual((status, headers["request-id"], json.loads(body)["type"]), (400, "mine-2", "error"))
        status, _, body = self.server.request("POST", "/v1/messages", {"model": "smollm2", "messages": MESSAGES})
        self.assertIn("max_tokens", json.loads(body)["error"]["message"])

    def test_keys(self):
        with tempfile.TemporaryDirectory() as folder:
            keys = pathlib.Path(folder) / "keys"
            keys.write_text("ada secret\n")
            with Server(shared.BINARY, SMOLLM2, "--ctx", 256, "--keys", keys, "--alias", "claude-of-tomorrow") as server:
                fields = {"model": "claude-of-tomorrow", "max_tokens": 2, "messages": MESSAGES}
                answer = client_of(server.url, "secret").messages.create(**fields)
                self.assertEqual(answer.model, "claude-of-tomorrow")
                with self.assertRaises(self.anthropic.AuthenticationError) as caught:
                    client_of(server.url, "wrong").messages.create(**fields)
                self.assertEqual(caught.exception.body["error"]["type"], "authentication_error")
                bearer = self.anthropic.Anthropic(base_url=server.url, auth_token="secret", api_key=None, max_retries=0)
                self.assertTrue(bearer.messages.create(**fields).content)


class AnthropicNode(SharedServer):
    def test_official_client(self):
        run_node_client(self, "@anthropic-ai/sdk", "node_messages.mjs", 5)


class AnthropicThinking(HarmonyServer):
    """gpt-oss's format with random weights: thoughts, calls and texts in any order."""

    @classmethod
    def setUpClass(cls):
        missing = harness.package("anthropic")
        if missing:
            raise unittest.SkipTest(missing)
        super().setUpClass()
        cls.client = client_of(cls.server.url)

    def fields(self, seed, **options):
        return {"model": "tiny", "max_tokens": 1100, "messages": MESSAGES, "extra_body": {"seed": seed, "logit_bias": self.end},
                **options}

    def test_thinking_is_a_block_for_those_who_ask(self):
        # Held to a schema they think first, most of them.
        schema = {"type": "object", "additionalProperties": False, "required": ["age"], "properties": {"age": {"enum": [1, 2]}}}
        held = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
        thought = 0
        for seed in range(12):
            asked = self.fields(seed, output_config=held, thinking={"type": "enabled", "budget_tokens": 1024})
            whole = self.client.messages.create(**asked)
            with self.client.messages.stream(**asked) as stream:
                final = stream.get_final_message()

            def shape(message):
                return [(b.type, getattr(b, "thinking", getattr(b, "text", None))) for b in message.content]

            self.assertEqual(shape(final), shape(whole))
            self.assertEqual(final.usage.output_tokens, whole.usage.output_tokens)
            for block in (*whole.content, *final.content):
                self.assertNotEqual(block.type == "thinking" and block.signature, "")
            thought += any(b.type == "thinking" for b in whole.content)
            without = self.client.messages.create(**self.fields(seed, output_config=held))
            self.assertEqual([b.text for b in without.content], [b.text for b in whole.content if b.type == "text"])
            omitted = self.client.messages.create(**{**asked, "thinking": {**asked["thinking"], "display": "omitted"}})
            self.assertEqual([b.type for b in omitted.content], [b.type for b in whole.content])
            self.assertEqual({b.thinking for b in omitted.content if b.type == "thinking"} - {""}, set())
        self.assertGreater(thought, 2)

    def test_budgets_become_efforts(self):
        def count(**options):
            return self.client.messages.count_tokens(model="tiny", messages=MESSAGES, **options).input_tokens

        def rendered(effort):
            fields = {"messages": MESSAGES, "reasoning_effort": effort}
            return len(self.server.json("POST", "/apply-template", fields)[1]["tokens"])

        by_effort = {effort: rendered(effort) for effort in ("low", "medium", "high")}
        for options, effort in (({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
                                ({"thinking": {"type": "enabled", "budget_tokens": 8000}}, "medium"),
                                ({"thinking": {"type": "enabled", "budget_tokens": 32000}}, "high"),
                                ({"thinking": {"type": "disabled"}}, "low"),
                                ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "high")):
            self.assertEqual(count(**options), by_effort[effort], options)

    def test_thoughts_and_calls_go_back(self):
        thinking = {"type": "enabled", "budget_tokens": 1024}
        for seed in range(12):
            message = self.client.messages.create(**self.fields(seed, thinking=thinking, tools=[WEATHER],
                                                                tool_choice={"type": "any"}))
            if message.stop_reason == "tool_use":
                break
        self.assertEqual(message.stop_reason, "tool_use")
        calls = [b for b in message.content if b.type == "tool_use"]
        for call in calls:
            self.assertEqual(list(call.input), ["city"])
        history = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [
            *({"type": "tool_result", "tool_use_id": c.id, "content": "rain"} for c in calls), {"type": "text", "text": "So?"}]}]
        after = self.client.messages.create(**self.fields(1, messages=history, tools=[WEATHER], max_tokens=20))
        self.assertGreater(after.usage.input_tokens + after.usage.cache_read_input_tokens, message.usage.input_tokens)

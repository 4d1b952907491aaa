"""Errors as OpenAI's clients look for them: codes, types, the words about the context; limits that are the same everywhere."""

import json
import pathlib
import tempfile

import shared
from harness import SMOLLM2, Server
from shared import MESSAGES, OpenAIClient

LONG_TEXT = "word " * 3000  # more than the context of SharedServer


class ErrorCodes(OpenAIClient):
    def test_context_length_exceeded_wherever_a_prompt_is_taken(self):
        user = [{"role": "user", "content": LONG_TEXT}]
        for field, call in (
                ("messages", lambda **o: self.client.chat.completions.create(model="smollm2", messages=user, **o)),
                ("input", lambda **o: self.client.responses.create(model="smollm2", input=LONG_TEXT, **o)),
                ("prompt", lambda **o: self.client.completions.create(model="smollm2", prompt=LONG_TEXT, **o))):
            for options in ({}, {"stream": True}):
                with self.assertRaises(self.openai.BadRequestError) as caught:
                    call(**options)
                error = caught.exception
                self.assertEqual((error.code, error.type, error.param),
                                 ("context_length_exceeded", "invalid_request_error", field))
                # What litellm looks for in lower case, and langchain in the message.
                self.assertIn("this model's maximum context length is 2048 tokens", str(error).lower())
                self.assertIn("prompt is too long", error.message)
        with self.assertRaises(self.openai.BadRequestError) as caught:
            self.client.embeddings.create(model="smollm2", input=["short", LONG_TEXT])
        self.assertEqual((caught.exception.code, caught.exception.param), ("context_length_exceeded", "input[1]"))
        with self.assertRaises(self.openai.BadRequestError) as caught:
            self.client.completions.create(model="smollm2", prompt=["short", [1] * 3000])
        self.assertEqual((caught.exception.code, caught.exception.param), ("context_length_exceeded", "prompt[1]"))
        self.assertIn("3000 tokens > 2048", caught.exception.message)  # counted, as far as it is worth it

    def test_a_prompt_that_is_far_too_long_is_not_counted(self):
        # Arguments go into a prompt as a template writes them, so that their bytes alone tell nothing.
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "mill " * 60_000})}}
        for path, body, field in (
                ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]}, "messages"),
                ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", **call["function"]}]}, "input")):
            status, answer = self.server.json("POST", path, body)
            error = answer["error"]
            self.assertEqual((status, error["code"], error["param"]), (400, "context_length_exceeded", field))
            self.assertRegex(error["message"], r"4\d\d\d tokens > 2048 maximum in '\w+' \(at least\)")

    def test_what_the_engine_refuses_names_its_field(self):
        self.assertEqual(self.code_of("/v1/chat/completions", {"messages": MESSAGES, "attention": "sparse"}),
                         ("unsupported_value", "attention"))

    def test_what_is_counted_has_an_end(self):
        text = "mill " * 530_000  # 2^19 tokens are counted
        for path, body, field in (
                ("/tokenize", {"content": text}, "content"), ("/tokenize", {"prompt": text}, "prompt"),
                ("/v1/responses/input_tokens", {"input": text}, "input")):
            self.assertEqual(self.code_of(path, body), ("invalid_value", field))
        status, answer = self.server.json("POST", "/v1/messages/count_tokens", {
            "model": "smollm2", "messages": [{"role": "user", "content": text}]})
        self.assertEqual((status, answer["error"]["type"]), (400, "invalid_request_error"))
        self.assertIn("'messages': is more than 524288 tokens", answer["error"]["message"])

    def code_of(self, path, body, status=400):
        code, parsed = self.server.json("POST", path, body)
        self.assertEqual(code, status, parsed)
        self.assertEqual(parsed["error"]["type"], "invalid_request_error")
        return parsed["error"]["code"], parsed["error"]["param"]

    def test_codes_name_what_is_wrong(self):
        chat, good = "/v1/chat/completions", {"messages": MESSAGES}
        for body, expected in (
                ({}, ("missing_required_parameter", "messages")),
                ({"messages": []}, ("empty_array", "messages")),
                ({"messages": [{"content": "x"}]}, ("missing_required_parameter", "messages[0].role")),
                ({**good, "temperature": "hot"}, ("invalid_type", "temperature")),
                ({**good, "temperature": 3}, ("decimal_above_max_value", "temperature")),
                ({**good, "temperature": -1}, ("decimal_below_min_value", "temperature")),
                ({**good, "top_logprobs": 99, "logprobs": True}, ("integer_above_max_value", "top_logprobs")),
                ({**good, "max_tokens": 0}, ("integer_below_min_value", "max_tokens")),
                ({**good, "tool_choice": "perhaps"}, ("invalid_value", "tool_choice")),
                ({**good, "chat_template_kwargs": {str(i): i for i in range(257)}}, ("invalid_value", "chat_template_kwargs")),
                ({**good, "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
                    "type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}}}]}, ("invalid_value", "tools")),
                ({**good, "stop": ["x"] * 17}, ("array_above_max_length", "stop")),
                ({**good, "stop": "x" * 1001}, ("string_above_max_length", "stop")),
                ({**good, "response_format": {"type": "json_schema"}},
                 ("missing_required_parameter", "response_format.schema"))):
            self.assertEqual(self.code_of(chat, body), expected)
        self.assertEqual(self.code_of("/v1/responses", {"input": "x", "n": 2}), ("unsupported_parameter", "n"))
        self.assertEqual(self.code_of("/v1/completions", {"prompt": "x", "suffix": "y"}), ("unsupported_parameter", "suffix"))
        self.assertEqual(self.code_of(chat, {**good, "model": "gpt-99"}, 404), ("model_not_found", "model"))
        self.assertEqual(self.code_of("/v1/nowhere", {}, 404), ("not_found", None))

    def test_samples_have_one_limit(self):
        # 16 run at once here.
        for path, body in (("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
                           ("/v1/completions", {"prompt": "x", "max_tokens": 1})):
            self.assertEqual(len(self.good("POST", path, {**body, "n": 16})["choices"]), 16)
            self.assertEqual(self.code_of(path, {**body, "n": 17}), ("integer_above_max_value", "n"))
            self.assertEqual(self.code_of(path, {**body, "n": 0}), ("integer_below_min_value", "n"))
        self.assertEqual(self.code_of("/v1/completions", {"prompt": "x", "n": 16, "best_of": 17}),
                         ("integer_above_max_value", "best_of"))

    def test_keys_and_rate(self):
        with tempfile.TemporaryDirectory() as folder:
            keys = pathlib.Path(folder) / "keys"
            keys.write_text("ada secret\n")
            with Server(shared.BINARY, SMOLLM2, "--ctx", 256, "--keys", keys, "--rate", 2) as server:
                def client(key):
                    return self.openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)

                with self.assertRaises(self.openai.AuthenticationError) as caught:
                    client("wrong").models.list()
                self.assertEqual((caught.exception.code, caught.exception.type), ("invalid_api_key", "invalid_request_error"))
                for _ in range(2):
                    client("secret").completions.create(model=None, prompt="x", max_tokens=1)
                with self.assertRaises(self.openai.RateLimitError) as caught:
                    client("secret").completions.create(model=None, prompt="x", max_tokens=1)
                self.assertEqual(caught.exception.code, "rate_limit_exceeded")
                self.assertGreater(int(caught.exception.response.headers["retry-after"]), 0)

"""What client packages send, sent again without them: tests/golden/client_requests.json was kept by tests/clients_test.py
--record, which runs the packages themselves. And the calls of Open WebUI, which is a server of its own.

A small model answers nonsense; what is checked is the form: that an answer comes and ends, that calls have names that were
offered and arguments in the shape of their schemas, that structured answers follow theirs."""

import json

import shared
from harness import ROOT, in_threads
from shared import SharedServer

REQUESTS = ROOT / "tests" / "golden" / "client_requests.json"
MOST_TOKENS = 80  # of an answer that may be cut short


def validated(schema, text):
    import jsonschema
    value = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


def schema_of(body):
    """The schema that the text of the answer follows, or None."""
    form = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    return (form.get("json_schema") or form).get("schema") if form.get("type") == "json_schema" else None


def tools_of(body):
    """Names and schemas of the functions offered."""
    tools = [tool.get("function", tool) for tool in body.get("tools") or [] if tool.get("type") == "function"]
    return {tool["name"]: tool.get("parameters") or {} for tool in tools}


class Recorded(SharedServer):
    def stream(self, path, body):
        """The events of an answer, as JSON."""
        status, headers, text = self.server.request("POST", path, body, timeout=900)
        self.assertEqual((status, headers["content-type"]), (200, "text/event-stream; charset=utf-8"), text)
        lines = [line[6:] for line in text.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def check_chat(self, body):
        """Finish, text and calls of a chat's answer, streamed or not."""
        if body.get("stream"):
            finish, text, calls = None, "", {}
            for choice in (c for event in self.stream("/v1/chat/completions", body) for c in event["choices"]):
                finish = choice["finish_reason"] or finish
                text += choice["delta"].get("content") or ""
                for piece in choice["delta"].get("tool_calls") or []:
                    call = calls.setdefault(piece["index"], ["", ""])
                    call[0] += piece["function"].get("name") or ""
                    call[1] += piece["function"].get("arguments") or ""
            return finish, text, [tuple(calls[i]) for i in sorted(calls)]
        choice = self.good("POST", "/v1/chat/completions", body, timeout=900)["choices"][0]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"].get("tool_calls") or []]
        return choice["finish_reason"], choice["message"]["content"] or "", calls

    def check_response(self, body):
        if body.get("stream"):
            response = self.stream("/v1/responses", body)[-1]["response"]
        else:
            response = self.good("POST", "/v1/responses", body, timeout=900)
        text = "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])
        calls = [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]
        calls += [(item["name"], None) for item in response["output"] if item["type"] == "custom_tool_call"]
        return {"completed": "stop", "incomplete": "length"}[response["status"]], text, calls

    def check(self, body, path):
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if name in body:
                limit = name
        body = {**body, "seed": 1, limit: min(body.get(limit) or MOST_TOKENS, MOST_TOKENS)}
        body.pop("previous_response_id", None)  # of a server that is gone
        finish, text, calls = (self.check_response if path == "/v1/responses" else self.check_chat)(body)
        self.assertIn(finish, ("stop", "length", "tool_calls"))
        tools, choice = tools_of(body), body.get("tool_choice")
        named = choice.get("name") or (choice.get("function") or {}).get("name") if isinstance(choice, dict) else None
        self.assertLessEqual({name for name, _ in calls}, {named} if named else set(tools))
        if finish == "length":
            return
        self.assertTrue(text or calls or not choice, "nothing was answered")
        if named or choice == "required":
            self.assertTrue(len(calls) == 1 if named else calls, calls)
            for name, arguments in calls:
                if arguments is not None:  # a custom tool's input is text
                    validated(tools[name], arguments)
        if schema_of(body) and not calls:
            validated(schema_of(body), text)

    def test_what_packages_send(self):
        if shared.NO_VALIDATOR:
            self.skipTest(shared.NO_VALIDATOR)
        requests = json.loads(REQUESTS.read_text(encoding="utf-8"))

        def check(i):
            kept = requests[i]
            try:
                if kept["path"] in ("/v1/chat/completions", "/v1/responses"):
                    self.check(kept["body"], kept["path"])
                else:
                    self.good(kept["method"], kept["path"], kept["body"] or None)
            except Exception as error:  # noqa: BLE001 - told below, with the request
                return f"{kept['client']}: {json.dumps(kept['body'])[:500]}: {error}"

        faults = [fault for fault in in_threads(len(requests), check) if fault]
        self.assertEqual(faults, [])
        self.assertEqual(self.server.stats()["server"]["responses"]["5xx"], 0)

    def test_open_webui(self):
        """Its connection's models, a chat with all the settings of its panel, and the tasks behind it: title, tags."""
        headers = {"authorization": "Bearer none", "x-openwebui-user-name": "Ada", "x-openwebui-user-id": "1",
                   "x-openwebui-user-email": "ada@example.com", "x-openwebui-user-role": "admin", "x-openwebui-chat-id": "2"}
        models = self.good("GET", "/v1/models", headers=headers)["data"]
        model = models[0]["id"]
        chat = {"stream": True, "model": model, "messages": [{"role": "system", "content": "Be brief."}, *shared.MESSAGES],
                "stream_options": {"include_usage": True}, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 42,
                "stop": ["###"], "frequency_penalty": 0.1, "presence_penalty": 0.1, "repeat_penalty": 1.1, "max_tokens": 16,
                "logit_bias": {}, "reasoning_effort": "medium", "user": {"name": "Ada", "id": "1", "email": "ada@example.com"}}
        events = self.stream("/v1/chat/completions", chat)
        self.assertEqual(events[0]["choices"][0]["delta"]["role"], "assistant")
        self.assertGreater(events[-1]["usage"]["completion_tokens"], 0)
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
        self.assertTrue(text)
        for task in ("### Task:\nGenerate a concise title as JSON: { \"title\": \"...\" }", "### Task:\nGenerate 1-3 tags as JSON."):
            answer = self.good("POST", "/v1/chat/completions", {"model": model, "stream": False, "max_completion_tokens": 24,
                                                                "messages": [{"role": "user", "content": task}]}, headers=headers)
            self.assertTrue(answer["choices"][0]["message"]["content"])
        self.assertEqual(len(self.good("POST", "/v1/embeddings", {"model": model, "input": ["a page", "another"]})["data"]), 2)

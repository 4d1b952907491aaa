"""The server by the clients people use: the official OpenAI packages for Python and Node."""

import array
import json

from harness import ROOT
from shared import MESSAGES, OpenAIClient, SharedServer, dot, run_node_client, wait_for


class OfficialClient(OpenAIClient):
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
        two = {"n": 2, "seed": 5, "max_tokens": 200, "temperature": 1.5, "extra_body": {"ignore_eos": True}}
        texts = [c.message.content for c in self.chat(**two).choices]
        word = next(w for w in texts[0].split()[1:] if w not in texts[1])
        some = self.chat(**two, stop=[word])
        self.assertEqual([c.finish_reason for c in some.choices], ["stop", "length"])
        self.assertLess(some.usage.completion_tokens, 2 * 200)  # the engine hears of it some tokens later
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
                if event.type == "response.output_item.done":
                    self.assertEqual(event.item.status, "incomplete")  # it was cut, and the event says so
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
        self.assertNotIn("completed", [item.status for item in self.client.responses.retrieve(running.id).output])
        self.assertTrue(wait_for(lambda: self.server.stats()["requests"]["running"] == 0))


class NodeClient(SharedServer):
    def test_official_client(self):
        run_node_client(self, "openai", "node_client.mjs", 15)

"""What the responses API keeps: conversations, events that are read again, prompts that are cut to fit."""

import shared
from harness import SMOLLM2, Server
from shared import OpenAIClient


class StoredResponses(OpenAIClient):
    def create(self, **options):
        return self.client.responses.create(model="smollm2", **{"temperature": 0, **options})

    def test_input_tokens(self):
        fields = {"input": "Count to five.", "instructions": "Be brief."}
        counted = self.client.responses.input_tokens.count(model="smollm2", **fields)
        self.assertEqual(counted.object, "response.input_tokens")
        done = self.create(max_output_tokens=1, **fields)
        self.assertEqual(counted.input_tokens, done.usage.input_tokens)
        more = self.client.responses.input_tokens.count(model="smollm2", previous_response_id=done.id, input="And?")
        again = self.create(previous_response_id=done.id, input="And?", max_output_tokens=1)
        self.assertEqual(more.input_tokens, again.usage.input_tokens)

    # ---------------------------------------------------------------- truncation

    def test_truncation(self):
        turns = []
        for i in range(20):
            turns += [{"role": "user", "content": f"Question {i}: " + "why " * 20},
                      {"role": "assistant", "content": f"Answer {i}: " + "so " * 20}]
        question = {"role": "user", "content": "What is the capital of Norway?"}
        with Server(shared.BINARY, SMOLLM2, "--ctx", 512, "--model-id", "smollm2") as server:
            client = self.openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

            def create(**options):
                return client.responses.create(model="smollm2", temperature=0, max_output_tokens=4, **options)

            def fields(messages):
                return {"input": [*messages, question], "instructions": "You are Olga."}

            with self.assertRaises(self.openai.BadRequestError) as caught:
                create(**fields(turns))
            self.assertEqual((caught.exception.code, caught.exception.param), ("context_length_exceeded", "input"))
            done = create(**fields(turns), truncation="auto")
            self.assertEqual(done.truncation, "auto")
            # As much as fits is kept, and what is kept is the newest: the same as the request that has only that.
            kept = max(k for k in range(20) if client.responses.input_tokens.count(
                model="smollm2", **fields(turns[40 - 2 * k:])).input_tokens <= 512 - 4)
            self.assertIn(kept, range(3, 19))
            shorter = create(**fields(turns[40 - 2 * kept:]))
            self.assertEqual((done.usage.input_tokens, done.output_text), (shorter.usage.input_tokens, shorter.output_text))
            # The question itself is never cut.
            with self.assertRaises(self.openai.BadRequestError) as caught:
                create(input=[*turns, {"role": "user", "content": "word " * 600}], truncation="auto")
            self.assertEqual(caught.exception.code, "context_length_exceeded")
            with self.assertRaises(self.openai.BadRequestError):
                create(input="x", truncation="perhaps")
            # Of one turn with many calls the oldest go, each with its result.
            items = [{"role": "user", "content": "Look up everything."}]
            for i in range(30):
                items += [{"type": "function_call", "call_id": f"c{i}", "name": "look", "arguments": "{}"},
                          {"type": "function_call_output", "call_id": f"c{i}", "output": f"result {i} " * 10}]
            self.assertIn(create(input=items, truncation="auto").usage.input_tokens, range(400, 509))

    # ---------------------------------------------------------------- events again

    def test_events_of_a_stored_response(self):
        sent = list(self.create(input="Count to five.", max_output_tokens=8, stream=True))
        self.assertEqual([e.sequence_number for e in sent], list(range(len(sent))))
        response = sent[-1].response
        again = list(self.client.responses.retrieve(response.id, stream=True))
        self.assertEqual([e.to_dict() for e in again], [e.to_dict() for e in sent])
        rest = list(self.client.responses.retrieve(response.id, stream=True, starting_after=5))
        self.assertEqual([e.to_dict() for e in rest], [e.to_dict() for e in sent[6:]])
        self.assertEqual(list(self.client.responses.retrieve(response.id, stream=True, starting_after=len(sent))), [])
        status, parsed = self.server.json("GET", f"/v1/responses/{response.id}?stream=true&starting_after=x")
        self.assertEqual((status, parsed["error"]["param"]), (400, "starting_after"))

    def test_events_of_a_response_made_without_any(self):
        done = self.create(input="Count to five.", max_output_tokens=8)
        events = list(self.client.responses.retrieve(done.id, stream=True))
        self.assertEqual([e.sequence_number for e in events], list(range(len(events))))
        self.assertEqual([e.type for e in events], [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.incomplete"])
        self.assertEqual(events[4].delta, done.output_text)
        self.assertEqual(events[-1].response.to_dict(), done.to_dict())
        tool = {"type": "function", "name": "look", "strict": True, "parameters": {
            "type": "object", "additionalProperties": False, "required": ["n"], "properties": {"n": {"enum": [1, 2]}}}}
        call = self.create(input="Look.", tools=[tool], tool_choice="required", parallel_tool_calls=False)
        deltas = [e.delta for e in self.client.responses.retrieve(call.id, stream=True)
                  if e.type == "response.function_call_arguments.delta"]
        self.assertEqual("".join(deltas), next(i for i in call.output if i.type == "function_call").arguments)

    def test_a_background_response_is_followed_and_survives_its_client(self):
        stream = self.create(input="Tell a story.", background=True, stream=True, max_output_tokens=60,
                             extra_body={"ignore_eos": True})
        seen = []
        for event in stream:
            seen.append(event)
            if len(seen) == 10:
                break
        stream.close()  # the client has gone, the response goes on
        response = seen[0].response
        self.assertEqual((response.status, response.background), ("in_progress", True))
        rest = list(self.client.responses.retrieve(response.id, stream=True, starting_after=seen[-1].sequence_number))
        self.assertEqual([e.sequence_number for e in seen + rest], list(range(len(seen) + len(rest))))
        self.assertEqual(rest[-1].type, "response.incomplete")
        text = "".join(e.delta for e in seen + rest if e.type == "response.output_text.delta")
        self.assertEqual(text, self.client.responses.retrieve(response.id).output_text)
        self.assertEqual(rest[-1].response.usage.output_tokens, 60)

    def test_followers_hear_of_a_cancel(self):
        running = self.create(input="Tell a story.", background=True, extra_body={"ignore_eos": True})
        follower = self.client.responses.retrieve(running.id, stream=True)
        first = next(iter(follower))
        self.assertEqual(first.type, "response.created")
        self.client.responses.cancel(running.id)
        last = list(follower)[-1]
        self.assertEqual((last.type, last.response.status), ("response.failed", "cancelled"))

    # ---------------------------------------------------------------- conversations

    def test_conversations(self):
        made = self.client.conversations.create(metadata={"topic": "demo"}, items=[
            {"type": "message", "role": "user", "content": "My name is Ada."}])
        self.assertTrue(made.id.startswith("conv_"))
        self.assertEqual(self.client.conversations.retrieve(made.id).metadata, {"topic": "demo"})
        self.assertEqual(self.client.conversations.update(made.id, metadata={"topic": "new"}).metadata, {"topic": "new"})
        added = self.client.conversations.items.create(made.id, items=[
            {"type": "message", "role": "assistant", "content": "Hello, Ada."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And hello again."}]}])
        self.assertEqual([i.role for i in added.data], ["assistant", "user"])
        listed = list(self.client.conversations.items.list(made.id, order="asc", limit=2))  # the client asks for more pages
        self.assertEqual([i.content[0].text for i in listed], ["My name is Ada.", "Hello, Ada.", "And hello again."])
        self.assertEqual([i.id for i in self.client.conversations.items.list(made.id)], [i.id for i in reversed(listed)])
        one = self.client.conversations.items.retrieve(listed[1].id, conversation_id=made.id)
        self.assertEqual((one.role, one.content[0].text), ("assistant", "Hello, Ada."))
        self.client.conversations.items.delete(listed[2].id, conversation_id=made.id)
        with self.assertRaises(self.openai.NotFoundError):
            self.client.conversations.items.retrieve(listed[2].id, conversation_id=made.id)
        self.assertTrue(self.client.conversations.delete(made.id).deleted)
        for call in (self.client.conversations.retrieve, self.client.conversations.items.list):
            with self.assertRaises(self.openai.NotFoundError) as caught:
                call(made.id)
            self.assertEqual(caught.exception.code, "conversation_not_found")

    def test_responses_in_a_conversation(self):
        conversation = self.client.conversations.create()
        first = self.create(input="My name is Ada.", conversation=conversation.id, max_output_tokens=8)
        self.assertEqual(first.conversation.id, conversation.id)
        second = self.create(input="What is my name?", conversation={"id": conversation.id}, max_output_tokens=8)
        items = list(self.client.conversations.items.list(conversation.id, order="asc"))
        self.assertEqual([i.role for i in items], ["user", "assistant", "user", "assistant"])
        self.assertEqual([i.content[0].text for i in items],
                         ["My name is Ada.", first.output_text, "What is my name?", second.output_text])
        # The same prompt as by the other way to go on.
        other = self.create(input="What is my name?", previous_response_id=first.id, max_output_tokens=8)
        self.assertEqual((other.usage.input_tokens, other.output_text), (second.usage.input_tokens, second.output_text))
        with self.assertRaises(self.openai.BadRequestError):
            self.create(input="x", conversation=conversation.id, previous_response_id=first.id)
        with self.assertRaises(self.openai.NotFoundError):
            self.create(input="x", conversation="conv_none")

    def test_refusals_of_conversations(self):
        self.refused("/v1/conversations", {"metadata": {"a": 1}}, 400, "metadata.a")
        self.refused("/v1/conversations", {"metadata": {"a": "x" * 513}}, 400, "metadata.a")
        self.refused("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": "x"}] * 21}, 400, "items")
        self.refused("/v1/conversations", {"items": [{"type": "image"}]}, 400, "items[0].type")
        made = self.good("POST", "/v1/conversations", {})
        self.refused(f"/v1/conversations/{made['id']}/items", {}, 400, "items")
        big = {"items": [{"type": "message", "role": "user", "content": "x" * (6 << 20)}]}
        for _ in range(2):
            self.good("POST", f"/v1/conversations/{made['id']}/items", big)
        status, parsed = self.server.json("POST", f"/v1/conversations/{made['id']}/items", big)
        self.assertEqual((status, parsed["error"]["code"]), (400, "conversation_too_large"))

    def test_the_oldest_conversations_are_forgotten(self):
        with Server(shared.BINARY, SMOLLM2, "--ctx", 256, "--store", 3) as server:
            made = [server.json("POST", "/v1/conversations", {})[1]["id"] for _ in range(3)]
            server.json("POST", f"/v1/conversations/{made[0]}", {"metadata": {"used": "again"}})
            server.json("POST", "/v1/conversations", {})
            self.assertEqual([server.json("GET", f"/v1/conversations/{i}")[0] for i in made], [200, 404, 200])

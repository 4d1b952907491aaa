"""Tools as clients expect them: one call where one is named, some of those offered, custom ones, only the properties named;
and answers under schemas without bounds, which end. Over both APIs, with the official client, whole and streamed."""

import json
import unittest

import shared
from harness import SMOLLM2, Server
from shared import MESSAGES, OpenAIClient


def function(name, strict=None, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": f"Calls {name}.", "parameters": parameters, **({} if strict is None else {"strict": strict})}


CITY, NIGHTS = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 1, "maximum": 9}
FUNCTIONS = [function("get_weather", city=CITY), function("book_hotel", nights=NIGHTS), function("get_time", city=CITY)]
DIAL_IN_LARK = """start: "+" DIGIT~2 " " DIGIT~3..5 | none\nnone: "\\"none\\"\\n"\n%import common.DIGIT\n"""
DIAL = {"name": "dial", "description": "Dials a number.", "format": {
    "type": "grammar", "grammar": {"syntax": "regex", "definition": "\\+[0-9]{2} [0-9]{3,5}|\"none\"\\n"}}}
NOTE = {"name": "note", "description": "Notes a text."}
NUMBER = r"\A(\+[0-9]{2} [0-9]{3,5}|\"none\"\n)\Z"


def flat_custom(tool):
    out = {"type": "custom", **tool}
    if "format" in tool:
        out["format"] = {"type": "grammar", **tool["format"]["grammar"]}
    return out


class ToolCalls(OpenAIClient):
    def chat(self, tools, choice, seed=0, **options):
        return self.client.chat.completions.create(model="smollm2", **{
            "messages": MESSAGES, "tools": tools, "tool_choice": choice, "seed": seed, "max_tokens": 400, **options})

    def respond(self, tools, choice, **options):
        return self.client.responses.create(model="smollm2", **{"input": "Name a colour.", "tools": tools, "tool_choice": choice,
                                                                "max_output_tokens": 400, **options})

    def test_a_named_tool_is_called_once(self):
        nested = [{"type": "function", "function": f} for f in FUNCTIONS]
        flat = [{"type": "function", **f} for f in FUNCTIONS]
        for seed in range(2):
            done = self.chat(nested, {"type": "function", "function": {"name": "book_hotel"}}, seed).choices[0]
            self.assertEqual([call.function.name for call in done.message.tool_calls], ["book_hotel"])
            self.assertEqual(list(json.loads(done.message.tool_calls[0].function.arguments)), ["nights"])
            self.assertEqual(done.finish_reason, "tool_calls")
        other = {"messages": MESSAGES, "tools": nested, "tool_choice": {"type": "custom", "custom": {"name": "book_hotel"}}}
        self.refused("/v1/chat/completions", other, 400, "tool_choice")
        response = self.respond(flat, {"type": "function", "name": "book_hotel"})
        self.assertEqual([item.name for item in response.output], ["book_hotel"])

    def test_only_allowed_tools_are_called(self):
        nested = [{"type": "function", "function": f} for f in FUNCTIONS]
        flat = [{"type": "function", **f} for f in FUNCTIONS]
        names = ["get_time", "book_hotel"]
        for mode in ("auto", "required"):
            allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]}
            for seed in range(2):
                done = self.chat(nested, {"type": "allowed_tools", "allowed_tools": allowed}, seed, max_tokens=60)
                called = [call.function.name for call in done.choices[0].message.tool_calls or []]
                self.assertTrue(set(called) <= set(names) and (called or mode == "auto"), called)
            allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
            response = self.respond(flat, allowed, max_output_tokens=60)
            self.assertEqual(response.tool_choice.mode, mode)
            called = [item.name for item in response.output if item.type == "function_call"]
            self.assertTrue(set(called) <= set(names) and (called or mode == "auto"), called)
        # The model is told of all of them: the prompt is the same, and stays in the cache.
        all_of_them = self.chat(nested, "auto", max_tokens=1).usage.prompt_tokens
        some = self.chat(nested, {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}}, max_tokens=1)
        self.assertEqual(some.usage.prompt_tokens, all_of_them)
        body = {"messages": MESSAGES, "tools": nested}
        for bad, param in (({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
                {"type": "function", "function": {"name": "other"}}]}}, "tool_choice.allowed_tools.tools[0]"),
                ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.allowed_tools.tools"),
                ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tool_choice.allowed_tools.mode")):
            self.refused("/v1/chat/completions", {**body, "tool_choice": bad}, 400, param)

    def test_custom_tools_in_chats(self):
        tools = [{"type": "custom", "custom": DIAL}, {"type": "custom", "custom": NOTE}, {"type": "function", "function": FUNCTIONS[0]}]
        for seed in range(2):
            done = self.chat(tools, {"type": "custom", "custom": {"name": "dial"}}, seed).choices[0]
            (call,) = done.message.tool_calls
            self.assertEqual((call.type, call.custom.name, done.finish_reason), ("custom", "dial", "tool_calls"))
            self.assertRegex(call.custom.input, NUMBER)
            lark = {**DIAL, "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": DIAL_IN_LARK}}}
            (other,) = self.chat([{"type": "custom", "custom": lark}], "required", seed).choices[0].message.tool_calls[:1]
            self.assertRegex(other.custom.input, NUMBER)
        chunks, name, text = self.chat(tools, {"type": "custom", "custom": {"name": "dial"}}, seed, stream=True), "", ""
        for chunk in chunks:
            for piece in chunk.choices[0].delta.tool_calls or []:
                self.assertEqual((piece.index, piece.function), (0, None))
                name += piece.custom.get("name", "")
                text += piece.custom["input"]
        self.assertEqual((name, text), ("dial", call.custom.input))
        free = self.chat(tools, {"type": "custom", "custom": {"name": "note"}}).choices[0].message.tool_calls[0]
        self.assertEqual(free.custom.name, "note")
        history = [*MESSAGES, done.message.model_dump(exclude_none=True),
                   {"role": "tool", "tool_call_id": call.id, "content": "nobody answered"}]
        rendered = self.good("POST", "/apply-template", {"messages": history, "tools": tools})["prompt"]
        self.assertIn(json.dumps(call.custom.input), rendered)
        self.assertIn("nobody answered", rendered)
        after = self.chat(tools, "auto", messages=history, max_tokens=5)
        self.assertGreater(after.usage.prompt_tokens, 100)

    def test_custom_tools_in_responses(self):
        tools = [flat_custom(DIAL), flat_custom(NOTE)]
        choice = {"type": "custom", "name": "dial"}
        response = self.respond(tools, choice, temperature=0)
        (item,) = response.output
        self.assertEqual((item.type, item.name, item.status), ("custom_tool_call", "dial", "completed"))
        self.assertRegex(item.input, NUMBER)
        events, text = [], ""
        with self.client.responses.stream(model="smollm2", input="Name a colour.", tools=tools, tool_choice=choice, temperature=0,
                                          max_output_tokens=400) as stream:
            for event in stream:
                events.append(event.type)
                if event.type == "response.custom_tool_call_input.delta":
                    text += event.delta
                if event.type == "response.custom_tool_call_input.done":
                    self.assertEqual(event.input, text)
        self.assertEqual(text, item.input)
        self.assertEqual(events[-3:], ["response.custom_tool_call_input.done", "response.output_item.done", "response.completed"])
        output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "nobody answered"}
        by_id = self.client.responses.create(model="smollm2", previous_response_id=response.id, tools=tools, max_output_tokens=4,
                                             input=[output])
        asked = {"role": "user", "content": "Name a colour."}
        by_hand = self.client.responses.create(model="smollm2", tools=tools, max_output_tokens=4, input=[
            asked, {"type": "custom_tool_call", "call_id": item.call_id, "name": "dial", "input": item.input}, output])
        self.assertEqual(by_id.usage.input_tokens, by_hand.usage.input_tokens)

    def test_custom_tools_refused(self):
        def body(form):
            return {"messages": MESSAGES, "tools": [{"type": "custom", "custom": {"name": "f", "format": form}}]}

        where = "tools[0].custom.format.grammar."
        for definition in ("start: \"a", "start: \"a\" start?", "start: \"a\"\n%ignore \" \""):
            lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": definition}}
            self.refused("/v1/chat/completions", body(lark), 400, where + "definition")
        bad = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "("}}
        self.refused("/v1/chat/completions", body(bad), 400, where + "definition")
        self.refused("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"type": "web_search"}]}, 400, "tools[0].type")

    def test_strict_tools_have_the_properties_named(self):
        for strict in (True, None):
            tool = {"type": "function", "function": function("book_hotel", strict, nights=NIGHTS)}
            for seed in range(2):
                done = self.chat([tool], "required", seed, parallel_tool_calls=False, extra_body={"open_objects": strict})
                arguments = json.loads(done.choices[0].message.tool_calls[0].function.arguments)
                self.assertEqual(list(arguments), ["nights"])

    def test_schemas_without_bounds_end(self):
        schema = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "number"}}, "required": ["name", "size"]}
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
        word = self.good("POST", "/tokenize", {"content": " the", "add_special": False})["tokens"][0]
        for bias in ({}, {str(word): 100}):  # the second never ends a string by itself
            done = self.client.chat.completions.create(model="smollm2", messages=MESSAGES, response_format=form, temperature=0,
                                                       max_tokens=600, logit_bias=bias)
            self.assertEqual(done.choices[0].finish_reason, "stop")
            self.assertEqual(list(json.loads(done.choices[0].message.content)), ["name", "size"])


@unittest.skipUnless(SMOLLM2.is_file(), "no model")
class OpenObjects(unittest.TestCase):
    def test_the_switch_and_the_field(self):
        """A comma behind the one property is the likeliest thing to write: it comes where objects are open."""
        schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}

        def goes_on(server, strict=None, further=None, **fields):
            comma = server.json("POST", "/tokenize", {"content": ",", "add_special": False})[1]["tokens"][0]
            said = schema if further is None else {**schema, "additionalProperties": further}
            form = {"name": "x", "schema": said, **({} if strict is None else {"strict": strict})}
            status, answer = server.json("POST", "/v1/chat/completions", {
                "messages": MESSAGES, "max_tokens": 16, "temperature": 0, "logit_bias": {str(comma): 100},
                "response_format": {"type": "json_schema", "json_schema": form}, **fields})
            self.assertEqual(status, 200, answer)
            return "1," in answer["choices"][0]["message"]["content"]

        with Server(shared.BINARY, SMOLLM2, "--ctx", 512) as server:
            self.assertFalse(goes_on(server))
            self.assertTrue(goes_on(server, open_objects=True))
            self.assertFalse(goes_on(server, strict=True, open_objects=True))
            self.assertTrue(goes_on(server, further=True))
            self.assertFalse(goes_on(server, strict=True, further=True))
        with Server(shared.BINARY, SMOLLM2, "--ctx", 512, "--open-objects") as server:
            self.assertTrue(goes_on(server))
            self.assertFalse(goes_on(server, open_objects=False))
            self.assertFalse(goes_on(server, strict=True))

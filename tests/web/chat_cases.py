"""The chat: answers stream in, conversations are kept, found and branched, settings and models are what is asked for."""

import json
import pathlib
import re
import tempfile
import time

from pages import LONG, WORLD, PageTest, event_stream, expect, said
from served import Server

HTML = '<img src=x onerror="document.title=1"><b>bold</b> <script>document.title=2</script>'

# What a stream may say that SmolLM2 does not: thoughts, then a call.
THINKING_STREAM = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "The weather is a *tool's* business."}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":"Be'}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": 'rn"}'}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}},
]


class ChatTest(PageTest):
    def test_an_answer_streams_in_and_says_how_fast(self):
        page = self.open(settings={"max_tokens": LONG})
        expect(page.locator("#model")).to_have_text(re.compile("SmolLM2"))
        self.never_end(page)
        self.send(page, "Explain how a water mill works.", wait=False)
        prose = page.locator(".assistant > .prose").last
        expect(prose).not_to_be_empty()
        early = self.answer(page)
        expect(page.locator("#stop")).to_be_visible()
        page.wait_for_function("([node, length]) => node.innerText.length > length", arg=[prose.element_handle(), len(early)])
        page.click("#stop")
        self.wait_done(page)
        self.assertTrue(self.answer(page).startswith(early[:1]))

        page = self.open()
        self.send(page, "Explain how a water mill works.")
        speed = page.locator(".assistant .speed").inner_text()
        self.assertRegex(speed, r"^[\d.,]+ tokens/s · first token [\d.]+ s · \d+ tokens")
        # A screen reader hears the answer once, when it is complete, and not each piece of it.
        self.assertEqual(page.locator("#messages").get_attribute("aria-live"), "off")
        expect(page.locator("#status")).to_have_text(re.compile("^The answer: .+"))
        self.assertEqual(page.locator(".assistant").get_attribute("aria-busy"), "false")

    def test_stop_ends_the_request_in_the_server_too(self):
        page = self.open(settings={"max_tokens": LONG})
        self.never_end(page)  # how much of the first answer the second one sees is a matter of timing
        for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
            self.send(page, "Tell me a very long story about a mill.", wait=False)
            expect(page.locator(".assistant > .prose").last).not_to_be_empty()
            stop()
            self.wait_done(page)
            expect(page.locator(".assistant .problem").last).to_have_text("Stopped.")
            text = self.answer(page)
            deadline = time.monotonic() + 60
            while self.server.get("/stats")[1]["requests"]["running"] and time.monotonic() < deadline:
                time.sleep(0.05)
            self.assertEqual(self.server.get("/stats")[1]["requests"]["running"], 0)
            self.assertEqual(self.answer(page), text)

    def test_a_reload_keeps_conversations(self):
        page = self.open()
        self.send(page, "First question")
        page.click("#new-chat")
        self.send(page, "Second question")
        answer = self.answer(page)
        page.reload()
        expect(page.locator("#conversations .title")).to_have_text(["Second question", "First question"])
        self.assertEqual(self.answer(page), answer)
        page.get_by_role("button", name="First question", exact=True).click()
        expect(page.locator(".bubble")).to_have_text(["First question"])
        with page.expect_download() as download:
            page.locator("#export-all").click()
        exported = json.loads(pathlib.Path(download.value.path()).read_text())
        self.assertEqual([one["title"] for one in exported["conversations"]], ["Second question", "First question"])
        page.get_by_role("button", name="Delete: First question").click(force=True)
        expect(page.locator("#conversations .title")).to_have_text(["Second question"])
        page.get_by_role("button", name="Undo").click()
        expect(page.locator(".bubble")).to_have_text(["First question"])
        for title in ("First question", "Second question"):
            page.get_by_role("button", name=f"Delete: {title}").click(force=True)
        page.reload()
        expect(page.locator("#conversations .title")).to_have_count(0)
        page.set_input_files("#import-file", download.value.path())
        expect(page.locator("#conversations .title")).to_have_text(["Second question", "First question"])

    def test_editing_and_asking_again_begin_branches(self):
        page = self.open(settings={"max_tokens": 8})
        bodies = []
        page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
        self.send(page, "One")
        first = self.answer(page)
        self.send(page, "Two")
        page.locator(".user").first.hover()
        page.get_by_role("button", name="Edit and send again").first.click()
        page.get_by_label("Edit your message").fill("Three")
        page.get_by_role("button", name="Send", exact=True).first.click()
        self.wait_done(page)
        expect(page.locator(".bubble")).to_have_text(["Three"])
        self.assertEqual([m["content"] for m in bodies[-1]["messages"]], ["Three"])
        third = self.answer(page)
        page.get_by_role("button", name="Answer again").click()
        self.wait_done(page)
        self.assertEqual(self.answer(page), third)  # at temperature 0
        expect(page.locator(".assistant")).to_have_count(1)
        expect(page.locator(".branches")).to_have_text(["2/2", "2/2"])
        self.assertEqual(len(bodies), 4)
        page.locator(".user").get_by_role("button", name="Previous version").click()
        expect(page.locator(".bubble")).to_have_text(["One", "Two"])  # nothing was overwritten
        self.assertEqual(page.locator(".assistant > .prose").first.inner_text(), first)
        page.reload()
        expect(page.locator(".bubble")).to_have_text(["One", "Two"])
        page.locator(".user").get_by_role("button", name="Next version").click()
        expect(page.locator(".bubble")).to_have_text(["Three"])
        page.locator(".assistant").get_by_role("button", name="Previous version").click()
        expect(page.locator(".assistant .branches")).to_have_text("1/2")
        self.assertEqual(len(bodies), 4)

    def test_an_answer_that_was_cut_off_goes_on(self):
        page = self.open(settings={"max_tokens": 40})
        self.send(page, "Count from one to twenty in words.")
        whole = self.answer(page)
        page.click("#new-chat")
        page.click("#open-settings")
        page.get_by_label("Max tokens").fill("20")
        page.get_by_role("button", name="Save").click()
        self.send(page, "Count from one to twenty in words.")
        half = self.answer(page)
        self.assertTrue(whole.startswith(half) and len(whole) > len(half), (whole, half))
        page.get_by_role("button", name="Continue the answer").click()
        page.wait_for_function("(length) => document.querySelector('.assistant > .prose').innerText.length > length", arg=len(half))
        self.wait_done(page)
        self.assertEqual(self.answer(page), whole)  # at temperature 0, the same as if it had never been cut
        expect(page.locator(".assistant")).to_have_count(1)

    def test_chats_are_searched_and_renamed(self):
        page = self.open(settings={"max_tokens": 1})
        self.answers(page, *[said(text) for text in ("Wheat is ground between stones.", "Bread is baked.", "x")])
        for text in ("What is a mill?", "What is an oven?"):
            page.click("#new-chat")
            self.send(page, text)
        titles = page.locator("#conversations .title span")
        page.keyboard.press("Control+k")
        self.assertEqual(page.evaluate("document.activeElement.id"), "search")
        page.keyboard.type("GROUND between")
        expect(titles).to_have_text(["What is a mill?"])
        expect(page.locator("#conversations mark")).to_have_text("ground between")
        page.keyboard.press("Escape")
        expect(titles).to_have_text(["What is an oven?", "What is a mill?"])
        page.fill("#search", "tractor")
        expect(page.locator("#nothing-found")).to_be_visible()
        page.fill("#search", "")
        page.locator("#conversations li").first.hover()
        page.get_by_role("button", name="Rename: What is an oven?").click()
        page.get_by_label("New name").fill("Ovens")
        page.keyboard.press("Enter")
        expect(titles).to_have_text(["Ovens", "What is a mill?"])
        self.assertIn("Ovens", page.title())
        self.send(page, "And how hot is it?")
        page.reload()
        expect(titles).to_have_text(["Ovens", "What is a mill?"])
        page.locator("#conversations li").first.hover()
        page.get_by_role("button", name="Rename: Ovens").click()
        page.get_by_label("New name").fill("Nothing")
        page.keyboard.press("Escape")
        expect(titles).to_have_text(["Ovens", "What is a mill?"])

    def test_a_message_and_a_chat_are_copied_as_markdown(self):
        page = self.open(permissions=["clipboard-read", "clipboard-write"])
        self.answers(page, said("**Bold** and `code`"))
        self.send(page, "Show me")
        clipboard = "navigator.clipboard.readText()"
        page.locator(".assistant").get_by_role("button", name="Copy as Markdown").click()
        page.wait_for_function("async () => (await navigator.clipboard.readText()).startsWith('**')")
        self.assertEqual(page.evaluate(clipboard), "**Bold** and `code`")
        page.click("#copy-chat")
        expect(page.locator("#toast")).to_have_text("The chat is copied as Markdown.")
        self.assertEqual(page.evaluate(clipboard), "# Show me\n\n## You\n\nShow me\n\n## Assistant\n\n**Bold** and `code`\n")

    def test_a_conversation_of_an_older_version_comes_along(self):
        page = self.open()
        old = {"id": "old", "title": "Old", "system": "", "created": 1, "updated": 1, "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "reasoning": "", "toolCalls": [{"id": "c1", "name": "look", "arguments": "{}"}]},
            {"role": "tool", "toolCallId": "c1", "content": "rain"},
            {"role": "assistant", "content": "It rains.", "reasoning": "", "toolCalls": []}]}
        export = {"application": "millrace", "conversations": [old]}
        page.set_input_files("#import-file", {"name": "old.json", "mimeType": "application/json", "buffer": json.dumps(export).encode()})
        page.get_by_role("button", name="Old", exact=True).click()
        expect(page.locator(".assistant > .prose").last).to_have_text("It rains.")
        page.locator(".call summary").click()
        expect(page.locator(".call code").last).to_have_text("rain")
        with page.expect_request("**/v1/chat/completions") as request:
            self.send(page, "Thanks")
        self.assertEqual([m["role"] for m in request.value.post_data_json["messages"]], ["user", "assistant", "tool", "assistant", "user"])

    def test_a_model_is_chosen_for_each_chat(self):
        models = {"object": "list", "data": [{"id": "small", "meta": {"loaded": True}}, {"id": "large", "meta": {"loaded": False, "state": "unloaded"}}]}
        page = self.open(prepare=lambda page: page.route("**/v1/models", lambda route: route.fulfill(json=models)))
        expect(page.locator("#model option")).to_have_text(["small · loaded", "large · not loaded"])
        asked = []
        page.on("request", lambda request: request.method == "POST" and asked.append(request.post_data_json["model"]))
        self.answers(page, *[said("yes")] * 4)
        self.send(page, "First")
        page.click("#new-chat")
        page.select_option("#model", "large")
        self.send(page, "Second")
        page.get_by_role("button", name="First", exact=True).click()
        self.assertEqual(page.input_value("#model"), "small")
        self.send(page, "Again")
        page.reload()
        page.get_by_role("button", name="Second", exact=True).click()
        expect(page.locator("#model")).to_have_value("large")
        self.send(page, "Again")
        self.assertEqual(asked, ["small", "large", "small", "large"])

    def test_settings_are_what_is_asked_for_in_each_chat(self):
        page = self.open()
        self.answers(page, *[said("yes")] * 4)
        page.click("#open-settings")
        page.get_by_label("System prompt").fill("You speak like a miller.")
        numbers = {"Temperature": 0.5, "Top p": 0.9, "Top k": 40, "Min p": 0.05, "Presence penalty": 0.1, "Frequency penalty": 0.2,
                   "Repetition penalty": 1.1, "Max tokens": 5, "Seed": 7}
        for label, value in numbers.items():
            page.get_by_label(label).fill(str(value))
        page.get_by_label("Reasoning effort").select_option("low")
        page.get_by_label("Stop at").fill("END\n\\n\\n")
        page.get_by_label("Format").select_option("json_schema")
        page.locator("[name=schema]").fill('{"type": "object"')
        page.locator("#settings summary").click()
        page.get_by_label("Tools, as JSON").fill("{}")
        problem = page.locator("#settings .problem")
        page.get_by_role("button", name="Save").click()
        expect(problem).to_have_text("Tools: expected a JSON list")
        page.get_by_label("Tools, as JSON").fill("")
        page.get_by_role("button", name="Save").click()
        expect(problem).to_have_text(re.compile("^Schema: "))
        page.locator("[name=schema]").fill('{"type": "object"}')
        page.get_by_label("Also for chats").uncheck()
        page.get_by_role("button", name="Save").click()
        with page.expect_request("**/v1/chat/completions") as request:
            self.send(page, "Hello")
        body = request.value.post_data_json
        self.assertEqual(request.value.headers["content-type"], "application/json")
        self.assertEqual(body["messages"][0], {"role": "system", "content": "You speak like a miller."})
        del body["messages"], body["model"]
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}
        self.assertEqual(body, {
            "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 0.1, "frequency_penalty": 0.2,
            "repetition_penalty": 1.1, "max_completion_tokens": 5, "seed": 7, "reasoning_effort": "low", "stop": ["END", "\n\n"],
            "response_format": schema, "stream": True, "stream_options": {"include_usage": True}})
        page.click("#new-chat")
        with page.expect_request("**/v1/chat/completions") as request:
            self.send(page, "Another chat")
        self.assertEqual(request.value.post_data_json["temperature"], 0)
        self.assertNotIn("top_k", request.value.post_data_json)
        page.get_by_role("button", name="Hello", exact=True).click()
        page.click("#open-settings")
        self.assertEqual(page.input_value("[name=top_k]"), "40")
        page.get_by_role("button", name="Back to defaults").click()
        page.get_by_role("button", name="Save").click()
        with page.expect_request("**/v1/chat/completions") as request:
            self.send(page, "Once more")
        self.assertEqual(sorted(request.value.post_data_json), ["messages", "model", "stream", "stream_options"])

    def test_the_server_takes_all_settings(self):
        schema = '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"], "additionalProperties": false}'
        page = self.open(settings={"top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 0.1, "frequency_penalty": 0.2,
                                   "repetition_penalty": 1.1, "seed": 7, "stop": "ENDE", "format": "json_schema", "schema": schema,
                                   "reasoning_effort": "low"})
        self.send(page, "A number, as JSON.")
        self.assertIn("n", json.loads(self.answer(page)))

    def test_html_is_shown_not_obeyed(self):
        page = self.open(settings={"max_tokens": 4})
        self.send(page, HTML)
        self.assertEqual(page.locator(".bubble").inner_text(), HTML)
        self.assertEqual(page.locator("#messages img, #messages b, #messages script").count(), 0)
        self.assertIn("Millrace", page.title())

    def test_thoughts_are_folded_and_tool_calls_answered(self):
        page = self.open(settings={"tools": '[{"type":"function","function":{"name":"get_weather"}}]', "max_tokens": 8})
        stream = event_stream(*THINKING_STREAM)
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream), times=1)
        self.send(page, "Weather in Bern?")
        expect(page.locator(".reasoning summary")).to_contain_text("Thought")
        expect(page.locator(".reasoning em")).to_be_hidden()
        page.click(".reasoning summary")
        expect(page.locator(".reasoning em")).to_have_text("tool's")
        expect(page.locator(".call-name")).to_have_text("get_weather")
        self.assertEqual(page.locator(".call code").inner_text(), '{\n  "city": "Bern"\n}')
        page.get_by_label("Result").fill("Rain, 12 degrees")
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_role("button", name="Send the result").click()
            self.wait_done(page)
        sent = request.value.post_data_json["messages"]
        self.assertEqual(sent[1]["tool_calls"][0]["function"], {"name": "get_weather", "arguments": '{"city":"Bern"}'})
        self.assertEqual(sent[2], {"role": "tool", "tool_call_id": "call_1", "content": "Rain, 12 degrees"})

    def test_a_key_is_asked_for(self):
        folder = tempfile.TemporaryDirectory(prefix="millrace-web-test-")
        self.addCleanup(folder.cleanup)
        keys = pathlib.Path(folder.name) / "keys"
        keys.write_text("mill-key-123\n")
        server = Server(WORLD.binary, WORLD.model, "--keys", keys).wait_ready()
        self.addCleanup(server.stop)
        page = self.open(url=server.url, settings={"max_tokens": 4})
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key-entry", "wrong")
        page.press("#key-entry", "Enter")
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key-entry", "mill-key-123")
        page.press("#key-entry", "Enter")
        expect(page.locator("#model")).to_have_text(re.compile("SmolLM2"))
        self.send(page, "Hello")
        self.assertTrue(self.answer(page))
        page.goto(server.url + "/dashboard.html")
        expect(page.locator("#tiles .value").first).to_be_visible()
        # Chromium itself writes a line for each refused request.
        self.complaints = [text for text in self.complaints if "401" not in text]

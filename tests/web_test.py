"""Drives the page and the dashboard in headless Chromium, against the real binary and SmolLM2.

    tests/web_test.py PATH/TO/millrace [unittest options]

Needs Debian's chromium, and Playwright from PyPI (kept in build/venv); without them it skips and says so. With
MILLRACE_SHOTS=DIRECTORY it also writes pictures of both pages there, wide and narrow, light and dark.
"""

import json
import os
import pathlib
import re
import sys
import tempfile
import time
import unittest

from served import Server, fetch_model, need_command, use_venv

WHAT = "the test of the page"
CHROMIUM = need_command(WHAT, "chromium", "chromium-browser", "google-chrome")
use_venv(WHAT, "playwright==1.65.0")

from playwright.sync_api import expect, sync_playwright  # noqa: E402

BINARY = ""
SHOTS = os.environ.get("MILLRACE_SHOTS")
TIMEOUT_MS = 120000  # for machines that are busy or stalled
LONG = 8000  # tokens that no test waits for
HTML = '<img src=x onerror="document.title=1"><b>bold</b> <script>document.title=2</script>'
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 360, "height": 740}

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

# [source, the HTML it must become without classes and the copy buttons]
MARKDOWN = [
    ["plain *it* **bold** `a<b` ~~no~~", "<p>plain <em>it</em> <strong>bold</strong> <code>a&lt;b</code> <del>no</del></p>"],
    ["a\n\nb\nc", "<p>a</p><p>b\nc</p>"],
    ["**bold with *it* inside**", "<p><strong>bold with <em>it</em> inside</strong></p>"],
    ["snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"],
    ["unclosed **bold and `code", "<p>unclosed **bold and `code</p>"],
    ["`a * b` and *c*", "<p><code>a * b</code> and <em>c</em></p>"],
    ["## Head\ntext", "<h4>Head</h4><p>text</p>"],
    ["- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"],
    ["3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'],
    ["1. a\n\n   more\n\n2. b", "<ol><li><p>a</p><p>more</p></li><li>b</li></ol>"],
    ["text\n- a", "<p>text</p><ul><li>a</li></ul>"],
    ["> quoted\n> **more**", "<blockquote><p>quoted\n<strong>more</strong></p></blockquote>"],
    ["a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"],
    ["[ok](https://example.org/a_(b)) [bad](javascript:alert(1)) [bad](data:text/html,x)",
     '<p><a href="https://example.org/a_(b)" target="_blank" rel="noopener noreferrer">ok</a> '
     "[bad](javascript:alert(1)) [bad](data:text/html,x)</p>"],
    ["see https://example.org/x.", '<p>see <a href="https://example.org/x" target="_blank" rel="noopener noreferrer">'
     "https://example.org/x</a>.</p>"],
    [HTML, "<p>" + HTML.replace("<", "&lt;").replace(">", "&gt;") + "</p>"],
    ["\\*not\\*", "<p>*not*</p>"],
]

# The worst pair of text and ground on the page: its contrast as WCAG computes it, and the text. Colours are painted on
# a canvas to be read, so that any notation will do.
CONTRAST = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (colour, ground) => {
    context.fillStyle = `rgb(${ground.join(" ")})`;
    context.fillRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const groundOf = (node) => {
    const under = node.parentElement ? groundOf(node.parentElement) : [255, 255, 255];
    return over(getComputedStyle(node).backgroundColor, under);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let worst = [99, ""];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(node);
    const ground = groundOf(node);
    const [a, b] = [light(over(node instanceof SVGElement ? style.fill : style.color, ground)), light(ground)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < worst[0]) worst = [contrast, walker.currentNode.data.trim()];
  }
  return worst;
}"""

# Controls without a name that a screen reader could say.
NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, textarea, summary")].filter((node) =>
  node.checkVisibility({ visibilityProperty: true }) && !node.getAttribute("aria-label") && !node.innerText?.trim() &&
  ![...(node.labels ?? [])].some((label) => label.textContent.trim())).map((node) => node.outerHTML)"""


class WebTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = fetch_model("smollm2", WHAT)
        cls.server = Server(BINARY, cls.model).wait_ready()
        cls.addClassCleanup(cls.server.stop)
        cls.playwright = sync_playwright().start()
        cls.addClassCleanup(cls.playwright.stop)
        cls.browser = cls.playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        cls.addClassCleanup(cls.browser.close)
        expect.set_options(timeout=TIMEOUT_MS)

    def open(self, path="/", viewport=WIDE, settings=None, url=None, **options):
        """A page in a browser of its own, that may neither complain nor look elsewhere."""
        origin = url or self.server.url
        context = self.browser.new_context(viewport=viewport, **options)
        self.addCleanup(context.close)
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        self.complaints, self.foreign = [], []
        page.on("console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith((origin, "blob:")) or self.foreign.append(request.url))
        settings = {"temperature": 0, "max_tokens": 24, **(settings or {})}
        # Once: what a test changes must survive its reloads.
        page.add_init_script(f"localStorage['millrace.settings'] ??= {json.dumps(json.dumps(settings))}")
        page.goto(origin + path)
        return page

    def tearDown(self):
        self.assertEqual(getattr(self, "complaints", []), [])
        self.assertEqual(getattr(self, "foreign", []), [])

    def send(self, page, text, wait=True):
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        if wait:
            self.wait_done(page)

    def wait_done(self, page):
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator(".assistant").last).to_have_attribute("aria-busy", "false")  # and drawn

    def never_end(self, page):
        """Answers go on until they are stopped: whoever looks at one looks in time."""
        page.route("**/v1/chat/completions", lambda route: route.continue_(
            post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True})))

    def stand_still(self, page):
        """Colours have faded in."""
        page.evaluate("""() => Promise.all(document.getAnimations().filter(
            (a) => a.effect.getComputedTiming().endTime < Infinity).map((a) => a.finished.catch(() => {})))""")

    def answer(self, page):
        return page.locator(".assistant > .prose").last.inner_text()

    def shot(self, page, name):
        if SHOTS:
            pathlib.Path(SHOTS).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=f"{SHOTS}/{name}.png", full_page="dashboard" in name)

    # ---- The chat ----

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
        self.assertRegex(speed, r"^[\d.]+ tokens/s · first token [\d.]+ s · \d+ tokens")
        self.assertEqual(page.locator("#messages").get_attribute("aria-live"), "polite")
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

    def test_an_earlier_message_is_edited_and_an_answer_asked_for_again(self):
        page = self.open(settings={"max_tokens": 8})
        bodies = []
        page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
        self.send(page, "One")
        self.send(page, "Two")
        page.locator(".user").first.hover()
        page.get_by_role("button", name="Edit and send again").first.click()
        page.get_by_label("Edit your message").fill("Three")
        page.get_by_role("button", name="Send", exact=True).first.click()
        self.wait_done(page)
        expect(page.locator(".bubble")).to_have_text(["Three"])
        self.assertEqual([m["content"] for m in bodies[-1]["messages"]], ["Three"])
        first = self.answer(page)
        page.get_by_role("button", name="Answer again").click()
        self.wait_done(page)
        self.assertEqual(self.answer(page), first)  # at temperature 0
        expect(page.locator(".assistant")).to_have_count(1)
        self.assertEqual(len(bodies), 4)

    def test_settings_are_what_is_asked_for(self):
        page = self.open()
        page.click("#open-settings")
        page.get_by_label("System prompt").fill("You speak like a miller.")
        for label, value in (("Temperature", "0.5"), ("Top p", "0.9"), ("Max tokens", "5"), ("Seed", "7")):
            page.get_by_label(label).fill(value)
        page.get_by_label("Reasoning effort").select_option("low")
        page.locator("#settings summary").click()
        page.get_by_label("Tools, as JSON").fill("{}")
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#settings .problem")).to_have_text("Tools: expected a JSON list")
        page.get_by_label("Tools, as JSON").fill("")
        page.get_by_role("button", name="Save").click()
        with page.expect_request("**/v1/chat/completions") as request:
            self.send(page, "Hello")
        body = request.value.post_data_json
        self.assertEqual(body["messages"][0], {"role": "system", "content": "You speak like a miller."})
        del body["messages"], body["model"]
        self.assertEqual(body, {"temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 5, "seed": 7, "reasoning_effort": "low",
                                "stream": True, "stream_options": {"include_usage": True}})
        expect(page.locator(".assistant .problem")).to_have_text("The answer reached its limit of tokens.")

    def test_html_is_shown_not_obeyed(self):
        page = self.open(settings={"max_tokens": 4})
        self.send(page, HTML)
        self.assertEqual(page.locator(".bubble").inner_text(), HTML)
        self.assertEqual(page.locator("#messages img, #messages b, #messages script").count(), 0)
        self.assertIn("Millrace", page.title())

    def test_markdown(self):
        page = self.open()
        render = """async (text) => {
          const { markdown } = await import("/markdown.js");
          const root = document.createElement("div");
          root.append(...markdown(text));
          root.querySelectorAll(".bar").forEach((bar) => bar.remove());
          return root.innerHTML;
        }"""
        for source, expected in MARKDOWN:
            self.assertEqual(page.evaluate(render, source), expected, source)
        table = page.evaluate(render, "| a | b |\n|---|--:|\n| 1 | **2** |")
        self.assertIn("<th>a</th><th class=\"right\">b</th>", table)
        self.assertIn("<td>1</td><td class=\"right\"><strong>2</strong></td>", table)
        code = page.evaluate(render, "```python\nif a < b:\n    pass\n```")
        self.assertIn("<code>if a &lt; b:\n    pass</code>", code)
        # A text that grows ends as if it had come at once.
        grows = """async (text) => {
          const { GrowingMarkdown, markdown } = await import("/markdown.js");
          const [grown, whole] = [document.createElement("div"), document.createElement("div")];
          const growing = new GrowingMarkdown(grown);
          for (let end = 0; end <= text.length; end++) growing.update(text.slice(0, end));
          whole.append(...markdown(text));
          return grown.innerHTML === whole.innerHTML;
        }"""
        self.assertTrue(page.evaluate(grows, "\n\n".join(source for source, _ in MARKDOWN) + "\n\n```js\nlet a;\n```\nend"))
        # Texts made to take long: four times the text is four times the work, not sixteen. Characters that the parser
        # searches and copies are counted, since time is anybody's guess on a busy machine.
        work = """async ([piece, count]) => {
          const { markdown } = await import("/markdown.js");
          const text = piece.repeat(count);
          const { indexOf, lastIndexOf, slice } = String.prototype;
          let characters = text.length;
          String.prototype.indexOf = function (what, from = 0) {
            const at = indexOf.call(this, what, from);
            characters += (at < 0 ? this.length : at) - from;
            return at;
          };
          String.prototype.lastIndexOf = function (what, from = this.length) {
            const at = lastIndexOf.call(this, what, from);
            characters += from - at;
            return at;
          };
          String.prototype.slice = function (...range) {
            const part = slice.apply(this, range);
            characters += part.length;
            return part;
          };
          markdown(text);
          Object.assign(String.prototype, { indexOf, lastIndexOf, slice });
          return characters;
        }"""
        for piece in ("*a ", "**a", "_a", "`", "``a`", "[", "[a](", "![", "<", "> ", "- ", "|a", "a\n", "~~~", "h", "***", "a`*b`"):
            self.assertLess(page.evaluate(work, [piece, 8000]) / page.evaluate(work, [piece, 2000]), 6, piece)

    def test_thoughts_are_folded_and_tool_calls_answered(self):
        page = self.open(settings={"tools": '[{"type":"function","function":{"name":"get_weather"}}]', "max_tokens": 8})
        stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in THINKING_STREAM) + "data: [DONE]\n\n"
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream), times=1)
        self.send(page, "Weather in Bern?")
        expect(page.locator(".reasoning summary")).to_contain_text("Thought")
        expect(page.locator(".reasoning em")).to_be_hidden()
        page.click(".reasoning summary")
        expect(page.locator(".reasoning em")).to_have_text("tool's")
        expect(page.locator(".call h3")).to_have_text("get_weather")
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
        server = Server(BINARY, self.model, "--keys", keys).wait_ready()
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

    # ---- Looks ----

    def test_light_dark_and_contrast(self):
        page = self.open(color_scheme="dark")
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(ground)
        page.emulate_media(color_scheme="light")
        light = page.evaluate(ground)
        self.assertNotEqual(dark, light)
        page.click("#theme")
        page.click("#theme")
        self.assertEqual(page.get_by_label("Theme: dark").count(), 1)
        page.reload()
        self.assertEqual(page.evaluate(ground), dark)
        self.send(page, "Hello")
        for theme in ("dark", "light"):
            page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
            for opened in (False, True):
                if opened:
                    page.click("#open-settings")
                self.stand_still(page)
                contrast, text = page.evaluate(CONTRAST)
                self.assertGreaterEqual(contrast, 4.5, f"{theme}: {text}")
                self.assertEqual(page.evaluate(NAMELESS), [])
            page.keyboard.press("Escape")

    def test_a_phone_does_not_scroll_sideways(self):
        page = self.open(viewport=NARROW, has_touch=True, is_mobile=True)
        overflow = f"document.documentElement.scrollWidth - {NARROW['width']}"  # innerWidth would grow with the page
        self.assertLessEqual(page.evaluate(overflow), 0)
        page.fill("#prompt", "w" * 300)
        page.tap("#send")
        self.wait_done(page)
        wide = "| " + " | ".join(["column"] * 20) + " |\n|" + "---|" * 20 + "\n\n```\n" + "code " * 100 + "\n```\n" + "word" * 100
        page.evaluate("""async (text) => {
          const { markdown } = await import("/markdown.js");
          document.querySelector(".assistant > .prose").append(...markdown(text));
        }""", wide)
        self.assertLessEqual(page.evaluate(overflow), 0)
        self.assertEqual(page.evaluate(NAMELESS), [])
        self.assertLessEqual(page.evaluate("document.querySelector('#scroll').scrollWidth - document.querySelector('#scroll').clientWidth"), 0)
        expect(page.locator("#sidebar")).to_be_hidden()
        page.tap("#open-sidebar")
        expect(page.get_by_role("button", name="New chat")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#sidebar")).to_be_hidden()
        page.goto(self.server.url + "/dashboard.html")
        expect(page.locator("#tiles .value").first).to_be_visible()
        self.assertEqual(page.evaluate(NAMELESS), [])
        self.assertLessEqual(page.evaluate(overflow), 0)

    def test_everything_is_reached_by_keyboard(self):
        page = self.open()
        self.assertEqual(page.evaluate("document.activeElement.id"), "prompt")
        page.keyboard.type("Hello")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("there")
        page.keyboard.press("Enter")
        self.wait_done(page)
        expect(page.locator(".bubble")).to_have_text("Hello\nthere")
        page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
        reached = set()
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText ?? ''"))
        for name in ("New chat", "Settings", "Dashboard", "Edit and send again", "Answer again", "Delete: Hello"):
            self.assertIn(name, reached)

    def test_the_dashboard_shows_the_engine(self):
        page = self.open("/dashboard.html")
        expect(page.locator("#model")).to_have_text(re.compile("SmolLM2"))
        chat = page.context.new_page()
        chat.goto(self.server.url)
        self.send(chat, "Hello")
        page.bring_to_front()
        stats = self.server.get("/stats")[1]
        finished = page.locator("#counters dt:has-text('Requests finished') + dd")
        expect(finished).to_have_text(f"{stats['requests']['finished']:,}")
        expect(page.locator("#tiles .value")).to_have_count(4)
        expect(page.locator("#tiles .value").nth(1)).to_have_text(re.compile(r"^[\d.]+ ?m?s$"))
        self.assertGreater(page.locator("#timeline g").count(), 0)
        page.click("summary")
        expect(page.locator("#timeline-rows tr").first).to_contain_text("chatcmpl-")
        self.assertEqual(page.locator("#throughput path.line").count(), 2)
        self.assertNotIn("NaN", page.content())
        self.assertNotIn("undefined", page.locator("main").inner_text())
        for theme in ("light", "dark"):
            page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
            self.stand_still(page)
            contrast, text = page.evaluate(CONTRAST)
            self.assertGreaterEqual(contrast, 4.5, f"{theme}: {text}")
        self.assertEqual(page.evaluate(NAMELESS), [])

    @unittest.skipUnless(SHOTS, "pictures are taken when MILLRACE_SHOTS names a directory")
    def test_pictures(self):
        for size, viewport in (("wide", WIDE), ("narrow", NARROW)):
            for scheme in ("light", "dark"):
                page = self.open(viewport=viewport, color_scheme=scheme, settings={"max_tokens": 160})
                self.shot(page, f"welcome-{size}-{scheme}")
                self.send(page, "Write a Python function that reverses the words of a sentence.")
                self.shot(page, f"chat-{size}-{scheme}")
                page.goto(self.server.url + "/dashboard.html")
                page.wait_for_timeout(1500)
                self.shot(page, f"dashboard-{size}-{scheme}")


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)

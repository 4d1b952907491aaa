"""How the pages look and sound: colours, sizes, the keyboard, what a screen reader has to say; and the dashboard."""

import re
import unittest

from pages import NARROW, SHOTS, WIDE, PageTest, expect, said

AXE = "axe-core@4.14.0"
# An answer that has all there is to see.
RICH = """The roots of $ax^2 + bx + c = 0$ are

$$x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$$

```python
@cache
def fib(n: int) -> int:
    # the slow way
    return n if n < 2 else fib(n - 1) + fib(n - 2)  # 'text'

print(f"fib: {fib(30)}", 3.14, None)
```

| Language | Year |
|---|--:|
| C | 1972 |

```diff
@@ -1 +1 @@
-old
+new
```

> A quote, and [a link](https://example.org/).
"""

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


class LookTest(PageTest):
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
        self.answers(page, said(RICH, reasoning="Roots, then."))
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
        for name in ("New chat", "Settings", "Dashboard", "Edit and send again", "Answer again", "Delete: Hello", "Rename: Hello",
                     "Search in your chats", "Tool servers", "Attach text files, PDFs or pictures", "Continue the answer", "Copy the chat as Markdown"):
            self.assertIn(name, reached)

    def test_shortcuts_do_what_the_help_says(self):
        page = self.open(settings={"max_tokens": 1})
        self.answers(page, said("first"), said("second"))
        self.send(page, "One")
        page.keyboard.press("Control+Shift+O")
        expect(page.locator("#welcome")).to_be_visible()
        self.send(page, "Two")
        page.keyboard.press("Alt+ArrowDown")
        expect(page.locator(".bubble")).to_have_text("One")
        page.keyboard.press("Alt+ArrowUp")
        expect(page.locator(".bubble")).to_have_text("Two")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
        self.assertGreater(page.locator("#shortcuts kbd").count(), 8)
        page.keyboard.press("Escape")
        expect(page.locator("#help")).to_be_hidden()
        page.keyboard.press("/")
        page.keyboard.type("/?")  # in the box they are text
        expect(page.locator("#prompt")).to_have_value("/?")
        expect(page.locator("#help")).to_be_hidden()

    def test_axe_finds_nothing(self):
        source = (self.node_modules(AXE) / "axe-core/axe.min.js").read_text()
        page = self.open()
        self.answers(page, said(RICH, reasoning="Roots, then."), said("I look.", calls=[("look", {"at": "mill"})]))
        page.set_input_files("#attach-file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"notes"})
        expect(page.locator("#attachments .chip")).to_have_count(1)
        self.send(page, "Show all")
        self.send(page, "And a call")
        page.locator(".reasoning summary").first.click()
        page.set_input_files("#attach-file", {"name": "more.txt", "mimeType": "text/plain", "buffer": b"notes"})
        expect(page.locator("#meter")).to_have_text(re.compile("tokens"))
        # A region may be as deep in the page as it is; the browser's own dialogs and logs are landmarks enough.
        check = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations.map(
          ({ id, impact, nodes }) => `${id} (${impact}): ${nodes.map((node) => node.html).slice(0, 3).join(" | ")}`)"""
        views = {"chat": None, "settings": "#open-settings", "tools": "#open-tools", "help": "#open-help", "dashboard": None}
        for theme in ("light", "dark"):
            for name, opener in views.items():
                if name == "dashboard":
                    page.goto(self.server.url + "/dashboard.html")
                    expect(page.locator("#tiles .value").first).to_be_visible()
                if opener:
                    page.click(opener)
                page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
                self.stand_still(page)
                page.evaluate(source)
                self.assertEqual(page.evaluate(check), [], f"{name}, {theme}")
                page.keyboard.press("Escape")
            page.goto(self.server.url)

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
        for kind in ("one", "two"):
            self.assertGreater(page.locator(f"#throughput path.line.{kind}").count(), 0)
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

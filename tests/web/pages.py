"""What the tests of the page share: one server and one browser for all of them, and a page in a context of its own for each.

web_test.py fills in WORLD before any test runs.
"""

import json
import os
import pathlib
import socket
import subprocess
import time
import types
import unittest

from playwright.sync_api import expect
from served import free_port, npm_packages, venv_python

WHAT = "the test of the page"
WORLD = types.SimpleNamespace(binary="", model="", server=None, browser=None)
SHOTS = os.environ.get("MILLRACE_SHOTS")
TIMEOUT_MS = 120000  # for machines that are busy or stalled
MCP = "mcp==2.3.0"
LONG = 8000  # tokens that no test waits for
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 360, "height": 740}


def event_stream(*chunks):
    """The body of a streamed answer."""
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def said(text="", calls=(), reasoning=""):
    """A streamed answer that says this."""
    deltas = [{"role": "assistant", "content": ""}]
    if reasoning:
        deltas.append({"reasoning_content": reasoning})
    if text:
        deltas.append({"content": text})
    for index, (name, arguments) in enumerate(calls):
        deltas.append({"tool_calls": [{"index": index, "id": f"call_{index}", "type": "function",
                                       "function": {"name": name, "arguments": json.dumps(arguments)}}]})
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else "stop"}]})
    return event_stream(*chunks, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})


class PageTest(unittest.TestCase):
    @property
    def server(self):
        return WORLD.server

    def open(self, path="/", viewport=WIDE, settings=None, url=None, may_reach=(), prepare=lambda page: None, **options):
        """A page in a browser of its own, that may neither complain nor look elsewhere (than at `may_reach`)."""
        origin = url or self.server.url
        options = {"service_workers": "block", **options}  # its requests come from the page itself, where tests see them
        context = WORLD.browser.new_context(viewport=viewport, **options)
        self.addCleanup(context.close)
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        self.complaints, self.foreign = [], []
        page.on("console", lambda message: message.type in ("error", "warning") and self.complain(message.text))
        page.on("pageerror", lambda error: self.complain(str(error)))
        page.on("request", lambda request: request.url.startswith((origin, "blob:", *may_reach)) or self.foreign.append(request.url))
        settings = {"temperature": 0, "max_tokens": 24, **(settings or {})}
        # Once: what a test changes must survive its reloads.
        page.add_init_script(f"localStorage['millrace.settings'] ??= {json.dumps(json.dumps(settings))}")
        prepare(page)
        page.goto(origin + path)
        return page

    def complain(self, text):
        if "Service Worker registration blocked by Playwright" not in text:
            self.complaints.append(text)

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

    def answers(self, page, *bodies):
        """The next answers are these, whatever is asked."""
        waiting = list(bodies)
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=waiting.pop(0)))

    def package(self, package):
        """A Python that has this package of PyPI, or the test is skipped."""
        try:
            return venv_python(WHAT, package)
        except SystemExit:
            self.skipTest(f"{package} cannot be had from PyPI")

    def node_modules(self, *packages):
        try:
            return npm_packages(*packages)
        except RuntimeError as error:
            self.skipTest(str(error))

    def tool_server(self, *options):
        """The address of a tool server that is running."""
        port = free_port()
        python = self.package(MCP)
        process = subprocess.Popen([python, pathlib.Path(__file__).with_name("mcp_server.py"), str(port), *options], stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}/mcp"
            time.sleep(0.05)
        raise RuntimeError("the tool server did not start")

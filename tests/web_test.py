"""Drives the page and the dashboard in headless Chromium and Firefox, against the real binary and SmolLM2.

    tests/web_test.py PATH/TO/millrace [unittest options]

Needs Debian's chromium, and Playwright from PyPI (kept in build/venv); without them it skips and says so. Firefox
(Debian's firefox-esr, driven by npm's puppeteer-core), KaTeX and axe (npm), the Model Context Protocol's package and
pikepdf (PyPI) are asked for by the tests that need them, which skip and say so without. With MILLRACE_SHOTS=DIRECTORY it
also writes pictures of both pages there, wide and narrow, light and dark. The cases are in tests/web/.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from served import Server, fetch_model, need_command, use_venv

WHAT = "the test of the page"
CHROMIUM = need_command(WHAT, "chromium", "chromium-browser", "google-chrome")
use_venv(WHAT, "playwright==1.65.0")
CASES = pathlib.Path(__file__).resolve().parent / "web"
sys.path.insert(0, str(CASES))

from answer_cases import AnswerTest  # noqa: E402, F401
from app_cases import AppTest  # noqa: E402, F401
from chat_cases import ChatTest  # noqa: E402, F401
from file_cases import FileTest  # noqa: E402, F401
from look_cases import AXE, LookTest  # noqa: E402, F401
from pages import TIMEOUT_MS, WORLD, PageTest, expect  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402
from tool_cases import ToolTest  # noqa: E402, F401


class OtherProgramsTest(PageTest):
    """What Node runs: formulas beside KaTeX's, and the page in Firefox."""

    def node(self, script, *arguments):
        done = subprocess.run(["node", CASES / script, *map(str, arguments)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_formulas_are_those_of_katex(self):
        self.node("math_test.mjs", self.node_modules("katex@0.19.1"))

    def test_colours_and_formulas_take_linear_time(self):
        if not shutil.which("node"):
            self.skipTest("node is not installed; apt-get install npm")
        self.node("linear_test.mjs")

    def test_firefox(self):
        firefox = shutil.which("firefox-esr") or shutil.which("firefox")
        if not firefox:
            self.skipTest("Firefox is not installed; apt-get install firefox-esr")
        modules = self.node_modules("puppeteer-core@24.43.1", AXE)
        with tempfile.TemporaryDirectory(prefix="millrace-web-test-") as folder:
            python = self.package("pikepdf==10.17.0")
            subprocess.run([python, CASES / "make_pdfs.py", folder], check=True)
            self.node("firefox_test.mjs", modules, firefox, self.server.url, self.tool_server(), pathlib.Path(folder) / "simple.pdf")


def main():
    WORLD.binary = os.path.abspath(sys.argv.pop(1))
    WORLD.model = fetch_model("smollm2", WHAT)
    WORLD.server = Server(WORLD.binary, WORLD.model).wait_ready()
    try:
        with sync_playwright() as playwright:
            WORLD.browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            expect.set_options(timeout=TIMEOUT_MS)
            done = unittest.main(verbosity=2, exit=False)
            WORLD.browser.close()
    finally:
        WORLD.server.stop()
    for test, why in done.result.skipped:
        print(f"SKIPPED: {test.id()} because {why}", flush=True)
    sys.exit(0 if done.result.wasSuccessful() else 1)


if __name__ == "__main__":
    main()

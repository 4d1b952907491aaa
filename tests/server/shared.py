"""What the server's tests share: the binary under test, what could not be had, and a server for a whole class."""

import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

import harness
from description import Description
from harness import SMOLLM2, Server

BINARY = ""
NO_CLIENT = None  # why there is no openai
NO_VALIDATOR = None  # why there is no jsonschema
MESSAGES = [{"role": "user", "content": "Name a colour."}]
LONG = {"messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True, "stream": True}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def wait_for(condition, seconds=60):
    """Whether it came to be; the time is for machines that are busy or stalled, and no measure of anything."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def describe(server):
    """From here on every JSON answer must be as the server's own /openapi.json says."""
    if not NO_VALIDATOR:
        server.description = Description(server.json("GET", "/openapi.json")[1])


class SharedServer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(BINARY, SMOLLM2, "--ctx", 2048, "--max-running", 16, "--model-id", "smollm2", "--alias",
                            "gpt-4o-mini", "--header-timeout", 2, "--log-json")
        cls.server.__enter__()
        describe(cls.server)

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()

    def good(self, method, path, body=None, **options):
        status, parsed = self.server.json(method, path, body, **options)
        self.assertEqual(status, 200, parsed)
        return parsed

    def refused(self, path, body, status, param=None):
        code, parsed = self.server.json("POST", path, body)
        self.assertEqual(code, status, parsed)
        self.assertEqual(set(parsed["error"]), {"message", "type", "param", "code"})
        if param:
            self.assertEqual(parsed["error"]["param"], param)
            self.assertIn(param, parsed["error"]["message"])


@unittest.skipUnless(SMOLLM2.is_file(), "no model")
class OpenAIClient(SharedServer):
    """self.client: OpenAI's client of that server; self.openai: its package."""

    @classmethod
    def setUpClass(cls):
        if NO_CLIENT:
            raise unittest.SkipTest(NO_CLIENT)
        super().setUpClass()
        import openai
        cls.openai = openai
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0)


class HarmonyServer(unittest.TestCase):
    """gpt-oss's format with random weights: self.model; self.end: a bias towards the end of a message, because thoughts
    of random weights would hardly ever end by themselves."""

    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="millrace-harmony-test-")
        cls.model = pathlib.Path(cls.directory.name) / "tiny.gguf"
        subprocess.run([BINARY, "synth", "tiny-gpt-oss", str(cls.model)], check=True, capture_output=True)
        cls.server = Server(BINARY, cls.model, "--ctx", 4096, "--model-id", "tiny")
        cls.server.__enter__()
        describe(cls.server)
        tokens = cls.server.json("POST", "/tokenize", {"content": "<|end|>"})[1]["tokens"]
        cls.end = {str(tokens[-1]): 8}

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()
        cls.directory.cleanup()


def run_node_client(test, package, script, held):
    """A script of this folder, with a package of npm, against test.server; it says how many of its checks held."""
    missing = harness.node_package(package)
    if missing:
        print(f"SKIPPED: the tests with npm's {package} because {missing}", file=sys.stderr)
        test.skipTest(missing)
    copy = harness.NODE / script  # Node looks for packages beside the script
    copy.write_text((pathlib.Path(__file__).resolve().parent / script).read_text())
    done = subprocess.run(["node", copy, test.server.url], capture_output=True, text=True, timeout=120)
    test.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    test.assertIn(f"all {held} held", done.stdout)

"""What the server's tests share: the binary under test, what could not be had, and a server for a whole class."""

import time
import unittest

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

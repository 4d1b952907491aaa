#!/usr/bin/env python3
"""Models by name from the package: fetched by Python's own HTTP, from a hub that speaks it (tests/hub/fake_hub.py).

    PYTHONPATH=build/dev/python tests/python/fetch_test.py [TEST ...]

What is done with what comes is src/hub's, which tests/hub_test.py is about; here is who brings it.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import millrace
from millrace import _millrace

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "hub"))
from fake_hub import FakeHub, Repository  # noqa: E402

TINY = (ROOT / "tests/golden/models/llama3/model.gguf").read_bytes()
BIG = random.Random(1).randbytes(6 << 20)
STRANGE = re.compile(r"^(HF_|HUGGINGFACE_|XDG_|SSL_)|_proxy$", re.IGNORECASE)


def fetch(name, progress=None):
    return Path(_millrace.find_model(name, progress)[0])


class Fetch(unittest.TestCase):
    def setUp(self):
        self.path = Path(tempfile.mkdtemp(prefix="millrace-fetch-test-"))
        self.addCleanup(shutil.rmtree, self.path, ignore_errors=True)
        before = dict(os.environ)
        self.addCleanup(lambda: (os.environ.clear(), os.environ.update(before)))
        for name in [name for name in os.environ if STRANGE.search(name)]:
            del os.environ[name]
        os.environ["HF_HOME"] = str(self.path / "home")

    def hub(self, repositories, **options):
        hub = FakeHub({name: files if isinstance(files, Repository) else Repository(files)
                       for name, files in repositories.items()}, **options)
        self.addCleanup(hub.close)
        os.environ["HF_ENDPOINT"] = hub.api.url
        return hub

    def noted(self):
        """Bytes that an unfinished download has noted to be there: every two seconds."""
        states = [json.loads(path.read_text()) for path in self.path.rglob("*.state")]
        return sum(last - first for state in states for first, last in state["have"])

    def refused(self, piece, name, kind=millrace.BadInputError):
        with self.assertRaises(kind) as caught:
            millrace.LLM(name)
        self.assertIn(piece, str(caught.exception))
        self.assertEqual(str(caught.exception).count("\n"), 0)

    def assert_whole(self, path, data=BIG):
        self.assertEqual(hashlib.sha256(path.read_bytes()).digest(), hashlib.sha256(data).digest())
        self.assertEqual([p for p in (self.path / "home").glob("hub/*/blobs/*") if "." in p.name], [])

    def test_a_name_becomes_a_model(self):
        hub = self.hub({"test/tiny": {"tiny-Q8_0.gguf": TINY, "README.md": b"hello"}})
        with millrace.LLM("hf:test/tiny:Q8_0", device="cpu", ctx=64, threads=1) as llm:
            self.assertEqual(len(llm.generate([1, 2, 3], max_tokens=3, ignore_eos=True)[0].token_ids), 3)
        asked, sent = len(hub.api.log), hub.sent
        self.assertEqual(sent, len(TINY))
        self.assertTrue(all(entry["headers"]["User-Agent"].startswith("millrace/") for entry in hub.api.log))
        os.environ["HF_HUB_OFFLINE"] = "1"
        millrace.LLM("hf:test/tiny", device="cpu", ctx=64, threads=1).close()
        self.assertEqual((len(hub.api.log), hub.sent), (asked, sent))
        self.refused("HF_HUB_OFFLINE", "hf:test/other")

    def test_ranges_and_progress(self):
        hub = self.hub({"test/big": {"big.gguf": BIG}})
        told = []
        self.assert_whole(fetch("hf:test/big", lambda done, total: told.append((done, total))))
        self.assertEqual(told[-1], (len(BIG), len(BIG)))
        self.assertGreater(len(hub.cdn.log), 1)
        self.assertTrue(all("Range" in entry["headers"] for entry in hub.cdn.log))
        self.assertEqual(hub.sent, len(BIG))

    def test_cut_connections_go_on(self):
        hub = self.hub({"test/big": {"big.gguf": BIG}})
        hub.cut_after, hub.cuts = 200_000, 5
        self.assert_whole(fetch("hf:test/big"))
        self.assertLess(hub.sent, 1.3 * len(BIG))

    def test_no_ranges(self):
        self.hub({"test/big": {"big.gguf": BIG}}).ranges = False
        self.assert_whole(fetch("hf:test/big"))

    def test_small_files_too(self):
        config = b'{"a": 1}'
        self.hub({"test/st": {"config.json": config, "model.safetensors": BIG[:300_000]}})
        path = fetch("hf:test/st")
        self.assertEqual((path / "config.json").read_bytes(), config)

    def test_wrong_bytes_are_refused(self):
        self.hub({"test/big": {"big.gguf": BIG}}).wrong = True
        self.refused("SHA-256", "hf:test/big", millrace.Error)

    def test_the_token_stays_with_the_hub(self):
        hub = self.hub({"test/big": Repository({"big.gguf": BIG[:300_000]}, private=True)}, token="secret")
        self.refused("HF_TOKEN", "hf:test/big")
        os.environ["HF_TOKEN"] = "secret"
        self.assert_whole(fetch("hf:test/big"), BIG[:300_000])
        self.assertIn("Bearer secret", [entry["headers"].get("Authorization") for entry in hub.api.log])
        self.assertNotIn("secret", str(hub.cdn.log))

    def test_what_is_not_there(self):
        self.hub({"test/big": {"big-Q8_0.gguf": BIG}})
        self.refused("Q4_K_M", "hf:test/big:Q4_K_M")
        self.refused("test/none", "hf:test/none")
        os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
        self.refused("127.0.0.1:9", "hf:test/big", millrace.FileError)

    def test_a_thread_goes_on_meanwhile(self):
        hub = self.hub({"test/big": {"big.gguf": BIG}})
        hub.hold(len(BIG) // 2)
        fetched = []
        thread = threading.Thread(target=lambda: fetched.append(fetch("hf:test/big")))
        thread.start()
        while hub.sent < len(BIG) // 2:  # the hub is a thread of this process too
            self.assertTrue(thread.is_alive())
            time.sleep(0.001)
        hub.release()
        thread.join()
        self.assert_whole(fetched[0])

    def test_control_c_ends_it_and_it_goes_on_later(self):
        hub = self.hub({"test/big": {"big.gguf": BIG}})
        hub.hold(len(BIG) // 2)
        program = "import millrace\ntry:\n    millrace.LLM('hf:test/big')\nexcept KeyboardInterrupt:\n    print('left')\n"
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        while not self.noted():  # what was sent may still lie in a socket
            self.assertIsNone(child.poll())
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        self.assertEqual(child.communicate(timeout=60)[0], "left\n")
        sent = hub.sent
        hub.release()
        self.assert_whole(fetch("hf:test/big"))
        self.assertLess(hub.sent - sent, len(BIG))

    @unittest.skipUnless(__import__("importlib.util").util.find_spec("tqdm"), "tqdm is not installed")
    def test_a_bar(self):
        self.hub({"test/tiny": {"tiny.gguf": TINY}})
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            millrace.LLM("hf:test/tiny", device="cpu", ctx=64, threads=1, progress=True).close()
        self.assertIn("loading", shown.getvalue())


if __name__ == "__main__":
    unittest.main()

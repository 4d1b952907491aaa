"""millrace pull, list, rm and names for models, against a hub that speaks real HTTP (tests/hub/fake_hub.py).

    tests/hub_test.py PATH/TO/millrace [unittest options]

The other side of the cache is the real huggingface_hub from PyPI (kept in build/venv): each finds what the other has
fetched. Without it those tests skip and say so.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import pty
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "hub"))

from fake_hub import FakeHub, Proxy, Repository, git_sha1  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden/models"
PACKAGE = "huggingface_hub==2.4.0"
BINARY = ""
TIMEOUT = 120  # of a command, on a machine that is busy with other things
TINY = (GOLDEN / "llama3/model.gguf").read_bytes()
BIG = random.Random(1).randbytes(12 << 20)
SMALL = random.Random(2).randbytes(300_000)
# What the environment of the tests may say of hubs, caches and proxies is nothing to these tests.
STRANGE = re.compile(r"^(HF_|HUGGINGFACE_|XDG_|SSL_)|_proxy$", re.IGNORECASE)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class HubTest(unittest.TestCase):
    def setUp(self):
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="millrace-hub-test-"))
        self.addCleanup(shutil.rmtree, self.path, ignore_errors=True)

    def hub(self, repositories, **options):
        hub = FakeHub({name: value if isinstance(value, Repository) else Repository(value)
                       for name, value in repositories.items()}, **options)
        self.addCleanup(hub.close)
        self.fake = hub
        return hub

    def environment(self, **more):
        env = {name: value for name, value in os.environ.items() if not STRANGE.search(name)}
        if hasattr(self, "fake"):
            env["HF_ENDPOINT"] = self.fake.api.url
        return {**env, "HF_HOME": str(self.path / "home"), **more}

    @property
    def cache(self):
        return self.path / "home/hub"

    def command(self, *args, env=None, **options):
        return subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, timeout=TIMEOUT,
                              env=self.environment(**(env or {})), cwd=self.path, stdin=subprocess.DEVNULL, **options)

    def good(self, *args, **options):
        done = self.command(*args, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def bad(self, *args, says=(), **options):
        done = self.command(*args, **options)
        self.assertEqual(done.returncode, 2, (args, done.stdout, done.stderr))
        last = done.stderr.splitlines()[-1]
        self.assertTrue(last.startswith("millrace: "), done.stderr)
        for piece in says:
            self.assertIn(piece, last)
        return last

    def pull(self, name, *args, **options):
        """The path, of a model that need not be one."""
        return pathlib.Path(self.good("pull", name, "--any", *args, **options).strip())

    def repository(self, name):
        return self.cache / ("models--" + name.replace("/", "--"))

    def leftovers(self):
        """Files in blobs/ that are no whole content."""
        return [path for path in self.cache.glob("*/blobs/*") if "." in path.name]


class Choice(HubTest):
    FILES = {"model-Q4_K_M.gguf": SMALL + b"4", "model-Q8_0.gguf": SMALL + b"8", "model-IQ2_XXS.gguf": SMALL + b"2",
             "model-BF16-00001-of-00002.gguf": SMALL + b"a", "model-BF16-00002-of-00002.gguf": SMALL + b"b",
             "mmproj-F16.gguf": SMALL, "UD-Q4_K_XL/model.gguf": SMALL + b"x", "README.md": b"hello",
             "../../evil.gguf": b"no", "config.json": b"{}"}

    def test_names(self):
        self.hub({"test/quants": self.FILES})
        for name, file in (("", "model-Q4_K_M.gguf"), (":q4_k_m", "model-Q4_K_M.gguf"), (":Q8", "model-Q8_0.gguf"),
                           (":model-Q8_0.gguf", "model-Q8_0.gguf"), (":model-Q8_0", "model-Q8_0.gguf"),
                           ("@main:bf16", "model-BF16-00001-of-00002.gguf"), (":Q4_K_XL", "UD-Q4_K_XL/model.gguf"),
                           (":iq2_xxs", "model-IQ2_XXS.gguf")):
            with self.subTest(name):
                path = self.pull("hf:test/quants" + name)
                commit = self.fake.repositories["test/quants"].commit
                self.assertEqual(path, self.repository("test/quants") / "snapshots" / commit / file)
                self.assertEqual(path.read_bytes(), self.FILES[file])
                self.assertTrue(path.is_symlink())
        part = self.repository("test/quants") / "snapshots" / commit / "model-BF16-00002-of-00002.gguf"
        self.assertEqual(part.read_bytes(), SMALL + b"b")
        self.assertFalse(list(self.path.rglob("*evil*")))
        message = self.bad("pull", "hf:test/quants:Q5_K_M", says=["Q5_K_M", "Q4_K_M", "Q8_0"])
        self.assertNotIn("mmproj", message)

    def test_says_what_it_chose(self):
        self.hub({"test/quants": self.FILES})
        done = self.command("pull", "hf:test/quants", "--any")
        self.assertRegex(done.stderr, r"chosen +Q4_K_M of .*Q8_0")
        self.assertIn("license apache-2.0", done.stderr)
        self.assertRegex(done.stderr, r"fetched .*hashes are right")

    def test_addresses_and_bad_names(self):
        hub = self.hub({"test/quants": self.FILES})
        hub.repositories["test/quants"].revisions.add("refs/pr/1")
        address = "https://huggingface.co/test/quants/blob/main/model-Q8_0.gguf"
        self.assertEqual(self.pull(address).name, "model-Q8_0.gguf")
        self.assertEqual(self.pull("hf.co/test/quants:Q8_0").name, "model-Q8_0.gguf")
        self.assertEqual(self.pull("hf:test/quants@refs/pr/1:Q8_0").name, "model-Q8_0.gguf")
        self.assertEqual((self.repository("test/quants") / "refs/refs/pr/1").read_text(),
                         hub.repositories["test/quants"].commit)
        for name in ("hf:", "hf:a/b/c", "hf:../x", "hf:a/..", "hf:a/b:../../x", "hf:a/b@../x", "hf:a/b:", "hf:a//b"):
            with self.subTest(name):
                self.bad("pull", name, says=["hf:owner/name"])
        self.bad("pull", "model.gguf", says=["hf:owner/name"])
        self.assertFalse([entry for entry in hub.api.log if ".." in entry["path"]])

    def test_unloadable_is_refused_before_it_is_fetched(self):
        hub = self.hub({"test/iq": {"m-IQ2_XXS.gguf": SMALL}, "test/torch": {"pytorch_model.bin": SMALL},
                        "test/clip": {"clip.gguf": (GOLDEN / "llama3/model.gguf").read_bytes().replace(b"llama", b"clamp")}})
        self.bad("pull", "hf:test/iq", says=["IQ2_XXS"])
        self.bad("pull", "hf:test/torch", says=["pytorch_model.bin", "safetensors"])
        self.bad("pull", "hf:test/clip", says=["hf:test/clip", "clamp"])
        self.assertFalse(list(self.cache.glob("*/blobs/*")))
        self.assertTrue(self.pull("hf:test/clip").is_file())
        self.assertTrue(hub.sent)


class Download(HubTest):
    def big(self, **options):
        return self.hub({"test/big": {"big.gguf": BIG}}, **options)

    def assert_whole(self, path, data=BIG):
        self.assertEqual(sha256(path.read_bytes()), sha256(data))
        self.assertEqual(os.readlink(path), f"../../blobs/{sha256(data)}")
        self.assertEqual(self.leftovers(), [])

    def test_parallel_ranges(self):
        hub = self.big()
        hub.delay = 0.002
        self.assert_whole(self.pull("hf:test/big"))
        ranges = [entry["headers"]["Range"] for entry in hub.cdn.log]
        self.assertEqual(len(ranges), 12)
        self.assertEqual(hub.sent, len(BIG))
        connections = {entry["path"] for entry in hub.cdn.log}
        self.assertEqual(len(connections), 1)  # one signed address for all
        self.pull("hf:test/big")  # nothing is missing: nothing is fetched
        self.assertEqual(hub.sent, len(BIG))

    def test_the_token_stays_with_the_hub(self):
        hub = self.hub({"test/big": Repository({"big.gguf": SMALL}, private=True)}, token="secret")
        self.bad("pull", "hf:test/big", says=["HF_TOKEN"])
        self.assert_whole(self.pull("hf:test/big", env={"HF_TOKEN": "secret"}), SMALL)
        self.assertTrue(all(entry["headers"].get("Authorization") in (None, "Bearer secret") for entry in hub.api.log))
        self.assertIn("Bearer secret", [entry["headers"].get("Authorization") for entry in hub.api.log])
        self.assertTrue(hub.cdn.log)
        for entry in hub.cdn.log:
            self.assertNotIn("secret", str(entry))

    def test_token_files(self):
        hub = self.hub({"test/big": Repository({"big.gguf": SMALL}, private=True)}, token="secret")
        home = self.path / "home"
        home.mkdir()
        (home / "token").write_text("secret\n")
        self.pull("hf:test/big")
        shutil.rmtree(home)
        (self.path / "other").write_text("secret")
        self.pull("hf:test/big", env={"HF_TOKEN_PATH": str(self.path / "other")})
        self.assertTrue(hub.sent)

    def test_cut_connections(self):
        hub = self.big()
        hub.cut_after, hub.cuts = 300_000, 10
        self.assert_whole(self.pull("hf:test/big"))
        self.assertEqual(hub.cuts, 0)
        self.assertLess(hub.sent, 1.2 * len(BIG))  # what had come was kept

    def noted(self):
        """Bytes that an unfinished pull has noted to be there."""
        states = [json.loads(path.read_text()) for path in self.cache.glob("*/blobs/*.state")]
        return sum(last - first for state in states for first, last in state["have"])

    def interrupted(self, end):
        """Starts a pull, ends it in the middle and returns how much of the file had been sent."""
        before = self.fake.sent
        self.fake.hold(len(BIG) // 3)
        process = subprocess.Popen([BINARY, "pull", "hf:test/big", "--any", "--json"], env=self.environment(),
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while self.fake.sent - before < len(BIG) // 3:
            self.assertIsNone(process.poll(), "it ended before it was interrupted")
            time.sleep(0.01)
        # It notes what it has every two seconds, and when it is asked to end.
        while end == signal.SIGKILL and self.noted() < len(BIG) // 4:
            self.assertIsNone(process.poll(), "it ended before it was interrupted")
            time.sleep(0.01)
        process.send_signal(end)
        process.communicate(timeout=TIMEOUT)
        sent = self.fake.sent
        self.fake.release()
        self.assertEqual(process.returncode, -end if end == signal.SIGKILL else 128 + end)
        return sent

    def test_goes_on_after_a_kill(self):
        hub = self.big()
        for end in (signal.SIGKILL, signal.SIGINT):
            with self.subTest(end):
                shutil.rmtree(self.cache, ignore_errors=True)
                before = hub.sent
                sent = self.interrupted(end)
                self.assertEqual(len(self.leftovers()), 2)
                self.assertFalse(list(self.cache.glob("*/snapshots/*/*")))
                listed = json.loads(self.good("list", "--json"))
                self.assertEqual(([], "hf:test/big"), (listed["models"], listed["incomplete"][0]["name"]))
                asked = len(hub.cdn.log)
                self.assert_whole(self.pull("hf:test/big"))
                self.assertLess(hub.sent - sent, len(BIG) - (sent - before) // 4)
                for entry in hub.cdn.log[asked:]:
                    self.assertEqual(entry["headers"].get("If-Range"), f'"{sha256(BIG)[:32]}"')

    def test_damaged_leftovers(self):
        self.big()
        self.interrupted(signal.SIGINT)
        partial = next(path for path in self.leftovers() if path.name.endswith(".incomplete"))
        with open(partial, "r+b") as file:
            file.write(b"wrong")
        self.assert_whole(self.pull("hf:test/big"))

    def test_another_file_meanwhile(self):
        self.big()
        self.interrupted(signal.SIGINT)
        state = next(path for path in self.leftovers() if path.name.endswith(".state"))
        state.write_text(state.read_text().replace(sha256(BIG)[:32], "0" * 32))  # what If-Range is asked with
        self.assert_whole(self.pull("hf:test/big"))

    def test_wrong_hash(self):
        hub = self.big()
        hub.wrong = True
        self.bad("pull", "hf:test/big", "--any", says=["big.gguf", "SHA-256", sha256(BIG)])
        self.assertEqual([path for path in self.cache.rglob("*") if path.is_file() and ".locks" not in path.parts], [])
        hub.wrong = False
        self.assert_whole(self.pull("hf:test/big"))

    def test_wrong_small_file(self):
        config = b'{"a": 1}'
        hub = self.hub({"test/st": {"config.json": config, "model.safetensors": SMALL}})
        sibling = hub.repositories["test/st"].sibling
        hub.repositories["test/st"].sibling = lambda path, data: {
            **sibling(path, data), **({"blobId": "1" * 40} if path == "config.json" else {})}
        self.bad("pull", "hf:test/st", "--any", says=["config.json", "git hash", git_sha1(config)])
        self.assertFalse(list(self.cache.glob("*/snapshots/*/config.json")))

    def test_no_ranges(self):
        hub = self.big()
        hub.ranges = False
        self.assert_whole(self.pull("hf:test/big"))
        shutil.rmtree(self.cache)
        hub.cut_after, hub.cuts = 4 << 20, 9  # more than the connections that ask first
        self.assert_whole(self.pull("hf:test/big"))
        self.assertEqual(hub.cuts, 0)

    def test_expired_addresses(self):
        hub = self.big()
        hub.expired = {"1"}
        self.assert_whole(self.pull("hf:test/big"))
        self.assertGreater(hub.signature, 1)

    def test_two_at_once(self):
        hub = self.big()
        hub.delay = 0.002
        results = []
        threads = [threading.Thread(target=lambda: results.append(self.command("pull", "hf:test/big", "--any")))
                   for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([result.returncode for result in results], [0, 0, 0], results)
        self.assertEqual(hub.sent, len(BIG))
        self.assert_whole(pathlib.Path(results[0].stdout.strip()))

    def test_progress_as_json(self):
        hub = self.big()
        hub.hold(len(BIG) // 3)
        process = subprocess.Popen([BINARY, "pull", "hf:test/big", "--any", "--json"], env=self.environment(),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines = []
        for line in process.stdout:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "progress" and lines[-1]["bytes_per_s"] > 0:
                hub.release()
        self.assertEqual(process.wait(TIMEOUT), 0, process.stderr.read())
        process.communicate()
        events = [line["event"] for line in lines]
        self.assertEqual((events[0], events[-1]), ("plan", "done"))
        self.assertEqual(lines[0]["bytes"], len(BIG))
        progress = [line for line in lines if line["event"] == "progress"]
        self.assertEqual([line["done"] for line in progress], sorted(line["done"] for line in progress))
        self.assertTrue(any(line["bytes_per_s"] > 0 and line["seconds_left"] > 0 for line in progress), progress)

    def test_bar_on_a_terminal(self):
        hub = self.big()
        hub.hold(len(BIG) // 3)
        master, slave = pty.openpty()
        process = subprocess.Popen([BINARY, "pull", "hf:test/big", "--any"], env=self.environment(), stdin=slave,
                                   stdout=subprocess.PIPE, stderr=slave)
        os.close(slave)
        shown = read_terminal(master, until=" left")  # not before the first bytes have come
        hub.release()
        shown += read_terminal(master)
        process.communicate(timeout=TIMEOUT)
        self.assertRegex(shown, r"█+░+ +\d+%  [\d.]+ MiB of 12.0 MiB, [\d.]+ MiB/s, 0:\d\d left")


class Disk(HubTest):
    def test_full(self):
        self.hub({"test/big": {"big.gguf": BIG}})
        small = self.path / "small"
        small.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(small)], capture_output=True)
        if mounted.returncode != 0:
            self.skipTest("no right to mount a small file system")
        try:
            self.bad("pull", "hf:test/big", "--any", env={"HF_HUB_CACHE": str(small)}, says=["disk space", "expected"])
            self.assertFalse(list(small.glob("*/blobs/*")))
        finally:
            subprocess.run(["umount", str(small)], check=True)

    def test_no_room_while_writing(self):
        self.hub({"test/big": {"big.gguf": BIG}})
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # noqa: E731
        self.bad("pull", "hf:test/big", "--any", preexec_fn=limit, says=["big.gguf", "File too large"])
        self.assertFalse(list(self.cache.glob("*/blobs/*")))

    def test_read_only(self):
        self.hub({"test/big": {"big.gguf": SMALL}})
        (self.path / "file").write_text("")
        self.bad("pull", "hf:test/big", "--any", env={"HF_HUB_CACHE": str(self.path / "file")}, says=["file"])


class Refusals(HubTest):
    def setUp(self):
        super().setUp()
        self.hub({"test/open": {"m.gguf": SMALL}, "test/gated": Repository({"m.gguf": SMALL}, gated=True)}, token="right")

    def test_who_may_not(self):
        self.bad("pull", "hf:test/none", says=["test/none", "no such repository"])
        self.bad("pull", "hf:test/none", env={"HF_TOKEN": "right"}, says=["no such repository"])
        self.bad("pull", "hf:test/open@nowhere", says=["nowhere", "revision"])
        self.bad("pull", "hf:test/gated", "--any", says=["gated", "accept its terms", "HF_TOKEN"])
        self.bad("pull", "hf:test/gated", "--any", env={"HF_TOKEN": "wrong"}, says=["gated", "does not give access"])
        self.pull("hf:test/gated", env={"HF_TOKEN": "right"})

    def test_passing_trouble(self):
        self.fake.fail = [("api", "/api/", 503, {}), ("api", "/api/", 429, {"Retry-After": "1"}),
                          ("api", "/resolve/", 500, {}), ("cdn", "", 502, {}), ("cdn", "", 429, {"Retry-After": "1"})]
        start = time.monotonic()
        self.pull("hf:test/open")
        self.assertEqual(self.fake.fail, [])
        self.assertGreater(time.monotonic() - start, 2.0)

    def test_lasting_trouble(self):
        self.fake.fail = [("api", "/api/", 500, {})] * 100
        self.bad("pull", "hf:test/open", says=["500"])
        self.assertEqual(len(self.fake.fail), 95)
        self.fake.fail = [("api", "/api/", 429, {"Retry-After": "3600"})]
        self.bad("pull", "hf:test/open", says=["429", "3600 s"])

    def test_nobody_there(self):
        self.bad("pull", "hf:test/open", env={"HF_ENDPOINT": "http://127.0.0.1:1"}, says=["127.0.0.1:1"])
        self.bad("pull", "hf:test/open", env={"HF_ENDPOINT": "ftp://x"}, says=["HF_ENDPOINT"])

    def test_no_hub(self):
        for body in (b"<html>", b"[]", b'{"sha": 3}', b'{"sha": "%s"}' % (b"0" * 40)):
            with self.subTest(body):
                self.fake.answer_info = lambda handler, rest: handler.wfile.write(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                self.bad("pull", "hf:test/open", says=["expected the description of a repository"])


class Offline(HubTest):
    def test_what_is_there(self):
        hub = self.hub({"test/tiny": {"tiny-F32.gguf": TINY}})
        offline = {"HF_HUB_OFFLINE": "1"}
        self.bad("inspect", "hf:test/tiny", env=offline, says=["HF_HUB_OFFLINE", "nothing is there"])
        self.pull("hf:test/tiny")
        asked = len(hub.api.log)
        for name in ("hf:test/tiny", "hf:test/tiny:f32", "hf:test/tiny@" + hub.repositories["test/tiny"].commit):
            self.assertIn("llama", self.good("inspect", name, env=offline))
        self.bad("inspect", "hf:test/tiny:Q4_K_M", env=offline, says=["hf:test/tiny:F32"])
        self.bad("pull", "hf:test/tiny", env=offline, says=["HF_HUB_OFFLINE"])
        self.good("inspect", "hf:test/tiny")  # what is here needs no network either
        self.assertEqual(len(hub.api.log), asked)


class Proxies(HubTest):
    def test_plain(self):
        proxy = Proxy()
        self.addCleanup(proxy.close)
        hub = self.hub({"test/open": {"m.gguf": SMALL}})
        for name in ("http_proxy", "HTTP_PROXY"):
            with self.subTest(name):
                shutil.rmtree(self.cache, ignore_errors=True)
                before = len(proxy.log)
                self.pull("hf:test/open", env={name: proxy.url})
                self.assertGreater(len(proxy.log), before)
                self.assertTrue(any(str(hub.cdn.port) in entry["path"] for entry in proxy.log[before:]))
        before = len(proxy.log)
        shutil.rmtree(self.cache)
        self.pull("hf:test/open", env={"http_proxy": proxy.url, "NO_PROXY": "localhost"})
        self.assertEqual(len(proxy.log), before)

    def test_tunnel(self):
        if not shutil.which("openssl"):
            self.skipTest("no openssl to make a certificate with")
        key, certificate = self.path / "key.pem", self.path / "certificate.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                        "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost", "-addext",
                        "subjectAltName=DNS:localhost"], check=True, capture_output=True)
        proxy = Proxy()
        self.addCleanup(proxy.close)
        self.hub({"test/open": {"m.gguf": SMALL}}, certificate=(certificate, key))
        self.bad("pull", "hf:test/open", says=["certificate"])  # nobody vouches for it
        self.pull("hf:test/open", env={"HTTPS_PROXY": proxy.url, "SSL_CERT_FILE": str(certificate)})
        self.assertEqual({entry["method"] for entry in proxy.log}, {"CONNECT"})


class Kinds(HubTest):
    def test_safetensors(self):
        folder = GOLDEN / "llama3" / "hf"
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.hub({"test/st": {**files, "README.md": b"x", "original/consolidated.00.pth": b"y"}})
        path = pathlib.Path(self.good("pull", "hf:test/st").strip())
        self.assertEqual(path.name, self.fake.repositories["test/st"].commit)
        self.assertIn("config.json", os.listdir(path))
        self.assertNotIn("README.md", os.listdir(path))
        self.assertNotIn("original", os.listdir(path))
        there = json.loads(self.good("inspect", "hf:test/st", "--json"))
        here = json.loads(self.good("inspect", folder, "--json"))
        self.assertEqual((there["config"].pop("name"), here["config"].pop("name")), ("st", "hf"))
        self.assertEqual((there["config"], there["tensors"]), (here["config"], here["tensors"]))

    def test_head_is_enough(self):
        head_bytes = 6 << 20
        blob = self.path / "large.gguf"
        self.good("synth", "tiny-llama", blob)
        data = blob.read_bytes()
        hub = self.hub({"test/large": {"large-F32.gguf": data}})
        remote = json.loads(self.good("inspect", "hf:test/large", "--json"))
        local = json.loads(self.good("inspect", blob, "--json"))
        self.assertEqual(remote["path"], "hf:test/large")
        for key in ("config", "metadata", "tensors"):
            self.assertEqual(remote[key], local[key])
        self.assertEqual(remote["memory"]["total_bytes"], local["memory"]["total_bytes"])
        self.assertLessEqual(hub.sent, head_bytes)
        self.assertFalse(list(self.cache.glob("*/blobs/*")))
        self.assertFalse(list(pathlib.Path(tempfile.gettempdir()).glob("millrace-head-*/large-F32.gguf")))


class Run(HubTest):
    def test_fetches_and_answers(self):
        hub = self.hub({"test/tiny": {"tiny-F32.gguf": TINY}})
        answer = ("-p", "hello", "-n", "4", "--temp", "0", "--ignore-end", "-q")
        refusal = self.bad("run", "hf:test/tiny", *answer, says=["millrace pull hf:test/tiny", "--yes"])
        self.assertIn(f"{len(TINY) / 1024:.1f} KiB", refusal)
        self.assertFalse(list(self.cache.glob("*/blobs/*")))
        done = self.command("run", "hf:test/tiny", "--yes", *answer)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"memory +[\d.]+ MiB at a context of [\d,]+, of [\d.]+ GiB available: it fits")
        self.assertRegex(done.stderr, r"speed +at most [\d.]+ tokens/s: each reads [\d.]+ KiB of weights, at [\d.]+ GB/s")
        self.assertEqual(done.stdout, self.good("run", GOLDEN / "llama3/model.gguf", *answer))
        asked = len(hub.api.log)
        self.assertEqual(done.stdout, self.good("run", "hf:test/tiny", *answer))  # now without a question
        self.assertEqual(len(hub.api.log), asked)
        self.assertEqual(self.good("tokenize", "hf:test/tiny", "hi"), self.good("tokenize", GOLDEN / "llama3/model.gguf", "hi"))

    def ask(self, typed):
        master, slave = pty.openpty()
        process = subprocess.Popen([BINARY, "tokenize", "hf:test/tiny", "hello"], env=self.environment(), stdin=slave,
                                   stdout=subprocess.PIPE, stderr=slave)
        os.close(slave)
        shown = read_terminal(master, until="[y/N]")
        os.write(master, typed)
        shown += read_terminal(master)
        return process.communicate(timeout=TIMEOUT)[0], process.returncode, shown

    def test_asks(self):
        self.hub({"test/tiny": {"tiny-F32.gguf": TINY}})
        for typed in (b"n\n", b"\n"):
            out, status, shown = self.ask(typed)
            self.assertEqual((out, status), (b"", 2), shown)
            self.assertIn("was not fetched", shown)
        out, status, shown = self.ask(b"y\n")
        self.assertEqual(status, 0, shown)
        self.assertTrue(out)

    def test_serve_names_it(self):
        self.hub({"test/tiny.v1": {"tiny-F32.gguf": TINY}})
        process = subprocess.Popen([BINARY, "serve", "hf:test/tiny.v1", "--yes", "--port", "0"], env=self.environment(),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        while line := process.stdout.readline():
            if "listening" in line:
                break
        self.assertIn("millrace: tiny.v1 on", line)


class Cache(HubTest):
    FILES = {"m-Q4_K_M.gguf": SMALL + b"4", "m-Q8_0.gguf": SMALL + b"8"}

    def test_list_and_rm(self):
        hub = self.hub({"test/quants": self.FILES, "test/tiny": {"tiny-F32.gguf": TINY}})
        self.assertIn("no models", self.good("list"))
        for name in ("hf:test/quants:Q4_K_M", "hf:test/quants:Q8_0", "hf:test/tiny"):
            self.pull(name)
        models = {model["name"]: model for model in json.loads(self.good("list", "--json"))["models"]}
        self.assertEqual(set(models), {"hf:test/quants:Q4_K_M", "hf:test/quants:Q8_0", "hf:test/tiny:F32"})
        tiny = models["hf:test/tiny:F32"]
        self.assertEqual((tiny["architecture"], tiny["bytes"], tiny["quantization"], tiny["files"]),
                         ("llama", len(TINY), "F32", ["tiny-F32.gguf"]))
        self.assertRegex(self.good("list"), r"hf:test/tiny:F32 +[\d.]+ KiB +1 +F32 +llama +just now")
        self.assertLess(time.time() - tiny["last_used"], 100)

        self.bad("rm", "hf:test/quants:Q4_K_M", says=["--yes"])
        self.bad("rm", "hf:test/other", "--yes", says=["millrace list"])
        self.bad("rm", "hf:test/quants:Q5_0", "--yes", says=["millrace list"])
        self.good("rm", "hf:test/quants:Q4_K_M", "--yes")
        names = {model["name"] for model in json.loads(self.good("list", "--json"))["models"]}
        self.assertEqual(names, {"hf:test/quants:Q8_0", "hf:test/tiny:F32"})
        self.assertEqual([path.name for path in self.repository("test/quants").glob("blobs/*")],
                         [sha256(self.FILES["m-Q8_0.gguf"])])
        self.good("rm", "hf:test/quants", "hf:test/tiny", "--yes")
        self.assertEqual([path for path in self.cache.rglob("*") if path.is_file()], [])
        self.assertTrue(hub.api.log)

    def test_content_of_two_snapshots_stays(self):
        hub = self.hub({"test/quants": self.FILES})
        self.pull("hf:test/quants:Q4_K_M")
        old = hub.repositories["test/quants"].commit
        hub.repositories["test/quants"] = Repository({**self.FILES, "README.md": b"new"})
        self.pull("hf:test/quants:Q4_K_M")
        self.assertEqual(hub.sent, len(SMALL) + 1)  # the same content is not fetched again
        new = hub.repositories["test/quants"].commit
        self.assertEqual((self.repository("test/quants") / "refs/main").read_text(), new)
        self.good("rm", f"hf:test/quants@{old}", "--yes")
        self.assertEqual([path.name for path in self.repository("test/quants").glob("snapshots/*")], [new])
        self.assertEqual(len(list(self.repository("test/quants").glob("blobs/*"))), 1)
        self.good("rm", f"hf:test/quants@{new}:Q4_K_M", "--yes")
        self.assertEqual(list(self.repository("test/quants").glob("blobs/*")), [])
        self.assertEqual(list(self.repository("test/quants").glob("refs/*")), [])

    def test_where_the_cache_is(self):
        self.hub({"test/tiny": {"tiny-F32.gguf": TINY}})
        places = ({"HF_HUB_CACHE": "a/hub"}, "a/hub"), ({"HF_HOME": "b"}, "b/hub"), \
            ({"HF_HOME": "", "XDG_CACHE_HOME": "c"}, "c/huggingface/hub"), \
            ({"HF_HOME": "", "HOME": "d"}, "d/.cache/huggingface/hub")
        for variables, folder in places:
            with self.subTest(folder):
                env = {name: str(self.path / value) if value else "" for name, value in variables.items()}
                path = self.pull("hf:test/tiny", env=env)
                self.assertTrue(path.is_relative_to(self.path / folder), path)


class Known(HubTest):
    def test_names(self):
        listed = json.loads(self.good("list", "--known", "--json"))["known"]
        self.assertIn("gpt-oss-20b", [model["name"] for model in listed])
        for model in listed:
            self.assertRegex(model["model"], r"^hf:[\w.-]+/[\w.-]+:\w+$")
        self.bad("run", "gpt-oss-20", "-p", "x", says=["did you mean gpt-oss-20b", "millrace list --known"])
        self.bad("run", "qwen3-4", "-p", "x", says=["qwen3-4b"])
        self.assertNotIn("did you mean", self.bad("run", "xyzzy", "-p", "x"))

    def test_fetched_by_name(self):
        self.hub({"ggml-org/gpt-oss-20b-GGUF": {"gpt-oss-20b-mxfp4.gguf": (GOLDEN / "gpt-oss-w32/model.gguf").read_bytes()}})
        done = self.command("run", "GPT-OSS-20B", "-p", "x")
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"hf:ggml-org/gpt-oss-20b-GGUF:MXFP4")
        self.assertIn("millrace pull GPT-OSS-20B", done.stderr)
        self.good("pull", "gpt-oss-20b")
        self.assertTrue(self.good("run", "gpt-oss-20b", "-p", "x", "-n", "2", "--ignore-end", "-q"))

    def test_found_in_folders(self):
        (self.path / "models").mkdir()
        for name in ("Qwen3-4B-Instruct-2507-Q4_K_M.gguf", "qwen3-4b-IQ1_S.gguf"):  # another model, another quantization
            (self.path / "models" / name).write_bytes(TINY)
        self.hub({})
        self.bad("run", "qwen3-4b", "-p", "x", says=["Qwen/Qwen3-4B-GGUF"])
        shutil.copy(GOLDEN / "llama3/model.gguf", self.path / "models/Qwen3-4B-Q8_0.gguf")
        done = self.command("run", "qwen3-4b", "-p", "x", "-n", "2", "--ignore-end", "-q")
        self.assertEqual((done.returncode, done.stderr), (0, "millrace: qwen3-4b is models/Qwen3-4B-Q8_0.gguf\n"))
        shutil.copy(GOLDEN / "llama3/model.gguf", self.path / "qwen3-4b")
        self.assertEqual(self.command("run", "qwen3-4b", "-p", "x", "-n", "2", "-q").stderr, "")


class Interoperability(HubTest):
    """The same cache under the real huggingface_hub."""

    @classmethod
    def setUpClass(cls):
        from served import venv_python  # its skip ends the process: these tests are asked last

        with contextlib.suppress(SystemExit):
            cls.python = venv_python("the cache shared with huggingface_hub", PACKAGE)
            return
        raise unittest.SkipTest(f"{PACKAGE} cannot be had")

    def ask_python(self, code, **env):
        environment = self.environment(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1", **env)
        done = subprocess.run([self.python, "-c", code], env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def test_both_ways(self):
        config = b'{"model_type": "llama"}'
        hub = self.hub({"test/tiny": {"tiny-F32.gguf": TINY, "config.json": config}, "test/st": {
            path.name: path.read_bytes() for path in (GOLDEN / "llama3/hf").iterdir()}})
        with self.subTest("they find ours"):
            path = self.pull("hf:test/tiny")
            self.pull("hf:test/st")
            asked = len(hub.api.log) + len(hub.cdn.log)
            found = self.ask_python("""if True:
                from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download
                print(hf_hub_download("test/tiny", "tiny-F32.gguf", local_files_only=True))
                hf_hub_download("test/st", "model.safetensors", local_files_only=True)
                info = scan_cache_dir()
                assert not info.warnings, info.warnings
                assert {repo.repo_id for repo in info.repos} == {"test/tiny", "test/st"}
                assert all("main" in repo.refs for repo in info.repos)""")
            self.assertEqual(found, str(path))
            self.assertEqual(len(hub.api.log) + len(hub.cdn.log), asked)
            sent = hub.sent
            self.ask_python('from huggingface_hub import hf_hub_download as d; d("test/tiny", "tiny-F32.gguf")')
            self.assertEqual(hub.sent, sent)  # online it asks, and finds the content there
        with self.subTest("we find theirs"):
            shutil.rmtree(self.cache)
            path = self.ask_python("""if True:
                from huggingface_hub import hf_hub_download, snapshot_download
                snapshot_download("test/st")
                print(hf_hub_download("test/tiny", "tiny-F32.gguf"))""")
            asked = len(hub.api.log) + len(hub.cdn.log)
            self.good("inspect", "hf:test/tiny", env={"HF_HUB_OFFLINE": "1"})
            self.good("inspect", "hf:test/st")
            names = {model["name"] for model in json.loads(self.good("list", "--json"))["models"]}
            self.assertEqual(names, {"hf:test/tiny:F32", "hf:test/st:safetensors"})
            self.assertEqual(len(hub.api.log) + len(hub.cdn.log), asked)
            self.assertEqual(str(self.pull("hf:test/tiny")), path)
        with self.subTest("their lock is ours"):
            shutil.rmtree(self.cache)
            lock = self.cache / ".locks/models--test--tiny" / f"{sha256(TINY)}.lock"
            process = subprocess.Popen([self.python, "-c", f"""if True:
                import os, sys, filelock
                os.makedirs({str(lock.parent)!r})
                with filelock.FileLock({str(lock)!r}):
                    print("held", flush=True)
                    sys.stdin.readline()"""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.assertEqual(process.stdout.readline(), "held\n")
            self.bad("rm", "hf:test/tiny", "--yes", says=["millrace list"])
            ours = subprocess.Popen([BINARY, "pull", "hf:test/tiny", "--any", "--json"], env=self.environment(),
                                    stdout=subprocess.PIPE, text=True)
            lines = iter(ours.stdout.readline, "")
            self.assertTrue(any('"phase":"waiting"' in line for line in lines))
            self.bad("rm", "hf:test/tiny", "--yes", says=["under way"])
            process.communicate("\n")
            self.assertIn('"done"', ours.communicate(timeout=TIMEOUT)[0])


def read_terminal(master, until=None):
    """What a program writes to its terminal, until it ends or this text has come."""
    shown = b""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end and not (until and until.encode() in shown):
        if not select.select([master], [], [], 1)[0]:
            continue
        try:
            piece = os.read(master, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        shown += piece
    return shown.decode(errors="replace")


if __name__ == "__main__":
    BINARY = str(pathlib.Path(sys.argv.pop(1)).resolve())
    if "without libcurl" in subprocess.run([BINARY, "pull", "hf:a/b"], capture_output=True, text=True,
                                           env={**os.environ, "HF_HUB_OFFLINE": "1"}).stderr:
        print("SKIPPED: fetching models because this build has no libcurl; install it: apt-get install libcurl4-openssl-dev")
        sys.exit(77)
    unittest.main(verbosity=1)

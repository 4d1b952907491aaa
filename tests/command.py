"""Runs the real binary and holds what it says to the rules that all commands share. For cli_test.py and config_test.py."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TIMEOUT = 300  # of a command, on a machine that is busy with other things
# The machine's file, and its variables, are not a test's.
PLAIN = {**{name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}, "MILLRACE_CONFIG": "/dev/null"}
BINARY = ""  # begin() sets it


def begin():
    """The binary's path, taken from the command line."""
    global BINARY
    if len(sys.argv) < 2:
        sys.exit(f"usage: {pathlib.Path(sys.argv[0]).name} PATH/TO/millrace [unittest options]")
    BINARY = os.path.abspath(sys.argv.pop(1))
    return BINARY


def millrace(*args, stdin=b"", env=None, **options):
    return subprocess.run([BINARY, *map(str, args)], input=stdin, capture_output=True, timeout=TIMEOUT,
                          env={**PLAIN, **(env or {})}, **options)


class CommandTest(unittest.TestCase):
    """A folder of its own, with tiny random models that the binary writes itself; self.model is the first."""

    families = ("llama",)  # of `millrace synth tiny-NAME`

    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="millrace-test-")
        cls.path = pathlib.Path(cls.directory.name)
        cls.models = {name: cls.path / f"{name}.gguf" for name in cls.families}
        for name, path in cls.models.items():
            done = millrace("synth", f"tiny-{name}", path)
            assert done.returncode == 0, done.stderr
        cls.model = cls.models[cls.families[0]]

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    def good(self, *args, **options):
        done = millrace(*args, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.decode("utf-8")  # everything we print is UTF-8

    def bad(self, *args, says=(), **options):
        """Status 2, one line on stderr that holds every piece of `says`, nothing on stdout."""
        done = millrace(*args, **options)
        error = done.stderr.decode("utf-8")
        self.assertEqual(done.returncode, 2, (args, error))
        self.assertRegex(error, r"\Amillrace: [^\n]+\n\Z", args)
        self.assertEqual(done.stdout, b"")
        for piece in says:
            self.assertIn(str(piece), error)
        return error

    def file(self, text, name="config.toml"):
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def fresh(self):
        return pathlib.Path(tempfile.mkdtemp(dir=self.path))

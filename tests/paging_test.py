"""A model larger than the memory it may use: it is paged in as it is used, slower, with the same result; nothing dies.

    tests/paging_test.py PATH/TO/millrace [unittest options]

The memory is bounded by a control group of the test's own (version 2 or 1), made below the one the test is in. Where
that is not allowed the test says so loudly and is skipped; what a normal user can do remains: a bound on memory of
the process's own (RLIMIT_DATA) far below the size of the file, so that weights can only be the file's pages, which
the system takes back whenever it wants.
"""

import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time
import unittest

BINARY = ""
TIMEOUT = 600
MIB = 1 << 20
LIMIT = 112 * MIB  # of the group, where the file has 258
TOKENS = 4


def forget(path):
    """Takes a file out of the page cache: pages in it already would not count against the group."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class MemoryGroup:
    """A control group with so many bytes; raises OSError where none can be made."""

    def __init__(self, limit):
        lines = [line.split(":", 2) for line in pathlib.Path("/proc/self/cgroup").read_text().split()]
        mounts = [line.split() for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
        first = [path for _, names, path in lines if "memory" in names.split(",")]
        if first:
            root = next((m[1] for m in mounts if m[2] == "cgroup" and "memory" in m[3].split(",")), None)
            path, settings, self.peak_file = first[0], {"memory.limit_in_bytes": limit}, "memory.max_usage_in_bytes"
        else:
            root = next((m[1] for m in mounts if m[2] == "cgroup2"), None)
            path = next((path for number, _, path in lines if number == "0"), None)
            settings, self.peak_file = {"memory.max": limit, "memory.swap.max": 0}, "memory.peak"
        if root is None or path is None:
            raise OSError("no control groups for memory are mounted")
        self.folder = pathlib.Path(root + path) / f"millrace-test-{os.getpid()}"
        self.folder.mkdir()
        try:
            for name, value in settings.items():
                if (self.folder / name).exists() or name != "memory.swap.max":
                    (self.folder / name).write_text(str(value))
        except OSError:
            self.close()
            raise

    def enter(self):
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self):
        return int((self.folder / self.peak_file).read_text())

    def close(self):
        for _ in range(100):  # a process that has ended leaves its group a little later
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.05)


class Paging(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="millrace-paging-test-", dir=os.environ.get("TMPDIR", "/var/tmp"))
        cls.path = pathlib.Path(cls.directory.name)
        cls.model = cls.path / "model.gguf"
        cls.start("synth", "smollm2-135m", cls.model, "--type", "f16")
        cls.expected = cls.answer()

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    @classmethod
    def start(cls, *args, **options):
        done = subprocess.run([BINARY, *map(str, args)], capture_output=True, timeout=TIMEOUT, **options)
        if done.returncode != 0:
            raise AssertionError((args, done.returncode, done.stderr))
        return done.stdout.decode()

    @classmethod
    def answer(cls, **options):
        return cls.start("run", cls.model, "--raw", "-p", "a mill by the river", "-n", TOKENS, "--temp", 0, "--ctx", 64,
                         "--threads", 2, **options)

    def group(self):
        try:
            if subprocess.run(["stat", "-f", "-c", "%T", self.path], capture_output=True).stdout.strip() == b"tmpfs":
                raise OSError(f"{self.path} is memory itself")
            group = MemoryGroup(LIMIT)
        except OSError as error:
            text = f"no control group can be made here ({error}); paging under a bound of memory is NOT tested"
            print(f"[  SKIPPED ] {text}", file=sys.stderr)
            self.skipTest(text)
        self.addCleanup(group.close)
        return group

    def bytes_read(self, call):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = call()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return result, (after.ru_inblock - before.ru_inblock) * 512

    def test_a_model_larger_than_its_memory_is_paged(self):
        group = self.group()
        size = self.model.stat().st_size
        self.assertGreater(size, 2 * LIMIT)
        forget(self.model)
        text, read = self.bytes_read(lambda: self.answer(preexec_fn=group.enter))
        print(f"[  figure  ] a file of {size / MIB:.0f} MiB in {LIMIT / MIB:.0f} MiB: {read / MIB:.0f} MiB read for "
              f"{TOKENS} tokens and a prompt, {group.peak() / MIB:.0f} MiB used at most", file=sys.stderr)
        self.assertEqual(text, self.expected)
        self.assertLessEqual(group.peak(), LIMIT)
        self.assertGreater(read, 2 * size)  # every token reads it again

    def test_quantizing_a_file_larger_than_memory(self):
        group = self.group()
        free, bound = self.path / "free.gguf", self.path / "bound.gguf"
        self.start("quantize", self.model, free, "--type", "q4_0")
        forget(self.model)
        self.start("quantize", self.model, bound, "--type", "q4_0", preexec_fn=group.enter)
        self.assertEqual(bound.read_bytes(), free.read_bytes())
        self.assertLessEqual(group.peak(), LIMIT)

    def test_weights_are_the_files_pages_and_no_memory_of_the_process(self):
        def bound():
            resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))

        self.assertEqual(self.answer(preexec_fn=bound), self.expected)
        # The bound bites: a context that does not fit is refused in one line.
        done = subprocess.run([BINARY, "run", str(self.model), "-p", "a", "-n", "1", "--ctx", "8192"], capture_output=True,
                              timeout=TIMEOUT, preexec_fn=bound)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stderr.decode(), re.compile(r"\Amillrace: [^\n]+\n\Z"))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: paging_test.py PATH/TO/millrace [unittest options]")
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main()

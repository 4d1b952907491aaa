#!/usr/bin/env python3
"""What a CUDA build says where it cannot use a GPU: one line each, status 2, and `--device auto` takes the CPU and says
why. The first part stands a driver of a few lines in the real one's place (the runtime looks for libcuda.so.1 by name),
so it needs no GPU; the second needs one.

    tests/gpu/errors_test.py PATH/TO/millrace [unittest options]
"""
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

BINARY = ""
MODEL = "tests/golden/models/llama3/model.gguf"
TIMEOUT = 120


def millrace(*args, **environment):
    return subprocess.run([BINARY, *args], capture_output=True, text=True, timeout=TIMEOUT,
                          env={**os.environ, **environment})


def run(device, *args, model=MODEL, **environment):
    return millrace("run", model, "-p", "a", "-n", "1", "--device", device, *args, **environment)


class Errors(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="millrace-errors-test-")

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    def expect(self, says, *args, device="cuda", **environment):
        """The device by name: this one line and nothing else. With auto: the CPU, and the same line behind a colon."""
        named = run(device, *args, **environment)
        self.assertEqual(named.returncode, 2, named.stderr)
        self.assertRegex(named.stderr, rf"\Amillrace: device cuda[^\n]*{says}[^\n]*\n\Z")
        self.assertEqual(named.stdout, "")
        if device != "cuda":
            return
        auto = run("auto", *args, **environment)
        self.assertEqual(auto.returncode, 0, auto.stderr)
        self.assertRegex(auto.stderr, rf"(?m)^millrace: using the CPU: device cuda[^\n]*{says}[^\n]*$")


class WithoutAGpu(Errors):
    def driver(self, name, version=0, init=0):
        """The search path of a driver for CUDA `version` whose cuInit returns `init`; 0: a file that is none."""
        folder = pathlib.Path(self.directory.name) / name
        folder.mkdir()
        library = folder / "libcuda.so.1"
        if version == 0:
            library.write_text("no library\n")
            return str(folder)
        compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
        if compiler is None:
            self.skipTest("*** no C++ compiler: a stand-in for the driver was not made ***")
        source = folder / "driver.cpp"
        source.write_text(f'extern "C" int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}\n'
                          f'extern "C" int cuInit(unsigned) {{ return {init}; }}\n')
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        return str(folder)

    def test_no_driver(self):
        self.expect("found no NVIDIA driver, expected one for CUDA", LD_LIBRARY_PATH=self.driver("none"))

    def test_driver_too_old(self):
        self.expect(r"the NVIDIA driver is for CUDA 11\.4, this binary needs 1\d\.\d or later",
                    LD_LIBRARY_PATH=self.driver("old", 11040))

    def test_no_gpu(self):
        self.expect("found no GPU", LD_LIBRARY_PATH=self.driver("no_gpu", 99000, 100))  # CUDA_ERROR_NO_DEVICE

    def test_driver_that_fails(self):
        self.expect("failed: ", LD_LIBRARY_PATH=self.driver("broken", 99000, 999))  # CUDA_ERROR_UNKNOWN


class WithAGpu(Errors):
    def setUp(self):
        self.working = run("cuda")
        if self.working.returncode != 0:
            self.skipTest(f"*** no GPU that this binary runs on: {self.working.stderr.strip()} ***")

    def test_hidden(self):
        self.expect(r"found no GPU \(CUDA_VISIBLE_DEVICES may hide it\)", CUDA_VISIBLE_DEVICES="")

    def test_no_such_gpu(self):
        self.expect(r"found \d+ GPUs?, expected cuda:0 to cuda:\d+", device="cuda:99")

    def test_architecture_not_in_the_binary(self):
        # The driver may only translate PTX, or only run what is compiled: whichever the binary lacks.
        for variable in ("CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT"):
            if run("cuda", **{variable: "1"}).returncode != 0:
                return self.expect(r"the GPU \(.*\) is sm_\d+, this binary has code for \d", **{variable: "1"})
        self.skipTest("*** this binary has both code and PTX for this GPU: nothing is missing from it ***")

    def long_model(self):
        """A model of 20 million tokens: its cache takes 5 GiB, whatever GPU this is. 0.01 of it is the least one may ask for."""
        data = bytearray(pathlib.Path(MODEL).read_bytes())
        at = data.index(b"llama.context_length") + len(b"llama.context_length")
        self.assertEqual(struct.unpack_from("<I", data, at)[0], 4)  # uint32
        struct.pack_into("<I", data, at + 4, 20_000_000)
        path = pathlib.Path(self.directory.name) / "long.gguf"
        path.write_bytes(data)
        return str(path)

    def test_too_little_memory(self):
        self.expect("a context of 20000000 tokens takes .* of KV cache, .* more than there is room for; .* tokens would fit",
                    "--ctx", "20000000", "--gpu-memory", "0.01", model=self.long_model())

    def test_inspect_answers_where_it_does_not_fit(self):
        args = ("inspect", self.long_model(), "--device", "cuda", "--ctx", "20000000", "--gpu-memory", "0.01")
        done = millrace(*args)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("total for one user at 20000000", done.stdout)
        self.assertRegex(done.stdout, r"does not fit: device cuda: a context of 20000000 tokens takes .*; \d+ tokens would fit")
        memory = json.loads(millrace(*args, "--json").stdout)["memory"]
        self.assertIn("a context of 20000000 tokens", memory["does_not_fit"])
        self.assertGreater(memory["longest_context"], 1000)
        self.assertGreater(memory["total_bytes"], memory["available_bytes"])


if __name__ == "__main__":
    BINARY = str(pathlib.Path(sys.argv.pop(1)).resolve())
    os.chdir(pathlib.Path(__file__).resolve().parents[2])
    if b"built without CUDA" in subprocess.run([BINARY, "run", MODEL, "-p", "a", "--device", "cuda"], capture_output=True,
                                               timeout=TIMEOUT).stderr:
        print("*** SKIPPED: this binary was built without CUDA ***", file=sys.stderr)
        sys.exit(77)
    unittest.main(verbosity=2)

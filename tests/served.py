"""Servers for tests: starts the real binary on a real model, waits until it is ready, stops it. Only Python's own library."""

import functools
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77  # the exit status that tests/CMakeLists.txt tells ctest to count as skipped
START_S = 120  # a model has to be loaded, on a machine that may be busy


def skip(what, why, remedy):
    print(f"SKIPPED: {what} because {why}; {remedy}", flush=True)
    sys.exit(SKIPPED)


@functools.cache
def fetch_model(name, what):
    """The path of a model of tools/fetch_model.py; skips the test when it is not here and cannot be fetched."""
    done = subprocess.run([sys.executable, ROOT / "tools/fetch_model.py", name], capture_output=True, text=True)
    if done.returncode != 0:
        skip(what, "its model cannot be fetched", done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()


def need_command(what, *names):
    """The first of these commands that is installed."""
    for name in names:
        found = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/usr/local/sbin")
        if found:
            return found
    skip(what, f"{names[0]} is not installed", f"install it: apt-get install {names[0]}")


def venv_python(what, package):
    """A Python that has `package`: of a virtual environment under build/, made once from PyPI."""
    venv = ROOT / "build/venv" / package.split("==")[0]
    python, ready = venv / "bin/python", venv / "ready"
    if ready.is_file():
        return python
    shutil.rmtree(venv, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", venv], capture_output=True, text=True)
    if made.returncode != 0:
        skip(what, "Python cannot make a virtual environment", "install it: apt-get install python3-venv")
    done = subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", package], capture_output=True, text=True)
    if done.returncode != 0:
        skip(what, f"{package} cannot be had from PyPI", (done.stderr.strip().splitlines() or ["no reason given"])[-1])
    ready.touch()
    return python


def use_venv(what, package):
    """Goes on with a Python that has `package`."""
    python = venv_python(what, package)
    if pathlib.Path(sys.prefix) != python.parent.parent:
        os.execv(python, [python, *sys.argv])


@functools.cache
def npm_packages(*packages):
    """The node_modules that has these packages ("name@version"), kept in build/node; or a RuntimeError that says why not."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise RuntimeError("node and npm are not installed; apt-get install npm")
    folder = ROOT / "build/node" / "+".join(package.replace("@", "-") for package in packages)
    if not (folder / "ready").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        done = subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages],
                              capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(packages)} cannot be had from npm ({(done.stderr.strip().splitlines() or ['npm failed'])[-1]})")
        (folder / "ready").touch()
    return folder / "node_modules"


def free_port():
    """A port nobody listens on, below those that the system gives to connections: it stays free while nobody asks for it."""
    for port in random.sample(range(20000, 32000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port from 20000 to 32000 is free")


class Server:
    """`millrace serve MODEL` on a port of its own."""

    def __init__(self, binary, model, *options, port=None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.NamedTemporaryFile(prefix="millrace-serve-", suffix=".log")
        command = [binary, "serve", model, "--port", str(self.port), *map(str, options)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def output(self):
        return pathlib.Path(self.log.name).read_text(errors="replace")

    def get(self, path, key=None):
        """The status and the JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(body) if body[:1] == b"{" else body

    def wait_ready(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}:\n{self.output()}")
            try:
                if self.get("/ready")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"the server was not ready after {START_S} s:\n{self.output()}")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        self.log.close()

"""Starts the real server and talks to it: what server_test.py and the scripts by hand share. Python's own library only."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SMOLLM2 = ROOT / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PYTHON = ROOT / "build" / "python"
NODE = ROOT / "build" / "node"


class Server:
    """`with Server(binary, model, "--option") as server:`; server.url, server.port, server.log()."""

    description = None  # a Description that every answer of json() is held to

    def __init__(self, binary, model, *options, env=None):
        self.env = env
        self.command = [str(binary), "serve", str(model), "--port", "0", *map(str, options)]

    def __enter__(self):
        self.log_file = tempfile.TemporaryFile(mode="w+b")
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=self.log_file, cwd=ROOT, env=self.env)
        line = self.process.stdout.readline().decode()
        found = re.search(r"listening on (https?)://\S*:(\d+)", line)
        if not found:
            self.process.wait()
            raise RuntimeError(f"the server did not start: {line!r} {self.log()}")
        self.scheme, self.port = found.group(1), int(found.group(2))
        self.url = f"{self.scheme}://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()
        self.log_file.close()

    def log(self):
        self.log_file.flush()
        return os.pread(self.log_file.fileno(), 1 << 24, 0).decode(errors="replace")

    def request(self, method, path, body=None, headers=None, timeout=60):
        """(status, headers, body as bytes)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, dict((k.lower(), v) for k, v in response.getheaders()), response.read()
        finally:
            connection.close()

    def json(self, method, path, body=None, **options):
        status, headers, text = self.request(method, path, body, **options)
        parsed = json.loads(text)
        if self.description:
            self.description.check(method, path, status, headers["content-type"], parsed)
        return status, parsed

    def stats(self, **options):
        return self.json("GET", "/stats", **options)[1]

    def raw(self, data, timeout=60, half_close=False):
        """Sends bytes, reads until the server closes or `timeout`; what came back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as s:
            try:
                s.sendall(data)
                if half_close:
                    s.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            return read_all(s)


def read_all(s):
    data = b""
    try:
        while True:
            piece = s.recv(65536)
            if not piece:
                return data
            data += piece
    except OSError:
        return data


def post(path, body, headers=""):
    body = body if isinstance(body, bytes) else body.encode()
    return (f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n{headers}"
            f"content-length: {len(body)}\r\n\r\n").encode() + body


def package(name, *requirements):
    """Adds a package from PyPI, kept in build/python/NAME, to the path. None, or why it cannot be had."""
    target = PYTHON / name
    if not (target / ".whole").is_file():
        target.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade",
                               "--target", str(target), *(requirements or (name,))], capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            return f"the package {name} cannot be had from PyPI ({last})"
        (target / ".whole").touch()
    sys.path.insert(0, str(target))
    return None


def node_package(name):
    """A package from npm in build/node. None, or why it cannot be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "node and npm are not installed; apt-get install npm"
    if not (NODE / "node_modules" / name / "package.json").is_file():
        NODE.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(NODE), name],
                              capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["npm failed"])[-1]
            return f"the package {name} cannot be had from npm ({last})"
    return None


def in_threads(count, function):
    """function(i) for every i, all at once; their results in order. Raises what one of them raised."""
    results, errors = [None] * count, []

    def run(i):
        try:
            results[i] = function(i)
        except Exception as error:  # noqa: BLE001 - handed on below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

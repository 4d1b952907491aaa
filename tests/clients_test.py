#!/usr/bin/env python3
"""The server by the packages that people use: each script of tests/clients runs against a server with SmolLM2.

  tests/clients_test.py PATH/TO/millrace [NAME ...]        all of them, or those whose file's name begins so
  tests/clients_test.py PATH/TO/millrace --record FILE     and keep what they sent, for tests/server/recorded.py

Python's packages come from PyPI into build/venv/clients (tests/clients/requirements.txt; a package that wants another
openai than the others has a file and an environment of its own), Node's from npm into build/clients
(tests/clients/package.json): some 900 MB, which is why this is part of `make check` and not of `make
test`. What cannot be had is skipped and said. docs/clients.md has the results.
"""

import functools
import http.client
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import served

ROOT = served.ROOT
SCRIPTS = ROOT / "tests" / "clients"
NODE = ROOT / "build" / "clients"
WHAT = "the clients' tests"
PATIENCE_S = 900  # for one package


@functools.cache
def python_environment(requirements):
    """A Python with the packages, or None and why not."""
    wanted = requirements.read_text()
    name = "clients" if requirements.stem == "requirements" else requirements.stem.removesuffix("_requirements")
    venv = ROOT / "build" / "venv" / name
    python, ready = venv / "bin" / "python", venv / "ready"
    if ready.is_file() and ready.read_text() == wanted:
        return python, None
    shutil.rmtree(venv, ignore_errors=True)
    for command in ([sys.executable, "-m", "venv", venv],
                    [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check", "-r", requirements]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return None, (done.stderr.strip().splitlines() or ["no reason given"])[-1][:300]
    ready.write_text(wanted)
    return python, None


@functools.cache
def node_environment():
    """The folder with Node's packages, or None and why not."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return None, "node and npm are not installed; apt-get install npm"
    wanted, ready = (SCRIPTS / "package.json").read_text(), NODE / "ready"
    if not (ready.is_file() and ready.read_text() == wanted):
        shutil.rmtree(NODE, ignore_errors=True)
        NODE.mkdir(parents=True)
        (NODE / "package.json").write_text(wanted)
        done = subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(NODE)],
                              capture_output=True, text=True)
        if done.returncode != 0:
            return None, (done.stderr.strip().splitlines() or ["no reason given"])[-1][:300]
        ready.write_text(wanted)
    for script in SCRIPTS.glob("*.mjs"):  # Node looks for packages beside the script
        shutil.copy(script, NODE / script.name)
    return NODE, None


def environment(script):
    if script.suffix == ".mjs":
        return node_environment()
    own = script.with_name(script.stem + "_requirements.txt")
    return python_environment(own if own.is_file() else SCRIPTS / "requirements.txt")


class Recorder(http.server.ThreadingHTTPServer):
    """Stands before the server and keeps what it is sent."""

    def __init__(self, url):
        super().__init__(("127.0.0.1", 0), Relay)
        self.upstream = urllib.parse.urlsplit(url).netloc
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.client, self.kept = "", {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def keep(self, method, path, body):
        fields = json.loads(body) if body else {}
        # Requests of one shape are one: what is said in them differs, and ids do. Of schemas and choices each client has its own.
        choice, messages = fields.get("tool_choice"), fields.get("messages", fields.get("input"))
        form = (fields.get("response_format") or (fields.get("text") or {}).get("format") or {}).get("type")
        roles = [m.get("role", m.get("type")) for m in messages[:3] if isinstance(m, dict)] if isinstance(messages, list) else []
        shape = json.dumps([path, self.client if choice or form == "json_schema" else "", bool(choice) and str(type(choice)), form,
                            fields.get("stream"), roles])
        if fields.get("model") in (None, "smollm2") and fields.get("temperature") != 9 and len(body) < 6000:
            self.kept.setdefault(shape, {"client": self.client, "method": method, "path": path, "body": fields})


class Relay(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # a connection each: the end of the answer is the end of the connection

    def relay(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.keep(self.command, self.path, body)
        connection = http.client.HTTPConnection(self.server.upstream, timeout=600)
        headers = {"content-type": "application/json", "authorization": self.headers.get("authorization", "")}
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        self.send_response(answer.status)
        self.send_header("content-type", answer.getheader("content-type", ""))
        self.end_headers()
        while piece := answer.read1(65536):
            self.wfile.write(piece)
            self.wfile.flush()
        connection.close()

    do_GET = do_POST = do_DELETE = relay

    def log_message(self, *_):
        pass


def say_the_same_everywhere():
    """AMX's attention has bits of its own, and so small a model then says other things, some of which do not end before a
    client's limit. With the bits of every other x86 table it says what it says elsewhere."""
    cpu = Path("/proc/cpuinfo")
    if cpu.is_file() and " amx_int8" in cpu.read_text():
        os.environ.setdefault("MILLRACE_ISA", "avx512")


def main():
    say_the_same_everywhere()
    arguments = sys.argv[2:]
    record = arguments[arguments.index("--record") + 1] if "--record" in arguments else None
    names = [name for name in arguments if name not in ("--record", record)]
    model = served.fetch_model("smollm2", WHAT)
    scripts = sorted(path for path in (*SCRIPTS.glob("*_client.py"), *SCRIPTS.glob("*_client.mjs"))
                     if not names or any(path.name.startswith(name) for name in names))
    environments = {script: environment(script) for script in scripts}
    server = served.Server(os.path.abspath(sys.argv[1]), model, "--ctx", 2048, "--model-id", "smollm2").wait_ready()
    recorder = Recorder(server.url) if record else None
    failed, skipped = [], 0
    for script in scripts:
        place, why = environments[script]
        if place is None:
            print(f"SKIPPED: {script.name} because its package cannot be had: {why}", flush=True)
            skipped += 1
            continue
        if recorder:
            recorder.client = script.name
        command = [place, script] if script.suffix == ".py" else ["node", place / script.name]
        try:
            status = subprocess.run([*map(str, command), recorder.url if recorder else server.url], timeout=PATIENCE_S,
                                    env={**os.environ, "PYTHONPATH": str(SCRIPTS), "DO_NOT_TRACK": "1"}).returncode
        except subprocess.TimeoutExpired:
            print(f"{script.name}: FAILED: not done after {PATIENCE_S} s", flush=True)
            status = 1
        if status != 0:
            failed.append(script.name)
    faults = server.get("/stats")[1]["server"]["responses"]["5xx"]
    server.stop()
    if recorder:
        lines = ",\n".join(json.dumps(kept, ensure_ascii=False) for kept in recorder.kept.values())
        Path(record).write_text(f"[\n{lines}\n]\n")
    print(f"{len(scripts) - len(failed) - skipped} of {len(scripts)} packages held, {skipped} skipped, {faults} answers of 5xx")
    if failed or faults:
        print("FAILED:", ", ".join(failed))
        return 1
    return served.SKIPPED if skipped == len(scripts) else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""The server by the packages that people use: each script of tests/clients runs against a server with SmolLM2.

  tests/clients_test.py PATH/TO/millrace [NAME ...]        all of them, or those whose file's name begins so
  tests/clients_test.py PATH/TO/millrace --record FILE     and keep what they sent, for tests/server/recorded.py

Python's packages come from PyPI into build/venv/clients (tests/clients/requirements.txt), Node's from npm into
build/clients (tests/clients/package.json): some 750 MB, which is why this is part of `make check` and not of `make
test`. What cannot be had is skipped and said. docs/clients.md has the results.
"""

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
VENV = ROOT / "build" / "venv" / "clients"
NODE = ROOT / "build" / "clients"
WHAT = "the clients' tests"
PATIENCE_S = 900  # for one package


def python_environment():
    """A Python with the packages, or None and why not."""
    wanted = (SCRIPTS / "requirements.txt").read_text()
    python, ready = VENV / "bin" / "python", VENV / "ready"
    if ready.is_file() and ready.read_text() == wanted:
        return python, None
    shutil.rmtree(VENV, ignore_errors=True)
    for command in ([sys.executable, "-m", "venv", VENV],
                    [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", SCRIPTS / "requirements.txt"]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return None, (done.stderr.strip().splitlines() or ["no reason given"])[-1][:300]
    ready.write_text(wanted)
    return python, None


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
        # Requests of one shape are one: what is said differs, and ids do.
        shape = json.dumps([self.client, method, path.partition("?")[0], sorted(fields), fields.get("tool_choice"),
                            fields.get("response_format"), fields.get("text"), fields.get("tools"), fields.get("stream"),
                            [m.get("role", m.get("type")) for m in fields.get("messages", []) if isinstance(m, dict)][:4],
                            isinstance(fields.get("input"), str), "previous_response_id" in fields])
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


def main():
    arguments = sys.argv[2:]
    record = arguments[arguments.index("--record") + 1] if "--record" in arguments else None
    names = [name for name in arguments if name not in ("--record", record)]
    model = served.fetch_model("smollm2", WHAT)
    scripts = sorted(path for path in (*SCRIPTS.glob("*_client.py"), *SCRIPTS.glob("*_client.mjs"))
                     if not names or any(path.name.startswith(name) for name in names))
    environments = {".py": python_environment(), ".mjs": node_environment()}
    server = served.Server(os.path.abspath(sys.argv[1]), model, "--ctx", 2048, "--model-id", "smollm2").wait_ready()
    recorder = Recorder(server.url) if record else None
    failed, skipped = [], 0
    for script in scripts:
        place, why = environments[script.suffix]
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
        Path(record).write_text(json.dumps(list(recorder.kept.values()), indent=1, ensure_ascii=False) + "\n")
    print(f"{len(scripts) - len(failed) - skipped} of {len(scripts)} packages held, {skipped} skipped, {faults} answers of 5xx")
    if failed or faults:
        print("FAILED:", ", ".join(failed))
        return 1
    return served.SKIPPED if skipped == len(scripts) else 0


if __name__ == "__main__":
    sys.exit(main())

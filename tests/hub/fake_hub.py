"""A model hub for tests: Hugging Face's API on one port, its content servers on another, and proxies. Real HTTP over
real sockets, with faults on demand: cut connections, wrong bytes, statuses, no ranges. Only Python's own library."""

import hashlib
import http.client
import http.server
import json
import select
import socket
import ssl
import threading
import time
import urllib.parse

LFS_BYTES = 1 << 20  # larger files are in LFS, and so is every file of weights


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_lfs(path, data):
    return path.endswith((".gguf", ".safetensors", ".bin")) or len(data) > LFS_BYTES


class Repository:
    def __init__(self, files, gated=False, private=False, license="apache-2.0"):
        self.files, self.gated, self.private, self.license = files, gated, private, license
        self.commit = hashlib.sha1(repr(sorted((path, git_sha1(data)) for path, data in files.items())).encode()).hexdigest()
        self.revisions = {"main"}

    def sibling(self, path, data):
        entry = {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
        if is_lfs(path, data):
            sha = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 134}
        return entry


class Server:
    """An HTTP server in threads of its own, whose requests are kept in `log`."""

    def __init__(self, handle, context=None):
        log = self.log = []
        lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                entry = {"method": self.command, "path": self.path, "headers": dict(self.headers), "sent": 0}
                with lock:
                    log.append(entry)
                self.entry = entry
                try:
                    handle(self)
                except (ConnectionError, BrokenPipeError):
                    self.close_connection = True

            do_GET = do_HEAD = do_CONNECT = answer

            def log_message(self, *arguments):
                pass

        class Threads(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, address):  # a client that went away in the middle of a handshake
                pass

        self.server = Threads(("127.0.0.1", 0), Handler)
        if context:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.scheme = "https" if context else "http"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self):
        return f"{self.scheme}://localhost:{self.port}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def reply(handler, status, headers=(), body=b""):
    handler.send_response(status)
    for name, value in dict(headers).items():
        handler.send_header(name, value)
    if "Content-Length" not in dict(headers):
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


class FakeHub:
    """api and cdn are servers of their own. Faults are plain attributes; `fail` is a list of
    (server, part of a path, status, headers), each used once."""

    def __init__(self, repositories, token=None, certificate=None):
        self.repositories, self.token = repositories, token
        self.fail = []
        self.ranges, self.cut_after, self.cuts = True, None, 0  # cuts: answers of the cdn that end after cut_after bytes
        self.wrong, self.delay = False, 0.0  # delay: seconds for each piece of 64 KiB
        self.stop_at, self.going = None, threading.Event()  # hold()
        self.expired = set()  # signatures that are no longer taken
        self.signature = 0
        self.lock = threading.Lock()
        context = None
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
        self.api, self.cdn = Server(self.answer_api, context), Server(self.answer_cdn, context)

    def close(self):
        self.release()
        self.api.close()
        self.cdn.close()

    def hold(self, more):
        """After so many more bytes of content no more are sent until release(): who asks is surely in the middle."""
        self.going.clear()
        self.stop_at = self.sent + more

    def release(self):
        self.stop_at = None
        self.going.set()

    @property
    def sent(self):
        """Bytes of content that the second server has sent."""
        return sum(entry["sent"] for entry in self.cdn.log)

    def planned_failure(self, name, handler):
        with self.lock:
            for i, (server, part, status, headers) in enumerate(self.fail):
                if server == name and part in handler.path:
                    del self.fail[i]
                    reply(handler, status, headers, b"{}")
                    return True
        return False

    def refusal(self, handler, name):
        """(status, headers) for a repository that this client may not see, or None."""
        repository = self.repositories.get(name)
        given = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        known = self.token is not None and given == self.token
        if repository is None or repository.private and not known:
            return 401 if not known else 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
        return None

    def answer_api(self, handler):
        if self.planned_failure("api", handler):
            return
        path = urllib.parse.urlsplit(handler.path).path
        if path.startswith("/api/models/"):
            self.answer_info(handler, path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            self.answer_resolve(handler, *path[1:].split("/resolve/", 1))
        else:
            reply(handler, 404)

    def answer_info(self, handler, rest):
        name, _, tail = rest.partition("/revision/") if "/revision/" in rest else rest.partition("/tree/")
        if refused := self.refusal(handler, name):
            return reply(handler, *refused)
        repository = self.repositories[name]
        revision = urllib.parse.unquote(tail) if tail else "main"
        if revision not in repository.revisions | {repository.commit}:
            return reply(handler, 404, {"X-Error-Code": "RevisionNotFound"})
        files = [repository.sibling(path, data) for path, data in repository.files.items()]
        if "/tree/" in rest:
            body = [{"type": "file", "path": file["rfilename"], "size": file["size"], "oid": file["blobId"],
                     **({"lfs": {"oid": file["lfs"]["sha256"], "size": file["size"], "pointerSize": 134}}
                        if "lfs" in file else {})} for file in files]
        else:
            body = {"id": name, "modelId": name, "sha": repository.commit, "private": repository.private,
                    "gated": "auto" if repository.gated else False, "tags": [f"license:{repository.license}"],
                    "cardData": {"license": repository.license}, "siblings": files}
        reply(handler, 200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def answer_resolve(self, handler, name, rest):
        if refused := self.refusal(handler, name):
            return reply(handler, *refused)
        repository = self.repositories[name]
        if repository.gated and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return reply(handler, 403 if "Authorization" in handler.headers else 401, {"X-Error-Code": "GatedRepo"})
        revision, _, path = rest.partition("/")
        path = urllib.parse.unquote(path)
        if urllib.parse.unquote(revision) not in repository.revisions | {repository.commit}:
            return reply(handler, 404, {"X-Error-Code": "RevisionNotFound"})
        if path not in repository.files:
            return reply(handler, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repository.commit})
        data = repository.files[path]
        headers = {"X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        if is_lfs(path, data):
            sha = hashlib.sha256(data).hexdigest()
            with self.lock:
                self.signature += 1
                signature = self.signature
            location = f"{self.cdn.url}/{name}/{sha}/{urllib.parse.quote(path)}?signature={signature}"
            reply(handler, 302, {**headers, "Location": location, "X-Linked-Size": str(len(data)),
                                 "X-Linked-Etag": f'"{sha}"', "ETag": f'"{git_sha1(data)}"'})
        else:
            reply(handler, 200, {**headers, "ETag": f'"{git_sha1(data)}"', "Content-Length": str(len(data))}, data)

    def answer_cdn(self, handler):
        if self.planned_failure("cdn", handler):
            return
        parts = urllib.parse.urlsplit(handler.path)
        owner, name, sha, path = parts.path[1:].split("/", 3)
        if urllib.parse.parse_qs(parts.query)["signature"][0] in self.expired:
            return reply(handler, 403)
        data = self.repositories[f"{owner}/{name}"].files[urllib.parse.unquote(path)]
        etag, begin, end, status = f'"{sha[:32]}"', 0, len(data), 200
        headers = {"ETag": etag}
        wanted = handler.headers.get("Range")
        if wanted and self.ranges and handler.headers.get("If-Range", etag) == etag:
            first, last = wanted.removeprefix("bytes=").split("-")
            begin, end, status = int(first), min(len(data), int(last) + 1), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        piece = data[begin:end]
        if self.wrong and begin == 0:
            piece = bytes([piece[0] ^ 1]) + piece[1:]
        self.send_content(handler, status, {**headers, "Content-Length": str(end - begin)}, piece)

    def send_content(self, handler, status, headers, piece):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        with self.lock:
            cut = self.cut_after is not None and self.cuts > 0 and len(piece) > self.cut_after
            self.cuts -= cut
        piece = piece[:self.cut_after] if cut else piece
        for at in range(0, len(piece), 1 << 16):
            if self.stop_at is not None and self.sent >= self.stop_at:
                self.going.wait()
            handler.wfile.write(piece[at:at + (1 << 16)])
            handler.entry["sent"] += len(piece[at:at + (1 << 16)])
            if self.delay:
                time.sleep(self.delay)
        if cut:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)


class Proxy(Server):
    """Passes requests on: whole ones for http, tunnels (CONNECT) for https."""

    def __init__(self):
        super().__init__(self.pass_on)

    @staticmethod
    def pass_on(handler):
        if handler.command == "CONNECT":
            host, port = handler.path.rsplit(":", 1)
            with socket.create_connection((host, int(port))) as other:
                handler.send_response(200)
                handler.end_headers()
                Proxy.tunnel(handler.connection, other)
            handler.close_connection = True
            return
        parts = urllib.parse.urlsplit(handler.path)
        connection = http.client.HTTPConnection(parts.hostname, parts.port)
        headers = {name: value for name, value in handler.headers.items() if not name.lower().startswith("proxy-")}
        connection.request(handler.command, handler.path[len(f"{parts.scheme}://{parts.netloc}"):], headers=headers)
        answer = connection.getresponse()
        reply(handler, answer.status, answer.getheaders(), answer.read())
        connection.close()

    @staticmethod
    def tunnel(a, b):
        while True:
            for source in select.select([a, b], [], [], 30)[0]:
                data = source.recv(1 << 16)
                if not data:
                    return
                (b if source is a else a).sendall(data)

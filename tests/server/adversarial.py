"""What an attacker sends, as data: each case is (name, bytes, statuses). The server answers the first request in the bytes
with one of `statuses`, or closes where None is among them; it answers others meanwhile and afterwards, and nothing is a 5xx
but 501 and 505. gate_test.py sends them; smuggling.py has requests within requests, malformed.py bad JSON.
"""

import json

REFUSED = (400,)
SILENT = (400, None)
H = b"Host: localhost\r\n"
CLOSE = b"Connection: close\r\n"
JSON = b"Content-Type: application/json\r\n"


def get(target, fields=b"", version=b"HTTP/1.1"):
    return b"GET " + target + b" " + version + b"\r\n" + H + CLOSE + fields + b"\r\n"


def post(path, body, fields=JSON, host=H):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (b"POST " + path + b" HTTP/1.1\r\n" + host + CLOSE + fields + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def chunked(*pieces, fields=JSON):
    return (b"POST /tokenize HTTP/1.1\r\n" + H + CLOSE + fields + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(pieces))


GOOD = {"content": "mill"}
GOOD_CHUNK = b'13\r\n{"content": "mill"}\r\n'
assert int(GOOD_CHUNK[:2], 16) == len(b'{"content": "mill"}')


def request_lines():
    for name, line in {
        "nothing but line ends": b"\r\n\r\n\r\n\r\n", "one word": b"GET\r\n\r\n", "HTTP/0.9": b"GET /\r\n\r\n", "only a version": b"HTTP/1.1\r\n\r\n",
        "a response": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "spaces": b"   \r\n\r\n", "bare line feeds": b"\n\n",
        "a zero byte": b"G\x00T / HTTP/1.1\r\n" + H + b"\r\n", "an empty target": b"GET  HTTP/1.1\r\n" + H + b"\r\n",
        "a relative target": b"GET v1/models HTTP/1.1\r\n" + H + b"\r\n", "brackets in the method": b"GE(T / HTTP/1.1\r\n" + H + b"\r\n",
        "a long method": b"G" * 100 + b" / HTTP/1.1\r\n" + H + b"\r\n", "HTTP/1.x": b"GET / HTTP/1.x\r\n" + H + b"\r\n",
        "HTTP/11": b"GET / HTTP/11\r\n" + H + b"\r\n", "HTTPS/1.1": b"GET / HTTPS/1.1\r\n" + H + b"\r\n", "a tab in front": b"\tGET / HTTP/1.1\r\n" + H + b"\r\n",
        "an asterisk": b"GET * HTTP/1.1\r\n" + H + b"\r\n", "a backslash": b"GET \\ HTTP/1.1\r\n" + H + b"\r\n",
        "CONNECT": b"CONNECT localhost:22 HTTP/1.1\r\n" + H + b"\r\n", "CONNECT to a path": b"CONNECT / HTTP/1.1\r\n" + H + CLOSE + b"\r\n",
        "ftp": b"GET ftp://localhost/ HTTP/1.1\r\n" + H + b"\r\n", "javascript": b"GET javascript:x HTTP/1.1\r\n" + H + b"\r\n",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 300, "SSLv2": b"\x80\x2e\x01\x00\x02\x00\x15", "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
        "SMTP": b"EHLO localhost\r\n", "memcached": b"stats\r\n", "redis": b"*1\r\n$4\r\nPING\r\n", "FIX": b"8=FIX.4.4\x019=1\x01",
        "PROXY protocol": b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n" + get(b"/health"),
        "PROXY protocol 2": b"\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c" + b"\x00" * 12 + get(b"/health"),
        "UTF-16": "GET / HTTP/1.1\r\n\r\n".encode("utf-16"), "a byte order mark": b"\xef\xbb\xbf" + get(b"/health"),
    }.items():
        yield f"line: {name}", line, (400, 404, 405, None)
    for name, line in {"HTTP/1.2": b"HTTP/1.2", "HTTP/2.0": b"HTTP/2.0", "HTTP/0.9": b"HTTP/0.9", "HTTP/9.9": b"HTTP/9.9"}.items():
        yield f"version: {name}", get(b"/health", version=line), (505,)
    yield "version: preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", (505,)
    for method in (b"TRACE", b"TRACK", b"PUT", b"PATCH", b"DELETE", b"PROPFIND", b"DEBUG", b"get", b"M-SEARCH", b"PURGE", b"LINK", b"!"):
        yield f"method: {method.decode()}", method + b" /v1/chat/completions HTTP/1.1\r\n" + H + CLOSE + b"\r\n", (405,)


def targets():
    for name, target in {
        "dots": b"/../../../../etc/passwd", "escaped dots": b"/%2e%2e/%2e%2e/etc/passwd", "escaped twice": b"/%252e%252e/etc/passwd",
        "overlong UTF-8": b"/%c0%ae%c0%ae/etc/passwd", "a zero byte": b"/v1/models/%00", "bad UTF-8": b"/v1/models/%ff%fe%80", "half an escape": b"/%",
        "a bad escape": b"/%zz%4", "a surrogate": b"/v1/responses/%ed%a0%80", "line ends": b"/v1/models/%0d%0aX:%20y", "slashes": b"/" * 2000,
        "a path to a file": b"/v1/models//etc/passwd", "backslashes": b"/..\\..\\windows", "a script": b"/<script>", "quotes": b"/v1/models/%22%27",
        "a format": b"/%25s%25n%25x", "long": b"/" + b"a" * 8000, "a template": b"/{{7*7}}", "semicolons": b"/v1/models;x=y", "an id": b"/v1/responses/resp_0/x/y",
    }.items():
        yield f"target: {name}", get(target), (400, 404)
    yield "target: too long", get(b"/" + b"a" * 20000), (431,)
    yield "target: a long query", get(b"/health?" + b"a=b&" * 3000), (200,)
    yield "target: escapes in a query", get(b"/v1/responses/x?stream=%00%ff%zz&=&&a"), (404,)
    yield "target: absolute", b"GET http://localhost/health HTTP/1.1\r\n" + H + CLOSE + b"\r\n", (200,)
    yield "target: absolute, another scheme's letters", b"GET HTTPS://LOCALHOST/health HTTP/1.1\r\n" + H + CLOSE + b"\r\n", (200,)
    for name, target in {"another host": b"http://evil.example/", "a user": b"http://a:b@localhost/", "no host": b"http:///x", "a port": b"http://localhost:x/"}.items():
        yield f"target: absolute, {name}", b"GET " + target + b" HTTP/1.1\r\n" + H + b"\r\n", REFUSED
    yield "target: raw UTF-8", get("/é".encode()), REFUSED
    yield "target: raw bad UTF-8", get(b"/\xff\xfe"), REFUSED
    yield "target: a fragment", get(b"/metrics#x"), REFUSED
    yield "target: delete", get(b"/\x7f"), REFUSED


def fields():
    yield "header: 16 KiB in one", get(b"/health", b"X: " + b"y" * 17000 + b"\r\n"), (431,)
    yield "header: a name without end", b"GET /health HTTP/1.1\r\n" + H + b"x" * 20000, (431,)
    yield "header: 250 fields", get(b"/health", b"a: b\r\n" * 250), (200,)
    yield "header: 300 fields", get(b"/health", b"a: b\r\n" * 300), (431,)
    yield "header: 5,000 fields", get(b"/health", b"a: b\r\n" * 5000), (431,)
    yield "header: empty values", get(b"/health", b"a:\r\n" * 100), (200,)
    yield "header: 5 MB without a line end", b"A" * 5000000, (431, None)
    for name, value in {"zero": b"\x00", "escape": b"\x1b[2J", "bell": b"\x07", "delete": b"\x7f", "CR": b"a\rb", "LF": b"a\nb"}.items():
        yield f"header: a control character, {name}", get(b"/health", b"X: " + value + b"\r\n"), REFUSED
    yield "header: high bytes in a value", get(b"/health", b"X: \xff\xfe\x80\r\n"), (200,)
    for name, bad in {"folded": b"X: y\r\n z\r\n", "space before the colon": b"X : y\r\n", "no name": b": y\r\n", "no colon": b"xyz\r\n", "a quoted name": b'"X": y\r\n',
                      "a high byte in the name": b"X\xc3\xa9: y\r\n", "a slash in the name": b"X/Y: z\r\n", "parentheses": b"X(): y\r\n"}.items():
        yield f"header: {name}", get(b"/health", bad), REFUSED
    yield "header: two x-request-ids", get(b"/health", b"x-request-id: a\r\nx-request-id: b\r\n"), (200,)
    yield "header: a long x-request-id", get(b"/health", b"x-request-id: " + b"a" * 9000 + b"\r\n"), (200,)
    yield "header: a traceparent that is none", get(b"/health", b"traceparent: 00-" + b"z" * 200 + b"\r\n"), (200,)
    yield "header: a bad etag", get(b"/", b'if-none-match: "\xff", W/, *\r\n'), (200,)
    yield "header: ranges", get(b"/", b"Range: bytes=0-,0-,0-,0-,-1\r\n"), (200,)
    yield "header: every encoding", get(b"/", b"Accept-Encoding: " + b"gzip;q=0.1, " * 500 + b"\r\n"), (200,)
    yield "header: forwarded", get(b"/health", b"X-Forwarded-For: 127.0.0.1, ::1, x\r\nX-Forwarded-Host: evil\r\n"), (200,)
    yield "header: CRLF in an origin's escape", get(b"/health", b"Origin: http://a%0d%0aX:y\r\n"), (200,)
    yield "header: a long authorization", get(b"/stats", b"Authorization: Bearer " + b"x" * 10000 + b"\r\n"), (200,)


def expectations():
    body = json.dumps(GOOD).encode()
    for name, value, status in (("100-continue", b"100-continue", 200), ("in capitals", b"100-CONTINUE", 200), ("another", b"200-ok", 417), ("a list", b"100-continue, x", 417),
                                ("empty", b"", 417)):
        yield f"expect: {name}", post(b"/tokenize", body, JSON + b"Expect: " + value + b"\r\n"), (status,)
    yield "expect: in HTTP/1.0", b"POST /tokenize HTTP/1.0\r\n" + JSON + b"Expect: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body, (200,)
    yield "expect: without a body", get(b"/health", b"Expect: 100-continue\r\n"), (200,)
    yield "expect: a body that is too long", (b"POST /tokenize HTTP/1.1\r\n" + H + JSON + b"Expect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n"), (413,)


def bodies():
    last = b"0\r\n\r\n"
    yield "chunks: good", chunked(GOOD_CHUNK, last), (200,)
    yield "chunks: one byte each", chunked(*(b"1\r\n%c\r\n" % c for c in json.dumps(GOOD).encode()), last), (200,)
    yield "chunks: an extension", chunked(GOOD_CHUNK.replace(b"\r\n", b";a=b\r\n", 1), last), (200,)
    yield "chunks: trailers", chunked(GOOD_CHUNK, b"0\r\nx-sum: 1\r\ny: z\r\n\r\n"), (200,)
    yield "chunks: no data", chunked(last), REFUSED
    yield "chunks: zeros in front", chunked(b"000" + GOOD_CHUNK, last), (200,)
    yield "chunks: 20 KB of extension", chunked(b"1;" + b"x" * 20000), (431,)
    yield "chunks: extensions of 1.1 MB", chunked(b"".join(b"1;" + b"x" * 8000 + b"\r\na\r\n" for _ in range(140))), (413,)
    yield "chunks: 20 KB of trailers", chunked(GOOD_CHUNK, b"0\r\n", b"x: y\r\n" * 4000), (431,)
    yield "chunks: a trailer without end", chunked(GOOD_CHUNK, b"0\r\nx: " + b"y" * 500000), (431,)
    yield "chunks: a size without end", chunked(b"0" * 500000), (400, 431)
    for name, size in {"2^63": b"7fffffffffffffff", "2^64-1": b"ffffffffffffffff", "2^64": b"10000000000000000", "17 MB": b"1100000", "-1": b"-1", "NaN": b"NaN"}.items():
        yield f"chunks: a size of {name}", chunked(size + b"\r\n" + b"x" * 100), (400, 413)
    yield "length: more than sent", b"POST /tokenize HTTP/1.1\r\n" + H + JSON + b"Content-Length: 500\r\n\r\nabc", SILENT
    yield "length: less than sent", post(b"/tokenize", b"{}").replace(b"Content-Length: 2", b"Content-Length: 1"), REFUSED
    yield "length: 17 MB", b"POST /tokenize HTTP/1.1\r\n" + H + JSON + b"Content-Length: 17825792\r\n\r\n" + b" " * 100000, (413,)
    yield "length: none", b"POST /tokenize HTTP/1.1\r\n" + H + JSON + CLOSE + b"\r\n", REFUSED
    yield "length: none, and a body", b"POST /tokenize HTTP/1.1\r\n" + H + JSON + CLOSE + b"\r\n{}", REFUSED
    for name, kind in {"none": b"", "text": b"Content-Type: text/plain\r\n", "a form": b"Content-Type: application/x-www-form-urlencoded\r\n",
                       "parts": b"Content-Type: multipart/form-data; boundary=x\r\n", "XML": b"Content-Type: text/xml\r\n", "empty": b"Content-Type:\r\n",
                       "text that mentions JSON": b"Content-Type: text/plain; application/json\r\n", "JSON's beginning": b"Content-Type: application/js\r\n",
                       "a list": b"Content-Type: application/json, text/plain\r\n"}.items():
        yield f"type: {name}", post(b"/tokenize", GOOD, kind), (415,)
    for kind in (b"application/json; charset=utf-8", b"APPLICATION/JSON", b"application/json;charset=\"UTF-8\""):
        yield f"type: {kind.decode()}", post(b"/tokenize", GOOD, b"Content-Type: " + kind + b"\r\n"), (200,)
    yield "encoding: gzip of nothing known", post(b"/tokenize", b"\x1f\x8b" + b"\x00" * 20, JSON + b"Content-Encoding: gzip\r\n"), REFUSED


def sites():
    for host in (b"evil.example", b"evil.example:8080", b"localhost.evil.example", b"127.0.0.1.evil.example", b"10.0.0.1", b"[2001:db8::1]:80", b"0.0.0.0",
                 b"127.1", b"2130706433", b"localhost.", b"_"):
        for name, request in (("page", b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n" + CLOSE + b"\r\n"),
                              ("chat", post(b"/v1/chat/completions", {"messages": []}, host=b"Host: " + host + b"\r\n"))):
            yield f"site: {name} as {host.decode()}", request, (403,)
    for host in (b"[::1", b"::1", b"a b", b"a/b", b"a@b", b"a:b", b"a:123456", b"[x]:1:2", b"a,b", b"\"a\"", b"a\xffb", b"%61", b"*"):
        yield f"site: a Host that is none, {host!r}", b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n\r\n", REFUSED
    for host in (b"localhost", b"LocalHost:1", b"127.0.0.1:8080", b"127.255.255.254", b"[::1]", b"[::1]:8080"):
        yield f"site: as {host.decode()}", b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\n" + CLOSE + b"\r\n", (200,)
    for origin in (b"https://evil.example", b"null", b"http://localhost:3000", b"file://", b"http://localhost.evil.example", b"chrome-extension://abc", b"x"):
        yield f"site: a page of {origin.decode()}", post(b"/tokenize", GOOD, JSON + b"Origin: " + origin + b"\r\n"), (403,)
    yield "site: its own page", post(b"/tokenize", GOOD, JSON + b"Origin: http://localhost\r\n"), (200,)
    yield "site: another's page looks", get(b"/health", b"Origin: https://evil.example\r\n"), (200,)
    yield "site: a form of another page", post(b"/v1/chat/completions", b'{"messages":[{"role":"user","content":"', b"Content-Type: text/plain\r\n"
                                               b"Origin: https://evil.example\r\n"), (403,)


def cases():
    return [*request_lines(), *targets(), *fields(), *expectations(), *bodies(), *sites()]

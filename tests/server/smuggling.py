"""Requests that two readers could take for two different ones: the known differentials between Content-Length and
Transfer-Encoding, of chunk sizes, line ends, folded lines and names. Each holds a second request, and nobody may answer it.

Every row is (name, bytes, statuses). The second request asks for a path of its own, so that logs tell whose it was:
`statuses` is what a server may answer the first with; an answer to the second is a failure whatever it is.
"""

SMUGGLED = "/smuggled-{}"
REFUSED = (400,)
UNKNOWN = (501,)
ANY_ONE = (200, 204, 400, 403, 404, 405, 413, 415, 417, 431, 501, 505)


def second(number):
    return f"GET {SMUGGLED.format(number)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def chunk(data):
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)


# (name, statuses, the line or lines of the head). The body is an empty chunk and the second request: a reader that sees
# chunks stops before it, one that sees none does not.
CODINGS = [
    ("chunked, identity", REFUSED, b"Transfer-Encoding: chunked, identity"),
    ("identity, chunked", REFUSED, b"Transfer-Encoding: identity, chunked"),
    ("chunked twice", REFUSED, b"Transfer-Encoding: chunked, chunked"),
    ("chunked in two fields", REFUSED, b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
    ("identity", REFUSED, b"Transfer-Encoding: identity"),
    ("chunked, then identity", REFUSED, b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity"),
    ("identity, then chunked", REFUSED, b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked"),
    ("cow", UNKNOWN, b"Transfer-Encoding: cow"),
    ("chunked, cow", UNKNOWN, b"Transfer-Encoding: chunked, cow"),
    ("cow, chunked", UNKNOWN, b"Transfer-Encoding: cow, chunked"),
    ("chunked, then x", UNKNOWN, b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x"),
    ("x, then chunked", UNKNOWN, b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked"),
    ("xchunked", UNKNOWN, b"Transfer-Encoding: xchunked"),
    ("chunkedx", UNKNOWN, b"Transfer-Encoding: chunkedx"),
    ("gzip, chunked", UNKNOWN, b"Transfer-Encoding: gzip, chunked"),
    ("gzip", UNKNOWN, b"Transfer-Encoding: gzip"),
    ("deflate, gzip, chunked", UNKNOWN, b"Transfer-Encoding: deflate, gzip, chunked"),
    ("compress", UNKNOWN, b"Transfer-Encoding: compress"),
    ("a comma in front", REFUSED, b"Transfer-Encoding: ,chunked"),
    ("a comma behind", REFUSED, b"Transfer-Encoding: chunked,"),
    ("a semicolon behind", REFUSED, b"Transfer-Encoding: chunked;"),
    ("with a parameter", REFUSED, b"Transfer-Encoding: chunked;q=0.5"),
    ("in double quotes", REFUSED, b'Transfer-Encoding: "chunked"'),
    ("in brackets", REFUSED, b"Transfer-Encoding: (chunked)"),
    ("two words", REFUSED, b"Transfer-Encoding: chunked identity"),
    ("empty", REFUSED, b"Transfer-Encoding:"),
    ("vertical tab", REFUSED, b"Transfer-Encoding: \x0bchunked"),
    ("form feed behind", REFUSED, b"Transfer-Encoding: chunked\x0c"),
    ("zero byte behind", REFUSED, b"Transfer-Encoding: chunked\x00"),
    ("zero byte in front", REFUSED, b"Transfer-Encoding: \x00chunked"),
    ("high byte in front", REFUSED, b"Transfer-Encoding: \xffchunked"),
    ("no-break space", REFUSED, b"Transfer-Encoding: \xa0chunked"),
    ("the Kelvin sign", REFUSED, "Transfer-Encoding: chun\u212aed".encode()),
    ("backspace", REFUSED, b"Transfer-Encoding: chunkee\x08d"),
    ("space before the colon", REFUSED, b"Transfer-Encoding : chunked"),
    ("tab before the colon", REFUSED, b"Transfer-Encoding\t: chunked"),
    ("line end before the colon", REFUSED, b"Transfer-Encoding\r\n : chunked"),
    ("space before the name", REFUSED, b" Transfer-Encoding: chunked"),
    ("tab before the name", REFUSED, b"\tTransfer-Encoding: chunked"),
    ("vertical tab before the name", REFUSED, b"\x0bTransfer-Encoding: chunked"),
    ("zero byte in the name", REFUSED, b"Transfer-Encoding\x00: chunked"),
    ("high byte in the name", REFUSED, b"Transfer-Encoding\xff: chunked"),
    ("an underscore", REFUSED, b"Transfer_Encoding: chunked"),
    ("two colons", REFUSED, b"Transfer-Encoding:: chunked"),
    ("a quoted name", REFUSED, b'"Transfer-Encoding": chunked'),
    ("no colon", REFUSED, b"Transfer-Encoding chunked"),
    ("folded value", REFUSED, b"Transfer-Encoding:\r\n chunked"),
    ("folded value with a tab", REFUSED, b"Transfer-Encoding:\r\n\tchunked"),
    ("folded behind another", REFUSED, b"X: y\r\n Transfer-Encoding: chunked"),
    ("folded list", REFUSED, b"Transfer-Encoding: chunked,\r\n identity"),
    ("behind a bare line feed", REFUSED, b"X: y\nTransfer-Encoding: chunked"),
    ("behind a bare carriage return", REFUSED, b"X: y\rTransfer-Encoding: chunked"),
    ("two carriage returns", REFUSED, b"X: y\r\r\nTransfer-Encoding: chunked"),
    ("a bare carriage return behind", REFUSED, b"Transfer-Encoding: chunked\r"),
    ("a bare line feed behind", REFUSED, b"Transfer-Encoding: chunked\nX: y"),
    ("a line feed within", REFUSED, b"Transfer-Encoding: chun\nked"),
]

# The same, where the body is the second request alone and LENGTH is its length.
LENGTHS = [
    ("zero, then right", REFUSED, b"Content-Length: 0\r\nContent-Length: LENGTH"),
    ("right, then zero", REFUSED, b"Content-Length: LENGTH\r\nContent-Length: 0"),
    ("twice the same", REFUSED, b"Content-Length: LENGTH\r\nContent-Length: LENGTH"),
    ("a list of the same", REFUSED, b"Content-Length: LENGTH, LENGTH"),
    ("a list", REFUSED, b"Content-Length: 0, LENGTH"),
    ("plus", REFUSED, b"Content-Length: +LENGTH"),
    ("minus", REFUSED, b"Content-Length: -LENGTH"),
    ("minus zero", REFUSED, b"Content-Length: -0"),
    ("hexadecimal", REFUSED, b"Content-Length: 0x2f"),
    ("a fraction", REFUSED, b"Content-Length: LENGTH.0"),
    ("an exponent", REFUSED, b"Content-Length: 0e1"),
    ("an underscore in the number", REFUSED, b"Content-Length: 1_0"),
    ("a space in the number", REFUSED, b"Content-Length: 4 7"),
    ("a comma behind", REFUSED, b"Content-Length: LENGTH,"),
    ("a semicolon behind", REFUSED, b"Content-Length: LENGTH;"),
    ("letters behind", REFUSED, b"Content-Length: LENGTHabc"),
    ("quotes", REFUSED, b'Content-Length: "LENGTH"'),
    ("empty", REFUSED, b"Content-Length:"),
    ("a space only", REFUSED, b"Content-Length:  "),
    ("other digits", REFUSED, "Content-Length: \u0664\u0667".encode()),
    ("zero byte", REFUSED, b"Content-Length: LENGTH\x00"),
    ("vertical tab", REFUSED, b"Content-Length: \x0bLENGTH"),
    ("2 to the 64th", (413,), b"Content-Length: 18446744073709551616"),
    ("2 to the 64th and some", (413,), b"Content-Length: 18446744073709551663"),
    ("space before the colon", REFUSED, b"Content-Length : LENGTH"),
    ("tab before the colon", REFUSED, b"Content-Length\t: LENGTH"),
    ("space before the name", REFUSED, b" Content-Length: LENGTH"),
    ("an underscore", REFUSED, b"Content_Length: LENGTH"),
    ("an underscore, then right", REFUSED, b"Content_Length: 0\r\nContent-Length: LENGTH"),
    ("zero byte in the name", REFUSED, b"Content-Length\x00: LENGTH"),
    ("folded", REFUSED, b"Content-Length:\r\n LENGTH"),
    ("folded further", REFUSED, b"Content-Length: 0\r\n LENGTH"),
    ("behind a bare line feed", REFUSED, b"X: y\nContent-Length: LENGTH"),
    ("behind a bare carriage return", REFUSED, b"X: y\rContent-Length: LENGTH"),
]

# Chunks behind a good head; the second request follows. What is before it must be refused as it stands.
CHUNKS = [
    ("space behind the size", b"0 \r\n\r\n"), ("tab behind the size", b"0\t\r\n\r\n"), ("space before the size", b" 0\r\n\r\n"),
    ("plus", b"+0\r\n\r\n"), ("minus", b"-0\r\n\r\n"), ("0x", b"0x0\r\n\r\n"), ("0X1", b"0X1\r\nZ\r\n0\r\n\r\n"), ("h", b"0h\r\n\r\n"),
    ("no size", b"\r\n\r\n"), ("only an extension", b";a=b\r\n\r\n"), ("no digits", b"g\r\n\r\n"), ("comma", b"0,0\r\n\r\n"),
    ("point", b"0.0\r\n\r\n"), ("underscore", b"0_0\r\n\r\n"), ("zero byte", b"0\x00\r\n\r\n"),
    ("17 digits", b"0" * 17 + b"\r\n\r\n"), ("4,000 zeros", b"0" * 4000 + b"\r\n\r\n"),
    ("2 to the 64th", b"10000000000000000\r\n\r\n"), ("2 to the 32nd as 33 bits", b"0000000100000000" b"0\r\n\r\n"),
    ("bare line feed", b"0\n\n"), ("line feed, then CRLF", b"0\n\r\n"), ("CRLF, then line feed", b"0\r\n\n"),
    ("two carriage returns", b"0\r\r\n\r\n"), ("carriage return alone", b"0\r\r"), ("line feed in an extension", b"0;a\nb\r\n\r\n"),
    ("carriage return in an extension", b"0;a\rb\r\n\r\n"), ("open quotation mark", b'0;a="\r\n\r\n'),
    ("empty extension", b"0;\r\n\r\n"), ("space in an extension", b"0; a=b\r\n\r\n"), ("equals without a name", b"0;=b\r\n\r\n"),
    ("data longer than said", b"1\r\nZZ\r\n0\r\n\r\n"), ("data without its end", b"1\r\nZ0\r\n\r\n"),
    ("data ended by a line feed", b"1\r\nZ\n0\r\n\r\n"), ("data ended by a carriage return", b"1\r\nZ\r0\r\n\r\n"),
    ("data shorter than said", b"2\r\nZ\r\n0\r\n\r\n"),
    ("trailer with a length", b"0\r\nContent-Length: 5\r\n\r\n"), ("trailer with a coding", b"0\r\nTransfer-Encoding: chunked\r\n\r\n"),
    ("trailer with a host", b"0\r\nHost: evil.example\r\n\r\n"), ("folded trailer", b"0\r\n x: y\r\n\r\n"),
    ("folded second trailer", b"0\r\na: b\r\n x: y\r\n\r\n"), ("trailer without a colon", b"0\r\nabc\r\n\r\n"),
    ("trailer ended by a line feed", b"0\r\na: b\n\r\n"), ("trailer with a space before its colon", b"0\r\na : b\r\n\r\n"),
    ("trailers ended by a line feed", b"0\r\na: b\r\n\n"), ("trailer with a zero byte", b"0\r\na: \x00\r\n\r\n"),
]

# Whole heads; the second request follows.
HEADS = [
    ("no Host", b"GET /v1/models HTTP/1.1\r\n\r\n", REFUSED),
    ("two Hosts", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", REFUSED),
    ("two different Hosts", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", REFUSED),
    ("an empty Host", b"GET /v1/models HTTP/1.1\r\nHost:\r\n\r\n", REFUSED),
    ("a list of Hosts", b"GET /v1/models HTTP/1.1\r\nHost: localhost, evil.example\r\n\r\n", REFUSED),
    ("space before Host's colon", b"GET /v1/models HTTP/1.1\r\nHost : localhost\r\n\r\n", REFUSED),
    ("folded Host", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n .evil.example\r\n\r\n", REFUSED),
    ("Host with a path", b"GET /v1/models HTTP/1.1\r\nHost: localhost/x\r\n\r\n", REFUSED),
    ("Host with a user", b"GET /v1/models HTTP/1.1\r\nHost: evil@localhost\r\n\r\n", REFUSED),
    ("another host in the target", b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("a user in the target", b"GET http://a@localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("another scheme", b"GET file:///etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("CONNECT", b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n", REFUSED),
    ("no version", b"GET /v1/models\r\n\r\n", REFUSED),
    ("two versions", b"GET /v1/models HTTP/1.1 HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("two spaces", b"GET  /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("tabs", b"GET\t/v1/models\tHTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("space behind the version", b"GET /v1/models HTTP/1.1 \r\nHost: localhost\r\n\r\n", REFUSED),
    ("small letters in the version", b"GET /v1/models http/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("HTTP/1.10", b"GET /v1/models HTTP/1.10\r\nHost: localhost\r\n\r\n", REFUSED),
    ("HTTP/1,1", b"GET /v1/models HTTP/1,1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("HTTP/2.0", b"GET /v1/models HTTP/2.0\r\nHost: localhost\r\n\r\n", (505,)),
    ("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (505,)),
    ("a fragment", b"GET /v1/models#x HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("high bytes in the target", b"GET /\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("line feeds", b"GET /v1/models HTTP/1.1\nHost: localhost\n\n", REFUSED),
    ("the head ends with line feeds", b"GET /v1/models HTTP/1.1\r\nHost: localhost\n\n", REFUSED),
    ("the head ends with a line feed", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\n", REFUSED),
    ("the head ends with a carriage return", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r", REFUSED),
    ("no colon", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nabc\r\n\r\n", REFUSED),
    ("no name", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n: x\r\n\r\n", REFUSED),
    ("space in a name", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\na b: x\r\n\r\n", REFUSED),
    ("first line folded", b"GET /v1/models HTTP/1.1\r\n x: y\r\nHost: localhost\r\n\r\n", REFUSED),
    ("two empty lines in front", b"\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("a space in front", b" GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", REFUSED),
    ("another expectation", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nExpect: y 100-continue\r\n\r\n", (417,)),
    ("a coding in HTTP/1.0", b"POST /tokenize HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
     b"Connection: keep-alive\r\n\r\n0\r\n\r\n", REFUSED),
]

# A body where others do not look for one. It is read, and is no request.
METHODS = [("POST", "/health"), ("GET", "/v1/models"), ("GET", "/"), ("HEAD", "/"), ("OPTIONS", "/v1/models"), ("DELETE", "/v1/models"),
           ("POST", "/"), ("PUT", "/tokenize"), ("PATCH", "/nowhere"), ("TRACE", "/"), ("POST", "/tokenize"), ("BREW", "/pot")]


def rows():
    found = []

    def add(name, make, statuses):
        found.append((name, make(second(len(found))), statuses))

    def head(fields, path=b"/tokenize", method=b"POST"):
        return (b"%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%s\r\n\r\n" % (method, path, fields))

    for name, statuses, fields in CODINGS:
        add(f"coding: {name}", lambda s, f=fields: head(f) + b"0\r\n\r\n" + s, statuses)
    for name, statuses, fields in LENGTHS:
        add(f"length: {name}", lambda s, f=fields: head(f.replace(b"LENGTH", b"%d" % len(s))) + s, statuses)
    good = b"Transfer-Encoding: chunked"
    for name, chunks in CHUNKS:
        add(f"chunk: {name}", lambda s, c=chunks: head(good) + c + s, (400, 413))
    for name, whole, statuses in HEADS:
        add(f"head: {name}", lambda s, w=whole: w + s, statuses)
    for order in ("length first", "coding first"):
        for which, length in (("CL.TE", None), ("TE.CL", 4), ("CL 0", 0)):
            def both(s, first=order == "length first", n=length):
                size = b"Content-Length: %d" % (len(s) + 5 if n is None else n)
                return head(b"\r\n".join((size, good) if first else (good, size))) + b"0\r\n\r\n" + s
            add(f"both: {which}, {order}", both, REFUSED)
        for coding in (b"Transfer-Encoding: xchunked", b"Transfer-Encoding : chunked", b"Transfer-Encoding: identity"):
            def both_odd(s, first=order == "length first", c=coding):
                size = b"Content-Length: %d" % (len(s) + 5)
                return head(b"\r\n".join((size, c) if first else (c, size))) + b"0\r\n\r\n" + s
            add(f"both: {coding.decode()}, {order}", both_odd, (400, 501))
    for method, path in METHODS:
        m, p = method.encode(), path.encode()
        add(f"body with a length: {method} {path}", lambda s, m=m, p=p: head(b"Content-Length: %d" % len(s), p, m) + s, ANY_ONE)
        add(f"body in chunks: {method} {path}", lambda s, m=m, p=p: head(good, p, m) + chunk(s), ANY_ONE)
    hop = (("Content-Length", b"Content-Length: %d", False), ("Transfer-Encoding", good, True))
    for name, field, chunks in hop:
        add(f"Connection: {name}", lambda s, n=name, f=field, c=chunks: head(
            (f if c else f % len(s)) + b"\r\nConnection: keep-alive, " + n.encode()) + (chunk(s) if c else s), ANY_ONE)
    add("Expect with a body", lambda s: head(b"Expect: 100-continue\r\nContent-Length: %d" % len(s)) + s, ANY_ONE)
    add("an upgrade to h2c with a body", lambda s: head(
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nContent-Length: %d" % len(s)) + s,
        ANY_ONE)
    add("an upgrade to a websocket with a body", lambda s: head(
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 77\r\nContent-Length: %d" % len(s)) + s, ANY_ONE)
    add("X-HTTP-Method-Override", lambda s: head(b"X-HTTP-Method-Override: GET\r\nContent-Length: %d" % len(s)) + s, ANY_ONE)
    add("odd cases and a tab", lambda s: head(b"tRANSFER-eNCODING:\tcHUNKED") + chunk(s), ANY_ONE)
    add("an extension", lambda s: head(good) + b'%x;a;b=c;d="e\\"; f"\r\n%s\r\n000\r\nx-sum: 1\r\n\r\n' % (len(s), s), ANY_ONE)
    return found


def statuses_of(reply):
    """The statuses of all responses in these bytes, 100 left out, however few bytes came of the last."""
    found = []
    while reply:
        head, separator, rest = reply.partition(b"\r\n\r\n")
        line = head.split(b"\r\n")[0].split(b" ")
        if len(line) < 2 or not line[0].startswith(b"HTTP/1."):
            raise AssertionError(f"no response: {reply[:100]}")
        if line[1] != b"100":
            found.append(int(line[1]))
        if not separator:
            return found
        fields = dict(field.lower().split(b": ", 1) for field in head.split(b"\r\n")[1:] if b": " in field)
        length = int(fields.get(b"content-length", 0))
        if rest and not rest.startswith(b"HTTP/1."):
            rest = rest[length:]
        reply = rest
    return found

"""A corpus of malformed requests: 500 of them, made from a fixed seed, each with the statuses it may be answered with.

Every item is (name, bytes, half_close, statuses): `statuses` lists what may stand in the first line of the answer; None in
it means that the server may also say nothing and close.
"""

import json
import random

from harness import post

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BAD = (400,)


def wrong_types():
    """Each known field with values of the wrong type or range."""
    fields = {
        "messages": [3, "x", {}, [], [1], [{}], [{"role": 1}], [{"role": "nobody", "content": "x"}],
                     [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [{}]}],
                     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]],
        "temperature": ["1", -1, 3, [], {}, True], "top_p": ["1", -0.1, 1.5, {}], "n": [0, -1, 1.5, "2", 100000, 1e300],
        "max_tokens": [0, -1, "5", 1.5, 1 << 60, 1e300], "max_completion_tokens": [0, -5, [], "x"],
        "stop": [1, [1], {}, [""], "", ["x"] * 100, ["x" * 5000]], "stream": [1, "true", []],
        "stream_options": [1, [], {"include_usage": True}], "seed": ["x", 1.5, 1e300, {}],
        "logprobs": [1, "x"], "top_logprobs": [1, -1, 100, "x"], "presence_penalty": [5, "x"],
        "frequency_penalty": [-5, []], "logit_bias": [1, [], {"x": 1}, {"-1": 1}, {"99999999": 1}, {"1": "x"}, {"1": 1000}],
        "response_format": [1, "json", {}, {"type": "xml"}, {"type": 1}], "tools": [1, {}, [1], [{}], [{"type": "function"}],
                                                                                 [{"type": "x"}],
                                                                                 [{"type": "function", "function": {}}],
                                                                                 [{"type": "custom"}],
                                                                                 [{"type": "custom", "custom": {"name": ""}}],
                                                                                 [{"type": "custom", "custom": {
                                                                                     "name": "f", "format": {"type": "x"}}}]],
        "tool_choice": ["maybe", 1, {}, {"type": "function"}, "required", {"type": "function", "function": {"name": "f"}},
                        {"type": "custom"}, {"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}],
        "parallel_tool_calls": [1, "x"], "reasoning_effort": ["very", 1], "priority": ["x", 1.5, 1e30],
        "top_k": [-2, "x", 1.5], "min_p": [-1, 2], "open_objects": [1, "x", []], "modalities": [["audio"], 1],
    }
    for name, values in fields.items():
        for value in values:
            yield f"chat {name}={json.dumps(value)[:40]}", post(CHAT, json.dumps({**GOOD, name: value})), False, BAD
    for name, value in (("prompt", 5), ("prompt", []), ("prompt", [[]]), ("prompt", [-1]), ("prompt", [1 << 40]), ("prompt", ""),
                        ("prompt", [None]), ("max_tokens", -1), ("logprobs", 100), ("best_of", 5), ("echo", 1), ("suffix", "x")):
        yield (f"completion {name}={value}", post("/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1, name: value})),
               False, BAD)
    for value in (5, [], [5], [{}], [{"type": "x"}], [{"role": "x", "content": ""}], [{"type": "function_call"}]):
        yield f"responses input={value}", post("/v1/responses", json.dumps({"input": value})), False, BAD
    for path, body in (("/tokenize", {}), ("/tokenize", {"content": 1}), ("/detokenize", {"tokens": [-1]}),
                       ("/detokenize", {"tokens": ["x"]}), ("/detokenize", {"tokens": [1 << 62]}), ("/apply-template", {})):
        yield f"{path} {body}", post(path, json.dumps(body)), False, BAD


def bad_json(rng):
    good = json.dumps(GOOD).encode()
    pieces = [b"", b" ", b"nul", b"{", b"}", b"[", b'"', b"{]", b'{"a"}', b'{"a":}', b"{,}", b"[1,]", b"'x'", b"\x00", b"\xff\xfe",
              b'{"messages": [{"role": "user", "content": "\xff"}]}', b'{"messages": [{"role": "user", "content": "\xc3"}]}',
              b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": [{"role": "user", "content": "\\u12"}]}',
              b'{"a": 1e999999}', b'{"n": -1e999}', b'{"n": 1' + b"0" * 5000 + b"}", b'{"n": 01}', b'{"n": +1}', b'{"n": NaN}',
              b'{"n": Infinity}', b'{"n": 0x10}', b"[" * 100000, b'{"a":' * 50000, b"[" * 65 + b"]" * 65,
              b'{"messages":' + b"[" * 1000 + b"]" * 1000 + b"}", b"\xef\xbb\xbf{", b"true", b"[]", b"1", b'"x"', b"null"]
    for i, piece in enumerate(pieces):
        yield f"json {i} {piece[:20]}", post(CHAT, piece), False, BAD
    for i in range(90):  # cut short
        yield f"cut {i}", post(CHAT, good[: 1 + i % (len(good) - 1)]), False, BAD
    for i in range(70):  # a byte that makes it no JSON or no UTF-8
        at = rng.randrange(1, len(good) - 1)
        yield f"flip {i}", post(CHAT, good[:at] + bytes([rng.choice((0, 1, 31, 128, 192, 255))]) + good[at:]), False, BAD


def bad_http(rng):
    any_refusal = (400, 403, 404, 405, 413, 415, 417, 431, 501, 505, None)
    lines = [b"", b"\r\n\r\n", b"GET\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
             b"GET / HTTP/1.1\r\n: x\r\n\r\n", b"GET  /  HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
             b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\nx: \x00\r\n\r\n",
             b"POST " + CHAT.encode() + b" HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
             b"POST " + CHAT.encode() + b" HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
             b"POST " + CHAT.encode() + b" HTTP/1.1\r\ncontent-length: 1000000000\r\n\r\n",
             b"POST " + CHAT.encode() + b" HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
             b"POST " + CHAT.encode() + b" HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\nhello",
             b"POST " + CHAT.encode() + b" HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello",
             b"POST " + CHAT.encode() + b" HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\nhello",
             b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10000 + b"\r\n",
             b"GET / HTTP/1.1\r\nx: " + b"y" * 200000 + b"\r\n\r\n", b"A" * 100000,
             b"DELETE " + CHAT.encode() + b" HTTP/1.1\r\nconnection: close\r\n\r\n",
             b"GET /%00%ff%zz HTTP/1.1\r\nconnection: close\r\n\r\n", b"GET /../../etc/passwd HTTP/1.1\r\nconnection: close\r\n\r\n",
             b"BREW /coffee HTTP/1.1\r\nconnection: close\r\n\r\n"]
    for i, line in enumerate(lines):
        yield f"http {i} {line[:24]}", line, True, any_refusal
    request = post(CHAT, json.dumps(GOOD))
    for i in range(60):  # half-closed at every place of a request
        cut = 1 + i * (len(request) - 2) // 60
        yield f"half-closed at {cut}", request[:cut], True, any_refusal
    for i in range(60):  # noise
        yield f"noise {i}", rng.randbytes(rng.randrange(1, 400)), True, any_refusal


def corpus():
    rng = random.Random(7)
    items = [*wrong_types(), *bad_json(rng), *bad_http(rng)]
    while len(items) < 500:  # bytes of a good request changed until 500 are there
        request = bytearray(post(CHAT, json.dumps(GOOD)))
        for _ in range(rng.randrange(1, 4)):
            request[rng.randrange(len(request))] = rng.randrange(256)
        items.append((f"mutated {len(items)}", bytes(request), True, (200, 400, 403, 404, 405, 413, 415, 417, 431, 501, 505, None)))
    return items

#!/usr/bin/env python3
"""Writes kept inputs of fuzz targets: tests/fuzz/corpus/{gguf,safetensors}, and corpus/api/attack_* and http_*, which are
what tests/server/attacks.py sends, made small.

Small files, each with another part of the format in it, from which mutations reach the rest. Inputs that once
crashed are added by hand and not touched by this script.
"""

import json
import re
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "server"))
from attacks import attacks  # noqa: E402

CORPUS = Path(__file__).resolve().parent / "corpus"
API_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize",
             "/apply-template")  # as api_fuzz.cpp has them
MORE_PATHS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/conversations", "/v1/rerank", "/infill",
              "/api/chat", "/api/generate", "/api/embed", "/api/show")  # and these, from 98 on
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def scalar(kind, value):
    return text(value) if kind == STRING else struct.pack(SCALARS[kind], value)


def entry(key, kind, value, element=None):
    out = text(key) + struct.pack("<I", kind)
    if kind != ARRAY:
        return out + scalar(kind, value)
    return out + struct.pack("<IQ", element, len(value)) + b"".join(scalar(element, item) for item in value)


def gguf(metadata=(), tensors=(), data=b"", version=3, alignment=32):
    """tensors: (name, dims fastest first, type, offset)"""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + b"".join(metadata)
    for name, dims, kind, offset in tensors:
        out += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        out += struct.pack("<IQ", kind, offset)
    if data:
        out += bytes(-len(out) % alignment) + data
    return out


def safetensors(header, data=b"", padding=0):
    encoded = json.dumps(header, separators=(",", ":")).encode() + b" " * padding
    return struct.pack("<Q", len(encoded)) + encoded + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def gguf_files():
    yield "empty", gguf()
    yield "version2", gguf([entry("general.architecture", STRING, "llama")], version=2)
    yield "scalars", gguf([entry(f"k{kind}", kind, 1) for kind in SCALARS])
    yield "arrays", gguf([entry("tokens", ARRAY, ["a", "", "bc"], STRING), entry("scores", ARRAY, [0.5, -1], 6),
                          entry("types", ARRAY, [1, -2, 3], 5), entry("flags", ARRAY, [0, 1], 7),
                          entry("bytes", ARRAY, [255], 0), entry("wide", ARRAY, [1 << 40], 10), entry("none", ARRAY, [], 3)])
    yield "plain", gguf([entry("general.architecture", STRING, "llama")],
                        [("a", [3, 2], 0, 0), ("b", [2, 2, 2, 2], 1, 32), ("c", [4], 30, 64), ("s", [], 0, 96)],
                        bytes(range(100)))
    blocks = [(2, 32, 18), (3, 32, 20), (6, 32, 22), (7, 32, 24), (8, 32, 34), (39, 32, 17), (12, 256, 144),
              (13, 256, 176), (14, 256, 210)]
    offsets, tensors = 0, []
    for kind, elements, size in blocks:
        tensors.append((f"t{kind}", [elements], kind, offsets))
        offsets += size + -size % 32
    yield "blocks", gguf((), tensors, bytes(offsets))
    yield "aligned64", gguf([entry("general.alignment", 4, 64)], [("a", [1], 0, 0), ("b", [1], 26, 64)], bytes(68),
                            alignment=64)
    yield "split", gguf([entry("split.no", 2, 0), entry("split.count", 2, 2), entry("split.tensors.count", 5, 2)],
                        [("a", [1], 0, 0)], bytes(4))


def safetensors_files():
    yield "empty", safetensors({})
    yield "metadata", safetensors({"__metadata__": {"format": "pt", "u": "\u00e9\n"}})
    kinds = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8, "BOOL": 1, "X9": 3}
    header, at = {}, 0
    for kind, size in kinds.items():
        header[kind] = tensor(kind, [2], at, at + 2 * size)
        at += 2 * size
    yield "types", safetensors(header, bytes(at))
    yield "shapes", safetensors({"s": tensor("F32", [], 0, 4), "e": tensor("F32", [0, 9], 4, 4),
                                 "d": tensor("U8", [1, 2, 3, 4], 4, 28)}, bytes(range(28)))
    yield "unaligned", safetensors({"b": tensor("U8", [1], 0, 1), "f": tensor("F32", [2], 1, 9)}, bytes(9), padding=1)
    yield "overlap", safetensors({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, bytes(12))
    yield "negative", safetensors({"a": tensor("F32", [-1, 1.5], 0, 8)}, bytes(8))
    yield "nested", struct.pack("<Q", 40) + b'{"a":' + b"[" * 35


def api_files():
    for number, (name, path, body, _) in enumerate(attacks(160)):
        model = 128 if number % 2 else 0
        if path in API_PATHS:
            which = next(i for i in range(model, model + 128) if i % len(API_PATHS) == API_PATHS.index(path))
        else:
            which = model + 98 + MORE_PATHS.index(path)
        if len(body) < 2000:
            yield "attack_" + re.sub(r"\W+", "_", name), bytes([which]) + body
    # No brace: edits of the body that api_fuzz.cpp has for the endpoint; none, and a few.
    for number, path in enumerate(MORE_PATHS):
        name = re.sub(r"\W+", "_", path)
        yield "body" + name, bytes([98 + number])
        yield "edits" + name, bytes([128 + 98 + number, 3, 12, 5, 34, 9, 0])
    chat = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2}'

    def http(line, body=b"", headers=b""):
        return line + b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + headers + (
            b"content-length: %d\r\n\r\n" % len(body)) + body

    yield "http_chat", b"\x00" + http(b"POST /v1/chat/completions", chat)
    yield "http_pipelined", b"\x80" + http(b"GET /health") + http(b"POST /tokenize", b'{"content":"a b"}') + http(b"GET /metrics")
    yield "http_chunked", (b"\x80POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                           b"transfer-encoding: chunked\r\n\r\n10\r\n{\"prompt\":\"a b\"\r\n12\r\n,\"max_tokens\":   2}"
                           b"\r\n0\r\n\r\n")
    yield "http_gets", b"\x00" + b"".join(http(b"GET " + path) for path in (b"/v1/models", b"/stats", b"/ready", b"/openapi.json"))
    yield "http_stored", b"\x00" + http(b"POST /v1/responses", b'{"input":"a","max_output_tokens":1,"background":true}') + http(
        b"GET /v1/responses/resp_0") + http(b"DELETE /v1/responses/resp_0") + http(b"POST /v1/responses/resp_0/cancel", b"{}")
    yield "http_smuggled", b"\x00" + http(b"POST /tokenize", b'{"content":"a"}', b"transfer-encoding: chunked, identity\r\n")


def main():
    for folder, files in (("gguf", gguf_files()), ("safetensors", safetensors_files()), ("api", api_files())):
        directory = CORPUS / folder
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files:
            (directory / name).write_bytes(data)


if __name__ == "__main__":
    main()

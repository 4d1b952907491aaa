#!/usr/bin/env python3
"""Writes llama2.c's stories15M as a GGUF file: F32 weights, SentencePiece vocabulary.

  tools/stories_gguf.py llama2.data OUT.gguf

The input is a llama2.c version 0 checkpoint (seven int32: dim, hidden, layers, heads, KV heads, vocabulary,
context; then float32 tensors) followed by llama2.c's tokenizer.bin (longest piece, then per piece a float32
score, an int32 length and bytes). llama2.c keeps Meta's order of the rotary pairs, which is also GGUF's for
"llama": no rows move. The output depends on the input alone, so its checksum can be kept.
"""

import os
import struct
import sys

CHECKPOINT_BYTES = 60816028
ALIGNMENT = 32
UINT32, FLOAT32, BOOL, STRING, ARRAY, INT32 = 4, 6, 7, 8, 9, 5  # GGUF value types
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # GGUF token types
UNK_ID, BOS_ID, EOS_ID, FIRST_BYTE_ID = 0, 1, 2, 3
LAST_BYTE_ID = FIRST_BYTE_ID + 255


def read_config(data):
    names = ("dim", "hidden", "layers", "heads", "kv_heads", "vocab", "context")
    config = dict(zip(names, struct.unpack_from("<7i", data)))
    config["tied"] = config["vocab"] > 0  # a negative count says that a classifier of its own follows
    config["vocab"] = abs(config["vocab"])
    return config


def tensor_table(config):
    """(GGUF name, GGUF dimensions with the contiguous one first, offset in the checkpoint) of every tensor.

    The checkpoint keeps each kind of tensor for all layers together.
    """
    dim, hidden, layers = config["dim"], config["hidden"], config["layers"]
    head_dim = dim // config["heads"]
    kv_dim = head_dim * config["kv_heads"]
    per_layer = (("attn_norm", (dim,)), ("attn_q", (dim, dim)), ("attn_k", (dim, kv_dim)), ("attn_v", (dim, kv_dim)),
                 ("attn_output", (dim, dim)), ("ffn_norm", (dim,)), ("ffn_gate", (dim, hidden)),
                 ("ffn_down", (hidden, dim)), ("ffn_up", (dim, hidden)))
    table, offset = [], 28

    def add(name, shape):
        nonlocal offset
        table.append((name, shape, offset))
        offset += num_bytes(shape)

    add("token_embd.weight", (dim, config["vocab"]))
    for kind, shape in per_layer:
        for layer in range(layers):
            add(f"blk.{layer}.{kind}.weight", shape)
    add("output_norm.weight", (dim,))
    offset += 2 * 4 * config["context"] * head_dim // 2  # cosines and sines, which nobody needs stored
    if not config["tied"]:
        add("output.weight", (dim, config["vocab"]))
    return table, offset


def num_bytes(shape):
    count = 4
    for extent in shape:
        count *= extent
    return count


def read_vocabulary(data, count):
    """Pieces, scores and types as SentencePiece had them: tokenizer.bin holds the text they stand for."""
    pieces, scores, types, offset = [], [], [], 4
    for token in range(count):
        score, length = struct.unpack_from("<fi", data, offset)
        text = data[offset + 8:offset + 8 + length]
        offset += 8 + length
        if token in (BOS_ID, EOS_ID):
            text = text.strip(b"\n")
        elif FIRST_BYTE_ID <= token <= LAST_BYTE_ID:
            text = b"<0x%02X>" % (token - FIRST_BYTE_ID)
        else:
            text = text.replace(b" ", "\u2581".encode())
        pieces.append(text)
        scores.append(score)
        types.append({UNK_ID: UNKNOWN, BOS_ID: CONTROL, EOS_ID: CONTROL}.get(
            token, BYTE if token <= LAST_BYTE_ID else NORMAL))
    if offset != len(data):
        raise ValueError(f"tokenizer.bin: {len(data) - offset} bytes after {count} pieces, expected 0")
    return pieces, scores, types


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def metadata(config, vocabulary):
    pieces, scores, types = vocabulary
    count = len(pieces)

    def number(kind, code, value):
        return struct.pack("<I" + code, kind, value)

    def array(kind, body):
        return struct.pack("<IIQ", ARRAY, kind, count) + body

    values = [("general.architecture", struct.pack("<I", STRING) + string("llama")),
              ("general.name", struct.pack("<I", STRING) + string("stories15M")),
              ("general.license", struct.pack("<I", STRING) + string("mit")),
              ("general.alignment", number(UINT32, "I", ALIGNMENT)),
              ("general.file_type", number(UINT32, "I", 0)),
              ("llama.context_length", number(UINT32, "I", config["context"])),
              ("llama.embedding_length", number(UINT32, "I", config["dim"])),
              ("llama.block_count", number(UINT32, "I", config["layers"])),
              ("llama.feed_forward_length", number(UINT32, "I", config["hidden"])),
              ("llama.attention.head_count", number(UINT32, "I", config["heads"])),
              ("llama.attention.head_count_kv", number(UINT32, "I", config["kv_heads"])),
              ("llama.attention.layer_norm_rms_epsilon", number(FLOAT32, "f", 1e-5)),
              ("llama.rope.dimension_count", number(UINT32, "I", config["dim"] // config["heads"])),
              ("llama.rope.freq_base", number(FLOAT32, "f", 10000.0)),
              ("llama.vocab_size", number(UINT32, "I", config["vocab"])),
              ("tokenizer.ggml.model", struct.pack("<I", STRING) + string("llama")),
              ("tokenizer.ggml.pre", struct.pack("<I", STRING) + string("default")),
              ("tokenizer.ggml.tokens", array(STRING, b"".join(map(string, pieces)))),
              ("tokenizer.ggml.scores", array(FLOAT32, struct.pack(f"<{count}f", *scores))),
              ("tokenizer.ggml.token_type", array(INT32, struct.pack(f"<{count}i", *types))),
              ("tokenizer.ggml.bos_token_id", number(UINT32, "I", BOS_ID)),
              ("tokenizer.ggml.eos_token_id", number(UINT32, "I", EOS_ID)),
              ("tokenizer.ggml.unknown_token_id", number(UINT32, "I", UNK_ID)),
              ("tokenizer.ggml.add_bos_token", number(BOOL, "?", True)),
              ("tokenizer.ggml.add_eos_token", number(BOOL, "?", False)),
              ("tokenizer.ggml.add_space_prefix", number(BOOL, "?", True))]
    return len(values), b"".join(string(key) + value for key, value in values)


def padding(size):
    return b"\0" * (-size % ALIGNMENT)


def convert(data, checkpoint_bytes, path):
    """Writes `path` from checkpoint and tokenizer.bin, one after the other in `data`."""
    config = read_config(data)
    table, end = tensor_table(config)
    if end != checkpoint_bytes:
        raise ValueError(f"checkpoint: its header asks for {end} bytes, expected {checkpoint_bytes}")
    num_values, values = metadata(config, read_vocabulary(data[checkpoint_bytes:], config["vocab"]))
    directory, offset = b"", 0
    for name, shape, _ in table:
        directory += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", 0, offset)
        offset += num_bytes(shape) + len(padding(num_bytes(shape)))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(table), num_values) + values + directory
    with open(path, "wb") as out:
        out.write(header + padding(len(header)))
        for _, shape, start in table:
            tensor = data[start:start + num_bytes(shape)]
            out.write(tensor + padding(len(tensor)))


def main():
    if len(sys.argv) != 3:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    source, target = sys.argv[1:]
    try:
        with open(source, "rb") as file:
            convert(file.read(), CHECKPOINT_BYTES, target + ".part")
        os.replace(target + ".part", target)
    except (OSError, ValueError, struct.error) as error:
        print(f"tools/stories_gguf.py: {source}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

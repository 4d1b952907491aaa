#!/usr/bin/env python3
"""Tiny text encoders and what transformers makes of them; all-MiniLM-L6-v2 and what sentence-transformers makes of it.

    venv/bin/python tests/golden/make_encoder_golden.py [build/models/all-MiniLM-L6-v2]

Writes encoders/<name>/: hf/, model.gguf (the same numbers, llama.cpp's names and keys), golden.json {name, architecture,
hidden, pooling, prompts [{tokens, offset}]} and golden.f32: at `offset` (in floats) the mean of the last hidden states
[hidden], behind it the first token's and the last token's. With the folder of the real model: encoders/minilm.json,
sentences, their tokens and unit vectors.
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T
from safetensors.torch import save_file

import layer_norm_models

HERE = Path(__file__).parent / "encoders"
LENGTHS = (1, 2, 7, 33, 100, 150)
SENTENCES = ["The mill turns with the water.", "Water drives the wheel of the mill!", "GPUs multiply matrices.",
             "Die Mühle mahlt Korn; naïve façade, 北京 — ok?",
             "A text encoder turns a text into a vector, so that texts of one meaning lie close together. " * 4]


def bert_weights(c, seed, prefix):
    d = layer_norm_models.Draw(seed)
    n, inner = c["hidden_size"], c["intermediate_size"]
    at = f"{prefix}embeddings."
    d.matrix(at + "word_embeddings", c["vocab_size"], n, np.sqrt(n))
    d.matrix(at + "position_embeddings", c["max_position_embeddings"], n, 0.5 * np.sqrt(n))
    d.matrix(at + "token_type_embeddings", c["type_vocab_size"], n, 0.7 * np.sqrt(n))
    d.norm(at + "LayerNorm", n)
    for i in range(c["num_hidden_layers"]):
        at = f"{prefix}encoder.layer.{i}."
        for part in ("query", "key", "value"):
            d.linear(f"{at}attention.self.{part}", n, n, 1.3)
        d.linear(f"{at}attention.output.dense", n, n, 1.6)
        d.norm(f"{at}attention.output.LayerNorm", n)
        d.linear(f"{at}intermediate.dense", inner, n, 1.5)
        d.linear(f"{at}output.dense", n, inner, 0.9)
        d.norm(f"{at}output.LayerNorm", n)
    return d.out


def modernbert_weights(c, seed, prefix):
    d = layer_norm_models.Draw(seed)
    n, inner = c["hidden_size"], c["intermediate_size"]
    linear = lambda name, rows, cols, gain, bias: (d.linear if bias else d.matrix)(name, rows, cols, gain)

    def norm(name):
        d.vector(name + ".weight", n, 1.0, 0.25)
        if c["norm_bias"]:
            d.vector(name + ".bias", n, 0.0, 0.3)

    d.matrix(f"{prefix}embeddings.tok_embeddings", c["vocab_size"], n, np.sqrt(n))
    norm(f"{prefix}embeddings.norm")
    for i in range(c["num_hidden_layers"]):
        at = f"{prefix}layers.{i}."
        if i > 0:
            norm(at + "attn_norm")
        linear(at + "attn.Wqkv", 3 * n, n, 1.5, c["attention_bias"])
        linear(at + "attn.Wo", n, n, 1.6, c["attention_bias"])
        norm(at + "mlp_norm")
        linear(at + "mlp.Wi", 2 * inner, n, 1.5, c["mlp_bias"])
        linear(at + "mlp.Wo", n, inner, 0.9, c["mlp_bias"])
    norm(f"{prefix}final_norm")
    return d.out


def write_hf(folder, config, weights, pooling):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({n: torch.from_numpy(w.values.copy()).to(torch.bfloat16) for n, w in weights.items()},
              folder / "model.safetensors", metadata={"format": "pt"})
    if pooling:
        kinds = ["Transformer", "Pooling", "Normalize"]
        modules = [{"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
                   for i, kind in enumerate(kinds)]
        (folder / "modules.json").write_text(json.dumps(modules, indent=1) + "\n")
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{m}": m.startswith(pooling) for m in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")}
        modes["pooling_mode_mean_sqrt_len_tokens"] = False
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": config["hidden_size"], **modes}) + "\n")


def write_gguf(path, config, weights, prefix, types, pooling):
    """With the keys of llama.cpp's converter."""
    modern = config["model_type"] == "modernbert"
    arch = gguf.MODEL_ARCH.MODERN_BERT if modern else gguf.MODEL_ARCH.BERT
    w = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    w.add_name(path.parent.name)
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_layer_norm_eps(config["norm_eps" if modern else "layer_norm_eps"])
    w.add_causal_attention(False)
    w.add_pooling_type({"mean": gguf.PoolingType.MEAN, "cls": gguf.PoolingType.CLS}[pooling])
    if modern:
        w.add_sliding_window(config["local_attention"])
        w.add_uint32(f"{gguf.MODEL_ARCH_NAMES[arch]}.attention.sliding_window_pattern", config["global_attn_every_n_layers"])
        w.add_rope_freq_base(config["global_rope_theta"])
        w.add_float32(gguf.Keys.Rope.FREQ_BASE_SWA.format(arch=gguf.MODEL_ARCH_NAMES[arch]), config["local_rope_theta"])
    else:
        w.add_token_type_count(config["type_vocab_size"])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, weight in weights.items():
        mapped = names.get_name(name.removeprefix(prefix), try_suffixes=(".weight", ".bias"))
        small = weight.values.ndim == 1 or mapped.startswith(("position_embd", "token_types"))
        kind = T.F32 if small else types
        w.add_tensor(mapped, np.ascontiguousarray(weight.gguf(kind)), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def record(name, config, weights, prefix, pooling, types):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    write_hf(folder / "hf", config, weights, pooling)
    write_gguf(folder / "model.gguf", config, weights, prefix, types, pooling)
    net = transformers.AutoModel.from_pretrained(folder / "hf", dtype=torch.float32, attn_implementation="eager").eval()
    state = net.state_dict()
    for n, w in weights.items():  # all of them, as they are
        found = state.get(n, state.get(n.removeprefix(prefix)))
        assert found is not None and torch.equal(found, torch.from_numpy(w.values)), n
    rng = np.random.default_rng([ord(ch) for ch in name])
    entries, floats = [], []
    for length in LENGTHS:
        tokens = rng.integers(0, config["vocab_size"], size=length).tolist()
        with torch.no_grad():
            hidden = net(torch.tensor([tokens])).last_hidden_state[0].double()
        entry = {"tokens": tokens, "offset": sum(len(f) for f in floats)}
        floats += [x.float().numpy() for x in (hidden.mean(0), hidden[0], hidden[-1])]
        entries.append(entry)
    np.concatenate(floats).astype("<f4").tofile(folder / "golden.f32")
    arch = "modern-bert" if config["model_type"] == "modernbert" else "bert"
    golden = {"name": name, "architecture": arch, "hidden": config["hidden_size"], "pooling": pooling,
              "prompts": entries}
    (folder / "golden.json").write_text(json.dumps(golden, separators=(",", ":")).replace('{"tokens"', '\n{"tokens"') + "\n")
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{name}: {size / 1000:.0f} kB", flush=True)


def record_real(path):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu")
    vectors = model.encode(SENTENCES, normalize_embeddings=True, convert_to_numpy=True)
    tokens = [model.tokenizer(s)["input_ids"] for s in SENTENCES]
    out = [{"text": s, "tokens": t, "vector": [float(f"{x:.7g}") for x in v]} for s, t, v in zip(SENTENCES, tokens, vectors)]
    (HERE / "minilm.json").write_text("[\n" + ",\n".join(json.dumps(o, ensure_ascii=False) for o in out) + "\n]\n")


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bert = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 120, "hidden_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 5, "intermediate_size": 56, "hidden_act": "gelu", "max_position_embeddings": 160,
            "type_vocab_size": 2, "layer_norm_eps": 1e-12, "torch_dtype": "bfloat16", "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
    modern = {"architectures": ["ModernBertModel"], "model_type": "modernbert", "vocab_size": 120, "hidden_size": 32,
              "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32, "hidden_activation": "gelu",
              "max_position_embeddings": 256, "norm_eps": 1e-5, "norm_bias": False, "attention_bias": False, "mlp_bias": False,
              "local_attention": 24, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 1000.0,
              "torch_dtype": "bfloat16", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
              "sep_token_id": 2}
    record("bert", bert, bert_weights(bert, 71, ""), "", "mean", T.F16)
    cls = bert | {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 3,
                  "hidden_act": "gelu", "layer_norm_eps": 1e-5}
    record("bert-cls", cls, bert_weights(cls, 72, ""), "", "cls", T.Q8_0)
    record("modernbert", modern, modernbert_weights(modern, 73, ""), "", "mean", T.Q8_0)
    odd = modern | {"hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 44, "norm_bias": True,
                    "attention_bias": True, "mlp_bias": True, "local_attention": 17, "num_hidden_layers": 3,
                    "global_attn_every_n_layers": 2}
    record("modernbert-odd", odd, modernbert_weights(odd, 74, ""), "", "cls", T.F16)
    if len(sys.argv) > 1:
        record_real(Path(sys.argv[1]))


if __name__ == "__main__":
    main()

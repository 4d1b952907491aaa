#!/usr/bin/env python3
"""Tiny cross-encoders and the scores that transformers gives pairs of texts.

    venv/bin/python tests/golden/make_classifier_golden.py

Writes classifiers/<name>/: hf/, model.gguf (the same numbers, llama.cpp's names and keys) and golden.json {name, architecture, labels,
sigmoid, gguf, pairs [{tokens ([CLS] words [SEP] words [SEP]), second (where the second text begins), scores [labels]}]}.
"""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T

import make_encoder_golden as encoders

HERE = Path(__file__).parent / "classifiers"
LENGTHS = ((3, 4), (9, 8), (20, 60), (1, 100))
CLS, SEP = 1, 2
HEAD = {"bert.pooler.dense": "cls", "head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"}


def write_gguf(path, config, weights, prefix):
    body = {n: w for n, w in weights.items() if n.rpartition(".")[0] not in HEAD}
    encoders.write_gguf(path, config, body, prefix, T.F16, "cls")
    reader = gguf.GGUFReader(path)
    w = gguf.GGUFWriter(path.with_suffix(".new"), reader.get_field("general.architecture").contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            value = gguf.PoolingType.RANK if key.endswith("pooling_type") else field.contents()
            kind = field.types[0]
            w.add_key_value(key, int(value) if key.endswith("pooling_type") else value, kind)
    for tensor in reader.tensors:
        w.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, weight in weights.items():
        at, _, last = name.rpartition(".")
        if at in HEAD:
            kind = T.F32 if weight.values.ndim == 1 else T.F16
            w.add_tensor(f"{HEAD[at]}.{last}", np.ascontiguousarray(weight.gguf(kind)), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    path.with_suffix(".new").rename(path)


def head(config, weights, seed, modern):
    d = encoders.layer_norm_models.Draw(seed)
    n = config["hidden_size"]
    if modern:
        d.matrix("head.dense", n, n, 1.5)
        d.vector("head.norm.weight", n, 1.0, 0.25)
    else:
        d.linear("bert.pooler.dense", n, n, 1.2)
    d.linear("classifier", len(config["id2label"]), n, 2.0)
    return weights | d.out


def record(name, config, weights, prefix, gguf_too=True):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    encoders.write_hf(folder / "hf", config, weights, "")
    if gguf_too:
        write_gguf(folder / "model.gguf", config, weights, prefix)
    net = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "hf", dtype=torch.float32, attn_implementation="eager").eval()
    state = net.state_dict()
    for n, w in weights.items():
        assert torch.equal(state[n], torch.from_numpy(w.values)), n
    rng = np.random.default_rng([ord(ch) for ch in name])
    pairs = []
    for first, second in LENGTHS:
        words = rng.integers(4, config["vocab_size"], size=first + second).tolist()
        tokens, at = [CLS, *words[:first], SEP, *words[first:], SEP], first + 2
        ids = torch.tensor([tokens])
        types = {"token_type_ids": torch.tensor([[0] * at + [1] * (len(tokens) - at)])} if prefix == "bert." else {}
        with torch.no_grad():
            scores = net(ids, attention_mask=torch.ones_like(ids), **types).logits[0]
        pairs.append({"tokens": tokens, "second": at, "scores": [float(f"{x:.7g}") for x in scores]})
    (folder / "golden.json").write_text(json.dumps(
        {"name": name, "architecture": "bert" if prefix == "bert." else "modern-bert", "labels": len(config["id2label"]), "sigmoid": "sentence_transformers" not in config,
         "gguf": gguf_too, "pairs": pairs}, separators=(",", ":")).replace('{"tokens"', '\n{"tokens"') + "\n")
    print(name, [p["scores"] for p in pairs])


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    labels = lambda n: {"id2label": {str(i): f"L{i}" for i in range(n)}, "label2id": {f"L{i}": i for i in range(n)}}
    bert = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": 100, "hidden_size": 40,
            "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 56, "hidden_act": "gelu",
            "max_position_embeddings": 128, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "torch_dtype": "bfloat16",
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0, **labels(1)}
    record("bert", bert, head(bert, encoders.bert_weights(bert, 81, "bert."), 91, False), "bert.")
    identity = bert | labels(3) | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    record("bert-labels", identity, head(identity, encoders.bert_weights(identity, 82, "bert."), 92, False), "bert.", False)
    modern = {"architectures": ["ModernBertForSequenceClassification"], "model_type": "modernbert", "vocab_size": 100,
              "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
              "hidden_activation": "gelu", "max_position_embeddings": 256, "norm_eps": 1e-5, "norm_bias": False,
              "attention_bias": False, "mlp_bias": False, "local_attention": 24, "global_attn_every_n_layers": 2,
              "global_rope_theta": 160000.0, "local_rope_theta": 1000.0, "torch_dtype": "bfloat16", "pad_token_id": 0,
              "classifier_bias": False, "classifier_activation": "gelu", "classifier_pooling": "cls", **labels(1)}
    record("modernbert", modern, head(modern, encoders.modernbert_weights(modern, 83, "model."), 93, True), "model.")
    mean = modern | {"classifier_pooling": "mean"}
    record("modernbert-mean", mean, head(mean, encoders.modernbert_weights(mean, 84, "model."), 94, True), "model.", False)


if __name__ == "__main__":
    main()

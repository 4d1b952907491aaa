#!/usr/bin/env python3
"""The same as make_config_golden.py for models with LayerNorm and for encoders: layer_norm_configs.json.

    venv/bin/python tests/golden/make_layer_norm_config_golden.py [--check]

Every key of a class absent, at its default and at other values, and what a model built from it has.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import make_config_golden

transformers.logging.set_verbosity_error()
OUT = Path(__file__).parent / "layer_norm_configs.json"
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
         "max_position_embeddings": 512, "tie_word_embeddings": True}
BASES = {
    "gpt2": {"vocab_size": 64, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "layer_norm_epsilon": 1e-5},
    "phi": {**SMALL, "hidden_size": 256, "layer_norm_eps": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "bert": {**SMALL, "layer_norm_eps": 1e-12, "pad_token_id": 0},
    "modernbert": {**SMALL, "norm_eps": 1e-5, "local_attention": 32, "pad_token_id": 0},
}
VALUES = {
    "n_embd": [32, 96], "n_layer": [1, 2], "n_head": [2, 8], "n_positions": [77, 256], "n_inner": [None, 80, 100],
    "activation_function": ["gelu", "gelu_new", "gelu_pytorch_tanh", "silu"], "layer_norm_epsilon": [1e-3, 1e-6],
    "scale_attn_weights": [True, False], "hidden_size": [32, 128], "intermediate_size": [64, 160],
    "num_hidden_layers": [1, 5], "num_attention_heads": [2, 8], "num_key_value_heads": [1, 4, None],
    "max_position_embeddings": [100, 4096], "layer_norm_eps": [1e-3, 1e-8], "norm_eps": [1e-3, 1e-8],
    "hidden_act": ["gelu", "gelu_new", "gelu_pytorch_tanh", "silu"], "hidden_activation": ["gelu", "gelu_pytorch_tanh"],
    "type_vocab_size": [1, 3], "partial_rotary_factor": [0.25, 0.4, 1.0], "rope_theta": [500.0, 100000],
    "local_attention": [16, 33, 128], "global_attn_every_n_layers": [1, 2, 5], "global_rope_theta": [500.0],
    "local_rope_theta": [777.0, 20000.0], "layer_types": [["full_attention", "sliding_attention"] * 2],
    "rope_parameters": [None, {"rope_type": "default", "rope_theta": 4000.0, "partial_rotary_factor": 0.75},
                        {"rope_type": "linear", "factor": 2.5, "rope_theta": 3000.0},
                        {"full_attention": {"rope_type": "default", "rope_theta": 3000.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 900.0}}],
}
TANH = {"gelu_new", "gelu_pytorch_tanh"}


def numbers(values):
    return [float(f"{x:.9g}") for x in values.tolist()]


def facts(fields):
    config = AutoConfig.for_model(**fields)
    causal = config.model_type in ("gpt2", "phi")
    model = (AutoModelForCausalLM if causal else AutoModel).from_config(config, attn_implementation="eager")
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    base = model.base_model
    layers = list({"gpt2": lambda: base.h, "bert": lambda: base.encoder.layer}.get(config.model_type, lambda: base.layers)())
    heads = config.num_attention_heads
    first = layers[0]
    out = {"layers": len(layers), "hidden": config.hidden_size, "heads": heads, "head_dim": config.hidden_size // heads,
           "context": config.max_position_embeddings, "windows": [0] * len(layers)}
    if config.model_type == "gpt2":
        out |= {"ffn": first.mlp.c_fc.nf, "norm_eps": first.ln_1.eps, "context": base.wpe.num_embeddings,
                "tanh": config.activation_function in TANH, "scale": first.attn.scaling if hasattr(first.attn, "scaling") else None}
        if out["scale"] is None:
            out["scale"] = (config.hidden_size // heads) ** -0.5 if config.scale_attn_weights else 1.0
    elif config.model_type == "phi":
        rotary = type(base.rotary_emb)(config)
        out |= {"ffn": first.mlp.fc1.out_features, "norm_eps": first.input_layernorm.eps,
                "kv_heads": first.self_attn.k_proj.out_features // first.self_attn.head_dim, "tanh": config.hidden_act in TANH,
                "angles": numbers(rotary.inv_freq)}
    elif config.model_type == "bert":
        out |= {"ffn": first.intermediate.dense.out_features, "norm_eps": first.output.LayerNorm.eps,
                "tanh": config.hidden_act in TANH, "context": base.embeddings.position_embeddings.num_embeddings}
    else:
        rotary = type(base.rotary_emb)(config)
        out |= {"ffn": first.mlp.Wo.in_features, "norm_eps": first.mlp_norm.eps, "tanh": config.hidden_activation in TANH,
                "windows": [layer.attn.sliding_window or 0 for layer in layers],
                "angles": numbers(rotary.full_attention_inv_freq)}
        if hasattr(rotary, "sliding_attention_inv_freq"):  # else no layer slides
            out["window_angles"] = numbers(rotary.sliding_attention_inv_freq)
    return out


def variations(model_type, base):
    known = set(AutoConfig.for_model(model_type).to_dict()) | set(base)
    known |= {"phi": {"rope_theta", "partial_rotary_factor"},
              "modernbert": {"global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"}}.get(model_type, set())
    defaults = AutoConfig.for_model(model_type)
    for key in sorted(known & set(VALUES)):
        yield {}, [key]
        if hasattr(defaults, key) and key not in ("rope_parameters", "layer_types"):
            yield {key: getattr(defaults, key)}, []
        for value in VALUES[key]:
            yield {key: value}, []


def make():
    make_config_golden.facts = facts  # what its cases are made of
    out = {"transformers": transformers.__version__, "classes": {}}
    for model_type, base in BASES.items():
        of_base = facts({"model_type": model_type, **base})
        cases = [make_config_golden.case_of(model_type, base, of_base, *v) for v in variations(model_type, base)]
        out["classes"][model_type] = {"base": base, "facts": of_base, "cases": cases}
        refused = [case for case in cases if "refused" in case]
        print(f"{model_type}: {len(cases)} cases, {len(refused)} refused", file=sys.stderr)
    return json.dumps(out, separators=(", ", ": ")).replace('{"set"', '\n{"set"') + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with layer_norm_configs.json instead of writing it")
    made = make()
    if parser.parse_args().check:
        return 0 if json.loads(made) == json.loads(OUT.read_text()) else 1
    OUT.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Records what transformers makes of config.json's of Gemma 4, whose layers differ in their heads.

    venv/bin/python tests/golden/make_gemma4_config_golden.py [--check]

Writes gemma4_configs.json, in the form of configs.json (make_config_golden.py), with the heads, the source of keys and
the feed-forward size of every layer among the facts.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

OUT = Path(__file__).parent / "gemma4_configs.json"
S, F = "sliding_attention", "full_attention"
BASE = {"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 24,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 24, "num_kv_shared_layers": 2,
        "layer_types": [S, F, S, F], "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8,
        "max_position_embeddings": 256}
MOE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}


def rope(full, window=None):
    return {"rope_parameters": {F: full, S: window or {"rope_type": "default", "rope_theta": 500.0}}}


def variations():
    values = {
        "hidden_size": [32], "intermediate_size": [64], "num_hidden_layers": [], "num_attention_heads": [8],
        "num_key_value_heads": [1, 4], "head_dim": [8, 24, 32], "global_head_dim": [16, 8, 64],
        "num_global_key_value_heads": [2, 4, None], "attention_k_eq_v": [False], "sliding_window": [8, 100],
        "num_kv_shared_layers": [0, 1], "layer_types": [[F, S, F, S], [F, S, S, F], [S, F, F, F]],
        "use_double_wide_mlp": [False], "hidden_size_per_layer_input": [0, 16], "rms_norm_eps": [1e-3],
        "final_logit_softcapping": [9.0, None], "use_bidirectional_attention": ["vision", None], "attention_bias": [False],
        "max_position_embeddings": [100]}
    for key, others in values.items():
        if key in BASE and key not in ("vocab_size", "hidden_size", "num_hidden_layers"):
            yield {}, [key]
        for value in others:
            yield {key: value}, []
    yield MOE, []
    yield MOE | {"top_k_experts": 3, "hidden_size_per_layer_input": 0}, ["num_kv_shared_layers"]
    yield {"num_hidden_layers": 7}, ["layer_types"]
    yield {"num_hidden_layers": 7, "num_kv_shared_layers": 0}, ["layer_types"]
    half = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 7000.0}
    yield rope(half), []
    yield rope(half | {"factor": 4.0}), []
    yield rope(half | {"partial_rotary_factor": 0.4}), []
    yield rope({"rope_type": "proportional", "rope_theta": 7000.0}), []
    yield rope({"rope_type": "default", "rope_theta": 9000.0}), []
    yield rope(half, {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 1.0}), []
    each = {"1": {"head_dim": 32}, "3": {"head_dim": 32}}
    yield {"per_layer_config": each}, ["global_head_dim", "num_global_key_value_heads"]
    each = {k: v | {"num_key_value_heads": 4} for k, v in each.items()}
    yield {"per_layer_config": each}, ["global_head_dim", "num_global_key_value_heads"]


def facts(fields):
    config = AutoConfig.for_model("gemma4_text", **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    layers, rotary = list(model.model.layers), model.model.rotary_emb
    attention = [layer.self_attn for layer in layers]
    angles = lambda values: [float(f"{x:.9g}") for x in values.tolist()]
    last = {}
    source = []
    for i, a in enumerate(attention):
        if not a.is_kv_shared_layer:
            last[a.layer_type] = i
        source.append(last[a.layer_type])
    out = {"layers": len(layers), "hidden": config.hidden_size, "heads": config.num_attention_heads,
           "layer_kv_heads": [config.num_attention_heads // a.num_key_value_groups for a in attention],
           "layer_head_dims": [a.head_dim for a in attention], "kv_source": source,
           "windows": [a.sliding_window or 0 for a in attention], "norm_eps": layers[0].input_layernorm.eps,
           "ffn": max(layer.mlp.gate_proj.out_features for layer in layers), "attention_scale": attention[0].scaling,
           "embedding_scale": float(model.model.embed_tokens.embed_scale), "layer_input": config.hidden_size_per_layer_input,
           "logit_softcap": config.final_logit_softcapping or 0, "context": config.max_position_embeddings,
           "angles": angles(rotary.full_attention_inv_freq)}
    if S in config.layer_types:
        out["window_angles"] = angles(rotary.sliding_attention_inv_freq)
    if config.enable_moe_block:
        router, experts = layers[0].router, layers[0].experts
        out |= {"experts": router.proj.out_features, "experts_per_token": config.top_k_experts,
                "expert_ffn": experts.down_proj.shape[2]}
    return out


def main():
    of_base = facts(BASE)
    cases = []
    for to_set, to_drop in variations():
        fields = {k: v for k, v in {**BASE, **to_set}.items() if k not in to_drop}
        case = {"set": to_set, "drop": to_drop}
        try:
            found = facts(json.loads(json.dumps(fields)))
            case["facts"] = {k: v for k, v in found.items() if of_base.get(k) != v}
        except Exception as error:  # whatever the class finds wrong with it
            case["refused"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        cases.append(case)
    print(f"{len(cases)} cases, {sum('refused' in c for c in cases)} refused", file=sys.stderr)
    made = json.dumps({"classes": {"gemma4_text": {"base": BASE, "facts": of_base, "cases": cases}}})
    made = made.replace('{"set"', '\n{"set"') + "\n"
    if "--check" in sys.argv[1:]:
        return 0 if json.loads(made) == json.loads(OUT.read_text()) else 1
    OUT.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

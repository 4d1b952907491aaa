#!/usr/bin/env python3
"""What transformers makes of config.json of classes with latent attention, states or convolutions, and of Ministral 3:
mixer_configs.json, in the form of configs.json (make_config_golden.py).

    venv/bin/python tests/golden/make_mixer_config_golden.py [--check]

Sizes are those of the modules that a class builds, not what its configuration says: a key that a class does not look at
is one that changes nothing.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import make_config_golden
from make_config_golden import EXPERTS, SMALL

transformers.logging.set_verbosity_error()
OUT = Path(__file__).parent / "mixer_configs.json"
SIZES = {**SMALL, "num_hidden_layers": 3, "pad_token_id": 0}
LATENT = {**SIZES, **EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12,
          "qk_rope_head_dim": 8, "v_head_dim": 14, "n_routed_experts": 6, "n_shared_experts": 1, "moe_intermediate_size": 20,
          "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.3}
GROWING = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
           "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2, "rope_theta": 5000.0}
DELTA = {**SIZES, "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 12, "linear_value_head_dim": 10, "linear_conv_kernel_dim": 3}
SHARED = {**EXPERTS, "num_experts": 5, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 36}
CONV = {**SIZES, "num_hidden_layers": 4, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2, "norm_eps": 1e-5}
BASES = {
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "deepseek_v32": {**LATENT, "index_topk": 9, "index_n_heads": 4, "index_head_dim": 12},
    "mistral4": {**LATENT, "n_group": 1, "rope_parameters": {**GROWING, "partial_rotary_factor": 0.4}},
    "ministral3": {**SIZES, "head_dim": 10, "sliding_window": 24, "rope_parameters": GROWING},
    "qwen3_next": {**DELTA, **SHARED},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SHARED},
    "lfm2": {**CONV, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**CONV, **EXPERTS, "num_dense_layers": 1, "num_experts": 5, "moe_intermediate_size": 28},
    "granitemoehybrid": {**SIZES, **EXPERTS, "num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2,
                         "shared_intermediate_size": 40, "num_local_experts": 5, "mamba_n_heads": 8, "mamba_d_head": 16,
                         "mamba_d_state": 9, "mamba_n_groups": 1, "mamba_d_conv": 3, "mamba_expand": 2},
    "mamba2": {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 16, "state_size": 9,
               "n_groups": 1, "expand": 2, "conv_kernel": 3},
    "nemotron_h": {**SIZES, "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "head_dim": 12, "mamba_num_heads": 4, "mamba_head_dim": 10,
                   "n_groups": 2, "ssm_state_size": 9, "conv_kernel": 3, "moe_intermediate_size": 20,
                   "moe_shared_expert_intermediate_size": 28},
    "falcon_h1": {**SIZES, "mamba_d_ssm": 40, "mamba_n_heads": 4, "mamba_d_head": 10, "mamba_n_groups": 1,
                  "mamba_d_state": 9, "mamba_d_conv": 3},
}
for name in ("rms_norm_eps", "rope_theta"):  # keys that some of them do not have
    for kind in ("lfm2", "lfm2_moe", "nemotron_h")[: 2 if name == "rms_norm_eps" else 3]:
        BASES[kind].pop(name)

VALUES = {
    "hidden_size": [32], "intermediate_size": [64, 160], "num_hidden_layers": [1], "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, None], "head_dim": [8, 24, None], "max_position_embeddings": [100, 4096],
    "rms_norm_eps": [1e-3, 1e-8], "norm_eps": [1e-3, 1e-8], "layer_norm_epsilon": [1e-3, 1e-8],
    "rope_theta": [500000.0, 1000], "hidden_act": ["silu"], "moe_intermediate_size": [32, 36], "num_experts": [3, 8],
    "num_local_experts": [3, 8], "n_routed_experts": [4, 8], "num_experts_per_tok": [1, 3], "n_shared_experts": [2, 3],
    "shared_expert_intermediate_size": [32, 112], "shared_intermediate_size": [24, 50], "norm_topk_prob": [True, False],
    "routed_scaling_factor": [1.0, 2.5], "n_group": [1, 3], "topk_group": [2], "first_k_dense_replace": [0, 2, 9],
    "mlp_layer_types": [["dense", "dense", "sparse"], ["sparse"] * 3, None], "kv_lora_rank": [16, 40],
    "q_lora_rank": [None, 16], "qk_nope_head_dim": [8, 20], "qk_rope_head_dim": [4, 10], "v_head_dim": [8, 20],
    "index_topk": [5, 20], "index_n_heads": [2, 6], "index_head_dim": [10, 16], "rope_interleave": [True],
    "topk_method": ["group_limited_greedy"], "sliding_window": [8, 100, None], "full_attention_interval": [2, 3],
    "linear_num_key_heads": [1, 4], "linear_num_value_heads": [2, 8], "linear_key_head_dim": [8, 14],
    "linear_value_head_dim": [8, 14], "linear_conv_kernel_dim": [2, 4], "mlp_only_layers": [[1], None],
    "decoder_sparse_step": [2], "partial_rotary_factor": [0.5, 0.75], "conv_L_cache": [2, 5], "num_dense_layers": [0, 2],
    "block_multiple_of": [32, 100], "block_ffn_dim_multiplier": [0.5, 1.3, None], "block_auto_adjust_ff_dim": [True],
    "full_attn_idxs": [[0], [1, 2]], "block_ff_dim": [72], "use_expert_bias": [True],
    "mamba_n_heads": [4, 16], "mamba_d_head": ["auto", 8, 32], "mamba_d_state": [5, 16], "mamba_n_groups": [2, 4],
    "mamba_d_conv": [2, 4], "mamba_expand": [1, 3], "mamba_d_ssm": [20, 80, None], "num_heads": [3, 12],
    "state_size": [5, 16], "n_groups": [1, 2], "expand": [1, 3], "conv_kernel": [2, 4], "mamba_num_heads": [2, 8],
    "mamba_head_dim": [6, 16], "ssm_state_size": [5, 16], "hybrid_override_pattern": ["M*-M"],
    "embedding_multiplier": [2.5], "logits_scaling": [3.0], "residual_multiplier": [0.3], "attention_multiplier": [0.2],
    "key_multiplier": [0.7], "attention_in_multiplier": [1.5], "lm_head_multiplier": [0.6],
    "position_embedding_type": ["rope", "nope", None],
    "layer_types": [["linear_attention", "full_attention"] * 2, ["full_attention"] + ["conv"] * 3, None],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 900.0},
                        {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.6},
                        {"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "original_max_position_embeddings": 64}],
    "rope_scaling": [{"type": "linear", "factor": 2.0}, {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9,
                                                        "original_max_position_embeddings": 64}],
}


def numbers(values):
    return [float(f"{x:.9g}") for x in values.tolist()]


def first_with(layers, *names):
    """The first module under one of the names, of any layer, that is there."""
    for layer in layers:
        for name in names:
            if (found := getattr(layer, name, None)) is not None:
                yield found


def mixer(layers, has):
    for found in first_with(layers, "self_attn", "linear_attn", "mamba", "mixer", "conv"):
        if has(found):
            return found
    return None


def state_of(module):
    """[key heads, key dimensions, value heads, value dimensions, taps] of a module with a state."""
    if hasattr(module, "head_k_dim"):
        return [module.num_k_heads, module.head_k_dim, module.num_v_heads, module.head_v_dim, module.conv_kernel_size]
    taps = module.conv1d.kernel_size[0]
    return [module.n_groups, module.ssm_state_size, module.num_heads, module.head_dim, taps]


def experts_of(blocks):
    out, sparse = {}, [b for b in blocks if hasattr(b, "experts")]
    if not sparse:
        return out
    block = sparse[0]
    router = next(first_with([block], "gate", "router"))
    down = block.experts.down_proj
    out.update(experts=down.shape[0], expert_ffn=down.shape[2])
    out["experts_per_token"] = getattr(router, "top_k", None) or block.top_k
    shared = next(first_with([block], "shared_expert", "shared_experts"), None)
    if shared is not None:
        out["shared_ffn"] = shared.down_proj.in_features
    if hasattr(router, "norm_topk_prob"):
        out["renormalize"] = bool(router.norm_topk_prob)
    if hasattr(router, "routed_scaling_factor"):
        out["expert_scale"] = router.routed_scaling_factor
    limited = getattr(router, "topk_method", "noaux_tc") != "greedy"  # V2's greedy choice looks at no groups
    if limited and hasattr(router, "num_group"):
        out["groups"] = [router.num_group, router.topk_group]
    return out


def facts(fields):
    config = AutoConfig.for_model(**fields)
    if config.model_type == "mistral4":  # which AutoModelForCausalLM does not know
        model = transformers.Mistral4ForCausalLM._from_config(config, attn_implementation="eager")
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    kind, base = config.model_type, model.base_model
    layers = list(base.layers)
    norms = first_with(layers, "input_layernorm", "operator_norm", "norm")
    norm = next(norms)
    out = {"layers": len(layers), "hidden": config.hidden_size,
           "norm_eps": norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps}
    if kind != "mamba2":
        out["context"] = config.max_position_embeddings
    attention = mixer(layers, lambda m: hasattr(m, "kv_lora_rank") or hasattr(m, "k_proj"))
    if attention is not None:
        latent = hasattr(attention, "kv_lora_rank")
        out |= {"heads": config.num_attention_heads, "scale": float(attention.scaling)}
        if latent:
            out["latent"] = [attention.kv_lora_rank, attention.q_lora_rank or 0, attention.qk_rope_head_dim,
                             attention.qk_nope_head_dim, attention.v_head_dim]
        else:
            dim = attention.head_dim
            out |= {"head_dim": dim, "kv_heads": attention.k_proj.out_features // dim}
        if hasattr(attention, "indexer"):
            index = attention.indexer
            out["indexer"] = [index.n_heads, index.head_dim, index.index_topk]
    if kind == "falcon_h1":  # what multiplies the input of queries and keys multiplies scores
        out["scale"] *= layers[0].attention_in_multiplier ** 2 * attention.key_multiplier
    rotary = getattr(base, "rotary_emb", None)
    if rotary is not None and kind != "nemotron_h":
        made = type(rotary)(config)
        out |= {"angles": numbers(made.inv_freq), "magnitude": made.attention_scaling}
    if kind == "ministral3":
        out["windows"] = [config.sliding_window or 0] * len(layers)
    state = mixer(layers, lambda m: hasattr(m, "conv1d"))
    if state is not None:
        out["state"] = state_of(state)
    taps = mixer(layers, lambda m: hasattr(m, "L_cache"))
    if taps is not None:
        out["taps"] = taps.L_cache
    if kind not in ("mamba2", "falcon_h1", "nemotron_h"):
        blocks = [next(first_with([layer], "mlp", "feed_forward", "block_sparse_moe", "shared_mlp"), None) for layer in layers]
        if kind == "granitemoehybrid":
            blocks = []
        dense = [not hasattr(b, "experts") for b in blocks]
        if any(dense) and blocks:
            block = blocks[dense.index(True)]
            out["ffn"] = (block.down_proj if hasattr(block, "down_proj") else block.w2).in_features
        if not all(dense):
            out["dense"] = dense
        out |= experts_of(blocks)
        stateful = [hasattr(layer, "linear_attn") or getattr(layer, "mamba", None) is not None or
                    getattr(layer, "conv", None) is not None for layer in layers]
        if any(stateful) or kind.startswith("lfm2"):
            out["stateful"] = stateful
    if kind == "granitemoehybrid":
        out |= {"embedding_scale": base.embedding_multiplier, "logit_scale": 1 / config.logits_scaling,
                "residual_scale": layers[0].residual_multiplier}
    return out


def variations(model_type, base):
    defaults = AutoConfig.for_model(model_type)
    known = set(defaults.to_dict()) | set(base) | {"rope_scaling", "rope_theta", "partial_rotary_factor"}
    if model_type == "mamba2":
        known = set(defaults.to_dict()) | set(base)
    if model_type == "nemotron_h":  # its kinds of layers say how many there are; another number is refused here
        known -= {"num_hidden_layers"}
    for key in sorted(known & (set(VALUES) | set(base))):
        if key != "hybrid_override_pattern":  # without one there is no model
            yield {}, [key]
        if key in VALUES and hasattr(defaults, key) and key not in (
                "rope_parameters", "layer_types", "mlp_layer_types", "full_attn_idxs", "hybrid_override_pattern"):
            yield {key: getattr(defaults, key)}, []
        for value in VALUES.get(key, []):
            yield {key: value}, []


# What would take gigabytes at the class's own default is left out.
def fits(fields):
    config = AutoConfig.for_model(**fields)
    big = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "shared_intermediate_size",
           "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
    return all((getattr(config, k, 0) or 0) <= 1536 for k in big) and len(getattr(config, "layer_types", None) or []) <= 8 and \
        (getattr(config, "num_hidden_layers", 0) or 0) <= 8 and all(
            (getattr(config, k, 0) or 0) <= 64 for k in ("n_routed_experts", "num_experts", "num_local_experts"))


def make():
    make_config_golden.facts = facts  # what its cases are made of
    out = {"transformers": transformers.__version__, "classes": {}}
    for model_type, base in BASES.items():
        of_base = facts({"model_type": model_type, **base})
        cases = []
        for to_set, to_drop in variations(model_type, base):
            fields = {"model_type": model_type} | {k: v for k, v in {**base, **to_set}.items() if k not in to_drop}
            try:
                if not fits(fields):
                    continue
            except Exception:  # refused: so says the case
                pass
            cases.append(make_config_golden.case_of(model_type, base, of_base, to_set, to_drop))
        out["classes"][model_type] = {"base": base, "facts": of_base, "cases": cases}
        print(f"{model_type}: {len(cases)} cases, {sum('refused' in c for c in cases)} refused", file=sys.stderr)
    return json.dumps(out, separators=(", ", ": ")).replace('{"set"', '\n{"set"') + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with mixer_configs.json instead of writing it")
    arguments = parser.parse_args()
    made = make()
    if arguments.check:
        return 0 if json.loads(made) == json.loads(OUT.read_text()) else 1
    OUT.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

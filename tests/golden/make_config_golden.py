#!/usr/bin/env python3
"""What transformers makes of config.json: configs.json, the oracle of src/model/hf_config_test.cpp.

    venv/bin/python tests/golden/make_config_golden.py [--check]

For each configuration class: a small base configuration, and every key of the class absent, at its default and at
other values; every rotary scaling with every key it knows; and the spellings of older and newer files. A case is the
base's config.json with keys set (`set`) and removed (`drop`), and what a model built from it has, as far as it differs
from the base's: sizes, windows of its layers, rotary angles. `refused`: transformers itself does not run it.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
OUT = Path(__file__).parent / "configs.json"

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
         "tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2}
BASES = {
    "llama": SMALL,
    "mistral": {**SMALL, "sliding_window": 24},
    "qwen2": SMALL,
    "qwen3": {**SMALL, "head_dim": 32},
    "qwen3_moe": {**SMALL, **EXPERTS, "head_dim": 32, "num_experts": 6, "moe_intermediate_size": 48,
                  "norm_topk_prob": True},
    "gpt_oss": {**SMALL, **EXPERTS, "head_dim": 16, "num_local_experts": 6, "sliding_window": 24},
    "mixtral": {**SMALL, **EXPERTS, "head_dim": 16, "num_local_experts": 6},
    "qwen2_moe": {**SMALL, **EXPERTS, "num_experts": 6, "moe_intermediate_size": 48,
                  "shared_expert_intermediate_size": 80},
    "glm4_moe": {**SMALL, **EXPERTS, "head_dim": 32, "n_routed_experts": 6, "moe_intermediate_size": 48},
    "llama4_text": {**SMALL, "head_dim": 32, "num_local_experts": 6, "intermediate_size_mlp": 80,
                    "pad_token_id": 0},
}
# Dense decoders that differ from llama by a few switches: with some of the rotary scalings.
GEMMA = {**SMALL, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 20}
DENSE = {
    "gemma3_text": {**GEMMA, "rope_local_base_freq": 2000.0, "sliding_window_pattern": 3},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 25.0},
    "phi3": {**SMALL, "sliding_window": 24, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "granite": {**SMALL, "embedding_multiplier": 5.0, "logits_scaling": 3.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.2},
    "olmo2": {**SMALL, "pad_token_id": 0},
    "smollm3": {**SMALL, "no_rope_layers": [1, 0, 1, 1], "pad_token_id": 0},
    "seed_oss": {**SMALL, "head_dim": 32, "pad_token_id": 0},
    "ernie4_5": {**SMALL, "head_dim": 32},
    "ministral": {**SMALL, "head_dim": 32, "sliding_window": 24},
}
BASES |= DENSE

# Other values of a key than its default. Keys that change nothing a reader sees (dropout, caching) are not here.
VALUES = {
    "hidden_size": [32, 128], "intermediate_size": [64, 160], "num_hidden_layers": [1, 5],
    "num_attention_heads": [2, 8], "num_key_value_heads": [1, 4, None], "head_dim": [8, 64, None],
    "max_position_embeddings": [100, 4096], "rms_norm_eps": [1e-3, 1e-8], "rope_theta": [500000.0, 1000],
    "sliding_window": [8, 100, None], "use_sliding_window": [True, False], "max_window_layers": [0, 2],
    "layer_types": [["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2, None],
    "attention_bias": [True, False], "mlp_bias": [True, False], "partial_rotary_factor": [0.5, 1.0],
    "num_experts": [3, 8], "num_local_experts": [3, 8], "num_experts_per_tok": [1, 3],
    "moe_intermediate_size": [32, 80], "norm_topk_prob": [True, False], "decoder_sparse_step": [1, 2, 3],
    "mlp_only_layers": [[], [1], [0, 3], None], "swiglu_limit": [5.0, 9.5], "swiglu_alpha": [1.5, 2.0],
    "original_max_position_embeddings": [64, 256], "hidden_act": ["silu"], "rope_parameters": [None],
    "rope_scaling": [None], "shared_expert_intermediate_size": [32, 112], "n_routed_experts": [4, 8],
    "n_shared_experts": [1, 3], "n_group": [2, 3], "topk_group": [1], "routed_scaling_factor": [1.0, 2.5],
    "first_k_dense_replace": [0, 2, 9], "use_qk_norm": [True, False], "intermediate_size_mlp": [64, 112],
    "moe_layers": [None, [1], [0, 3]], "interleave_moe_layer_step": [1, 2, 3], "attention_chunk_size": [16, 100],
    "no_rope_layers": [None, [1, 0, 0, 1]], "no_rope_layer_interval": [1, 2, 3],
}
VALUES |= {
    "query_pre_attn_scalar": [16, 64], "attn_logit_softcapping": [20.0, None], "final_logit_softcapping": [9.0, None],
    "rope_local_base_freq": [700.0], "sliding_window_pattern": [2, 4], "hidden_activation": ["gelu_pytorch_tanh"],
    "embedding_multiplier": [0.5, 12], "logits_scaling": [0.5, 8], "residual_multiplier": [0.22, 2],
    "attention_multiplier": [0.015625, 2], "no_rope_layers": [[1, 1, 1, 1], [0, 1, 0, 1], None],
    "no_rope_layer_interval": [2, 3], "use_bias": [True], "attention_out_bias": [True],
}
SHORT = [1.0 + 0.1 * i for i in range(32)]
ROPE = [
    {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 77777.0}, {"type": "linear", "factor": 2.6},
    {"rope_type": "linear", "factor": 4}, {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 128},
    {"rope_type": "llama3", "factor": 3.3, "low_freq_factor": 0.7, "high_freq_factor": 6.5},
    {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 2.6, "original_max_position_embeddings": 100},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 20.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.9},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7}, {"rope_type": "yarn", "factor": 0.5},
    {"rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 96},
    {"rope_type": "yarn", "factor": 8.0, "truncate": True, "original_max_position_embeddings": 96},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128, "short_factor": SHORT,
     "long_factor": [2.0] * 32},
    {"rope_type": "longrope", "original_max_position_embeddings": 128, "short_factor": SHORT,
     "long_factor": [2.0] * 32},
    {"rope_type": "longrope", "original_max_position_embeddings": 128, "short_factor": SHORT,
     "long_factor": [2.0] * 32, "attention_factor": 1.25},
]


def window_of(config, layer):
    if config.model_type in ("llama", "granite", "olmo2", "seed_oss", "ernie4_5"):
        return 0
    if config.model_type in ("mistral", "mixtral", "phi3"):
        return config.sliding_window or 0
    if config.model_type == "smollm3":  # its mask goes by layer_types alone
        return config.sliding_window if config.layer_types[layer.self_attn.layer_idx] == "sliding_attention" else 0
    if config.model_type == "llama4_text":
        chunked = config.layer_types[layer.self_attn.layer_idx] == "chunked_attention"
        return config.attention_chunk_size if chunked else 0
    return getattr(layer.self_attn, "sliding_window", 0) or 0


def dense_facts(config, model, rotary, out):
    """What the classes of DENSE have beside sizes."""
    kind, attention = config.model_type, model.model.layers[0].self_attn
    if kind in ("gemma2", "gemma3_text"):
        out["embedding_scale"] = float(model.model.embed_tokens.embed_scale)
        out["logit_softcap"] = config.final_logit_softcapping or 0
    if kind in ("gemma2", "gemma3_text", "granite"):
        out["attention_scale"] = attention.scaling
    if kind == "gemma2":
        out["attention_softcap"] = attention.attn_logit_softcapping or 0
    if hasattr(rotary, "sliding_attention_inv_freq"):
        out["window_angles"] = [float(f"{x:.9g}") for x in rotary.sliding_attention_inv_freq.tolist()]
    if kind == "granite":
        out |= {"embedding_scale": model.model.embedding_multiplier, "logit_scale": 1 / config.logits_scaling,
                "residual_scale": model.model.layers[0].residual_multiplier}
    if kind == "smollm3":
        out["unrotated"] = [not layer.self_attn.use_rope for layer in model.model.layers]


def facts(fields):
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    rotary = type(model.model.rotary_emb)(config)
    with torch.no_grad():  # what can be built cannot always be run
        model(torch.tensor([[1, 2, 3]]))
    layers = list(model.model.layers)
    attention = layers[0].self_attn
    norm = layers[0].post_attention_layernorm
    split = hasattr(rotary, "full_attention_inv_freq")  # Gemma 3: angles by the kind of layer
    angles = lambda values: [float(f"{x:.9g}") for x in values.tolist()]
    out = {"layers": len(layers), "hidden": config.hidden_size, "heads": config.num_attention_heads,
           "kv_heads": config.num_attention_heads // attention.num_key_value_groups, "head_dim": attention.head_dim,
           "norm_eps": norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps,
           "windows": [window_of(config, layer) for layer in layers]}
    if config.model_type != "gemma3_text" or split:  # else all its layers have a window
        out["angles"] = angles(rotary.full_attention_inv_freq if split else rotary.inv_freq)
        out["magnitude"] = rotary.full_attention_attention_scaling if split else rotary.attention_scaling
    dense_facts(config, model, rotary, out)
    blocks = [layer.feed_forward if config.model_type == "llama4_text" else layer.mlp for layer in layers]
    dense = [hasattr(block, "gate_proj") or hasattr(block, "gate_up_proj") for block in blocks]
    if hasattr(blocks[0], "gate_up_proj"):
        out["ffn"] = blocks[0].gate_up_proj.out_features // 2
    elif any(dense):
        out["ffn"] = blocks[dense.index(True)].gate_proj.out_features
    if not all(dense):
        sparse = blocks[dense.index(False)]
        router = sparse.gate if hasattr(sparse, "gate") else sparse.router
        out.update(dense=dense, experts=router.num_experts, experts_per_token=router.top_k,
                   expert_ffn=sparse.experts.down_proj.shape[1 if config.model_type in ("gpt_oss", "llama4_text") else 2])
        shared = getattr(sparse, "shared_expert", None) or getattr(sparse, "shared_experts", None)
        if shared is not None:
            out["shared_ffn"] = shared.gate_proj.out_features
        if hasattr(router, "norm_topk_prob"):
            out["renormalize"] = bool(router.norm_topk_prob)
        if hasattr(router, "num_group"):
            out.update(groups=[router.num_group, router.topk_group], expert_scale=router.routed_scaling_factor)
        if config.model_type == "llama4_text":
            out["unrotated"] = [not layer.self_attn.use_rope for layer in layers]
            out["qk_norm"] = any(hasattr(layer.self_attn, "qk_norm") for layer in layers)
        if config.model_type == "gpt_oss":
            out["swiglu"] = [sparse.experts.alpha, sparse.experts.limit]
    return out


def variations(model_type, base):
    """Pairs of keys to set and keys to drop."""
    known = set(AutoConfig.for_model(model_type).to_dict()) | set(base) | {"rope_scaling"}
    defaults = AutoConfig.for_model(model_type)
    for key in sorted(known & (set(VALUES) | set(base))):
        yield {}, [key]
        if key in VALUES and hasattr(defaults, key) and key not in ("rope_parameters", "layer_types", "mlp_only_layers"):
            yield {key: getattr(defaults, key)}, []
        for value in VALUES.get(key, []):
            yield {key: value}, []
    for key in ("sliding_window", "layer_types", "partial_rotary_factor", "original_max_position_embeddings"):
        if key not in known:  # ignored, or not, by a class that does not know it
            for value in VALUES[key]:
                yield {key: value}, []
    if "use_sliding_window" in known:
        for first in (0, 2, 28):
            yield {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": first}, []
        yield {"use_sliding_window": True, "sliding_window": None}, []
        yield {"use_sliding_window": True, "layer_types": VALUES["layer_types"][1], "sliding_window": 16}, []
    if "num_experts" in base:
        yield {"num_local_experts": 5}, ["num_experts"]
        yield {"mlp_only_layers": [2], "decoder_sparse_step": 2}, []
    angles = base.get("head_dim", base["hidden_size"] // base["num_attention_heads"]) // 2
    for rope in ROPE[::3] if model_type in DENSE else ROPE:
        rope = {k: v[:angles] if isinstance(v, list) else v for k, v in rope.items()}
        yield {"rope_scaling": rope}, []
        yield {"rope_parameters": {"rope_theta": 5000.0, **rope}}, ["rope_theta"]
        yield {"rope_parameters": rope}, ["rope_theta"]
        yield {"rope_scaling": rope, "original_max_position_embeddings": 64}, []
    for rope in (ROPE[3], ROPE[5], ROPE[8], ROPE[15]):  # older files have a type, which not every class looks for
        yield {"rope_scaling": {("type" if k == "rope_type" else k): v for k, v in rope.items()}}, []
    if model_type == "gemma3_text":
        of_kinds = {"full_attention": ROPE[15], "sliding_attention": {"rope_type": "default"}}
        yield {"rope_parameters": of_kinds}, ["rope_theta", "rope_local_base_freq"]
        yield {"rope_parameters": of_kinds, "rope_scaling": {"type": "linear", "factor": 3.0}}, []
    yield {"rope_scaling": {}, "rope_parameters": ROPE[7]}, []
    yield {"rope_scaling": ROPE[7], "rope_parameters": ROPE[2]}, []


def case_of(model_type, base, of_base, to_set, to_drop):
    fields = {k: v for k, v in {**base, **to_set}.items() if k not in to_drop}
    case = {"set": to_set, "drop": to_drop}
    try:
        found = facts({"model_type": model_type, **json.loads(json.dumps(fields))})
    except Exception as error:  # whatever a class finds wrong with it
        case["refused"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        return case
    case["facts"] = {k: v for k, v in found.items() if of_base.get(k) != v}
    return case


def make():
    out = {"transformers": transformers.__version__, "classes": {}}
    for model_type, base in BASES.items():
        of_base = facts({"model_type": model_type, **base})
        cases = [case_of(model_type, base, of_base, *v) for v in variations(model_type, base)]
        out["classes"][model_type] = {"base": base, "facts": of_base, "cases": cases}
        refused = sum("refused" in case for case in cases)
        print(f"{model_type}: {len(cases)} cases, {refused} refused", file=sys.stderr)
    lines = json.dumps(out, separators=(", ", ": "))
    return lines.replace('{"set"', '\n{"set"').replace('"qwen', '\n"qwen') + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with configs.json instead of writing it")
    made = make()
    if parser.parse_args().check:
        return 0 if json.loads(made) == json.loads(OUT.read_text()) else 1
    OUT.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

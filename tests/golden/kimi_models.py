"""Tiny models of Kimi Linear: delta nets with a decay of each channel, latent attention without positions, experts.
GGUF names and orders are llama.cpp's converter's.
"""

import numpy as np
from gguf import ExpertGatingFuncType
from gguf import GGMLQuantizationType as T

import tiny_tokenizers
from mamba_models import MixerDraw
from quantize_formats import Weight
from tiny_models import base_config, shape
from write_models import Model, absorbed


def delta_net(draw, at, heads, dim, taps):
    hidden, all_cols = draw.config["hidden_size"], heads * dim
    for part in "qkv":
        draw.linear(f"{at}.{part}_proj", all_cols, hidden, 1.5)
        draw.conv(f"{at}.{part}_conv1d", all_cols, taps)
    draw.linear(f"{at}.f_a_proj", dim, hidden, 1.3)
    draw.linear(f"{at}.f_b_proj", all_cols, dim, 1.3)
    draw.linear(f"{at}.b_proj", heads, hidden, 1.5)
    draw.linear(f"{at}.g_a_proj", dim, hidden, 1.3)
    draw.linear(f"{at}.g_b_proj", all_cols, dim, 1.3)
    draw.vector(f"{at}.dt_bias", all_cols, 0.0, 0.7)
    draw.vector(f"{at}.A_log", heads, -2.0, 1.2)  # from a few tokens to a hundred
    draw.out[f"{at}.A_log"] = Weight(draw.out[f"{at}.A_log"].values.reshape(1, 1, heads, 1))
    draw.norm(f"{at}.o_norm", dim)
    draw.linear(f"{at}.o_proj", hidden, all_cols, 1.6)


def kimi(name, seed, s, full, linear, gguf=True, **more):
    """full: layers of attention, from one; linear: heads, their size, taps."""
    tok = tiny_tokenizers.make("llama3")
    heads, dim, taps = linear
    layers = s["num_hidden_layers"]
    config = base_config("kimi_linear", "KimiLinearForCausalLM", tok, pad_token_id=0, **(s | {
        "moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_token": 2, "num_shared_experts": 1,
        "routed_scaling_factor": 1.4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True,
        "first_k_dense_replace": 1, "linear_attn_config": {
            "head_dim": dim, "num_heads": heads, "short_conv_kernel_size": taps, "full_attn_layers": full,
            "kda_layers": [i + 1 for i in range(layers) if i + 1 not in full]}} | more))
    config["model_max_length"] = config.pop("max_position_embeddings")
    draw, hidden = MixerDraw(seed, config), config["hidden_size"]
    draw.head("model.embed_tokens")
    for i in range(layers):
        at = f"model.layers.{i}"
        draw.norm(f"{at}.input_layernorm", hidden)
        if i + 1 in full:
            draw.latent_attention(f"{at}.self_attn")
        else:
            delta_net(draw, f"{at}.self_attn", heads, dim, taps)
        draw.norm(f"{at}.post_attention_layernorm", hidden)
        if i < config["first_k_dense_replace"]:
            draw.mlp(f"{at}.mlp", config["intermediate_size"])
            continue
        moe = f"{at}.block_sparse_moe"
        draw.linear(f"{moe}.gate", config["num_experts"], hidden, 2.0)
        draw.vector(f"{moe}.gate.e_score_correction_bias", config["num_experts"], 0.0, 0.2)
        draw.experts(moe, config["num_experts"], config["moe_intermediate_size"], ("w1", "w3", "w2"))
        draw.mlp(f"{moe}.shared_experts", config["moe_intermediate_size"] * config["num_shared_experts"])
    draw.tail("model.norm")

    def modules(state):
        import torch

        out, stacks = {}, {}
        for name, value in state.items():
            name = name.replace(".block_sparse_moe.", ".mlp.")
            for part in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log"):
                name = name.replace(f".self_attn.{part}", f".self_attn.forget_gate.{part}")
            if ".experts." in name:
                before, after = name.split(".experts.")
                stacks.setdefault(before + ".experts.", {}).setdefault(after.split(".")[1], []).append(value)
            elif "_conv1d." in name:
                out.setdefault(name.split(".self_attn.")[0] + ".self_attn.conv1d.weight", []).append(value)
            else:
                out[name] = value
        for at, parts in stacks.items():
            gate, up, down = (torch.stack(parts[p]) for p in ("w1", "w3", "w2"))
            out[at + "gate_up_proj"], out[at + "down_proj"] = torch.cat([gate, up], dim=1), down
        return {name: torch.cat(value) if isinstance(value, list) else value for name, value in out.items()}

    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
             "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
             "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
             "self_attn.f_a_proj": "ssm_f_a", "self_attn.f_b_proj": "ssm_f_b", "self_attn.g_a_proj": "ssm_g_a",
             "self_attn.g_b_proj": "ssm_g_b", "self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
             "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.shared_experts.gate_proj": "ffn_gate_shexp",
             "block_sparse_moe.shared_experts.up_proj": "ffn_up_shexp",
             "block_sparse_moe.shared_experts.down_proj": "ffn_down_shexp"}

    def own(name, w):
        outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                 "lm_head.weight": "output.weight"}
        if name in outer:
            return [(outer[name], w)]
        at, part = f"blk.{name.split('.')[2]}.", name.split(".", 3)[3]
        if "_conv1d." in part:
            return [(f"{at}ssm_conv1d_{part.split('.')[1][0]}.weight", Weight(w.values[None]))]
        if part == "self_attn.A_log":
            return [(at + "ssm_a", Weight(-np.exp(w.values)))]
        if part == "self_attn.dt_bias":
            return [(at + "ssm_dt.bias", w)]
        if part.endswith("e_score_correction_bias"):
            return [(at + "exp_probs_b.bias", w)]
        if part == "self_attn.kv_b_proj.weight":
            k_b, v_b = absorbed(config, w)
            return [(at + "attn_k_b.weight", k_b), (at + "attn_v_b.weight", v_b)]
        if ".experts." in part:
            _, _, e, proj, _ = part.split(".")
            pile = [draw.out[name.replace(f".experts.{e}.", f".experts.{i}.")] for i in range(config["num_experts"])]
            kind = {"w1": "gate", "w3": "up", "w2": "down"}[proj]
            return [] if e != "0" else [(f"{at}ffn_{kind}_exps.weight", Weight(
                np.stack([one.values for one in pile]), {k: np.stack([one.raw[k] for one in pile]) for k in w.raw}))]
        return [(at + names[part.removesuffix(".weight")] + ".weight", w)]

    def metadata(writer):
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.add_context_length(config["model_max_length"])
        writer.add_embedding_length(hidden)
        writer.add_block_count(layers)
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv([config["num_attention_heads"] if i + 1 in full else 0 for i in range(layers)])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_ssm_conv_kernel(taps)
        writer.add_uint32("kimi-linear.kda.head_dim", dim)
        writer.add_kv_lora_rank(rank)
        writer.add_key_length(rank + rope)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_rope_dimension_count(rope)
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_token"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)

    how = {"types": {None: T.Q8_0, "attn_k_b": T.F32}, "own": own, "metadata": metadata}
    return Model(name, config, draw.out, tok, {"x": 1}, how if gguf else {}, modules=modules,
                 variants={"topk_group": None})


def build():
    return {
        "kimi-linear": lambda: kimi("kimi-linear", 98, shape(32, 3, 2, 2, 64), [2], (2, 32, 4), rms_norm_eps=1e-6),
        "kimi-linear-odd": lambda: kimi(
            "kimi-linear-odd", 99, shape(48, 2, 4, 4, 32), [2], (3, 20, 3), gguf=False, rms_norm_eps=1e-5,
            q_lora_rank=32, first_k_dense_replace=0, moe_renormalize=False),
    }

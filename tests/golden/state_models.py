"""The tiny models with a state: gated delta nets, state-space layers, short convolutions, and the attention between
them. Heads are of odd sizes, so that what pads them counts. GGUF names and orders are llama.cpp's converter's.
"""

import numpy as np
from gguf import GGMLQuantizationType as T

import quantize_formats as qf
import tiny_tokenizers
from quantize_formats import Weight
from tiny_models import Draw, base_config, shape
from write_models import Model


class StateDraw(Draw):
    """Qwen 3 Next and Qwen 3.5. Norms are stored less one, but for the gated ones."""

    def norm(self, name, n, mean=1.0):
        self.vector(name + ".weight", n, mean - 1.0, 0.25)

    def conv(self, name, channels, taps):
        self.out[name + ".weight"] = qf.exact_bf16(self.rng, (channels, 1, taps), 0.0, 0.6)

    def delta_net(self, at):
        c = self.config
        hidden, kh, vh = c["hidden_size"], c["linear_num_key_heads"], c["linear_num_value_heads"]
        keys, values = kh * c["linear_key_head_dim"], vh * c["linear_value_head_dim"]
        if c["model_type"] == "qwen3_next":
            self.linear(f"{at}.in_proj_qkvz", 2 * keys + 2 * values, hidden, 1.5)
            self.linear(f"{at}.in_proj_ba", 2 * vh, hidden, 1.5)
        else:
            for part, rows in (("qkv", 2 * keys + values), ("z", values), ("b", vh), ("a", vh)):
                self.linear(f"{at}.in_proj_{part}", rows, hidden, 1.5)
        self.conv(f"{at}.conv1d", 2 * keys + values, c["linear_conv_kernel_dim"])
        self.vector(f"{at}.dt_bias", vh, 0.0, 0.5)
        self.vector(f"{at}.A_log", vh, -2.0, 1.2)  # from a few tokens to a hundred
        self.vector(f"{at}.norm.weight", c["linear_value_head_dim"], 1.0, 0.25)
        self.linear(f"{at}.out_proj", hidden, values, 1.6)

    def gated_attention(self, at):
        c = self.config
        hidden, heads, kv, dim = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        for proj, rows in (("q_proj", 2 * heads * dim), ("k_proj", kv * dim), ("v_proj", kv * dim)):
            self.linear(f"{at}.{proj}", rows, hidden, 1.3)
        self.linear(f"{at}.o_proj", hidden, heads * dim, 2.2)
        self.norm(f"{at}.q_norm", dim, 1.3)
        self.norm(f"{at}.k_norm", dim, 1.3)

    def model(self):
        c, hidden = self.config, self.config["hidden_size"]
        embedding = 0.3 if c["tie_word_embeddings"] else 1.0
        self.linear("model.embed_tokens", c["vocab_size"], hidden, embedding * np.sqrt(hidden))
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            self.norm(f"{at}.input_layernorm", hidden)
            if (i + 1) % c["full_attention_interval"]:
                self.delta_net(f"{at}.linear_attn")
            else:
                self.gated_attention(f"{at}.self_attn")
            self.norm(f"{at}.post_attention_layernorm", hidden)
            if "num_experts" in c and not self.is_dense(i):
                self.moe(f"{at}.mlp", "qwen2_moe")
            else:
                self.mlp(f"{at}.mlp", c["intermediate_size"])
        if c["tie_word_embeddings"]:
            self.norm("model.norm", hidden, 2.0 / (embedding * np.sqrt(hidden)))
        else:
            self.norm("model.norm", hidden)
            self.linear("lm_head", c["vocab_size"], hidden, 1.8)
        return self.out


def sorted_qkvz(config):
    """Rows of in_proj_qkvz, by key head, as attn_qkv's and attn_gate's: by kind."""
    kh, kd, vd = (config[k] for k in ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"))
    values = config["linear_num_value_heads"] // kh * vd
    rows = np.arange(kh * (2 * kd + 2 * values)).reshape(kh, -1)
    q, k, v, z = np.split(rows, [kd, 2 * kd, 2 * kd + values], axis=1)
    return np.concatenate([part.reshape(-1) for part in (q, k, v)]), z.reshape(-1)


def tiled(config, dim):
    """Rows of value heads in llama.cpp's order of Qwen 3.5: those of one key head apart."""
    kh, vh = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return np.arange(vh * dim).reshape(kh, vh // kh, dim).swapaxes(0, 1).reshape(-1)


def gguf_delta_net(config):
    """What a weight of a delta net becomes in GGUF: [(name, weight)], or None for others."""
    tile = config["model_type"] != "qwen3_next"
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, wide = tiled(config, 1), tiled(config, config["linear_value_head_dim"])
    if not tile:
        heads, wide = np.arange(heads.size), np.arange(wide.size)
    channels = np.concatenate([np.arange(2 * keys), 2 * keys + wide])

    def own(name, w):
        if ".linear_attn." not in name:
            return None
        at, part = f"blk.{name.split('.')[2]}.", name.split(".linear_attn.")[1]
        flat = lambda rows: Weight(np.ascontiguousarray(w.values.reshape(w.values.shape[0], -1)[rows].squeeze()))
        if part == "in_proj_qkvz.weight":
            qkv, z = sorted_qkvz(config)
            return [(at + "attn_qkv.weight", w.rows(qkv)), (at + "attn_gate.weight", w.rows(z))]
        if part == "conv1d.weight":
            return [(at + "ssm_conv1d.weight", flat(channels))]
        if part == "A_log":
            return [(at + "ssm_a", Weight(-np.exp(w.values[heads])))]
        if part == "dt_bias":
            return [(at + "ssm_dt.bias", Weight(w.values[heads]))]
        if part == "out_proj.weight" and tile:  # columns
            columns = Weight(np.ascontiguousarray(w.values[:, wide]))
            return [(at + "ssm_out.weight", columns)]
        index = {"in_proj_qkv.weight": channels, "in_proj_z.weight": wide, "in_proj_b.weight": heads,
                 "in_proj_a.weight": heads}.get(part)
        names = {"in_proj_ba": "ssm_ba", "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_b": "ssm_beta",
                 "in_proj_a": "ssm_alpha", "norm": "ssm_norm", "out_proj": "ssm_out"}
        return [(at + names[part.removesuffix(".weight")] + ".weight", w if index is None else w.rows(index))]

    return own


def qwen(name, seed, kind, architecture, s, gguf=True, hf=None, **more):
    tok = tiny_tokenizers.make("qwen2")
    more = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "tie_word_embeddings": False} | more
    config = base_config(kind, architecture, tok, **(s | more))
    weights = StateDraw(seed, config).model()
    # A matrix whose columns were moved has its blocks elsewhere: F32 holds it in any order.
    keys = {"add_ssm_conv_kernel": config["linear_conv_kernel_dim"], "add_ssm_state_size": config["linear_key_head_dim"],
            "add_ssm_group_count": config["linear_num_key_heads"],
            "add_ssm_time_step_rank": config["linear_num_value_heads"],
            "add_ssm_inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
            "add_full_attention_interval": config["full_attention_interval"],
            "add_rope_dimension_count": int(config["head_dim"] * config["partial_rotary_factor"])}
    if "num_experts" in config:
        keys |= {"add_expert_count": config["num_experts"], "add_expert_used_count": config["num_experts_per_tok"],
                 "add_expert_feed_forward_length": config["moe_intermediate_size"],
                 "add_expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}
    how = {"types": T.Q8_0 if kind == "qwen3_next" else T.F32, "keys": keys, "own": gguf_delta_net(config)}
    return Model(name, config, weights, tok, hf or {"x": 1}, how if gguf else {}, None, 1.0)


def build():
    experts = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64,
                   norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    heads = lambda kh, vh, kd, vd, taps: dict(
        linear_num_key_heads=kh, linear_num_value_heads=vh, linear_key_head_dim=kd, linear_value_head_dim=vd,
        linear_conv_kernel_dim=taps)
    return {
        "qwen3next": lambda: qwen(
            "qwen3next", 81, "qwen3_next", "Qwen3NextForCausalLM", shape(64, 3, 4, 2, 64, 32),
            full_attention_interval=3, **heads(2, 4, 20, 24, 4), **experts),
        "qwen3next-odd": lambda: qwen(
            "qwen3next-odd", 82, "qwen3_next", "Qwen3NextForCausalLM", shape(32, 4, 2, 1, 64, 16), gguf=False,
            full_attention_interval=2, **heads(1, 3, 33, 32, 3),
            **(experts | {"mlp_only_layers": [0], "norm_topk_prob": False})),
    }

"""The tiny models with a state: gated delta nets, state-space layers, short convolutions, and the attention between
them. Heads are of odd sizes, so that what pads them counts. GGUF names and orders are llama.cpp's converter's.
"""

import numpy as np
from gguf import ExpertGatingFuncType
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


class ConvDraw(Draw):
    """LFM 2."""

    def model(self):
        c, hidden = self.config, self.config["hidden_size"]
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], hidden // c["num_attention_heads"]
        self.linear("model.embed_tokens", c["vocab_size"], hidden, 0.3 * np.sqrt(hidden))
        for i, kind in enumerate(c["layer_types"]):
            at = f"model.layers.{i}"
            self.norm(f"{at}.operator_norm", hidden)
            if kind == "conv":
                self.linear(f"{at}.conv.in_proj", 3 * hidden, hidden, 1.2)
                self.out[f"{at}.conv.conv.weight"] = qf.exact_bf16(self.rng, (hidden, 1, c["conv_L_cache"]), 0.0, 0.7)
                self.linear(f"{at}.conv.out_proj", hidden, hidden, 1.2)
                for part, n in (("in_proj", 3 * hidden), ("conv", hidden), ("out_proj", hidden)):
                    if c["conv_bias"]:
                        self.vector(f"{at}.conv.{part}.bias", n, 0.0, 0.3)
            else:
                for proj, rows in (("q_proj", heads * dim), ("k_proj", kv * dim), ("v_proj", kv * dim)):
                    self.linear(f"{at}.self_attn.{proj}", rows, hidden, 1.3)
                self.linear(f"{at}.self_attn.out_proj", hidden, heads * dim, 1.6)
                self.vector(f"{at}.self_attn.q_layernorm.weight", dim, 1.2, 0.3)
                self.vector(f"{at}.self_attn.k_layernorm.weight", dim, 1.2, 0.3)
            self.norm(f"{at}.ffn_norm", hidden)
            if i < c.get("num_dense_layers", c["num_hidden_layers"]):
                for name, rows, cols in (("w1", c["intermediate_size"], hidden), ("w3", c["intermediate_size"], hidden),
                                         ("w2", hidden, c["intermediate_size"])):
                    self.linear(f"{at}.feed_forward.{name}", rows, cols, 1.2)
                continue
            self.linear(f"{at}.feed_forward.gate", c["num_experts"], hidden, 2.0)
            self.vector(f"{at}.feed_forward.expert_bias", c["num_experts"], 0.0, 0.2)
            self.experts(f"{at}.feed_forward", c["num_experts"], c["moe_intermediate_size"], ("w1", "w3", "w2"))
        self.norm("model.embedding_norm", hidden)
        scale = np.float32(2.0 ** -np.rint(np.log2(0.3 * np.sqrt(hidden) / 2)))
        self.out["model.embedding_norm.weight"].values *= scale
        return self.out


def lfm2(name, seed, kind, architecture, s, layer_types, gguf=True, **more):
    tok = tiny_tokenizers.make("llama3")
    config = base_config(kind, architecture, tok, pad_token_id=0, **(s | {
        "norm_eps": 1e-5, "tie_word_embeddings": True, "layer_types": layer_types, "rope_theta": 10000.0,
        "block_auto_adjust_ff_dim": False} | more))
    del config["rms_norm_eps"]
    kv = [config["num_key_value_heads"] if t != "conv" else 0 for t in layer_types]

    def own(name, w):
        at = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        if name.endswith("conv.conv.weight"):
            return [(at + "shortconv.conv.weight", Weight(w.values.squeeze(1)))]
        if name.endswith("expert_bias"):
            return [(at + "exp_probs_b.bias", w)]
        return None

    keys = {"add_shortconv_l_cache": config["conv_L_cache"], "add_vocab_size": config["vocab_size"]}
    if "num_experts" in config:
        keys |= {"add_expert_count": config["num_experts"], "add_expert_used_count": config["num_experts_per_tok"],
                 "add_expert_feed_forward_length": config["moe_intermediate_size"],
                 "add_leading_dense_block_count": config["num_dense_layers"], "add_expert_gating_func": ExpertGatingFuncType.SIGMOID,
                 "add_expert_weights_scale": config["routed_scaling_factor"]}
    weights = ConvDraw(seed, config).model()
    how = {"types": T.Q8_0, "keys": keys, "own": own, "kv_heads": kv}
    return Model(name, config, weights, tok, {"x": 1}, how if gguf else {},
                 variants={"norm_eps": {"norm_eps": 1e-1}})


class MambaDraw(StateDraw):
    """Granite 4 without experts."""

    def norm(self, name, n, mean=1.0):
        self.vector(name + ".weight", n, mean, 0.25 * mean)

    def model(self):
        c, hidden = self.config, self.config["hidden_size"]
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], hidden // c["num_attention_heads"]
        inner, states = c["mamba_expand"] * hidden, c["mamba_n_groups"] * c["mamba_d_state"]
        embedding = 0.5 / c["embedding_multiplier"]
        self.linear("model.embed_tokens", c["vocab_size"], hidden, embedding * np.sqrt(hidden))
        for i, kind in enumerate(c["layer_types"]):
            at = f"model.layers.{i}"
            self.norm(f"{at}.input_layernorm", hidden)
            if kind == "mamba":
                m = f"{at}.mamba"
                self.linear(f"{m}.in_proj", 2 * inner + 2 * states + c["mamba_n_heads"], hidden, 1.5)
                self.conv(f"{m}.conv1d", inner + 2 * states, c["mamba_d_conv"])
                if c["mamba_conv_bias"]:
                    self.vector(f"{m}.conv1d.bias", inner + 2 * states, 0.0, 0.3)
                self.vector(f"{m}.dt_bias", c["mamba_n_heads"], -1.0, 0.7)
                self.vector(f"{m}.A_log", c["mamba_n_heads"], -0.5, 1.0)
                self.vector(f"{m}.D", c["mamba_n_heads"], 0.5, 0.5)
                self.norm(f"{m}.norm", inner)
                self.linear(f"{m}.out_proj", hidden, inner, 1.6)
            else:
                for proj, rows in (("q_proj", heads * dim), ("k_proj", kv * dim), ("v_proj", kv * dim)):
                    self.linear(f"{at}.self_attn.{proj}", rows, hidden, 1.3)
                self.linear(f"{at}.self_attn.o_proj", hidden, heads * dim, 1.6)
            self.norm(f"{at}.post_attention_layernorm", hidden)
            self.linear(f"{at}.shared_mlp.input_linear", 2 * c["shared_intermediate_size"], hidden, 1.5)
            self.linear(f"{at}.shared_mlp.output_linear", hidden, c["shared_intermediate_size"], 0.9)
        self.norm("model.norm", hidden, 2.0 * c["logits_scaling"] / (embedding * np.sqrt(hidden)))
        return self.out


def granite(name, seed, s, layer_types, gguf=True, draw=MambaDraw, **more):
    tok = tiny_tokenizers.make("llama3")
    config = base_config("granitemoehybrid", "GraniteMoeHybridForCausalLM", tok, pad_token_id=0, **(s | {
        "tie_word_embeddings": True, "layer_types": layer_types, "num_local_experts": 0, "num_experts_per_tok": 0,
        "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3,
        "position_embedding_type": "nope", "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "mamba_n_groups": 1, "mamba_chunk_size": 32} | more))
    weights = draw(seed, config).model()
    shared, hidden = config["shared_intermediate_size"], config["hidden_size"]

    def own(name, w):
        at, part = f"blk.{name.split('.')[2]}." if ".layers." in name else "", name.split(".mamba.")[-1]
        if name.endswith("shared_mlp.input_linear.weight"):
            return [(at + "ffn_gate.weight", w.rows(np.arange(shared))),
                    (at + "ffn_up.weight", w.rows(np.arange(shared, 2 * shared)))]
        if name.endswith("shared_mlp.output_linear.weight"):
            return [(at + "ffn_down.weight", w)]
        if ".mamba." not in name:
            return None
        if part == "conv1d.weight":
            return [(at + "ssm_conv1d.weight", Weight(w.values.squeeze(1)))]
        if part == "A_log":
            return [(at + "ssm_a", Weight(-np.exp(w.values)[:, None]))]
        if part == "D":
            return [(at + "ssm_d", Weight(w.values[:, None]))]
        if part == "norm.weight":
            return [(at + "ssm_norm.weight", Weight(w.values.reshape(config["mamba_n_groups"], -1)))]
        names = {"in_proj.weight": "ssm_in.weight", "conv1d.bias": "ssm_conv1d.bias", "dt_bias": "ssm_dt.bias",
                 "out_proj.weight": "ssm_out.weight"}
        return [(at + names[part], w)]

    keys = {"add_ssm_conv_kernel": config["mamba_d_conv"], "add_ssm_state_size": config["mamba_d_state"],
            "add_ssm_group_count": config["mamba_n_groups"], "add_ssm_time_step_rank": config["mamba_n_heads"],
            "add_ssm_inner_size": 2 * hidden, "add_embedding_scale": 6.0, "add_logit_scale": 4.0,
            "add_residual_scale": 0.4, "add_attention_scale": 0.3, "add_rope_scaling_finetuned": False,
            "add_rope_dimension_count": hidden // config["num_attention_heads"]}
    kv = [0 if t == "mamba" else config["num_key_value_heads"] for t in layer_types]
    how = {"types": T.Q8_0, "keys": keys, "own": own, "kv_heads": kv}
    return Model(name, config, weights, tok, {"x": 1}, how if gguf else {}, variants={
        key: {key: config[key] * 1.5} for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier")})


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
        "qwen35": lambda: qwen(
            "qwen35", 83, "qwen3_5_text", "Qwen3_5ForCausalLM", shape(32, 4, 2, 1, 64, 32), full_attention_interval=2,
            **heads(2, 6, 17, 16, 4)),
        "qwen35moe": lambda: qwen(
            "qwen35moe", 84, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", shape(32, 2, 4, 2, 64, 16),
            full_attention_interval=2, **heads(2, 4, 16, 24, 4),
            **{k: v for k, v in experts.items() if k not in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")}),
        "lfm2": lambda: lfm2(
            "lfm2", 85, "lfm2", "Lfm2ForCausalLM", shape(64, 3, 4, 2, 64), ["conv", "full_attention", "conv"],
            conv_bias=False, conv_L_cache=3),
        "lfm2-bias": lambda: lfm2(
            "lfm2-bias", 86, "lfm2", "Lfm2ForCausalLM", shape(32, 2, 2, 1, 32), ["full_attention", "conv"], gguf=False,
            conv_bias=True, conv_L_cache=5),
        "lfm2moe": lambda: lfm2(
            "lfm2moe", 87, "lfm2_moe", "Lfm2MoeForCausalLM", shape(32, 3, 4, 2, 64),
            ["conv", "full_attention", "conv"], conv_bias=False, conv_L_cache=3, num_experts=5, num_experts_per_tok=2,
            moe_intermediate_size=32, num_dense_layers=1, use_expert_bias=True, routed_scaling_factor=1.4,
            norm_topk_prob=True),
        "granitehybrid": lambda: granite(
            "granitehybrid", 88, shape(32, 3, 2, 1, 64), ["mamba", "attention", "mamba"], shared_intermediate_size=64,
            mamba_n_heads=4, mamba_d_head=16, mamba_d_state=24, mamba_d_conv=4),
        "granitehybrid-groups": lambda: granite(
            "granitehybrid-groups", 89, shape(32, 2, 2, 2, 32), ["mamba", "attention"], gguf=False,
            shared_intermediate_size=32, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=10, mamba_d_conv=3,
            mamba_n_groups=2, mamba_conv_bias=False, position_embedding_type="rope"),
    }

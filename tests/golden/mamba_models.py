"""The tiny models of Mamba-2: by itself, between attention, between feed-forward layers and experts, and beside
attention. GGUF names, orders and multipliers are llama.cpp's converter's.
"""

import numpy as np
from gguf import ExpertGatingFuncType
from gguf import GGMLQuantizationType as T

import quantize_formats as qf
import tiny_tokenizers
from quantize_formats import Weight
from state_models import MambaDraw, granite
from tiny_models import base_config, shape
from write_models import Model


class MixerDraw(MambaDraw):
    """Weights of a mixer under any names. Rows that are no whole blocks of 32 are drawn as BF16."""

    def linear(self, name, rows, cols, gain=1.0):
        if cols % 32 == 0:
            return super().linear(name, rows, cols, gain)
        self.out[name + ".weight"] = qf.exact_bf16(self.rng, (rows, cols), 0.0, gain / np.sqrt(cols))

    def mixer(self, at, heads, inner, groups, states, taps, norm=True):
        channels = inner + 2 * groups * states
        self.linear(f"{at}.in_proj", inner + channels + heads, self.config["hidden_size"], 1.5)
        self.conv(f"{at}.conv1d", channels, taps)
        self.vector(f"{at}.conv1d.bias", channels, 0.0, 0.3)
        self.vector(f"{at}.dt_bias", heads, -1.0, 0.7)
        self.vector(f"{at}.A_log", heads, -0.5, 1.0)
        self.vector(f"{at}.D", heads, 0.5, 0.5)
        if norm:
            self.norm(f"{at}.norm", inner)
        self.linear(f"{at}.out_proj", self.config["hidden_size"], inner, 1.6)

    def head(self, name, gain=1.0):
        hidden = self.config["hidden_size"]
        embedding = 0.3 if self.config["tie_word_embeddings"] else 1.0
        self.linear(name, self.config["vocab_size"], hidden, embedding * np.sqrt(hidden) * gain)

    def tail(self, name, gain=1.0):
        """The last norm, which brings the logits to a standard deviation of about 2."""
        hidden = self.config["hidden_size"]
        if self.config["tie_word_embeddings"]:
            return self.norm(name, hidden, 2.0 * gain / (0.3 * np.sqrt(hidden)))
        self.norm(name, hidden)
        return self.linear("lm_head", self.config["vocab_size"], hidden, 1.8 * gain)


SSM = {"in_proj.weight": "ssm_in.weight", "conv1d.bias": "ssm_conv1d.bias", "dt_bias": "ssm_dt.bias",
       "out_proj.weight": "ssm_out.weight"}


def gguf_mixer(at, part, w, groups):
    """A weight of a mixer in GGUF: [(name, weight)]."""
    if part == "conv1d.weight":
        return [(at + "ssm_conv1d.weight", Weight(w.values.squeeze(1)))]
    if part == "A_log":
        return [(at + "ssm_a", Weight(-np.exp(w.values)[:, None]))]
    if part == "D":
        return [(at + "ssm_d", Weight(w.values[:, None]))]
    if part == "norm.weight":
        return [(at + "ssm_norm.weight", Weight(w.values.reshape(groups, -1)))]
    return [(at + SSM[part], w)]


def mamba2(name, seed, hidden, layers, heads, states, groups, taps, gguf=True, tied=True, hf=None, **more):
    tok = tiny_tokenizers.make("llama3")
    config = base_config("mamba2", "Mamba2ForCausalLM", tok, pad_token_id=0, hidden_size=hidden,
                         num_hidden_layers=layers, num_heads=heads, head_dim=2 * hidden // heads, state_size=states,
                         n_groups=groups, conv_kernel=taps, expand=2, chunk_size=32, layer_norm_epsilon=1e-5,
                         use_conv_bias=True, use_bias=False, **more)
    config["tie_word_embeddings"] = tied
    for key in ("rms_norm_eps", "rope_theta", "attention_dropout", "max_position_embeddings"):
        del config[key]
    draw = MixerDraw(seed, config)
    draw.head("backbone.embeddings")
    for i in range(layers):
        draw.norm(f"backbone.layers.{i}.norm", hidden)
        draw.mixer(f"backbone.layers.{i}.mixer", heads, 2 * hidden, groups, states, taps)
    draw.tail("backbone.norm_f")

    def own(name, w):
        outer = {"backbone.embeddings.weight": "token_embd.weight", "backbone.norm_f.weight": "output_norm.weight",
                 "lm_head.weight": "output.weight"}
        if name in outer:
            return [(outer[name], w)]
        at, part = f"blk.{name.split('.')[2]}.", name.split(".", 3)[3]
        return [(at + "attn_norm.weight", w)] if part == "norm.weight" else gguf_mixer(at, part[6:], w, groups)

    def metadata(writer):
        writer.add_context_length(2**20)
        writer.add_embedding_length(hidden)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_block_count(layers)
        writer.add_layer_norm_rms_eps(1e-5)
        add_ssm(writer, taps, 2 * hidden, states, heads, groups)

    how = {"types": T.Q8_0, "own": own, "metadata": metadata}
    return Model(name, config, draw.out, tok, hf or {"x": 1}, how if gguf else {})


def add_ssm(writer, taps, inner, states, heads, groups):
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(states)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def nemotron(name, seed, hidden, pattern, heads, kv, head_dim, inner, mamba, gguf=True, experts=None, hf=None, **more):
    """mamba: heads, their size, groups, states, taps."""
    tok = tiny_tokenizers.make("llama3")
    mh, md, groups, states, taps = mamba
    config = base_config("nemotron_h", "NemotronHForCausalLM", tok, pad_token_id=0, hidden_size=hidden,
                         num_hidden_layers=len(pattern), hybrid_override_pattern=pattern, num_attention_heads=heads,
                         num_key_value_heads=kv, head_dim=head_dim, intermediate_size=inner, mlp_hidden_act="relu2",
                         mamba_num_heads=mh, mamba_head_dim=md, n_groups=groups, ssm_state_size=states,
                         conv_kernel=taps, chunk_size=32, layer_norm_epsilon=1e-5, use_conv_bias=True, expand=2,
                         **((experts or {}) | more))
    for key in ("rms_norm_eps", "rope_theta", "hidden_act"):
        del config[key]
    draw = MixerDraw(seed, config)
    draw.head("backbone.embeddings")
    for i, kind in enumerate(pattern):
        at = f"backbone.layers.{i}"
        draw.norm(f"{at}.norm", hidden)
        if kind == "M":
            draw.mixer(f"{at}.mixer", mh, mh * md, groups, states, taps)
        elif kind == "*":
            for proj, rows in (("q_proj", heads * head_dim), ("k_proj", kv * head_dim), ("v_proj", kv * head_dim)):
                draw.linear(f"{at}.mixer.{proj}", rows, hidden, 1.3)
            draw.linear(f"{at}.mixer.o_proj", hidden, heads * head_dim, 1.6)
        elif kind == "-":
            draw.linear(f"{at}.mixer.up_proj", inner, hidden, 1.2)
            draw.linear(f"{at}.mixer.down_proj", hidden, inner, 0.8)
        else:
            n, wide = config["n_routed_experts"], config["moe_shared_expert_intermediate_size"]
            draw.linear(f"{at}.mixer.gate", n, hidden, 2.0)
            draw.vector(f"{at}.mixer.gate.e_score_correction_bias", n, 0.0, 0.2)
            for e in range(n):
                draw.linear(f"{at}.mixer.experts.{e}.up_proj", config["moe_intermediate_size"], hidden, 1.2)
                draw.linear(f"{at}.mixer.experts.{e}.down_proj", hidden, config["moe_intermediate_size"], 0.8)
            draw.linear(f"{at}.mixer.shared_experts.up_proj", wide, hidden, 1.2)
            draw.linear(f"{at}.mixer.shared_experts.down_proj", hidden, wide, 0.8)
    draw.tail("backbone.norm_f")

    def own(name, w):
        outer = {"backbone.embeddings.weight": "token_embd.weight", "backbone.norm_f.weight": "output_norm.weight",
                 "lm_head.weight": "output.weight"}
        if name in outer:
            return [(outer[name], w)]
        at, part = f"blk.{name.split('.')[2]}.", name.split(".", 3)[3]
        if part == "norm.weight":
            return [(at + "attn_norm.weight", w)]
        part = part.removeprefix("mixer.")
        names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "up_proj": "ffn_up",
                 "down_proj": "ffn_down", "gate": "ffn_gate_inp", "shared_experts.up_proj": "ffn_up_shexp",
                 "shared_experts.down_proj": "ffn_down_shexp"}
        if part == "gate.e_score_correction_bias":
            return [(at + "exp_probs_b.bias", w)]
        if part.startswith("experts."):  # one after another, in one
            _, e, proj, _ = part.split(".")
            pile = [draw.out[name.replace(f".experts.{e}.", f".experts.{i}.")] for i in range(config["n_routed_experts"])]
            raw = {k: np.stack([one.raw[k] for one in pile]) for k in w.raw}
            return [] if e != "0" else [(f"{at}ffn_{proj.removesuffix('_proj')}_exps.weight",
                                         Weight(np.stack([one.values for one in pile]), raw))]
        if part.removesuffix(".weight") in names:
            return [(at + names[part.removesuffix(".weight")] + ".weight", w)]
        return gguf_mixer(at, part, w, groups)

    def metadata(writer):
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(hidden)
        writer.add_block_count(len(pattern))
        size = config["moe_intermediate_size"] if experts else inner
        writer.add_feed_forward_length([size if k == "E" else inner if k == "-" else 0 for k in pattern])
        writer.add_head_count(heads)
        writer.add_head_count_kv([kv if k == "*" else 0 for k in pattern])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_layer_norm_rms_eps(1e-5)
        add_ssm(writer, taps, mh * md, states, mh, groups)
        if experts:
            writer.add_expert_count(config["n_routed_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
            writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
            writer.add_expert_shared_count(1)
            writer.add_expert_weights_norm(True)
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])
            writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)

    def modules(state):
        return stacked({name.replace("backbone.", "model.", 1): value for name, value in state.items()}, ("up_proj", "down_proj"))

    how = {"types": T.Q8_0, "own": own, "metadata": metadata, "arch": "NEMOTRON_H_MOE" if experts else "NEMOTRON_H"}
    return Model(name, config, draw.out, tok, hf or {"x": 1}, how if gguf else {}, modules=modules)


def stacked(state, parts):
    """Experts' matrices in one."""
    import torch

    out, stacks = {}, {}
    for name, value in state.items():
        if ".experts." in name:
            before, after = name.split(".experts.")
            stacks.setdefault(f"{before}.experts.{after.split('.')[1]}", []).append(value)
        else:
            out[name] = value
    return out | {name: torch.stack(values) for name, values in stacks.items()}


class GraniteMoeDraw(MambaDraw):
    """Granite 4 with experts: each layer's feed-forward layer is a shared one."""

    def linear(self, name, rows, cols, gain=1.0):
        super().linear(name, rows, cols, gain)
        if not name.endswith("shared_mlp.output_linear"):
            return
        at, c = name.replace(".shared_mlp.output_linear", ".block_sparse_moe"), self.config
        n, inner, hidden = c["num_local_experts"], c["intermediate_size"], c["hidden_size"]
        super().linear(f"{at}.router.layer", n, hidden, 2.0)
        stack = lambda rows, cols, gain: [qf.exact_q8(self.rng, (rows, cols), gain / np.sqrt(cols)) for _ in range(n)]
        for part, weights in (("input", stack(2 * inner, hidden, 1.5)), ("output", stack(hidden, inner, 0.9))):
            pile = lambda get: np.stack([get(w) for w in weights])
            self.out[f"{at}.{part}_linear.weight"] = Weight(pile(lambda w: w.values),
                                                            {k: pile(lambda w: w.raw[k]) for k in weights[0].raw})


def granite_moe(name, seed, s, layer_types, **more):
    model = granite(name, seed, s, layer_types, draw=GraniteMoeDraw, **more)
    plain, inner, c = model.gguf["own"], model.config["intermediate_size"], model.config

    def rows(w, first, count):
        cut = lambda v: np.ascontiguousarray(v[:, first:first + count])
        return Weight(cut(w.values), {k: cut(v) for k, v in w.raw.items()})

    def own(name, w):
        at = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        if name.endswith("block_sparse_moe.input_linear.weight"):
            return [(at + "ffn_gate_exps.weight", rows(w, 0, inner)), (at + "ffn_up_exps.weight", rows(w, inner, inner))]
        if name.endswith("block_sparse_moe.output_linear.weight"):
            return [(at + "ffn_down_exps.weight", w)]
        if name.endswith("router.layer.weight"):
            return [(at + "ffn_gate_inp.weight", w)]
        found = plain(name, w)
        if ".shared_mlp." in name:
            found = [(n.replace(".weight", "_shexp.weight"), v) for n, v in found]
        return found

    model.gguf["own"] = own
    model.gguf["keys"] |= {"add_expert_count": c["num_local_experts"], "add_expert_used_count": c["num_experts_per_tok"],
                           "add_expert_shared_feed_forward_length": c["shared_intermediate_size"]}
    renamed = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj",
               "router.layer.weight": "router.weight"}

    def modules(state):
        out = {}
        for name, value in state.items():
            before, _, part = name.partition(".block_sparse_moe.")
            out[f"{before}.block_sparse_moe.{renamed[part]}" if part else name] = value
        return out

    model.modules = modules
    return model


def falcon(name, seed, s, mamba, gguf=True, norm=False, **more):
    """mamba: heads, their size, groups, states, taps."""
    tok = tiny_tokenizers.make("llama3")
    mh, md, groups, states, taps = mamba
    config = base_config("falcon_h1", "FalconH1ForCausalLM", tok, pad_token_id=0, **(s | {
        "mamba_d_ssm": mh * md, "mamba_n_heads": mh, "mamba_d_head": md, "mamba_n_groups": groups,
        "mamba_d_state": states, "mamba_d_conv": taps, "mamba_chunk_size": 32, "mamba_rms_norm": norm,
        "mamba_norm_before_gate": False, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7,
        "attention_in_multiplier": 1.25, "attention_out_multiplier": 0.75, "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 0.6, "ssm_multipliers": [1.2, 0.9, 1.4, 0.7, 1.1], "mlp_multipliers": [1.3, 0.6]} | more))
    c, hidden = config, config["hidden_size"]
    heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    draw = MixerDraw(seed, config)
    draw.head("model.embed_tokens", 1 / 3.0)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        draw.norm(f"{at}.input_layernorm", hidden)
        draw.mixer(f"{at}.mamba", mh, mh * md, groups, states, taps, norm)
        for proj, rows in (("q_proj", heads * dim), ("k_proj", kv * dim), ("v_proj", kv * dim)):
            draw.linear(f"{at}.self_attn.{proj}", rows, hidden, 1.3)
        draw.linear(f"{at}.self_attn.o_proj", hidden, heads * dim, 1.6)
        draw.norm(f"{at}.pre_ff_layernorm", hidden)
        for proj, rows, cols in (("gate_proj", c["intermediate_size"], hidden), ("up_proj", c["intermediate_size"], hidden),
                                 ("down_proj", hidden, c["intermediate_size"])):
            draw.linear(f"{at}.feed_forward.{proj}", rows, cols, 1.3)
    draw.tail("model.final_layernorm", 2.0 if not c["tie_word_embeddings"] else 6.0)

    def own(name, w):
        """Matrices have the multipliers in GGUF, in F32, which holds them."""
        at = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        part = name.split(".", 3)[3] if at else name
        z, x, b, cc, dt = c["ssm_multipliers"]
        sizes = [mh * md, mh * md, groups * states, groups * states, mh]
        columns = np.repeat(np.float32([z, x, b, cc, dt]) * np.float32(c["ssm_in_multiplier"]), sizes)[:, None]
        into = np.float32(c["attention_in_multiplier"])
        table = {"model.embed_tokens.weight": ("token_embd", c["embedding_multiplier"]),
                 "model.final_layernorm.weight": ("output_norm", 1.0), "lm_head.weight": ("output", c["lm_head_multiplier"]),
                 "input_layernorm.weight": ("attn_norm", 1.0), "pre_ff_layernorm.weight": ("ffn_norm", 1.0),
                 "self_attn.q_proj.weight": ("attn_q", into), "self_attn.v_proj.weight": ("attn_v", into),
                 "self_attn.k_proj.weight": ("attn_k", into * np.float32(c["key_multiplier"])),
                 "self_attn.o_proj.weight": ("attn_output", c["attention_out_multiplier"]),
                 "mamba.out_proj.weight": ("ssm_out", c["ssm_out_multiplier"]), "mamba.in_proj.weight": ("ssm_in", columns),
                 "feed_forward.gate_proj.weight": ("ffn_gate", c["mlp_multipliers"][0]),
                 "feed_forward.up_proj.weight": ("ffn_up", 1.0),
                 "feed_forward.down_proj.weight": ("ffn_down", c["mlp_multipliers"][1])}
        if part in table:
            to, by = table[part]
            ends = "" if to == "ffn_norm" else ".weight"  # so llama.cpp's converter has it
            return [(at + to + ends, Weight(w.values * np.float32(by)))]
        return gguf_mixer(at, part.removeprefix("mamba."), w, groups)

    keys = {"add_ssm_conv_kernel": taps, "add_ssm_inner_size": mh * md, "add_ssm_state_size": states,
            "add_ssm_time_step_rank": mh, "add_ssm_group_count": groups, "add_vocab_size": c["vocab_size"]}
    ones = {key: {key: [1.0] * len(v) if isinstance(v, list) else 1.0} for key, v in c.items() if "multiplier" in key}
    return Model(name, config, draw.out, tok, {"x": 1}, {"types": T.F32, "own": own, "keys": keys} if gguf else {},
                 variants=ones)


def build():
    return {
        "granitehybrid-moe": lambda: granite_moe(
            "granitehybrid-moe", 90, shape(32, 2, 2, 1, 32), ["mamba", "attention"], shared_intermediate_size=64,
            num_local_experts=5, num_experts_per_tok=2, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=24, mamba_d_conv=4),
        "mamba2": lambda: mamba2("mamba2", 91, 32, 3, 4, 20, 1, 4),
        "mamba2-groups": lambda: mamba2("mamba2-groups", 92, 24, 2, 6, 9, 2, 3, gguf=False, tied=False,
                                        hf={"limited": True}, time_step_limit=[0.2, 0.6]),
        "nemotron-h": lambda: nemotron("nemotron-h", 93, 32, "M-*-M", 4, 2, 24, 64, (4, 24, 2, 10, 4)),
        "nemotron-h-odd": lambda: nemotron("nemotron-h-odd", 94, 40, "*M-", 2, 1, 20, 48, (3, 16, 1, 7, 3), gguf=False,
                                           hf={"limited": True}, time_step_min=0.4),
        "nemotron-h-moe": lambda: nemotron(
            "nemotron-h-moe", 95, 32, "ME*E", 2, 1, 16, 32, (4, 8, 2, 12, 4), experts=dict(
                n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
                moe_shared_expert_intermediate_size=64, routed_scaling_factor=1.6, n_group=3, topk_group=2,
                norm_topk_prob=True)),
        "falcon-h1": lambda: falcon("falcon-h1", 96, shape(32, 2, 4, 2, 64, 16), (3, 20, 1, 12, 4)),
        "falcon-h1-norm": lambda: falcon(
            "falcon-h1-norm", 97, shape(24, 2, 2, 1, 32, 16), (4, 9, 2, 8, 3), gguf=False, norm=True,
            mamba_norm_before_gate=True, tie_word_embeddings=True),
    }

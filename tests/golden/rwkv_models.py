"""Tiny models of RWKV 7, and its published formulas (Peng et al. 2025) as a module, a token at a time: transformers
has none. Directories are named as flash-linear-attention has them, GGUF files as llama.cpp's converter.
"""

from types import SimpleNamespace

import numpy as np
import torch
from gguf import GGMLQuantizationType as T

import quantize_formats as qf
import tiny_tokenizers
from mamba_models import MixerDraw
from quantize_formats import Weight
from tiny_models import base_config
from write_models import Model

INPUTS = "rwkvag"  # of the token shift, in GGUF's order


class Rwkv7(torch.nn.Module):
    """Config keys that begin with "without" leave a feature out."""

    def __init__(self, config, state):
        super().__init__()
        self.config = SimpleNamespace(model_type="rwkv7", hidden_size=config["hidden_size"])
        self.c = config
        for name, value in state.items():
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(value.clone(), requires_grad=False))

    def get(self, name, required=True):
        value = getattr(self, name.replace(".", "/"), None)
        assert value is not None or not required, name
        return value

    def norm(self, name, x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.get(name + ".weight"),
                                              self.get(name + ".bias", False), self.c["norm_eps"])

    def lora(self, name, x, act):
        y = act(x @ self.get(f"{name}.lora.0.weight").T) @ self.get(f"{name}.lora.2.weight").T
        bias = self.get(f"{name}.lora.2.bias", False)
        return y if bias is None else y + bias

    def shifted(self, x):
        if "without shift" in self.c:
            return x
        return torch.cat([torch.zeros_like(x[:1]), x[:-1]])

    def lerp(self, at, i):
        whole = self.get(f"{at}.x_x", False)
        return whole[i] if whole is not None else self.get(f"{at}.x_{INPUTS[i]}").reshape(-1)

    def time_mix(self, at, x, v_first):
        heads = x.shape[1] // self.head_dim()
        each = lambda t: t.reshape(len(t), heads, -1)
        delta = self.shifted(x) - x
        xr, xw, xk, xv, xa, xg = (x + delta * self.lerp(at, i) for i in range(6))
        same = lambda t: t
        r, k, v = (y @ self.get(f"{at}.{p}_proj.weight").T for y, p in ((xr, "r"), (xk, "k"), (xv, "v")))
        w = torch.exp(-np.exp(-0.5) * torch.sigmoid(self.lora(f"{at}.w_lora", xw, torch.tanh)))
        a = torch.sigmoid(self.lora(f"{at}.a_lora", xa, same))
        g = self.lora(f"{at}.g_lora", xg, torch.sigmoid)
        if v_first is None:
            v_first = v
        elif "without v_first" not in self.c:
            v = v + (v_first - v) * torch.sigmoid(self.lora(f"{at}.v_lora", xv, same))
        kk = torch.nn.functional.normalize(each(k * self.get(f"{at}.k_k").reshape(-1)), dim=-1)
        k = k * (1 + (a - 1) * self.get(f"{at}.k_a").reshape(-1))
        r, w, k, v, a = (each(t) for t in (r, w, k, v, a))
        state = torch.zeros(heads, v.shape[-1], k.shape[-1], dtype=x.dtype)  # [value][key]
        out = []
        for t in range(len(x)):
            read = state @ -kk[t][:, :, None]
            if "without erasing" in self.c:
                read = read * 0
            state = state * w[t][:, None] + read @ (kk[t] * a[t])[:, None] + v[t][:, :, None] @ k[t][:, None]
            out.append((state @ r[t][:, :, None])[..., 0])
        y = torch.stack(out)
        eps = self.head_dim() * self.c["norm_eps"]
        y = torch.nn.functional.group_norm(y.reshape(len(x), -1), heads, self.get(f"{at}.g_norm.weight"),
                                           self.get(f"{at}.g_norm.bias"), eps)
        if "without bonus" not in self.c:
            y = y + ((r * k * self.get(f"{at}.r_k")).sum(-1, keepdim=True) * v).reshape(y.shape)
        return (y * g) @ self.get(f"{at}.o_proj.weight").T, v_first

    def head_dim(self):
        return self.c["head_dim"] or self.c["hidden_size"] // self.c["num_heads"]

    def channel_mix(self, at, x):
        y = x + (self.shifted(x) - x) * self.get(f"{at}.x_k").reshape(-1)
        y = torch.relu(y @ self.get(f"{at}.key.weight").T)
        return (y if self.c["hidden_act"] == "relu" else y * y) @ self.get(f"{at}.value.weight").T

    @property
    def base_model(self):
        return self.encode

    def encode(self, tokens, use_cache=False):
        x = self.norm("model.layers.0.pre_norm", self.get("model.embeddings.weight")[tokens[0]])
        v_first = None
        for i in range(self.c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            y, v_first = self.time_mix(f"{at}.attn", self.norm(f"{at}.attn_norm", x), v_first)
            x = x + y
            x = x + self.channel_mix(f"{at}.ffn", self.norm(f"{at}.ffn_norm", x))
        return SimpleNamespace(last_hidden_state=self.norm("model.norm", x)[None])

    def forward(self, tokens, use_cache=False):
        hidden = self.encode(tokens).last_hidden_state
        return SimpleNamespace(logits=hidden @ self.get("lm_head.weight").T)


def draw_layer(draw, at, first, hidden, heads, ranks, inner, fused, bias):
    def norm(name):
        draw.norm(f"{at}.{name}", hidden)
        if bias:
            draw.vector(f"{at}.{name}.bias", hidden, 0.0, 0.2)

    def share(name, shape, mean=0.5, std=0.3):
        draw.out[f"{at}.{name}"] = qf.exact_bf16(draw.rng, shape, mean, std)

    if first:
        norm("pre_norm")
    norm("attn_norm")
    if fused:
        share("attn.x_x", (6, hidden))
    for part in "" if fused else INPUTS:
        share(f"attn.x_{part}", (1, 1, hidden))
    share("attn.k_k", (hidden,), 0.8)
    share("attn.k_a", (hidden,), 1.0)
    share("attn.r_k", (heads, hidden // heads), 0.0, 0.4)
    for part in "rkvo":
        draw.linear(f"{at}.attn.{part}_proj", hidden, hidden, 1.3)
    for part, rank in ranks.items():
        if part == "v" and first:
            continue
        draw.linear(f"{at}.attn.{part}_lora.lora.0", rank, hidden, 1.2)
        draw.linear(f"{at}.attn.{part}_lora.lora.2", hidden, rank, 2.0)
        if part != "g":
            draw.vector(f"{at}.attn.{part}_lora.lora.2.bias", hidden, -1.5 if part == "w" else 0.0, 1.0)
    draw.norm(f"{at}.attn.g_norm", hidden)
    draw.vector(f"{at}.attn.g_norm.bias", hidden, 0.0, 0.2)
    norm("ffn_norm")
    share("ffn.x_k", (hidden,))
    draw.linear(f"{at}.ffn.key", inner, hidden, 1.0)
    draw.linear(f"{at}.ffn.value", hidden, inner, 0.8)


NAMES = {"attn_norm": "attn_norm", "ffn_norm": "attn_norm_2", "attn.k_k": "time_mix_k_k", "attn.k_a": "time_mix_k_a",
         "attn.r_k": "time_mix_r_k", "attn.r_proj": "time_mix_receptance", "attn.k_proj": "time_mix_key",
         "attn.v_proj": "time_mix_value", "attn.o_proj": "time_mix_output", "attn.g_norm": "time_mix_ln",
         "ffn.x_k": "channel_mix_lerp_k", "ffn.key": "channel_mix_key", "ffn.value": "channel_mix_value"}


def rwkv7(name, seed, hidden, layers, heads, ranks, inner, eps, gguf=True, fused=False, bias=True, **more):
    tok = tiny_tokenizers.make("llama3")
    config = base_config("rwkv7", "RWKV7ForCausalLM", tok, hidden_act="sqrelu", attn_mode="chunk", hidden_size=hidden,
                         hidden_ratio=4.0, intermediate_size=inner, num_hidden_layers=layers, head_dim=hidden // heads,
                         num_heads=None, decay_low_rank_dim=ranks["w"], a_low_rank_dim=ranks["a"],
                         v_low_rank_dim=ranks["v"], gate_low_rank_dim=ranks["g"], norm_first=True, norm_bias=bias,
                         norm_eps=eps, attn=None, fuse_norm=False, value_dim=[hidden] * layers) | more
    for key in ("rms_norm_eps", "rope_theta", "attention_dropout"):
        del config[key]
    draw = MixerDraw(seed, config)
    draw.head("model.embeddings")
    for i in range(layers):
        draw_layer(draw, f"model.layers.{i}", i == 0, hidden, heads, ranks, inner or 4 * hidden, fused, bias)
    draw.norm("model.norm", hidden)
    if bias:
        draw.vector("model.norm.bias", hidden, 0.0, 0.2)
    draw.linear("lm_head", config["vocab_size"], hidden, 1.8)

    def own(name, w):
        outer = {"model.embeddings.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                 "model.norm.bias": "output_norm.bias", "lm_head.weight": "output.weight",
                 "model.layers.0.pre_norm.weight": "token_embd_norm.weight",
                 "model.layers.0.pre_norm.bias": "token_embd_norm.bias"}
        if name in outer:
            return [(outer[name], w)]
        at, part = f"blk.{name.split('.')[2]}.", name.split(".", 3)[3]
        if part.startswith("attn.x_"):
            each = [draw.out[name[:-1] + i].values.reshape(1, 1, -1) for i in INPUTS]
            return [] if not part.endswith("_r") else [(at + "time_mix_lerp_fused.weight", Weight(np.stack(each)))]
        if "_lora." in part:
            kind = {"0.weight": "1", "2.weight": "2", "2.bias": "0"}[part.split(".lora.")[1]]
            made = [(f"{at}time_mix_{part[5]}{kind}.weight", w)]
            if at == "blk.0." and part[5] == "a":  # llama.cpp wants them of the first layer too
                made.append((f"{at}time_mix_v{kind}.weight", w))
            return made
        if part == "attn.r_k":
            return [(at + "time_mix_r_k.weight", Weight(w.values.reshape(-1)))]
        bare = part.removesuffix(".weight").removesuffix(".bias")
        return [(at + NAMES[bare] + (".bias" if part.endswith(".bias") else ".weight"), w)]

    def metadata(writer):
        writer.add_context_length(1048576)
        writer.add_embedding_length(hidden)
        writer.add_block_count(layers)
        writer.add_layer_norm_eps(eps)
        writer.add_wkv_head_size(hidden // heads)
        writer.add_decay_lora_rank(ranks["w"])
        writer.add_iclr_lora_rank(ranks["a"])
        writer.add_value_residual_mix_lora_rank(ranks["v"])
        writer.add_gate_lora_rank(ranks["g"])
        writer.add_feed_forward_length(inner)
        writer.add_head_count(0)

    left_out = {what: {f"without {what}": True} for what in ("shift", "v_first", "erasing", "bonus")}
    # What is of low rank stays as it is, as llama.cpp's quantizer leaves it.
    low = {f"time_mix_{part}{i}": T.BF16 for part in "wavg" for i in (1, 2)}
    how = {"types": {None: T.Q8_0, "time_mix_lerp_fused": T.F32} | low, "own": own, "metadata": metadata}
    return Model(name, config, draw.out, tok, {"limited": True}, how if gguf else {}, reference=Rwkv7,
                 variants=left_out | {"norm_eps": {"norm_eps": 1e-1}})


def build():
    return {
        # GGUF takes a head's epsilon for 64e-5, a directory for head_dim * norm_eps: here they are the same.
        "rwkv7": lambda: rwkv7("rwkv7", 110, 32, 3, 2, dict(w=32, a=32, v=32, g=32), 64, 4e-5),
        "rwkv7-odd": lambda: rwkv7(
            "rwkv7-odd", 111, 40, 2, 2, dict(w=12, a=10, v=6, g=14), None, 1e-5, gguf=False, fused=True, bias=False,
            head_dim=None, num_heads=2, decay_low_rank_dim=None, a_low_rank_dim=None, v_low_rank_dim=None,
            gate_low_rank_dim=None),
    }

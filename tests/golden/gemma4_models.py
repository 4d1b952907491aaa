"""Tiny models of Gemma 4: heads of two sizes, keys and values that later layers read, inputs of every layer, experts
beside a feed-forward layer. GGUF names and keys are llama.cpp's converter's.
"""

import numpy as np
from gguf import GGMLQuantizationType as T

import quantize_formats as qf
import tiny_tokenizers
from quantize_formats import Weight
from tiny_models import Draw, base_config, shape
from write_models import Model

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
OWN = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
       "layer_scalar": "layer_output_scale.weight", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
       "experts.down_proj": "ffn_down_exps.weight"}


def heads_of(config, layer):
    """Key/value heads and their size."""
    if config["layer_types"][layer] == "sliding_attention":
        return config["num_key_value_heads"], config["head_dim"]
    own = config["attention_k_eq_v"] and config.get("num_global_key_value_heads")
    return own or config["num_key_value_heads"], config["global_head_dim"]


class Gemma4Draw(Draw):
    def stacked(self, name, shape):
        self.out[name] = self.linear_draw(name, shape, 1.5 / np.sqrt(shape[-1]))

    def layer(self, at, i, first_shared):
        c = self.config
        hidden, heads, size = c["hidden_size"], c["num_attention_heads"], c["hidden_size_per_layer_input"]
        kv, dim = heads_of(c, i)
        for name in NORMS:
            self.norm(f"{at}.{name}", hidden)
        # Scores are not scaled: norms of q and k make them spread; less so where routing amplifies every error.
        scale = np.sqrt((0.5 if c["enable_moe_block"] else 1.5) / np.sqrt(dim))
        self.linear(f"{at}.self_attn.q_proj", heads * dim, hidden, 1.3)
        self.vector(f"{at}.self_attn.q_norm.weight", dim, scale, 0.2 * scale)
        if i < first_shared:
            self.linear(f"{at}.self_attn.k_proj", kv * dim, hidden, 1.3)
            self.vector(f"{at}.self_attn.k_norm.weight", dim, scale, 0.2 * scale)
            if not (c["attention_k_eq_v"] and c["layer_types"][i] == "full_attention"):
                self.linear(f"{at}.self_attn.v_proj", kv * dim, hidden, 1.3)
        self.linear(f"{at}.self_attn.o_proj", hidden, heads * dim, 1.6)
        wide = 2 if c["use_double_wide_mlp"] and i >= first_shared else 1
        self.mlp(f"{at}.mlp", wide * c["intermediate_size"])
        if c["enable_moe_block"]:
            n, inner = c["num_experts"], c["moe_intermediate_size"]
            self.linear(f"{at}.router.proj", n, hidden, 2.0 * np.sqrt(hidden))
            self.vector(f"{at}.router.scale", hidden, 1.0, 0.2)
            self.vector(f"{at}.router.per_expert_scale", n, 1.0, 0.3)
            self.stacked(f"{at}.experts.gate_up_proj", (n, 2 * inner, hidden))
            self.stacked(f"{at}.experts.down_proj", (n, hidden, inner))
            for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"):
                self.norm(f"{at}.{name}", hidden)
            # Less than the feed-forward layer's part: a token that 8 bits send to another expert stays near.
            self.vector(f"{at}.post_feedforward_layernorm_2.weight", hidden, 0.35, 0.1)
        if size:
            self.linear(f"{at}.per_layer_input_gate", size, hidden, 1.5)
            self.linear(f"{at}.per_layer_projection", hidden, size, 1.0)
            self.norm(f"{at}.post_per_layer_input_norm", hidden)
        self.vector(f"{at}.layer_scalar", 1, 0.85, 0.1)

    def model(self):
        c = self.config
        hidden, layers, size = c["hidden_size"], c["num_hidden_layers"], c["hidden_size_per_layer_input"]
        self.linear("model.embed_tokens", c["vocab_size"], hidden, 0.5)
        if size:
            self.linear("model.embed_tokens_per_layer", c["vocab_size"], layers * size, np.sqrt(layers))
            self.linear("model.per_layer_model_projection", layers * size, hidden, 1.0)
            self.norm("model.per_layer_projection_norm", size)
        for i in range(layers):
            self.layer(f"model.layers.{i}", i, layers - c["num_kv_shared_layers"])
        # Logits with a standard deviation of about 2.
        self.vector("model.norm.weight", hidden, 4.0, 1.0)
        return self.out


def gemma4(name, seed, s, types, hf=None, variants=None, **more):
    tok = tiny_tokenizers.make("spm")
    config = base_config("gemma4_text", "Gemma4ForCausalLM", tok, pad_token_id=0, **(s | {
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_k_eq_v": False,
        "num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": None, "attention_bias": False} | more))
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    for key in ("rope_theta", "hidden_act"):
        del config[key]
    draw = Gemma4Draw(seed, config)
    if types == T.BF16:  # rows of any length
        draw.linear_draw = lambda name, shape, std: qf.exact_bf16(draw.rng, shape, 0.0, std)
    weights = draw.model()
    layers, first_shared = config["num_hidden_layers"], config["num_hidden_layers"] - config["num_kv_shared_layers"]
    full = config["rope_parameters"]["full_attention"]

    def own(name, w):
        for end, mapped in OWN.items():
            if name.endswith(end):
                return [(f"blk.{name.split('.')[2]}.{mapped}", w)]
        return None

    def metadata(w):
        w.add_block_count(layers)
        w.add_context_length(config["max_position_embeddings"])
        w.add_embedding_length(config["hidden_size"])
        wide = [config["intermediate_size"] * (2 if config["use_double_wide_mlp"] and i >= first_shared else 1)
                for i in range(layers)]
        w.add_feed_forward_length(wide if config["use_double_wide_mlp"] else wide[0])
        w.add_head_count(config["num_attention_heads"])
        kv = [heads_of(config, i)[0] for i in range(layers)]
        w.add_head_count_kv(kv if len(set(kv)) > 1 else kv[0])
        w.add_layer_norm_rms_eps(config["rms_norm_eps"])
        for add, size in (("", config["global_head_dim"]), ("_swa", config["head_dim"])):
            getattr(w, "add_key_length" + add)(size)
            getattr(w, "add_value_length" + add)(size)
            getattr(w, "add_rope_dimension_count" + add)(size)
        w.add_rope_freq_base(full["rope_theta"])
        w.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
        w.add_sliding_window(config["sliding_window"])
        w.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        w.add_shared_kv_layers(config["num_kv_shared_layers"])
        w.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        if config["final_logit_softcapping"]:
            w.add_final_logit_softcapping(config["final_logit_softcapping"])
        if config["enable_moe_block"]:
            w.add_expert_count(config["num_experts"])
            w.add_expert_used_count(config["top_k_experts"])
            w.add_expert_feed_forward_length(config["moe_intermediate_size"])

    half = config["global_head_dim"] // 2
    turned = int(config["global_head_dim"] * full["partial_rotary_factor"] / 2)
    how = {"types": types, "own": own, "metadata": metadata,
           "vectors": {"rope_freqs.weight": [1.0] * turned + [1e30] * (half - turned)}}
    return Model(name, config, weights, tok, hf or {"x": 1}, how, config["sliding_window"], 0.0, variants or {})


def around_text(config):
    """config.json of a model that sees and hears, around that of its text model."""
    return {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": config,
            "vision_config": None, "audio_config": None, "eos_token_id": config["eos_token_id"],
            "tie_word_embeddings": True}


def build():
    rope = lambda full, window, part: {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": full},
        "sliding_attention": {"rope_type": "default", "rope_theta": window}}
    s, f = "sliding_attention", "full_attention"
    wider = rope(20000.0, 700.0, 1.0)
    return {
        "gemma4": lambda: gemma4(
            "gemma4", 101, shape(40, 6, 4, 2, 24, 12), T.BF16, global_head_dim=20, num_global_key_value_heads=1,
            attention_k_eq_v=True, sliding_window=24, layer_types=[s, f, s, s, s, f], num_kv_shared_layers=2,
            use_double_wide_mlp=True, hidden_size_per_layer_input=12, rope_parameters=rope(20000.0, 700.0, 0.5),
            variants={"whole rotation": {"rope_parameters": wider},
                      "window angles": {"rope_parameters": rope(20000.0, 20000.0, 0.5)}}),
        "gemma4-moe": lambda: gemma4(
            "gemma4-moe", 102, shape(32, 3, 2, 1, 32, 32), T.Q8_0, global_head_dim=64, sliding_window=32,
            layer_types=[s, s, f], enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=32,
            final_logit_softcapping=5.0, rope_parameters=rope(50000.0, 900.0, 0.25),
            hf={"around": around_text, "rename": lambda name: name.replace("model.", "model.language_model.", 1)},
            variants={"final cap": {"final_logit_softcapping": None}}),
    }

"""The tiny models of dense decoders that differ from llama by a few switches: where norms stand, multipliers, soft caps,
fused matrices, layers without positions. As in tiny_models.py, weights are drawn so that every switch counts.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import RopeScalingType

import quantize_formats as qf
import tiny_tokenizers
from tiny_models import Draw, base_config, shape
from write_models import Model


class DenseDraw(Draw):
    """norms: the names of a layer's norms. qk: of q and k, "head" or "whole". offset: what norms are stored less."""

    def __init__(self, seed, config, norms=("input_layernorm", "post_attention_layernorm"), qk=None, offset=0.0,
                 bias=None, fused=False, embedding_scale=1.0, logit_scale=1.0, qk_mean=1.25):
        super().__init__(seed, config)
        self.norms, self.qk, self.offset, self.bias, self.fused = norms, qk, offset, bias, fused
        self.embedding_scale, self.logit_scale, self.qk_mean = embedding_scale, logit_scale, qk_mean

    def norm(self, name, n, mean=1.0):
        self.vector(name + ".weight", n, mean - self.offset, 0.25 * mean)

    def fused_layer(self, at):
        c = self.config
        hidden, heads, kv, inner = (c[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads",
                                                   "intermediate_size"))
        dim = hidden // heads
        self.linear(f"{at}.self_attn.qkv_proj", (heads + 2 * kv) * dim, hidden, 1.3)
        self.linear(f"{at}.self_attn.o_proj", hidden, heads * dim, 1.6)
        self.linear(f"{at}.mlp.gate_up_proj", 2 * inner, hidden, 1.5)
        self.linear(f"{at}.mlp.down_proj", hidden, inner, 0.9)

    def model(self):
        c = self.config
        hidden = c["hidden_size"]
        dim = c.get("head_dim") or hidden // c["num_attention_heads"]
        embedding = 0.5 / self.embedding_scale
        self.linear("model.embed_tokens", c["vocab_size"], hidden, embedding * np.sqrt(hidden))
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            for name in self.norms:
                self.norm(f"{at}.{name}", hidden)
            if self.fused:
                self.fused_layer(at)
                continue
            self.attention(f"{at}.self_attn", self.bias)
            if self.qk:
                count = {"q": c["num_attention_heads"], "k": c["num_key_value_heads"]}
                for part, n in count.items():
                    self.norm(f"{at}.self_attn.{part}_norm", dim * (n if self.qk == "whole" else 1), self.qk_mean)
            self.mlp(f"{at}.mlp", c["intermediate_size"])
        # Logits with a standard deviation of about 2.
        tied = c["tie_word_embeddings"]
        self.norm("model.norm", hidden, 2.0 * self.logit_scale / (embedding * np.sqrt(hidden)) if tied else 1.0)
        if not tied:
            self.linear("lm_head", c["vocab_size"], hidden, 2.0 * self.logit_scale)
        return self.out


def dense(name, seed, kind, architecture, family, s, draw, keys=None, vectors=None, gguf=True, hf=None, window=None,
          variants=None, types=T.Q8_0, **more):
    tok = tiny_tokenizers.make(family)
    config = base_config(kind, architecture, tok, pad_token_id=0, **(s | more))
    drawn = DenseDraw(seed, config, **draw)
    if types != T.Q8_0:  # rows of any length
        drawn.linear_draw = lambda name, shape, std: qf.exact_bf16(drawn.rng, shape, 0.0, std)
    weights = drawn.model()
    how = {"types": types, "keys": keys or {}, "vectors": vectors or {}} if gguf else {}
    return Model(name, config, weights, tok, hf or {"x": 1}, how, window, draw.get("offset", 0.0), variants or {})


GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def gemma(name, seed, kind, s, qk, **more):
    draw = {"norms": GEMMA_NORMS, "qk": qk, "offset": 1.0, "embedding_scale": np.sqrt(s["hidden_size"])}
    draw["qk_mean"] = 0.9 if s["num_hidden_layers"] > 3 else 1.25  # many layers amplify what 8 bits round
    more = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True} | more
    return dense(name, seed, kind, "Gemma3ForCausalLM" if "3" in kind else "Gemma2ForCausalLM", "spm", s, draw, **more)


def around_text(config):
    """config.json of a model that sees, around that of its text model, whose cap of logits its class does not read."""
    config = config | {"final_logit_softcapping": 2.0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
    return {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config,
            "vision_config": vision, "mm_tokens_per_image": 4, "eos_token_id": config["eos_token_id"]}


def build():
    linear = {"rope_type": "linear", "factor": 4.0}
    both = {"full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}
    short = [1.0, 1.15, 1.4, 1.9, 2.5, 3.1]
    longrope = {"type": "longrope", "short_factor": short, "long_factor": [2 * f for f in short]}
    longer = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 1.2, 1.5, 2.0, 2.6, 3.5, 5.0, 8.0],
              "attention_factor": 1.1}
    long_factor = float(np.sqrt(1 + np.log(4096 / 1024) / np.log(1024)))
    granite = {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.4,
               "attention_multiplier": 0.3}
    return {
        "gemma3": lambda: gemma(
            "gemma3", 61, "gemma3_text", shape(32, 6, 2, 1, 32, 32), "head", window=24, sliding_window=24,
            query_pre_attn_scalar=32, rope_theta=30000.0, rope_local_base_freq=10000.0, rope_scaling=linear,
            keys={"add_sliding_window": 24, "add_rope_scaling_type": RopeScalingType.LINEAR,
                  "add_rope_scaling_factor": 4.0},
            variants={"rope scaling": {"rope_scaling": None}, "window angles": {"rope_local_base_freq": 30000.0},
                      "query_pre_attn_scalar": {"query_pre_attn_scalar": 64}}),
        "gemma3-sees": lambda: gemma(
            "gemma3-sees", 62, "gemma3_text", shape(64, 3, 4, 2, 32, 16), "head", window=32, sliding_window=32,
            query_pre_attn_scalar=24, sliding_window_pattern=2, rope_parameters=both, gguf=False,
            hf={"around": around_text, "before": "language_model."}),
        "gemma2": lambda: gemma(
            "gemma2", 63, "gemma2", shape(64, 2, 2, 1, 32, 32), None, window=40, sliding_window=40,
            query_pre_attn_scalar=32, attn_logit_softcapping=1.5, final_logit_softcapping=5.0,
            keys={"add_sliding_window": 40, "add_attn_logit_softcapping": 1.5, "add_final_logit_softcapping": 5.0},
            variants={"cap of scores": {"attn_logit_softcapping": None}, "final cap": {"final_logit_softcapping": None}}),
        "phi3": lambda: dense(
            "phi3", 64, "phi3", "Phi3ForCausalLM", "llama3", shape(64, 2, 4, 2, 32), {"fused": True}, window=48,
            sliding_window=48, partial_rotary_factor=0.75, original_max_position_embeddings=1024, rope_scaling=longrope,
            keys={"add_sliding_window": 48, "add_rope_dimension_count": 12, "add_rope_scaling_orig_ctx_len": 1024,
                  "add_rope_scaling_attn_factors": long_factor},
            vectors={"rope_factors_long.weight": longrope["long_factor"], "rope_factors_short.weight": short},
            variants={"partial rotary": {"partial_rotary_factor": 0.5, "rope_scaling": None}}),
        # Contexts beyond the original one: the long factors, for all of their positions.
        "phi3-long": lambda: dense(
            "phi3-long", 68, "phi3", "Phi3ForCausalLM", "llama3", shape(48, 1, 3, 1, 40), {"fused": True},
            sliding_window=None, original_max_position_embeddings=4, rope_scaling=longer,
            keys={"add_rope_dimension_count": 16, "add_rope_scaling_orig_ctx_len": 4, "add_rope_scaling_attn_factors": 1.1},
            vectors={"rope_factors_long.weight": longer["long_factor"], "rope_factors_short.weight": longer["short_factor"]},
            types=T.BF16, variants={"long factors": {"rope_scaling": longer | {"long_factor": longer["short_factor"]}}}),
        "granite": lambda: dense(
            "granite", 65, "granite", "GraniteForCausalLM", "llama3", shape(64, 2, 4, 2, 32),
            {"embedding_scale": 6.0, "logit_scale": 4.0}, tie_word_embeddings=True, **granite,
            keys={"add_embedding_scale": 6.0, "add_logit_scale": 4.0, "add_residual_scale": 0.4,
                  "add_attention_scale": 0.3, "add_rope_dimension_count": 16},
            variants={key: {key: value * 1.5} for key, value in granite.items()}),
        "olmo2": lambda: dense(
            "olmo2", 66, "olmo2", "Olmo2ForCausalLM", "llama3", shape(64, 2, 4, 2, 32),
            {"norms": ("post_attention_layernorm", "post_feedforward_layernorm"), "qk": "whole"}),
        # Windows on two layers, whose angles are neither scaled nor of the same base.
        "olmo3": lambda: dense(
            "olmo3", 72, "olmo3", "Olmo3ForCausalLM", "llama3", shape(48, 3, 3, 1, 40),
            {"norms": ("post_attention_layernorm", "post_feedforward_layernorm"), "qk": "whole"}, window=24,
            sliding_window=24, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                          "attention_factor": 1.3},
            keys={"add_sliding_window": 24, "add_sliding_window_pattern": [True, False, True],
                  "add_rope_freq_base_swa": 500000.0, "add_rope_scaling_yarn_attn_factor": 1.3}, types=T.BF16,
            variants={"yarn without truncation": None, "window angles": {"rope_parameters": {
                "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                                   "attention_factor": 1.3, "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}, "rope_scaling": None}}),
        "smollm3": lambda: dense(
            "smollm3", 67, "smollm3", "SmolLM3ForCausalLM", "llama3", shape(64, 4, 4, 1, 32), {},
            tie_word_embeddings=True, keys={"add_rope_dimension_count": 16},
            variants={"layers without positions": {"no_rope_layers": [1, 1, 1, 1]}}),
        "smollm3-own": lambda: dense(
            "smollm3-own", 68, "smollm3", "SmolLM3ForCausalLM", "llama3", shape(64, 3, 4, 2, 32), {"bias": "qkvo"},
            no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=24, window=24, attention_bias=True,
            gguf=False),
        "seed-oss": lambda: dense(
            "seed-oss", 69, "seed_oss", "SeedOssForCausalLM", "llama3", shape(32, 2, 3, 1, 64, 32), {"bias": "qkv"},
            attention_bias=True, attention_out_bias=False),
        "ernie4-5": lambda: dense(
            "ernie4-5", 70, "ernie4_5", "Ernie4_5ForCausalLM", "spm", shape(32, 2, 3, 1, 32, 32), {},
            tie_word_embeddings=True, use_bias=False),
        "ministral": lambda: dense(
            "ministral", 71, "ministral", "MinistralForCausalLM", "llama3", shape(32, 3, 2, 1, 32, 32), {}, window=24,
            sliding_window=24, layer_types=["full_attention", "sliding_attention", "full_attention"],
            keys={"add_sliding_window": 24, "add_sliding_window_pattern": [False, True, False],
                  "add_rope_dimension_count": 32}),
    }

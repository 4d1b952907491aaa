"""Tiny GPT-2 and Phi models for make_golden.py: LayerNorms with biases, GELU without a gate.

GPT-2's matrices are drawn as GGUF has them, [out, in]; its Hugging Face files and module have them transposed.
"""

import numpy as np
from gguf import GGMLQuantizationType as T

import quantize_formats as qf
import tiny_tokenizers
from write_models import Model


class Draw:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.out = {}

    def matrix(self, name, rows, cols, gain):
        """Rows of whole blocks are exact in Q8_0, others in BF16 and F16."""
        std = gain / np.sqrt(cols)
        exact = qf.exact_q8(self.rng, (rows, cols), std) if cols % 32 == 0 else self.coarse((rows, cols), std)
        self.out[name + ".weight"] = exact

    def coarse(self, shape, std):
        step = 2.0 ** np.rint(np.log2(std / 40))
        return qf.Weight((np.clip(np.rint(self.rng.standard_normal(shape) * std / step), -127, 127) * step).astype(np.float32))

    def vector(self, name, n, mean, std):
        self.out[name] = qf.exact_bf16(self.rng, (n,), mean, std)

    def linear(self, name, rows, cols, gain):
        self.matrix(name, rows, cols, gain)
        self.vector(name + ".bias", rows, 0.0, 0.3)

    def norm(self, name, n, scale=1.0):
        self.vector(name + ".weight", n, scale, 0.25 * scale)
        self.vector(name + ".bias", n, 0.0, 0.3 * scale)


def gpt2(name, seed, n, layers, heads, inner, hf, gguf, **more):
    tok = tiny_tokenizers.make("gpt2")
    vocab = len(tok["tokens"])
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": n, "n_layer": layers, "n_head": heads,
              "n_positions": 512, "n_inner": inner, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
              "vocab_size": vocab, "eos_token_id": vocab - 1, "bos_token_id": vocab - 1, "torch_dtype": "bfloat16",
              "tie_word_embeddings": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | more
    d = Draw(seed)
    d.matrix("transformer.wte", vocab, n, 0.3 * np.sqrt(n))
    d.matrix("transformer.wpe", 512, n, 0.1 * np.sqrt(n))
    for i in range(layers):
        at = f"transformer.h.{i}"
        d.norm(f"{at}.ln_1", n)
        d.linear(f"{at}.attn.c_attn", 3 * n, n, 1.3)
        d.linear(f"{at}.attn.c_proj", n, n, 1.0)
        d.norm(f"{at}.ln_2", n)
        d.linear(f"{at}.mlp.c_fc", inner or 4 * n, n, 1.5)
        d.linear(f"{at}.mlp.c_proj", n, inner or 4 * n, 0.9)
    d.norm("transformer.ln_f", n, 1.5 / (0.3 * np.sqrt(n)))
    return Model(name, config, d.out, tok, hf, gguf)


def phi(name, seed, n, layers, heads, kv, inner, hf, gguf, **more):
    tok = tiny_tokenizers.make("gpt2")
    vocab = len(tok["tokens"])
    config = {"architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_size": n, "num_hidden_layers": layers,
              "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": inner, "hidden_act": "gelu_new",
              "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
              "partial_rotary_factor": 0.5, "qk_layernorm": False, "vocab_size": vocab, "eos_token_id": vocab - 1,
              "bos_token_id": vocab - 1, "torch_dtype": "bfloat16", "tie_word_embeddings": False} | more
    d = Draw(seed)
    dim = n // heads
    d.matrix("model.embed_tokens", vocab, n, np.sqrt(n))
    for i in range(layers):
        at = f"model.layers.{i}"
        d.norm(f"{at}.input_layernorm", n)
        for proj, rows in (("q_proj", heads * dim), ("k_proj", kv * dim), ("v_proj", kv * dim)):
            d.linear(f"{at}.self_attn.{proj}", rows, n, 1.3)
        d.linear(f"{at}.self_attn.dense", n, heads * dim, 1.6)
        d.linear(f"{at}.mlp.fc1", inner, n, 1.5)
        d.linear(f"{at}.mlp.fc2", n, inner, 0.9)
    d.norm("model.final_layernorm", n)
    d.linear("lm_head", vocab, n, 1.8)
    return Model(name, config, d.out, tok, hf, gguf)


def build():
    return {
        "gpt2": lambda: gpt2("gpt2", 61, 32, 2, 4, None, {"strip": "transformer."}, {"types": T.Q8_0}),
        "gpt2-scaled": lambda: gpt2("gpt2-scaled", 62, 36, 3, 3, 56, {"x": 1}, {}, activation_function="gelu",
                                    scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=1e-3, n_positions=512),
        "phi": lambda: phi("phi", 63, 64, 2, 4, 2, 96, {"x": 1}, {"types": T.Q8_0}),
        "phi-odd": lambda: phi("phi-odd", 64, 60, 2, 3, 3, 84, {"spelling": 5}, {"types": T.F16}, partial_rotary_factor=0.4),
    }


def add_keys(writer, model):
    """The keys of llama.cpp's converter."""
    c = model.config
    get = lambda *names: next(c[n] for n in names if n in c)
    hidden, heads = get("n_embd", "hidden_size"), get("n_head", "num_attention_heads")
    writer.add_type("model")
    writer.add_name(model.name)
    writer.add_block_count(get("n_layer", "num_hidden_layers"))
    writer.add_context_length(get("n_positions", "max_position_embeddings"))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(c["intermediate_size"] if model.type == "phi" else c["n_inner"] or 4 * hidden)
    writer.add_head_count(heads)
    writer.add_layer_norm_eps(get("layer_norm_epsilon", "layer_norm_eps"))
    if model.type == "phi":
        writer.add_head_count_kv(c["num_key_value_heads"])
        writer.add_rope_dimension_count(int(c["partial_rotary_factor"] * hidden) // heads)
    writer.add_quantization_version(2)

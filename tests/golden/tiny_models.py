"""The tiny models: every architecture with every feature on, random weights that keep the logits alive.

Standard deviations are chosen so that attention scores spread (about 1.5), every layer moves the residual
stream by about its own size and the logits have a standard deviation of 1 to 3.
"""

import numpy as np
import torch
from gguf import GGMLQuantizationType as T

import hf_quantized as hq
import layer_norm_models
import quantize_formats as qf
import tiny_tokenizers
from write_models import Model

MIXTURES = ("mixtral", "qwen2_moe", "glm4_moe", "llama4_text", "deepseek_v2", "deepseek_v3", "mistral4", "glm4_moe_lite",
            "deepseek_v32", "qwen3_next", "qwen3_5_moe_text", "lfm2_moe")
QKV, PROJ = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")


def base_config(kind, architecture, tokenizer, **more):
    eos = tokenizer["tokens"].index(tokenizer["eos"])
    bos = {"bos_token_id": tokenizer["tokens"].index(tokenizer["bos"])} if tokenizer["bos"] else {}
    config = {"architectures": [architecture], "model_type": kind, "hidden_act": "silu", "eos_token_id": eos, **bos,
              "attention_dropout": 0.0, "initializer_range": 0.02, "max_position_embeddings": 4096,
              "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
              "use_cache": True, "vocab_size": len(tokenizer["tokens"])}
    return config | more


class Draw:
    """Draws the weights of one model in order, by Hugging Face name."""

    def __init__(self, seed, config, linear=None):
        self.rng = np.random.default_rng(seed)
        self.config = config
        self.linear_draw = linear or (lambda name, shape, std: qf.exact_q8(self.rng, shape, std))
        self.out = {}

    def linear(self, name, rows, cols, gain=1.0):
        self.out[name + ".weight"] = self.linear_draw(name, (rows, cols), gain / np.sqrt(cols))

    def vector(self, name, n, mean, std):
        self.out[name] = qf.exact_bf16(self.rng, (n,), mean, std)

    def norm(self, name, n):
        self.vector(name + ".weight", n, 1.0, 0.25)

    def attention(self, at, bias, qk_norm=False):
        c = self.config
        hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        dim = c.get("head_dim") or hidden // heads
        for proj, rows in zip(QKV, (heads * dim, kv * dim, kv * dim)):
            self.linear(f"{at}.{proj}", rows, hidden, 1.3)
            if bias:
                self.vector(f"{at}.{proj}.bias", rows, 0.0, 0.4)
        self.linear(f"{at}.o_proj", hidden, heads * dim, 1.6)
        if bias in ("all", "qkvo"):
            self.vector(f"{at}.o_proj.bias", hidden, 0.0, 0.3)
        if bias == "all":
            self.vector(f"{at}.sinks", heads, 1.0, 1.0)
        if qk_norm:
            self.vector(f"{at}.q_norm.weight", dim, 1.2, 0.3)
            self.vector(f"{at}.k_norm.weight", dim, 1.2, 0.3)

    def latent_attention(self, at):
        """DeepSeek's: q, or what it is compressed to, and one latent for keys and values."""
        c = self.config
        hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
        nope, rope, value = (c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        indexed = "index_topk" in c  # a cache's rounding changes what is chosen: no single token may weigh much
        if q_rank := c["q_lora_rank"]:
            self.linear(f"{at}.q_a_proj", q_rank, hidden, 1.3)
            self.norm(f"{at}.q_a_layernorm", q_rank)
            self.linear(f"{at}.q_b_proj", heads * (nope + rope), q_rank, 0.5 if indexed else 1.3)
        else:
            self.linear(f"{at}.q_proj", heads * (nope + rope), hidden, 1.3)
        self.linear(f"{at}.kv_a_proj_with_mqa", rank + rope, hidden, 1.3)
        self.norm(f"{at}.kv_a_layernorm", rank)
        self.linear(f"{at}.kv_b_proj", heads * (nope + value), rank, 1.3)
        self.linear(f"{at}.o_proj", hidden, heads * value, 0.5 if indexed else 1.6)
        if indexed:
            heads, dim = c["index_n_heads"], c["index_head_dim"]
            self.linear(f"{at}.indexer.wq_b", heads * dim, q_rank, 1.3)
            self.linear(f"{at}.indexer.wk", dim, hidden, 1.3)
            self.norm(f"{at}.indexer.k_norm", dim)
            self.vector(f"{at}.indexer.k_norm.bias", dim, 0.0, 0.3)
            self.linear(f"{at}.indexer.weights_proj", heads, hidden, 1.3)
        if c.get("attention_bias"):
            self.vector(f"{at}.kv_a_proj_with_mqa.bias", rank + rope, 0.0, 0.3)
            self.vector(f"{at}.o_proj.bias", hidden, 0.0, 0.3)
            if q_rank:
                self.vector(f"{at}.q_a_proj.bias", q_rank, 0.0, 0.3)

    def mlp(self, at, inner):
        hidden = self.config["hidden_size"]
        self.linear(f"{at}.gate_proj", inner, hidden, 1.5)
        self.linear(f"{at}.up_proj", inner, hidden, 1.5)
        self.linear(f"{at}.down_proj", hidden, inner, 0.9)
        if self.config.get("mlp_bias"):
            for proj, rows in zip(PROJ, (inner, inner, hidden)):
                self.vector(f"{at}.{proj}.bias", rows, 0.0, 0.3)

    def gpt_oss_mlp(self, at):
        c, rng = self.config, self.rng
        hidden, inner, n = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
        self.linear(f"{at}.router", n, hidden, 2.0)
        self.vector(f"{at}.router.bias", n, 0.0, 0.5)
        # gate and up with std 3.5, so that about one in twenty meets the clamp at 7
        self.out[f"{at}.experts.gate_up_proj"] = qf.exact_mxfp4(rng, (n, 2 * inner, hidden), 3.5 / np.sqrt(hidden))
        self.out[f"{at}.experts.gate_up_proj_bias"] = qf.exact_bf16(rng, (n, 2 * inner), 0.0, 0.5)
        self.out[f"{at}.experts.down_proj"] = qf.exact_mxfp4(rng, (n, hidden, inner), 0.12 / np.sqrt(inner))
        self.out[f"{at}.experts.down_proj_bias"] = qf.exact_bf16(rng, (n, hidden), 0.0, 0.2)

    def experts(self, at, experts, inner, names=PROJ):
        hidden = self.config["hidden_size"]
        for e in range(experts):
            for proj, rows, cols, gain in zip(names, (inner, inner, hidden), (hidden, hidden, inner), (1.5, 1.5, 0.9)):
                self.linear(f"{at}.experts.{e}.{proj}", rows, cols, gain)

    def moe(self, at, kind):
        """The experts of Mixtral, Qwen 2 MoE, GLM 4.5, DeepSeek V3 and Llama 4, under their published names."""
        c, hidden = self.config, self.config["hidden_size"]
        if kind == "mixtral":
            at = at.replace(".mlp", ".block_sparse_moe")
            self.linear(f"{at}.gate", c["num_local_experts"], hidden, 2.0)
            return self.experts(at, c["num_local_experts"], c["intermediate_size"], ("w1", "w3", "w2"))
        if kind == "llama4_text":
            self.linear(f"{at}.router", c["num_local_experts"], hidden, 2.0)
            self.experts(at, c["num_local_experts"], c["intermediate_size"])
            return self.mlp(f"{at}.shared_expert", c["intermediate_size"])
        experts = c.get("num_experts") or c["n_routed_experts"]
        self.linear(f"{at}.gate", experts, hidden, 2.0)
        if kind == "qwen2_moe":
            self.mlp(f"{at}.shared_expert", c["shared_expert_intermediate_size"])
            self.linear(f"{at}.shared_expert_gate", 1, hidden, 1.5)
        else:
            if kind not in ("deepseek_v2", "mistral4"):
                self.vector(f"{at}.gate.e_score_correction_bias", experts, 0.0, 0.2)
            self.mlp(f"{at}.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
        return self.experts(at, experts, c["moe_intermediate_size"])

    def is_dense(self, layer):
        c = self.config
        if "interleave_moe_layer_step" in c:
            return (layer + 1) % c["interleave_moe_layer_step"] != 0
        return layer < c.get("first_k_dense_replace", 0) or layer in c.get("mlp_only_layers", [])

    def model(self):
        c, kind = self.config, self.config["model_type"]
        hidden = c["hidden_size"]
        # A tied embedding that dominated the stream would only ever predict the token it has just read.
        embedding = 0.3 if c["tie_word_embeddings"] else 1.0
        self.linear("model.embed_tokens", c["vocab_size"], hidden, embedding * np.sqrt(hidden))
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}"
            self.norm(f"{at}.input_layernorm", hidden)
            bias = {"gpt_oss": "all", "qwen2": "qkv", "qwen2_moe": "qkv", "llama": "qkvo" if c.get("attention_bias") else None}.get(kind)
            qk_norm = kind in ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text") or kind == "glm4_moe" and c["use_qk_norm"]
            if "kv_lora_rank" in c:
                self.latent_attention(f"{at}.self_attn")
            else:
                self.attention(f"{at}.self_attn", bias, qk_norm=qk_norm)
            self.norm(f"{at}.post_attention_layernorm", hidden)
            if kind == "gpt_oss":
                self.gpt_oss_mlp(f"{at}.mlp")
            elif kind in ("qwen3_moe", "qwen3_vl_moe_text") and i not in c["mlp_only_layers"]:
                experts = c.get("num_experts") or c["num_local_experts"]
                self.linear(f"{at}.mlp.gate", experts, hidden, 2.0)
                for e in range(experts):
                    self.mlp(f"{at}.mlp.experts.{e}", c["moe_intermediate_size"])
            elif kind in MIXTURES and not self.is_dense(i):
                self.moe(f"{at}.feed_forward" if kind == "llama4_text" else f"{at}.mlp", kind)
            elif kind == "llama4_text":
                self.mlp(f"{at}.feed_forward", c["intermediate_size_mlp"])
            else:
                self.mlp(f"{at}.mlp", c["intermediate_size"])
        self.norm("model.norm", hidden)
        if c["tie_word_embeddings"]:
            # The last norm brings the logits to a standard deviation of about 2.
            self.out["model.norm.weight"].values *= np.float32(2.0 ** -np.rint(np.log2(embedding * np.sqrt(hidden) / 2)))
        else:
            self.linear("lm_head", c["vocab_size"], hidden, 1.8)
        return self.out


def shape(hidden, layers, heads, kv, inner, head_dim=None):
    s = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
             intermediate_size=inner)
    return s | ({"head_dim": head_dim} if head_dim else {})


def gpt_oss(name, seed, window, s, experts, top_k, original, quantized, **write):
    tok = tiny_tokenizers.make("gpt-oss")
    config = base_config("gpt_oss", "GptOssForCausalLM", tok, **s, attention_bias=True, rms_norm_eps=1e-5,
                         num_local_experts=experts, num_experts_per_tok=top_k, experts_per_token=top_k,
                         initial_context_length=original, max_position_embeddings=original * 32,
                         rope_theta=150000, swiglu_limit=7.0, sliding_window=window, output_router_logits=False,
                         router_aux_loss_coef=0.9)
    config["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(s["num_hidden_layers"])]
    config["rope_scaling"] = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                              "original_max_position_embeddings": original, "truncate": False}
    if quantized:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    return Model(name, config, Draw(seed, config).model(), tok, **write)


def plain(name, seed, kind, architecture, family, s, hf=None, gguf=None, linear=None, variants=None, **more):
    tok = tiny_tokenizers.make(family)
    config = base_config(kind, architecture, tok, **(s | more))
    draw = Draw(seed, config)
    if linear:
        draw.linear_draw = lambda n, sh, std: linear(draw.rng, n, sh, std)
    return Model(name, config, draw.model(), tok, hf or {}, gguf or {}, variants=variants or {})


def qwen3vl(name, seed, experts=False):
    """The language model of one that sees; make_qwen_image_golden.py has one with a tower."""
    kind, classes = ("qwen3_vl_moe", "Qwen3VLMoe") if experts else ("qwen3_vl", "Qwen3VL")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
              "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}

    sections = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 5, 3]}}  # they count within images

    def within(name):
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

    def around(config):
        return {"architectures": config["architectures"], "model_type": kind, "text_config": config | sections,
                "vision_config": vision | {"model_type": kind}, "tie_word_embeddings": False}

    def reference(config, state):
        import transformers

        text = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")} | sections
        config = getattr(transformers, classes + "Config")(text_config=text, vision_config=vision, tie_word_embeddings=False)
        net = getattr(transformers, classes + "ForConditionalGeneration")._from_config(
            config, attn_implementation="eager", experts_implementation="eager").float()
        missing, unexpected = net.load_state_dict({within(n): v for n, v in state.items()}, strict=False)
        assert not unexpected and all(n.startswith("model.visual.") for n in missing), (missing, unexpected)
        return net

    more = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, decoder_sparse_step=1,
                mlp_only_layers=[]) if experts else {}
    m = plain(name, seed, kind + "_text", classes + "ForConditionalGeneration", "qwen2", shape(48, 3, 3, 1, 40, 24),
              hf={"around": around, "rename": within, "stacked": experts}, linear=lambda rng, n, sh, std: qf.exact_bf16(rng, sh, 0.0, std),
              gguf={"types": T.BF16, "keys": {"add_rope_dimension_sections": [4, 5, 3, 0], "add_num_deepstack_layers": 1}},
              rope_theta=500000.0, **more)
    m.reference = reference
    return m


# Files that between them use every GGUF type, on different matrices.
MIX_1 = {"token_embd": T.Q4_K, "output": T.Q6_K, "attn_q": T.Q4_0, "attn_k": T.Q5_0, "attn_v": T.F16,
         "attn_output": T.Q5_K, "ffn_gate": T.Q4_1, "ffn_up": T.Q8_0, "ffn_down": T.Q6_K}
MIX_2 = {"token_embd": T.Q5_1, "attn_q": T.Q4_K, "attn_k": T.BF16, "attn_v": T.Q8_0,
         "attn_output": T.Q5_1, "ffn_gate": T.Q5_K, "ffn_up": T.Q5_0, "ffn_down": T.Q4_K}
MIX_3 = {"token_embd": T.IQ4_NL, "output": T.IQ4_XS, "attn_q": T.Q3_K, "attn_k": T.IQ3_S, "attn_v": T.NVFP4,
         "attn_output": T.Q2_K, "ffn_gate": T.IQ3_XXS, "ffn_up": T.IQ2_S, "ffn_down": T.IQ2_XXS}
MIX_4 = {"token_embd": T.IQ4_NL, "attn_q": T.IQ1_S, "attn_k": T.IQ1_M, "attn_v": T.TQ2_0, "attn_output": T.NVFP4,
         "ffn_gate": T.IQ2_XS, "ffn_up": T.IQ2_XS, "ffn_gate_up_exps": T.IQ2_XS, "ffn_down_exps": T.TQ1_0,
         "ffn_down": T.TQ1_0}
HF_TO_MIX = {"embed_tokens": "token_embd", "lm_head": "output", "q_proj": "attn_q", "k_proj": "attn_k",
             "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
             "down_proj": "ffn_down"}


def mix(name, seed, types, s, tied):
    draw = lambda rng, n, sh, std: qf.quantized(rng, sh, std, types[HF_TO_MIX[n.split(".")[-1]]])
    return plain(name, seed, "llama", "LlamaForCausalLM", "llama3", s, gguf={"types": types}, linear=draw,
                 tie_word_embeddings=tied)


def mix_experts(name, seed, types, s, **more):
    """Experts with their gate and up in one tensor, and a matrix with a factor beside it."""
    def draw(rng, n, sh, std):
        role = HF_TO_MIX.get(n.split(".")[-1])
        if role == "attn_output":
            return qf.random_codes(rng, sh, std, types[role], factor=0.001)
        return qf.quantized(rng, sh, std, types[role]) if role else qf.exact_q8(rng, sh, std)

    return plain(name, seed, "qwen3_moe", "Qwen3MoeForCausalLM", "qwen2", s, linear=draw,
                 gguf={"types": types, "fused_gate_up": True}, tie_word_embeddings=True, **more)


def fp8(name, seed):
    def draw(rng, n, sh, std):
        if "self_attn" in n:
            return qf.fp8_blocks(rng, sh, std, torch.float32)  # DeepSeek's scales
        return qf.fp8_blocks(rng, sh, std, torch.bfloat16) if ".mlp." in n else qf.exact_q8(rng, sh, std)

    m = plain(name, seed, "qwen3", "Qwen3ForCausalLM", "qwen2", shape(160, 1, 4, 2, 192, 32), hf={"fp8": True},
              linear=draw, tie_word_embeddings=True, rope_theta=1000000)
    m.config["quantization_config"] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                       "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    return m


def packed(name, seed, config, kinds, kind, architecture, family, s, **more):
    """A directory of packed weights; kinds: end of a module's name -> (maker, arguments). The rest is BF16."""
    def draw(rng, n, sh, std):
        for end, (make, arguments) in kinds.items():
            if n.endswith(end):
                return make(rng, sh, std, **arguments)
        return qf.exact_q8(rng, sh, std)

    m = plain(name, seed, kind, architecture, family, s, hf={"packed": True}, linear=draw, **more)
    m.config["quantization_config"] = config
    return m


def packed_models(qwen_moe):
    """One model per scheme, its matrices packed in as many ways as the scheme has."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False, "lm_head": True,
            "checkpoint_format": "gptq"}
    gptq_kinds = {"q_proj": (hq.gptq, dict()), "k_proj": (hq.gptq, dict(sym=False)),
                  "v_proj": (hq.gptq, dict(bits=8, group=-1)), "o_proj": (hq.gptq, dict(act_order=True)),
                  "gate_proj": (hq.gptq, dict(sym=False, act_order=True)), "up_proj": (hq.gptq, dict(bits=8, sym=False)),
                  "lm_head": (hq.gptq, dict(group=64))}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
           "modules_to_not_convert": ["down_proj"]}
    groups = [{"num_bits": 4, "group_size": 32, "strategy": "group", "type": "int"},
              {"num_bits": 8, "strategy": "channel", "type": "int"},
              {"num_bits": 8, "strategy": "block", "type": "float", "block_structure": [128, 128]}]
    compressed = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"],
                  "quantization_status": "compressed",
                  "config_groups": {f"group_{i}": {"targets": ["Linear"], "weights": g} for i, g in enumerate(groups)}}
    ct = lambda kind, **k: (hq.compressed, dict(kind=kind, **k))
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
           "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": ["lm_head"]}
    nf4_kinds = {end: (hq.bitsandbytes_4bit, dict(nested=end != "v_proj")) for end in QKV + PROJ + ("o_proj",)}
    return {
        "gptq": lambda: packed("gptq", 61, gptq, gptq_kinds, "llama", "LlamaForCausalLM", "llama3",
                               shape(64, 1, 4, 2, 128), vocab_size=288),
        "awq": lambda: packed("awq", 62, awq, dict.fromkeys(QKV + ("o_proj", "gate_proj", "up_proj"), (hq.awq, {})),
                              "qwen2", "Qwen2ForCausalLM", "qwen2", shape(64, 1, 4, 2, 96), tie_word_embeddings=True,
                              rope_theta=1000000.0, vocab_size=288, sliding_window=32, use_sliding_window=False,
                              max_window_layers=2),
        "compressed": lambda: packed(
            "compressed", 63, compressed,
            {"q_proj": ct("int4", group=32), "k_proj": ct("int4", group=32, zero_point=True), "v_proj": ct("w8a8"),
             "o_proj": ct("fp8-channel", dtype=torch.float16), "gate_proj": ct("nvfp4", dtype=torch.float32),
             "up_proj": ct("mxfp4"), "down_proj": ct("fp8-block")},
            "llama", "LlamaForCausalLM", "llama3", shape(64, 1, 4, 2, 160), tie_word_embeddings=True),
        "compressed-moe": lambda: packed(
            "compressed-moe", 64, compressed,
            {"q_proj": ct("fp8"), "o_proj": ct("int8"), "gate_proj": ct("int4", group=32),
             "up_proj": ct("int4", group=32, zero_point=True), "down_proj": ct("w8a8")},
            "qwen3_moe", "Qwen3MoeForCausalLM", "qwen2", shape(64, 1, 4, 2, 96, 32), num_experts=4,
            moe_intermediate_size=32, norm_topk_prob=True, **qwen_moe),
        # Rows of whole blocks: for others the CPU dequantizer of bitsandbytes 0.50 takes wrong scales.
        "nf4": lambda: packed("nf4", 65, nf4, nf4_kinds, "qwen3", "Qwen3ForCausalLM", "qwen2",
                              shape(64, 1, 4, 2, 128, 32), tie_word_embeddings=True, rope_theta=1000000.0,
                              attention_bias=False),
    }


def build():
    """Name -> function that makes the model (each takes a moment, so only the asked ones run)."""
    import dense_models
    import gemma4_models
    import kimi_models
    import mamba_models
    import rwkv_models
    import state_models

    llama3_scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 64}
    qwen_moe = dict(num_experts_per_tok=3, decoder_sparse_step=1, mlp_only_layers=[], attention_bias=False,
                    output_router_logits=False, rope_theta=1000000.0, use_sliding_window=False, sliding_window=None)
    deepseek_yarn = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
                     "mscale_all_dim": 0.7, "original_max_position_embeddings": 64}
    growing = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
               "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25}
    by = lambda mscale: 0.1 * mscale * np.log(deepseek_yarn["factor"]) + 1.0
    yarn = {"rope_type": "yarn", "factor": 2.6, "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3,
            "truncate": False}
    q8 = {"types": T.Q8_0}
    mostly_bf16 = {"types": dict.fromkeys(("token_embd", "attn_q", "attn_k", "attn_v"), T.BF16)
                   | {"attn_output": T.Q8_0, "output": T.Q8_0}}
    mostly_f16 = {"types": dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), T.F16)
                  | dict.fromkeys(("token_embd", "ffn_gate", "ffn_up", "ffn_down"), T.Q8_0)}
    return {
        "gpt-oss-w32": lambda: gpt_oss("gpt-oss-w32", 11, 32, shape(96, 3, 3, 1, 64, 32), 4, 3, 64, True,
                                       hf={"experts": "mxfp4", "shards": 3, "template": "file"}, gguf=q8),
        "gpt-oss-w128": lambda: gpt_oss("gpt-oss-w128", 12, 128, shape(64, 2, 4, 2, 32, 64), 4, 2, 128, False,
                                        hf={"experts": "bf16"}, gguf=mostly_bf16),
        "llama2": lambda: plain("llama2", 21, "llama", "LlamaForCausalLM", "spm", shape(64, 2, 4, 4, 64),
                                hf={"x": 1}, gguf=q8, rms_norm_eps=1e-5, rope_scaling=None),
        "llama3": lambda: plain("llama3", 22, "llama", "LlamaForCausalLM", "llama3", shape(96, 2, 6, 2, 64, 16),
                                hf={"x": 1}, gguf=q8, rms_norm_eps=1e-5, rope_theta=500000.0,
                                tie_word_embeddings=True, rope_scaling=llama3_scaling, attention_bias=False,
                                mlp_bias=False),
        "mistral": lambda: plain("mistral", 23, "mistral", "MistralForCausalLM", "spm", shape(64, 2, 6, 2, 64, 16),
                                 hf={"shards": 2}, gguf=q8, sliding_window=24, rms_norm_eps=1e-5),
        "mistral-full": lambda: plain("mistral-full", 24, "mistral", "MistralForCausalLM", "spm",
                                      shape(32, 1, 2, 1, 64, 16), hf={"x": 1}, gguf={"types": T.F32},
                                      sliding_window=None, tie_word_embeddings=True, rope_theta=1000000.0),
        "qwen2": lambda: plain("qwen2", 31, "qwen2", "Qwen2ForCausalLM", "qwen2", shape(64, 2, 4, 2, 96),
                               hf={"x": 1}, gguf={"types": T.Q8_0, "split": 9}, tie_word_embeddings=True,
                               rope_theta=1000000.0, vocab_size=288, sliding_window=32, use_sliding_window=False,
                               max_window_layers=2),
        "qwen3": lambda: plain("qwen3", 32, "qwen3", "Qwen3ForCausalLM", "qwen2", shape(64, 2, 4, 2, 64, 32),
                               hf={"spelling": 5}, gguf=mostly_f16, tie_word_embeddings=True,
                               rope_theta=1000000.0, attention_bias=False),
        "qwen3vl": lambda: qwen3vl("qwen3vl", 34),
        "qwen3vlmoe": lambda: qwen3vl("qwen3vlmoe", 35, experts=True),
        "qwen3-fp8": lambda: fp8("qwen3-fp8", 33),
        "qwen3moe": lambda: plain("qwen3moe", 41, "qwen3_moe", "Qwen3MoeForCausalLM", "qwen2",
                                  shape(64, 2, 4, 2, 96, 32), hf={"shards": 2}, gguf=q8, num_experts=5,
                                  moe_intermediate_size=32, norm_topk_prob=True, **qwen_moe),
        "qwen3moe-raw": lambda: plain("qwen3moe-raw", 42, "qwen3_moe", "Qwen3MoeForCausalLM", "qwen2",
                                      shape(64, 1, 2, 1, 96, 32), hf={"x": 1}, num_experts=5,
                                      moe_intermediate_size=32, norm_topk_prob=False, **qwen_moe),
        # What only a Hugging Face directory says: biases everywhere, YaRN with all its keys, dense layers among experts.
        "llama-bias": lambda: plain("llama-bias", 25, "llama", "LlamaForCausalLM", "llama3", shape(64, 2, 4, 2, 96),
                                    hf={"x": 1}, attention_bias=True, mlp_bias=True, rope_scaling=yarn,
                                    original_max_position_embeddings=96),
        "qwen3moe-dense": lambda: plain("qwen3moe-dense", 43, "qwen3_moe", "Qwen3MoeForCausalLM", "qwen2",
                                        shape(64, 2, 4, 2, 96, 32), hf={"x": 1}, num_local_experts=5,
                                        moe_intermediate_size=32, norm_topk_prob=True,
                                        **(qwen_moe | {"mlp_only_layers": [0]})),
        "quant-mix-1": lambda: mix("quant-mix-1", 51, MIX_1, shape(256, 1, 4, 1, 256, 64), False),
        "quant-mix-2": lambda: mix("quant-mix-2", 52, MIX_2, shape(256, 1, 4, 2, 256, 32), True),
        "quant-mix-3": lambda: mix("quant-mix-3", 53, MIX_3, shape(256, 1, 4, 1, 256, 64), False),
        "quant-mix-4": lambda: mix_experts("quant-mix-4", 54, MIX_4, shape(256, 1, 4, 2, 256, 64), num_experts=3,
                                           moe_intermediate_size=256, norm_topk_prob=True,
                                           **(qwen_moe | {"num_experts_per_tok": 2})),
        "mixtral": lambda: plain("mixtral", 66, "mixtral", "MixtralForCausalLM", "spm", shape(32, 2, 6, 2, 32, 16),
                                 hf={"x": 1}, gguf=q8, num_local_experts=5, num_experts_per_tok=2, sliding_window=24,
                                 rope_theta=1000000.0, output_router_logits=False),
        "mixtral-stacked": lambda: plain("mixtral-stacked", 62, "mixtral", "MixtralForCausalLM", "spm",
                                         shape(32, 1, 2, 1, 32, 16), hf={"stacked": True}, num_local_experts=4,
                                         num_experts_per_tok=3, sliding_window=None),
        "qwen2moe": lambda: plain("qwen2moe", 63, "qwen2_moe", "Qwen2MoeForCausalLM", "qwen2", shape(32, 2, 4, 2, 64),
                                  hf={"x": 1}, gguf=q8, num_experts=5, moe_intermediate_size=32, norm_topk_prob=False,
                                  shared_expert_intermediate_size=64, **qwen_moe),
        "glm4moe": lambda: plain("glm4moe", 64, "glm4_moe", "Glm4MoeForCausalLM", "qwen2", shape(32, 3, 6, 2, 64, 16),
                                 hf={"x": 1}, gguf=q8, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
                                 moe_intermediate_size=32, n_group=3, topk_group=2, routed_scaling_factor=1.7,
                                 norm_topk_prob=True, first_k_dense_replace=1, use_qk_norm=True,
                                 partial_rotary_factor=0.5, rope_theta=1000000.0, num_nextn_predict_layers=0),
        "llama4": lambda: plain("llama4", 65, "llama4_text", "Llama4ForCausalLM", "llama3", shape(32, 4, 4, 2, 32, 16),
                                hf={"x": 1}, gguf=q8, intermediate_size_mlp=64, num_local_experts=4,
                                num_experts_per_tok=1, interleave_moe_layer_step=2, no_rope_layer_interval=3,
                                attention_chunk_size=40, floor_scale=16, attn_scale=0.3, attn_temperature_tuning=True,
                                use_qk_norm=True, rope_theta=500000.0, rope_scaling=llama3_scaling),
        "deepseek-v3": lambda: plain("deepseek-v3", 71, "deepseek_v3", "DeepseekV3ForCausalLM", "llama3",
                                     shape(64, 3, 5, 5, 96), hf={"x": 1},
                                     gguf={"types": {"attn_k_b": T.BF16, None: T.Q8_0}, "absorbed": True,
                                           "keys": {"add_rope_scaling_attn_factors": by(1.0) / by(0.7)}},
                                     variants={"yarn without truncation": None}, kv_lora_rank=64, q_lora_rank=32,
                                     qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=8,
                                     num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=32, n_group=4,
                                     topk_group=2, routed_scaling_factor=0.8, norm_topk_prob=True,
                                     first_k_dense_replace=1, num_nextn_predict_layers=0, rope_scaling=deepseek_yarn),
        "deepseek-v2": lambda: plain("deepseek-v2", 72, "deepseek_v2", "DeepseekV2ForCausalLM", "llama3",
                                     shape(48, 2, 3, 3, 64), hf={"x": 1}, gguf={"types": T.BF16},
                                     linear=lambda rng, n, sh, std: qf.exact_bf16(rng, sh, 0.0, std),
                                     kv_lora_rank=40, q_lora_rank=None, qk_nope_head_dim=20, qk_rope_head_dim=6,
                                     v_head_dim=12, n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=2,
                                     moe_intermediate_size=24, topk_method="greedy", routed_scaling_factor=1.3,
                                     first_k_dense_replace=1, attention_bias=True),
        "deepseek-v2-groups": lambda: plain("deepseek-v2-groups", 78, "deepseek_v2", "DeepseekV2ForCausalLM", "llama3",
                                            shape(32, 2, 2, 2, 64), hf={"x": 1},
                                            linear=lambda rng, n, sh, std: qf.exact_bf16(rng, sh, 0.0, std),
                                            kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8,
                                            v_head_dim=16, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
                                            moe_intermediate_size=16, topk_method="group_limited_greedy", n_group=4,
                                            topk_group=2, routed_scaling_factor=1.5, first_k_dense_replace=1),
        "deepseek-v32": lambda: plain("deepseek-v32", 79, "deepseek_v32", "DeepseekV32ForCausalLM", "llama3",
                                      shape(48, 2, 3, 3, 64), hf={"x": 1},
                                      gguf={"types": T.BF16, "absorbed": True, "arch": "GLM_DSA", "name": "deepseek32",
                                            "keys": {"add_rope_scaling_attn_factors": by(1.0) / by(0.7),
                                                     "add_indexer_head_count": 8, "add_indexer_key_length": 20,
                                                     "add_indexer_top_k": 37}},
                                      variants={"yarn without truncation": None, "topk_group": None, "indexer": {"index_topk": 4096},
                                                "index_topk one more": {"index_topk": 38}},
                                      linear=lambda rng, n, sh, std: qf.exact_bf16(rng, sh, 0.0, std),
                                      kv_lora_rank=40, q_lora_rank=24, qk_nope_head_dim=20, qk_rope_head_dim=8,
                                      v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
                                      moe_intermediate_size=24, n_group=2, topk_group=2, routed_scaling_factor=0.8,
                                      norm_topk_prob=True, first_k_dense_replace=1, rope_scaling=deepseek_yarn,
                                      index_topk=37, index_n_heads=8, index_head_dim=20),
        "mistral4": lambda: plain("mistral4", 73, "mistral4", "Mistral4ForCausalLM", "llama3", shape(64, 2, 4, 4, 64),
                                  hf={"stacked": True},
                                  gguf={"types": {"attn_k_b": T.BF16, None: T.Q8_0}, "absorbed": True,
                                        "keys": {"add_attn_temperature_scale": 0.25}},
                                  variants={"rope scaling": None, "yarn without truncation": None, "yarn attention factor": None,
                                            "routed_scaling_factor": {"routed_scaling_factor": 1.0},
                                            "growth": {"rope_scaling": growing | {"llama_4_scaling_beta": 0.0,
                                                                                  "partial_rotary_factor": 0.2}}},
                                  kv_lora_rank=32, q_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=16,
                                  n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1,
                                  moe_intermediate_size=32, routed_scaling_factor=0.5, norm_topk_prob=True,
                                  first_k_dense_replace=0, rope_scaling=growing | {"partial_rotary_factor": 0.2}),
        "glm4-moe-lite": lambda: plain("glm4-moe-lite", 75, "glm4_moe_lite", "Glm4MoeLiteForCausalLM", "qwen2",
                                       shape(64, 2, 4, 4, 64), hf={"x": 1}, kv_lora_rank=32, q_lora_rank=32,
                                       qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=64, n_routed_experts=6,
                                       num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32, n_group=1,
                                       topk_group=1, routed_scaling_factor=1.8, norm_topk_prob=True, rms_norm_eps=1e-5,
                                       mlp_layer_types=["dense", "sparse"], first_k_dense_replace=1,
                                       variants={"topk_group": None}),
        "ministral3": lambda: plain("ministral3", 74, "ministral3", "Ministral3ForCausalLM", "llama3",
                                    shape(48, 2, 6, 2, 64, 16), hf={"x": 1},
                                    gguf={"types": T.BF16, "keys": {"add_attn_temperature_scale": 0.25,
                                          "add_rope_scaling_yarn_log_mul": 1.0, "add_sliding_window": 72}},
                                    variants={"rope scaling": None, "yarn without truncation": None, "yarn attention factor": None,
                                              "growth": {"rope_scaling": growing | {"llama_4_scaling_beta": 0.0}}},
                                    linear=lambda rng, n, sh, std: qf.exact_bf16(rng, sh, 0.0, std),
                                    sliding_window=72, rope_scaling=growing),
    } | packed_models(qwen_moe) | dense_models.build() | layer_norm_models.build() \
        | state_models.build() | mamba_models.build() | kimi_models.build() | rwkv_models.build() \
        | gemma4_models.build()

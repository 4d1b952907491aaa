"""Writes one tiny model as a Hugging Face directory and as GGUF, with the names and keys the published
checkpoints and llama.cpp's converter use. A model is a Model: config (as config.json) plus named weights.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from safetensors.torch import save_file

from quantize_formats import Weight, mxfp4_hf_blocks

GGUF_ARCH = {"gpt_oss": "GPT_OSS", "llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3",
             "qwen3_moe": "QWEN3MOE", "qwen3_vl_text": "QWEN3VL", "qwen3_vl_moe_text": "QWEN3VLMOE"}
GGUF_ARCH |= {"gemma3_text": "GEMMA3", "gemma2": "GEMMA2", "phi3": "PHI3", "granite": "GRANITE", "olmo2": "OLMO2", "olmo3": "OLMO2",
              "smollm3": "SMOLLM3", "seed_oss": "SEED_OSS", "ernie4_5": "ERNIE4_5", "ministral": "LLAMA", 
              "gpt2": "GPT2", "phi": "PHI2", "mixtral": "LLAMA", "qwen2_moe": "QWEN2MOE", "glm4_moe": "GLM4_MOE",
              "llama4_text": "LLAMA4", "deepseek_v2": "DEEPSEEK2", "deepseek_v3": "DEEPSEEK2",
              "mistral4": "MISTRAL4", "glm4_moe_lite": "DEEPSEEK2", "ministral3": "MISTRAL3", "qwen3_next": "QWEN3NEXT",
              "qwen3_5_text": "QWEN35", "qwen3_5_moe_text": "QWEN35MOE", "lfm2": "LFM2", "lfm2_moe": "LFM2MOE",
              "granitemoehybrid": "GRANITE_HYBRID", "mamba2": "MAMBA2", "nemotron_h": "NEMOTRON_H",
              "falcon_h1": "FALCON_H1", "kimi_linear": "KIMI_LINEAR", "rwkv7": "RWKV7", "gemma4_text": "GEMMA4"}
# Those whose converter interleaves the halves of q's and k's heads.
INTERLEAVED = ("llama", "mistral", "ministral", "ministral3", "mixtral", "granite", "smollm3", "granitemoehybrid")


@dataclass
class Model:
    name: str
    config: dict  # what config.json says, in the published (transformers 4) spelling
    weights: dict  # Hugging Face name -> Weight; gpt-oss experts as rows: gate_up [E, 2I, H], down [E, H, I]
    tokenizer: dict
    hf: dict = field(default_factory=dict)  # how to write the directory; empty: not written
    gguf: dict = field(default_factory=dict)  # how to write the file; empty: not written
    window: int | None = None  # of some layers
    norm_offset: float = 0.0  # what GGUF's norms are more than Hugging Face's
    variants: dict = field(default_factory=dict)  # feature -> config without it; None: do not try
    reference: object = None  # a module of (config, weights) where transformers has none
    modules: object = None  # what transformers' modules call the weights, where that is not what files do

    @property
    def type(self):
        return self.config["model_type"]

    def head_dim(self):
        c = self.config
        return c.get("head_dim") or c.get("hidden_size", c.get("n_embd")) // c.get("num_attention_heads", c.get("n_head"))

    def embedding(self):
        own = {"gpt2": "transformer.wte.weight", "mamba2": "backbone.embeddings.weight",
               "nemotron_h": "model.embeddings.weight"}
        return own.get(self.type, "model.embed_tokens.weight")

    def gguf_arch(self):
        return getattr(gguf.MODEL_ARCH, self.gguf.get("arch") or GGUF_ARCH[self.type])

    def gguf_name(self):
        """What general.architecture says; of those that gguf-py does not know yet the tensors are another's."""
        return self.gguf.get("name") or gguf.MODEL_ARCH_NAMES[self.gguf_arch()]

    def transposed(self, name):
        """Whether Hugging Face has the matrix as [in, out]."""
        return self.type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def dump(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def hf_tensors(model):
    """Name -> torch tensor, as published."""
    brain = lambda v: torch.from_numpy(v.copy()).to(torch.bfloat16)
    out = {}
    for name, w in model.weights.items():
        if model.transposed(name):
            w = Weight(np.ascontiguousarray(w.values.T))
        name = name.removeprefix(model.hf.get("strip", ""))
        if "hf" in w.raw:  # packed (hf_quantized.py): tensors under the module's name
            out |= {name.removesuffix("weight") + part: tensor for part, tensor in w.raw["hf"].items()}
        elif "fp8" in w.raw:
            out[name], out[name + "_scale_inv"] = w.raw["fp8"], w.raw["scale_inv"]
        elif w.codes is not None and model.hf.get("experts") == "mxfp4":
            out[name + "_blocks"] = torch.from_numpy(mxfp4_hf_blocks(w))
            out[name + "_scales"] = torch.from_numpy(w.scales)
        elif w.codes is not None:
            out[name] = brain(np.swapaxes(w.values, -1, -2)).contiguous()
        else:
            out[name] = brain(w.values)
            assert torch.equal(out[name].float(), torch.from_numpy(w.values)), name
    if model.type == "llama4_text" or model.hf.get("stacked"):
        out = fused_experts(model, out)
    rename = model.hf.get("rename", lambda name: model.hf.get("before", "") + name)
    return {rename(name): tensor for name, tensor in out.items()}


def fused_experts(model, tensors):
    """One tensor for all experts: Llama 4's and Qwen 3 VL's [E, in, out], or [E, out, in] as transformers 5 holds them."""
    out, stacks = {}, {}
    for name, value in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        if ".experts." not in name:
            out[name] = value
            continue
        at, after = name.split(".experts.")
        stacks.setdefault(at, {}).setdefault(after.split(".")[1], []).append(value)
    for at, parts in stacks.items():
        gate, up, down = (torch.stack(p) for p in parts.values())
        both = {"gate_up_proj": torch.cat([gate, up], dim=1), "down_proj": down}
        turn = (lambda t: t.transpose(1, 2)) if model.type in ("llama4_text", "qwen3_vl_moe_text") else lambda t: t
        out |= {f"{at}.experts.{p}": turn(t).contiguous() for p, t in both.items()}
    return out


def write_hf(model, folder):
    folder.mkdir(parents=True)
    config = dict(model.config)
    if model.hf.get("spelling") == 5:  # transformers 5: one rope_parameters, dtype
        rope = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"} | (config.pop("rope_scaling", None) or {})
        config |= {"rope_parameters": rope, "dtype": config.pop("torch_dtype")}
    dump(folder / "config.json", model.hf["around"](config) if "around" in model.hf else config)
    eos = config["eos_token_id"]
    dump(folder / "generation_config.json", {"eos_token_id": [eos] if model.type == "gpt_oss" else eos,
                                             "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20})
    (folder / "tokenizer.json").write_text(model.tokenizer["tokenizer_json"])
    tokenizer_config = dict(model.tokenizer["config"])
    if model.hf.get("template") == "file":
        (folder / "chat_template.jinja").write_text(model.tokenizer["template"])
    else:
        tokenizer_config["chat_template"] = model.tokenizer["template"]
    dump(folder / "tokenizer_config.json", tokenizer_config)

    tensors = hf_tensors(model)
    shards = model.hf.get("shards", 1)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    per = math.ceil(len(names) / shards)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * per : (i + 1) * per]
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map |= {n: file for n in part}
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    dump(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def rope_order(heads, head_dim):
    """Row order of attn_q and attn_k in a llama GGUF: halves interleaved, head by head."""
    return np.arange(heads * head_dim).reshape(heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)


def llama3_rope_freqs(config, head_dim):
    s = config["rope_scaling"]
    freq = config["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = s["original_max_position_embeddings"] * freq / (2 * np.pi)
    smooth = np.clip((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"]), 0, 1)
    return (1 / ((1 - smooth) / s["factor"] + smooth)).astype(np.float32)


def gguf_tensors(model):
    """GGUF name -> Weight, in the converter's order and row layout."""
    arch = model.gguf_arch()
    names = gguf.get_tensor_name_map(arch, model.config.get("num_hidden_layers", model.config.get("n_layer")))
    heads, kv_heads = model.config.get("num_attention_heads"), model.config.get("num_key_value_heads")
    out, experts = {}, {}

    def put(name, w):
        ends = (".weight", ".bias")
        mapped = names.get_name(name, try_suffixes=ends) or names.get_name(name.removeprefix("model."), try_suffixes=ends)
        assert mapped, name
        out[mapped] = w

    for name, values in model.gguf.get("vectors", {}).items():
        out[name] = Weight(np.array(values, dtype=np.float32))
    if (model.config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        out["rope_freqs.weight"] = Weight(llama3_rope_freqs(model.config, model.head_dim()))
    own = model.gguf.get("own", lambda name, w: None)  # what is particular to one architecture
    for name, w in model.weights.items():
        if (parts := own(name, w)) is not None:
            out |= dict(parts)
            continue
        if model.norm_offset and name.endswith("norm.weight"):
            w = Weight(w.values + np.float32(model.norm_offset))
        if model.type in INTERLEAVED and name.endswith(("q_proj.weight", "k_proj.weight")):
            w = w.rows(rope_order(heads if "q_proj" in name else kv_heads, model.head_dim()))
        if name.endswith(".sinks"):
            put(name + ".weight", w)
        elif ".experts.gate_up_proj" in name:
            for part, first in (("gate", 0), ("up", 1)):
                mapped = name.replace("gate_up_proj", part + "_proj").replace("_bias", ".bias")
                half = Weight(w.values[..., first::2]) if "_bias" in name else w.rows(np.arange(first, w.values.shape[-2], 2))
                put(mapped if "_bias" in name else mapped + ".weight", half)
        elif ".experts.down_proj" in name:
            put(name.replace("_bias", ".bias") if "_bias" in name else name + ".weight", w)
        elif ".experts." in name:  # qwen3moe: one tensor per expert, stacked in GGUF
            before, after = name.split(".experts.")
            experts.setdefault(before + ".experts." + after.split(".", 1)[1], []).append(w)
        elif name.endswith("kv_b_proj.weight") and model.gguf.get("absorbed"):
            k_b, v_b = absorbed(model.config, w)
            put(name.replace("kv_b", "k_b"), k_b)
            put(name.replace("kv_b", "v_b"), v_b)
        elif name.endswith("e_score_correction_bias"):
            out[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = w
        elif name.endswith("shared_expert_gate.weight"):
            put(name, Weight(w.values[0]))
        else:
            put(name, w)
    for name, parts in experts.items():
        stack = lambda get: np.stack([get(p) for p in parts])
        put(name, Weight(stack(lambda p: p.values), {k: stack(lambda p: p.raw[k]) for k in parts[0].raw}))
    if model.gguf.get("fused_gate_up"):
        fuse_gate_up(out)
    for name in [n for n, w in out.items() if w.factor is not None]:
        out[name.replace(".weight", ".scale")] = Weight(np.float32([out[name].factor]))
    return out


def absorbed(config, w):
    """Of kv_b_proj [heads * (nope + value), rank]: k_b [heads, rank, nope], v_b [heads, value, rank]."""
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    each = lambda rows: rows.reshape(heads, -1, rows.shape[-1])
    k_b = Weight(np.ascontiguousarray(each(w.values)[:, :nope].swapaxes(1, 2)))
    return k_b, Weight(np.ascontiguousarray(each(w.values)[:, nope:]),
                       {k: np.ascontiguousarray(each(v)[:, nope:]) for k, v in w.raw.items()})


def fuse_gate_up(out):
    """Experts' gates and ups in one tensor, as some converters write them: an expert's gate rows come first."""
    for name in [n for n in out if n.endswith("ffn_gate_exps.weight")]:
        gate, up = out.pop(name), out.pop(name.replace("gate_exps", "up_exps"))
        both = lambda a, b: np.concatenate([a, b], axis=1)
        out[name.replace("gate_exps", "gate_up_exps")] = Weight(
            both(gate.values, up.values), {k: both(gate.raw[k], up.raw[k]) for k in gate.raw})


def choose_type(model, name, w):
    """Vectors and routers stay F32, as the converter has it; experts MXFP4 where they are; the rest as asked."""
    if w.values.ndim == 1 or name.endswith(".bias") or "ffn_gate_inp" in name or name == "position_embd.weight" \
            or "conv." in name or "conv1d" in name or ".ssm_" in name and not name.endswith(("_in.weight", "_out.weight",
                                                                                            "ssm_ba.weight")):
        return T.F32
    if w.codes is not None:
        return T.MXFP4
    types = model.gguf["types"]
    if isinstance(types, T):
        return types
    return types.get(name.split(".")[-2], types.get(None))


def add_metadata(writer, model):
    c = model.config
    if model.type in ("gpt2", "phi"):
        import layer_norm_models

        return layer_norm_models.add_keys(writer, model)
    rope = c.get("rope_scaling") or {}
    writer.add_type("model")
    writer.add_name(model.name)
    if "metadata" in model.gguf:
        model.gguf["metadata"](writer)
        return writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c.get("intermediate_size_mlp") or c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    kv_heads = 1 if model.gguf.get("absorbed") else c["num_key_value_heads"]
    writer.add_head_count_kv(model.gguf.get("kv_heads", kv_heads))
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_layer_norm_rms_eps(c.get("rms_norm_eps") or c["norm_eps"])
    if "head_dim" in c:
        writer.add_key_length(c["head_dim"])
        writer.add_value_length(c["head_dim"])
    if model.type in ("llama", "mistral", "mixtral"):
        writer.add_vocab_size(c["vocab_size"])
        writer.add_rope_dimension_count(model.head_dim())
    if model.type in ("gpt_oss", "mistral", "mixtral") and c["sliding_window"]:
        writer.add_sliding_window(c["sliding_window"])
    if model.type == "gpt_oss":
        writer.add_expert_count(c["num_local_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(c["intermediate_size"])
    if model.type in ("qwen3_moe", "qwen3_vl_moe_text"):
        writer.add_expert_count(c["num_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if model.type in ("mixtral", "qwen2_moe", "glm4_moe", "llama4_text", "deepseek_v2", "deepseek_v3",
                      "deepseek_v32", "mistral4"):
        add_experts(writer, model)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "kv_lora_rank" in c:
        add_latent(writer, model, rope)
    for add, value in model.gguf.get("keys", {}).items():
        getattr(writer, add)(value)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_latent(writer, model, rope):
    """As llama.cpp's converter has it: with absorbed heads and those of the model beside them, or these alone."""
    c = model.config
    key, value, rank = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
    writer.add_kv_lora_rank(rank)
    if c["q_lora_rank"]:
        writer.add_q_lora_rank(c["q_lora_rank"])
    writer.add_rope_dimension_count(c["qk_rope_head_dim"])
    absorbs = model.gguf.get("absorbed")
    writer.add_key_length(rank + c["qk_rope_head_dim"] if absorbs else key)
    writer.add_value_length(rank if absorbs else value)
    if absorbs:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    if rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def add_experts(writer, model):
    c = model.config
    writer.add_expert_count(c.get("num_local_experts") or c.get("num_experts") or c["n_routed_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    if model.type == "qwen2_moe":
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if model.type == "llama4_text":
        writer.add_rope_dimension_count(c["head_dim"])
        writer.add_expert_feed_forward_length(c["intermediate_size"])
        writer.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
        # What llama.cpp takes for granted of the published models is otherwise in a tiny one.
        writer.add_sliding_window(c["attention_chunk_size"])
        chunked = [(i + 1) % c["no_rope_layer_interval"] != 0 for i in range(c["num_hidden_layers"])]
        writer.add_sliding_window_pattern(chunked)
        writer.add_array("llama4.rope.unrotated_layers", [not flag for flag in chunked])
        writer.add_attn_temperature_length(c["floor_scale"])
        writer.add_attn_temperature_scale(c["attn_scale"])
    if model.type == "mistral4":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
        writer.add_expert_weights_norm(c["norm_topk_prob"])
    if model.type in ("deepseek_v2", "mistral4"):
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
        writer.add_expert_shared_count(c["n_shared_experts"])
        writer.add_leading_dense_block_count(c["first_k_dense_replace"])
        writer.add_expert_weights_scale(c["routed_scaling_factor"])
    if model.type in ("glm4_moe", "deepseek_v3", "deepseek_v32"):
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
        writer.add_expert_shared_count(c["n_shared_experts"])
        writer.add_leading_dense_block_count(c["first_k_dense_replace"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(c["routed_scaling_factor"])
        writer.add_expert_weights_norm(c["norm_topk_prob"])
        writer.add_expert_group_count(c["n_group"])
        writer.add_expert_group_used_count(c["topk_group"])
    if model.type == "glm4_moe":
        writer.add_rope_dimension_count(int(c["head_dim"] * c["partial_rotary_factor"]))


def add_tokenizer(writer, model):
    t = model.tokenizer
    pad = range(len(t["tokens"]), model.config["vocab_size"])  # rows the tokenizer does not know: unused (5)
    writer.add_tokenizer_model("llama" if t["kind"] == "spm" else "gpt2")
    writer.add_tokenizer_pre(t["pre"])
    writer.add_token_list(t["tokens"] + [f"[PAD{i}]" for i in pad])
    if t["scores"]:
        writer.add_token_scores(t["scores"] + [-1000.0] * len(pad))
    writer.add_token_types(t["types"] + [5] * len(pad))
    if t["merges"]:
        writer.add_token_merges(t["merges"])
    if t["bos"]:
        writer.add_bos_token_id(t["tokens"].index(t["bos"]))
    writer.add_eos_token_id(t["tokens"].index(t["eos"]))
    writer.add_add_bos_token(t["add_bos"])
    if t["kind"] == "spm":
        writer.add_unk_token_id(0)
        writer.add_add_eos_token(False)
    writer.add_chat_template(t["template"])


def write_gguf(model, path):
    """Writes path, or path's -00001-of-0000N parts; returns the first file."""
    writer = gguf.GGUFWriter(path, model.gguf_name(), split_max_tensors=model.gguf.get("split", 0))
    add_metadata(writer, model)
    add_tokenizer(writer, model)
    for name, w in gguf_tensors(model).items():
        qtype = choose_type(model, name, w)
        writer.add_tensor(name, np.ascontiguousarray(w.gguf(qtype)), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(path.stem + "*.gguf"))[0]


def read_back(model, first):
    """Reads the GGUF with gguf-py, decodes every tensor and compares it with the model's weights, bit for bit."""
    want = {name: w.values for name, w in gguf_tensors(model).items()}
    seen = {}
    for file in sorted(first.parent.glob("*.gguf")):
        for t in gguf.GGUFReader(file).tensors:
            shape = tuple(int(n) for n in reversed(t.shape))
            seen[t.name] = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(shape)
    assert seen.keys() == want.keys(), seen.keys() ^ want.keys()
    head_dim = model.head_dim()
    for name, got in seen.items():
        factor = name.replace(".weight", ".scale")
        if name.endswith(".weight") and factor in seen and model.type != "gemma4_text":  # where it is another tensor
            got = got * seen[factor]
        assert np.array_equal(got, want[name]), name
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if part in ("attn_q", "attn_k") and name.endswith("weight") and model.type in INTERLEAVED:
            proj = "q_proj" if part == "attn_q" else "k_proj"
            hf = model.weights[f"model.layers.{name.split('.')[1]}.self_attn.{proj}.weight"].values
            back = got.reshape(-1, head_dim // 2, 2, got.shape[-1]).swapaxes(1, 2).reshape(got.shape)
            assert np.array_equal(back, hf), name

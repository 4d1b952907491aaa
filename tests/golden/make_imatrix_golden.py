"""Importance matrices of some of the tiny models, from hooks on transformers' modules, as llama.cpp writes them.

    venv/bin/python tests/golden/make_imatrix_golden.py     # rewrites tests/golden/imatrix

Written per model: imatrix/<name>.gguf (X.in_sum2 [matrices, columns], X.counts [matrices, 1], float32) and
imatrix/<name>.json (the tokens). transformers runs in float32 on the weights of models/<name>/hf; sums in float64.
imatrix/llama3.dat: llama3's again in the older form (means times calls, no magic number).
"""

import json
import os
import struct
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import gguf
import numpy as np
import torch
import transformers

from write_models import GGUF_ARCH

HERE = Path(__file__).parent
MODELS = ("llama3", "phi3", "gpt2", "qwen2moe", "deepseek-v3", "deepseek-v2", "deepseek-v32", "kimi-linear", "qwen3next",
          "qwen35", "lfm2moe", "granitehybrid-moe", "nemotron-h-moe", "mamba2")
# What gguf-py has no name for.
OWN_NAMES = {"forget_gate.f_a_proj": "ssm_f_a", "forget_gate.f_b_proj": "ssm_f_b", "indexer.wq_b": "indexer.attn_q_b",
             "indexer.wk": "indexer.attn_k", "indexer.weights_proj": "indexer.proj", "mixer.in_proj": "ssm_in",
             "mixer.out_proj": "ssm_out", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v",
             "mixer.o_proj": "attn_output", "shared_experts.up_proj": "ffn_up_shexp",
             "shared_experts.down_proj": "ffn_down_shexp", "shared_mlp.input_linear": "ffn_gate_shexp"}
# Fused there, in parts in GGUF.
PARTS = {"ssm_in": ("attn_qkv", "attn_gate")}


class Sums:
    def __init__(self):
        self.sums, self.counts = {}, {}

    def add(self, name, x, expert=0, experts=1):
        x = x.reshape(-1, x.shape[-1]).double()
        sums = self.sums.setdefault(name, np.zeros((experts, x.shape[-1])))
        counts = self.counts.setdefault(name, np.zeros((experts, 1)))
        sums[expert] += (x * x).sum(0).numpy()
        counts[expert] += x.shape[0]


def watch(model, names, sums):
    def linear(name):
        def hook(_, inputs, output):
            sums.add(name, inputs[0].detach())
        return hook

    def experts(layer):
        def hook(module, inputs, output):
            x, chosen = inputs[0].detach(), inputs[1]
            gated = getattr(module, "gate_up_proj", None)
            count = module.down_proj.shape[0]
            for e in range(count):
                rows = x[(chosen == e).any(-1)]
                for part in ("up",) if gated is None else ("gate", "up"):
                    sums.add(f"blk.{layer}.ffn_{part}_exps.weight", rows, e, count)
                if gated is None:
                    inner = module.act_fn(rows @ module.up_proj[e].T)
                else:
                    gate, up = (rows @ gated[e].T).chunk(2, dim=-1)
                    inner = module.act_fn(gate) * up
                sums.add(f"blk.{layer}.ffn_down_exps.weight", inner, e, count)
        return hook

    def latent(layer, c):
        """Of absorbed latent attention: k_b is multiplied with queries, v_b with what a head attended to."""
        kept = {}

        def queries(_, inputs, output):
            q = output.detach().reshape(-1, c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim)
            for h in range(c.num_attention_heads):
                sums.add(f"blk.{layer}.attn_k_b.weight", q[:, h, :c.qk_nope_head_dim], h, c.num_attention_heads)

        def latents(_, inputs, output):
            kept["latent"] = inputs[0].detach().reshape(-1, c.kv_lora_rank)

        def attended(_, inputs, output):
            for h, weights in enumerate(output[1][0].detach()):
                sums.add(f"blk.{layer}.attn_v_b.weight", weights @ kept["latent"], h, c.num_attention_heads)
        return queries, latents, attended

    for name, module in model.named_modules():
        layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else 0
        if name.endswith(".experts"):
            module.register_forward_hook(experts(layer))
        elif isinstance(module, (torch.nn.Linear, transformers.pytorch_utils.Conv1D)):
            if name.endswith((".mlp.gate", "shared_expert_gate")):  # routers are not quantized
                continue
            own = next((gguf_name for end, gguf_name in OWN_NAMES.items() if name.endswith("." + end)), None)
            found = f"blk.{layer}.{own}" if own else names.get_name(name) or names.get_name(
                name.removeprefix("transformer.")) or "output"
            parts = PARTS.get(found.split(".")[-1], ()) if "linear_attn" in name else ()
            for part in parts or (found.split(".")[-1],):
                module.register_forward_hook(linear(found.rsplit(".", 1)[0] + f".{part}.weight" if "." in found
                                                    else found + ".weight"))
        if hasattr(module, "kv_b_proj"):
            queries, latents, attended = latent(layer, model.config)
            (module.q_proj if model.config.q_lora_rank is None else module.q_b_proj).register_forward_hook(queries)
            module.kv_b_proj.register_forward_hook(latents)
            module.register_forward_hook(attended)


def make(name):
    model = transformers.AutoModelForCausalLM.from_pretrained(HERE / "models" / name / "hf", dtype=torch.float32,
                                                              attn_implementation="eager").eval()
    arch = getattr(gguf.MODEL_ARCH, GGUF_ARCH.get(model.config.model_type, "DEEPSEEK2"))
    sums = Sums()
    watch(model, gguf.get_tensor_name_map(arch, model.config.num_hidden_layers), sums)
    tokens = torch.randint(0, model.config.vocab_size - 16, (1, 50), generator=torch.Generator().manual_seed(len(name)))
    with torch.no_grad():
        model(tokens)
    tied = model.config.tie_word_embeddings
    writer = gguf.GGUFWriter(HERE / "imatrix" / f"{name}.gguf", "imatrix")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["random"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", tokens.shape[1])
    for weight, values in sums.sums.items():
        weight = "token_embd.weight" if tied and weight == "output.weight" else weight
        writer.add_tensor(weight + ".in_sum2", values.astype(np.float32))
        writer.add_tensor(weight + ".counts", sums.counts.get(weight, sums.counts.get("output.weight")).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (HERE / "imatrix" / f"{name}.json").write_text(json.dumps({"tokens": tokens[0].tolist()}) + "\n")
    if name == "llama3":
        calls = 3
        with open(HERE / "imatrix" / "llama3.dat", "wb") as out:
            out.write(struct.pack("<i", len(sums.sums)))
            for weight, values in sums.sums.items():
                out.write(struct.pack("<i", len(weight)) + weight.encode() + struct.pack("<ii", calls, values.size))
                out.write((values / sums.counts[weight] * calls).astype("<f4").tobytes())
            out.write(struct.pack("<ii", calls, 6) + b"random")
    print(name, len(sums.sums), "weights")


if __name__ == "__main__":
    (HERE / "imatrix").mkdir(exist_ok=True)
    for name in MODELS:
        make(name)

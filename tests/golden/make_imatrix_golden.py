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
MODELS = ("llama3", "phi3", "gpt2", "qwen2moe")


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
            for e in range(module.gate_up_proj.shape[0]):
                rows = x[(chosen == e).any(-1)]
                for part in ("gate", "up"):
                    sums.add(f"blk.{layer}.ffn_{part}_exps.weight", rows, e, module.gate_up_proj.shape[0])
                gate, up = (rows @ module.gate_up_proj[e].T).chunk(2, dim=-1)
                sums.add(f"blk.{layer}.ffn_down_exps.weight", module.act_fn(gate) * up, e, module.gate_up_proj.shape[0])
        return hook

    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            module.register_forward_hook(experts(int(name.split(".layers.")[1].split(".")[0])))
        elif isinstance(module, (torch.nn.Linear, transformers.pytorch_utils.Conv1D)):
            if not name.endswith((".mlp.gate", "shared_expert_gate")):  # routers are not quantized
                found = names.get_name(name) or names.get_name(name.removeprefix("transformer."))
                module.register_forward_hook(linear(found + ".weight"))


def make(name):
    model = transformers.AutoModelForCausalLM.from_pretrained(HERE / "models" / name / "hf", dtype=torch.float32,
                                                              attn_implementation="eager").eval()
    arch = getattr(gguf.MODEL_ARCH, GGUF_ARCH[model.config.model_type])
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

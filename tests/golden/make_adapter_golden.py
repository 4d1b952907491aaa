"""Random low-rank adapters of some of the tiny models, and what transformers and peft say with them.

    venv/bin/pip install -r tests/golden/requirements.txt
    venv/bin/python tests/golden/make_adapter_golden.py     # rewrites tests/golden/adapters, or the cases named

Everything is seeded. transformers runs in float32 on the CPU, on the weights of models/<name>/hf.

Written per case, adapters/<case>/:
  peft/         adapter_config.json and adapter_model.safetensors as peft saves them
  modules/      of one with experts: as transformers 4 had it, a module for each expert
  adapter.gguf  the same numbers under llama.cpp's names, with its order of rotated rows
  golden.f32    little-endian float32: logits of every token, [tokens, vocabulary]
  golden.json   model, tokens, change (relative length of what the adapter changes in the logits)
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import gguf
import numpy as np
import peft
import safetensors.torch
import torch
import transformers

from write_models import GGUF_ARCH, INTERLEAVED

HERE = Path(__file__).parent
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Case: model, and what peft.LoraConfig is told. GGUF has one alpha for all: none where patterns change it.
CASES = {
    "llama3": ("llama3", {"r": 5, "lora_alpha": 12, "target_modules": LINEAR}),
    "llama3-patterns": ("llama3", {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj", "down_proj"],
                                   "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 17},
                                   "alpha_pattern": {r"layers\.\d\.mlp\.down_proj": 3}}),
    "phi3": ("phi3", {"r": 3, "lora_alpha": 4, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "gpt2": ("gpt2", {"r": 2, "lora_alpha": 3, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gemma3": ("gemma3", {"r": 8, "lora_alpha": 8, "target_modules": LINEAR}),
    "granite": ("granite", {"r": 4, "lora_alpha": 9, "target_modules": "all-linear"}),
    "qwen2moe": ("qwen2moe", {"r": 4, "lora_alpha": 4, "target_modules": LINEAR}),
    "mixtral-experts": ("mixtral", {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"],
                                    "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "gpt-oss-experts": ("gpt-oss-w128", {"r": 2, "lora_alpha": 8, "target_modules": [],
                                         "target_parameters": ["mlp.experts.gate_up_proj"]}),
    "qwen3moe-experts": ("qwen3moe", {"r": 2, "lora_alpha": 4, "target_modules": ["o_proj"],
                                      "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "llama2-output": ("llama2", {"r": 16, "lora_alpha": 16, "target_modules": ["v_proj", "lm_head"]}),
}


def permute(rows, heads):
    """llama.cpp's converter: the halves of a head alternate."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def num_experts(config):
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", 0)


def experts_of(adapter, experts):
    """Of parameters of experts, as peft nests them: (layer's module, "gate_up" or "down") to A and B of each expert,
    [E, r, in] and [E, out, r]."""
    out = {}
    for name, a in adapter.items():
        if not (".experts." in name and ".lora_A." in name):
            continue
        outer = name.split(".lora_A.")[0]
        at = outer.removesuffix(".base_layer").removeprefix("base_model.model.")
        both = any(".experts.base_layer." in n for n in adapter)
        b = adapter[name.replace(".lora_A.", ".lora_B.")].numpy()
        part = "down" if both and not outer.endswith(".base_layer") else "gate_up"
        rank = a.shape[0] // experts
        out[at, part] = (a.numpy().reshape(experts, rank, -1), b.reshape(b.shape[0], rank, experts).transpose(2, 0, 1))
    return out


def halves(kind, b):
    """Rows of gate and of up: in turn (gpt-oss), or one behind the other."""
    return (b[:, 0::2], b[:, 1::2]) if kind == "gpt_oss" else np.split(b, 2, axis=1)


def write_modules(folder, model, adapter, options):
    """The same adapter as transformers 4 had it, with a module for each expert."""
    folder.mkdir()
    tensors = {n: v for n, v in adapter.items() if ".experts." not in n}
    for (at, part), (a, b) in experts_of(adapter, num_experts(model.config)).items():
        parts = {"down_proj": b} if part == "down" else dict(zip(("gate_proj", "up_proj"), halves("", b)))
        for e in range(len(a)):
            for name, rows in parts.items():
                before = f"base_model.model.{at}.{e}.{name}"
                tensors[f"{before}.lora_A.weight"] = torch.from_numpy(a[e].copy())
                tensors[f"{before}.lora_B.weight"] = torch.from_numpy(rows[e].copy())
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": options["r"], "lora_alpha": options["lora_alpha"],
              "target_modules": sorted(["gate_proj", "up_proj", "down_proj", *options["target_modules"]]),
              "base_model_name_or_path": "qwen3moe"}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_gguf(path, model, adapter, config):
    kind = model.config.model_type
    arch = getattr(gguf.MODEL_ARCH, GGUF_ARCH[kind])
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", config["lora_alpha"])
    for (at, part), (a, b) in experts_of(adapter, num_experts(model.config)).items():
        layer = at.split(".")[2]
        parts = {"down": b} if part == "down" else dict(zip(("gate", "up"), halves(kind, b)))
        for which, rows in parts.items():
            writer.add_tensor(f"blk.{layer}.ffn_{which}_exps.weight.lora_a", np.ascontiguousarray(a))
            writer.add_tensor(f"blk.{layer}.ffn_{which}_exps.weight.lora_b", np.ascontiguousarray(rows))
    for name, value in adapter.items():
        if ".experts." in name:
            continue
        module, which = name.removeprefix("base_model.model.").rsplit(".lora_", 1)
        value = value.numpy()
        if which[0] == "B" and kind in INTERLEAVED and module.endswith(("q_proj", "k_proj")):
            heads = model.config.num_attention_heads if "q_proj" in module else model.config.num_key_value_heads
            value = permute(value, heads)
        writer.add_tensor(f"{names.get_name(module)}.weight.lora_{which[0].lower()}", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(model_name):
    return transformers.AutoModelForCausalLM.from_pretrained(HERE / "models" / model_name / "hf", dtype=torch.float32,
                                                             attn_implementation="eager").eval()


def make(case, model_name, options):
    folder = HERE / "adapters" / case
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    base = load(model_name)
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    tokens = torch.randint(0, base.config.vocab_size - 16, (1, 45), generator=generator)
    with torch.no_grad():
        plain = base(tokens).logits[0].numpy().copy()
    model = peft.get_peft_model(base, peft.LoraConfig(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # each moves its product by about a third
                spread = parameter.shape[1] ** -0.5 * (1.0 if "lora_A" in name else 0.35)
                if ".experts." in name and "lora_B" in name:  # its columns are all experts'
                    spread *= num_experts(base.config) ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        logits = model(tokens).logits[0].numpy()
    model.save_pretrained(folder / "peft", save_embedding_layers=False)
    (folder / "peft" / "README.md").unlink(missing_ok=True)
    config_path = folder / "peft" / "adapter_config.json"
    config = json.loads(config_path.read_text())
    config["base_model_name_or_path"] = model_name  # no path of this machine
    for key in ("target_modules", "target_parameters"):
        if isinstance(config[key], list):
            config[key].sort()  # peft keeps a set
    config_path.write_text(json.dumps(config, indent=1) + "\n")
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    if "alpha_pattern" not in options:
        write_gguf(folder / "adapter.gguf", base, state, options)
    if case == "qwen3moe-experts":
        write_modules(folder / "modules", base, state, options)
        with torch.no_grad():  # peft reads that too, and says the same
            again = peft.PeftModel.from_pretrained(load(model_name), folder / "modules")(tokens).logits[0].numpy()
        assert np.allclose(again, logits, atol=1e-4), np.abs(again - logits).max()
    logits.astype("<f4").tofile(folder / "golden.f32")
    change = float(np.linalg.norm(logits - plain) / np.linalg.norm(plain))
    assert change > 0.1, (case, change)
    (folder / "golden.json").write_text(json.dumps({"model": model_name, "tokens": tokens[0].tolist(),
                                                    "change": round(change, 4)}) + "\n")
    print(case, "changes the logits by", round(change, 3))


if __name__ == "__main__":
    for case, (model_name, options) in CASES.items():
        if sys.argv[1:] and case not in sys.argv[1:]:
            continue
        make(case, model_name, options)

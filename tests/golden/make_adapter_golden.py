"""Random low-rank adapters of some of the tiny models, and what transformers and peft say with them.

    venv/bin/pip install -r tests/golden/requirements.txt
    venv/bin/python tests/golden/make_adapter_golden.py     # rewrites tests/golden/adapters

Everything is seeded. transformers runs in float32 on the CPU, on the weights of models/<name>/hf.

Written per case, adapters/<case>/:
  peft/         adapter_config.json and adapter_model.safetensors as peft saves them
  adapter.gguf  the same numbers under llama.cpp's names, with its order of rotated rows
  golden.f32    little-endian float32: logits of every token, [tokens, vocabulary]
  golden.json   model, tokens, change (relative length of what the adapter changes in the logits)
"""

import json
import os
import shutil
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import gguf
import numpy as np
import peft
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
    "llama2-output": ("llama2", {"r": 16, "lora_alpha": 16, "target_modules": ["v_proj", "lm_head"]}),
}


def permute(rows, heads):
    """llama.cpp's converter: the halves of a head alternate."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, model, adapter, config):
    kind = model.config.model_type
    arch = getattr(gguf.MODEL_ARCH, GGUF_ARCH[kind])
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", config["lora_alpha"])
    for name, value in adapter.items():
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


def make(case, model_name, options):
    folder = HERE / "adapters" / case
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(HERE / "models" / model_name / "hf", dtype=torch.float32,
                                                             attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    tokens = torch.randint(0, base.config.vocab_size - 16, (1, 45), generator=generator)
    with torch.no_grad():
        plain = base(tokens).logits[0].numpy().copy()
    model = peft.get_peft_model(base, peft.LoraConfig(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # each moves its product by about a third
                spread = parameter.shape[1] ** -0.5 * (1.0 if "lora_A" in name else 0.35)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        logits = model(tokens).logits[0].numpy()
    model.save_pretrained(folder / "peft", save_embedding_layers=False)
    (folder / "peft" / "README.md").unlink(missing_ok=True)
    config_path = folder / "peft" / "adapter_config.json"
    config = json.loads(config_path.read_text())
    config["base_model_name_or_path"] = model_name  # no path of this machine
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # peft keeps a set
    config_path.write_text(json.dumps(config, indent=1) + "\n")
    if "alpha_pattern" not in options:
        write_gguf(folder / "adapter.gguf", base, peft.get_peft_model_state_dict(model, save_embedding_layers=False),
                   options)
    logits.astype("<f4").tofile(folder / "golden.f32")
    change = float(np.linalg.norm(logits - plain) / np.linalg.norm(plain))
    assert change > 0.1, (case, change)
    (folder / "golden.json").write_text(json.dumps({"model": model_name, "tokens": tokens[0].tolist(),
                                                    "change": round(change, 4)}) + "\n")
    print(case, "changes the logits by", round(change, 3))


if __name__ == "__main__":
    for case, (model_name, options) in CASES.items():
        make(case, model_name, options)

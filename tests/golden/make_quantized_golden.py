"""Quantized weights one by one: what find_quantized (src/model/quantized_weights) has to make of each, bit by bit.

    venv/bin/python tests/golden/make_quantized_golden.py [--check]

Written, quantized/<scheme>/: config.json (quantization_config as published, expected_types: the type of ours each
weight has to take) and model.safetensors (the tensors, and MODULE.expected: its values in float32).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from safetensors.torch import save_file

import hf_quantized as hq

HERE = Path(__file__).parent
SHAPE = (16, 128)


def gptq_cases(v2):
    half, brain, wide = torch.float16, torch.bfloat16, torch.float32
    return {
        "sym4": (dict(), "q4_0"), "sym4_one_group": (dict(group=-1), "q4_0"),
        "sym4_no_order": (dict(g_idx=False), "q4_0"),
        "sym4_brain": (dict(group=64, dtype=brain), "q4_0"), "sym4_wide": (dict(dtype=wide), "f32"),
        "asym4": (dict(sym=False), "q5_0"), "asym4_one_group": (dict(sym=False, group=-1), "q5_0"),
        "order4": (dict(act_order=True), "f32"), "order4_asym": (dict(act_order=True, sym=False, group=64), "f32"),
        "order4_brain": (dict(act_order=True, dtype=brain), "f16"),
        "sym8": (dict(bits=8), "q8_0"), "asym8": (dict(bits=8, sym=False, dtype=half), "f32"),
        "order8": (dict(bits=8, act_order=True, group=64), "f32"), "sym2": (dict(bits=2), "q4_0"),
    } if not v2 else {"sym4": (dict(), "q4_0"), "asym4": (dict(sym=False, group=64), "q5_0"),
                      "asym8": (dict(bits=8, sym=False), "f32")}


def schemes():
    """Scheme -> (quantization_config, maker, {module: (arguments, expected type)})."""
    ct = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["re:.*q_proj"], "weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}},
        "group_1": {"targets": ["re:.*k_proj"], "weights": {"num_bits": 4, "group_size": 64, "strategy": "group"}}}}
    return {
        "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq", "desc_act": True},
                 hq.gptq, gptq_cases(False)),
        "gptq_v2": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
                    lambda *a, **k: hq.gptq(*a, v2=True, **k), gptq_cases(True)),
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, hq.awq,
                {"plain": (dict(group=64), "q5_0"), "brain": (dict(group=64, dtype=torch.bfloat16), "q5_0")}),
        "compressed": (ct, hq.compressed, {
            "int4": (dict(kind="int4", group=32), "q4_0"), "int4_row": (dict(kind="int4"), "q4_0"),
            "int4_half": (dict(kind="int4", group=64, dtype=torch.float16), "q4_0"),
            "int4_zero": (dict(kind="int4", group=64, zero_point=True), "q5_0"),
            "int8": (dict(kind="int8", group=32), "q8_0"), "int8_zero": (dict(kind="int8", zero_point=True), "f32"),
            "w8a8": (dict(kind="w8a8"), "q8_0"), "w8a8_wide": (dict(kind="w8a8", dtype=torch.float32), "f32"),
            "nvfp4": (dict(kind="nvfp4", dtype=torch.float32), "f32"), "mxfp4": (dict(kind="mxfp4"), "mxfp4")}),
        "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
                         lambda *a, **k: (hq.bitsandbytes_int8 if k.pop("int8", 0) else hq.bitsandbytes_4bit)(*a, **k), {
            "nf4": (dict(), "bf16"), "nf4_plain": (dict(nested=False, dtype=torch.float16), "f16"),
            "nf4_wide": (dict(dtype=torch.float32), "f32"), "fp4": (dict(quant_type="fp4"), "bf16"),
            "int8": (dict(int8=1), "f32")}),
    }


def write(root):
    for seed, (name, (config, make, cases)) in enumerate(schemes().items()):
        rng = np.random.default_rng(900 + seed)
        tensors = {}
        for module, (arguments, _) in cases.items():
            weight = make(rng, SHAPE, 0.05, **arguments)
            tensors |= {f"{module}.{k}": v for k, v in weight.raw["hf"].items()}
            tensors[f"{module}.expected"] = torch.from_numpy(weight.values).contiguous()
        (root / name).mkdir(parents=True)
        save_file({k: v.clone() for k, v in tensors.items()}, root / name / "model.safetensors", metadata={"format": "pt"})
        config = {"quantization_config": config, "expected_types": {m: t for m, (_, t) in cases.items()}}
        (root / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    args = parser.parse_args()
    kept = HERE / "quantized"
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        write(fresh)
        wrong = 0
        for file in sorted(f.relative_to(fresh) for f in fresh.rglob("*") if f.is_file()):
            if not args.check:
                (kept / file).parent.mkdir(parents=True, exist_ok=True)
                (kept / file).write_bytes((fresh / file).read_bytes())
            elif not (kept / file).is_file() or (kept / file).read_bytes() != (fresh / file).read_bytes():
                print(f"{file}: differs")
                wrong += 1
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""Directories that `millrace quantize --type fp8` writes, read by transformers with compressed-tensors.

    venv/bin/python tests/golden/check_fp8.py build/dev/millrace

For some tiny models: the logits of transformers on the directory against those of millrace's reference on it, and the
weights that transformers decompresses against the model's own.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
TOKENS = [5, 17, 33, 2, 90, 41, 8, 120, 7, 7, 19]


def check(binary, name, folder):
    source, out = HERE / "models" / name / "hf", folder / name
    subprocess.run([binary, "quantize", source, out, "--type", "fp8"], check=True, capture_output=True)
    rows = folder / "logits.npy"
    subprocess.run([binary, "logits", out, "--tokens", ",".join(map(str, TOKENS)), "--all", "--out", rows, "--device",
                    "reference"], check=True, capture_output=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False))
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    got = np.load(rows)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    changed, worst = 0, 0.0
    own = dict(plain.named_parameters())
    for key, value in model.named_parameters():
        if key in own and not torch.equal(value.float(), own[key]):
            changed += 1
            worst = max(worst, float((value.float() - own[key]).norm() / own[key].norm()))
    print(f"{name}: logits differ by {error:.1e}, {changed} weights by up to {worst:.4f}")
    assert error < 1e-4 and changed > 0 and worst < 0.04


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name in ("llama3", "qwen3", "phi3"):
            check(os.path.abspath(sys.argv[1]), name, Path(folder))

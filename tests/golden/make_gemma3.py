"""Records what transformers makes of some prompts with Gemma 3 270M, on the weights that its GGUF file decodes to.

    venv/bin/python tests/golden/make_gemma3.py build/models/gemma-3-270m.Q4_K_M.gguf

Writes gemma3.json: [{prompt, greedy: the 24 likeliest tokens one after another, top: the 8 largest logits behind the
prompt as [token, logit]}].
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

# "The capital of France is", "Once upon a time", "def fibonacci(n):", each behind <bos>
PROMPTS = [[2, 818, 5279, 529, 7001, 563], [2, 14946, 3324, 496, 990], [2, 2063, 10779, 78113, 236769, 236749, 1473]]


def record(net, prompt):
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        top = torch.topk(net(tokens).logits[0, -1], 8)
        greedy = net.generate(tokens, max_new_tokens=24, do_sample=False)[0].tolist()[len(prompt):]
    return {"prompt": prompt, "greedy": greedy,
            "top": [[int(i), round(float(v), 5)] for v, i in zip(top.values, top.indices)]}


def main():
    file = Path(sys.argv[1])
    net = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    lines = ",\n".join(json.dumps(record(net, prompt)) for prompt in PROMPTS)
    (Path(__file__).parent / "gemma3.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

"""Records what transformers makes of a prompt as an embedding: the last hidden state (behind the final norm), of the
last token and the mean of all, in float32 on the numbers the files decode to.

    venv/bin/python tests/golden/make_embedding_golden.py [SmolLM2-135M-Instruct.Q4_1.gguf]

Writes embeddings.json, {model: {hidden, prompts: [{tokens, offset}]}}, and embeddings.f32, little-endian: at row
`offset` (in floats) the mean [hidden], behind it the last token's [hidden]. The tiny models of make_golden.py with two
of their own prompts; SmolLM2, when its file is given, with its chat prompt and 300 tokens of text (else what is
recorded of it stays).
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

import make_golden
import make_smollm2
import tiny_models

HERE = Path(__file__).parent


def record(net, prompts, floats):
    entries = []
    for tokens in prompts:
        with torch.no_grad():
            base = net.model if net.base_model is net else net.base_model  # Llama 4 names no base
            hidden = base(torch.tensor([tokens]), use_cache=False).last_hidden_state[0].double()
        entries.append({"tokens": tokens, "offset": sum(len(f) for f in floats)})
        floats += [hidden.mean(0).float().numpy(), hidden[-1].float().numpy()]
    config = net.config if hasattr(net.config, "hidden_size") else net.config.get_text_config()  # of one that sees
    return {"hidden": config.hidden_size, "prompts": entries}


def kept(name, floats):
    """An entry of the committed files, appended as it is."""
    entry = json.loads((HERE / "embeddings.json").read_text())[name]
    values = np.fromfile(HERE / "embeddings.f32", "<f4")
    for prompt in entry["prompts"]:
        rows = values[prompt["offset"] : prompt["offset"] + 2 * entry["hidden"]]
        prompt["offset"] = sum(len(f) for f in floats)
        floats.append(rows)
    return entry


def main():
    out, floats = {}, []
    for name, make in tiny_models.build().items():
        golden = json.loads((HERE / "models" / name / "golden.json").read_text())
        prompts = [golden["prompts"][i]["tokens"] for i in (4, 5)]
        out[name] = record(make_golden.load(make()), prompts, floats)
    if len(sys.argv) > 1:
        smollm2 = json.loads((HERE / "smollm2.json").read_text())
        prompts = [smollm2["chat"]["tokens"], smollm2["perplexity"]["tokens"][:300]]
        out["smollm2"] = record(make_smollm2.load_gguf(sys.argv[1])[1], prompts, floats)
    else:
        out["smollm2"] = kept("smollm2", floats)
    np.concatenate(floats).astype("<f4").tofile(HERE / "embeddings.f32")
    lines = ",\n".join(f'"{name}": {json.dumps(entry, separators=(",", ":"))}' for name, entry in out.items())
    (HERE / "embeddings.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()

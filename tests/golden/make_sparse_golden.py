"""Records what tiny golden models say with sparse attention, computed by torch in float64.

    venv/bin/python tests/golden/make_sparse_golden.py [--check]

transformers runs the models of tests/golden/models with an attention function of ours: every token of a layer that sees
the whole context chooses pages by the rule of src/base/sparse_pages.h, written down here a second time, plainly. Layers
with a window attend as they do. The 1,000 choices of a prompt are by float64; `margin` is the smallest relative gap
between the last page that was chosen and the first that was not, so that nobody compares what a rounding error decides.

sparse.json  [{name, pages, margin, tokens, positions, offset (float in sparse.f32), vocab_size, full (relative difference
             of the recorded logits from those of full attention)}]
sparse.f32   little-endian float32: logits, a row for each recorded position
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HERE = Path(__file__).parent
PAGE = 16
# Grouped heads; norms of queries and keys; soft caps beside a window; sinks beside a window; one KV head per head.
MODELS = {"llama3": 6, "qwen3": 5, "gemma2": 8, "gpt-oss-w128": 4, "llama2": 11}
POSITIONS = (63, 64, 95, 96, 111, 128, 160, 177, 191, 200, 233, 250, 271, 300, 319, 320, 332)

rule = {"pages": 0, "margin": float("inf")}


def bf16_outwards(x, up):
    """The nearest bf16 at or above (below) each value, as float64."""
    near = x.float().to(torch.bfloat16)
    wrong = near.double() < x if up else near.double() > x
    return torch.where(wrong, torch.nextafter(near, torch.full_like(near, float("inf") if up else -float("inf"))),
                       near).double()


def choose(query, keys, scaling):
    """query [group, dim] of a token, keys [tokens, dim] up to it: which of these tokens it reads."""
    pages, before = rule["pages"], (len(keys) - 1) // PAGE
    seen = torch.ones(len(keys), dtype=torch.bool)
    if before + 1 <= pages:
        return seen
    full = keys[: before * PAGE].reshape(before, PAGE, -1)
    low, high = bf16_outwards(full.amin(1), False), bf16_outwards(full.amax(1), True)
    bound = torch.maximum(query[:, None] * low, query[:, None] * high).sum(-1) * scaling  # [group, before]
    weight = bound.softmax(-1).sum(0)
    newest = max(2, pages // 4)
    last, wanted = before + 1 - newest, pages - newest - 1
    order = sorted(range(1, last), key=lambda page: (-weight[page].item(), page))
    chosen, first_rejected = weight[order[wanted - 1]], weight[order[wanted]]
    rule["margin"] = min(rule["margin"], ((chosen - first_rejected) / chosen).item())
    for page in order[wanted:]:
        seen[page * PAGE : (page + 1) * PAGE] = False
    return seen


def sparse(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **more):
    """[1, heads, tokens, dim], causal; a window is in the mask."""
    scaling = module.head_dim ** -0.5 if scaling is None else scaling
    softcap, sinks = more.get("softcap"), getattr(module, "sinks", None)
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    mask = attention_mask[0, 0, :, :tokens] >= 0 if attention_mask.dtype != torch.bool else attention_mask[0, 0, :, :tokens]
    is_full = bool(mask[-1].all())
    out = torch.zeros_like(query)
    for head in range(key.shape[1]):
        rows = slice(head * group, (head + 1) * group)
        for t in range(tokens):
            seen = mask[t, : t + 1]
            if is_full and rule["pages"]:
                seen = seen & choose(query[0, rows, t], key[0, head, : t + 1], scaling)
            scores = query[0, rows, t] @ key[0, head, : t + 1][seen].T * scaling
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[rows, None].to(scores)], dim=1)
            weights = scores.softmax(-1)
            out[0, rows, t] = weights[:, : int(seen.sum())] @ value[0, head, : t + 1][seen]
    return out.transpose(1, 2).contiguous(), None


def logits_of(model, tokens, pages):
    rule["pages"] = pages
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def record(name, pages):
    golden = json.loads((HERE / "models" / name / "golden.json").read_text())
    tokens = golden["prompts"][0]["tokens"]
    model = transformers.AutoModelForCausalLM.from_pretrained(HERE / "models" / name / "hf", dtype=torch.float64,
                                                              experts_implementation="eager")
    model.eval().set_attn_implementation("pages")
    positions = [p for p in POSITIONS if p < len(tokens)]
    full = logits_of(model, tokens, 0)[positions]
    recorded = np.fromfile(HERE / "models" / name / "golden.f32", "<f4").reshape(-1, full.shape[1])
    at = golden["prompts"][0]
    both = [p for p in at["positions"] if p in positions]
    want = recorded[[at["offset"] + at["positions"].index(p) for p in both]]
    assert np.allclose(full[[positions.index(p) for p in both]].numpy(), want, atol=1e-3), f"{name}: full attention differs"
    rule["margin"] = float("inf")
    rows = logits_of(model, tokens, pages)[positions]
    assert rule["margin"] > 1e-5, f"{name}: a choice is within {rule['margin']:.1e}, take another number of pages"
    change = ((rows - full).norm() / full.norm()).item()
    print(f"{name}: {pages} pages, margin {rule['margin']:.1e}, {change:.3f} from full attention")
    return {"name": name, "pages": pages, "margin": rule["margin"], "vocab_size": rows.shape[1], "tokens": tokens,
            "positions": positions, "full": round(change, 4)}, rows.float().numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there")
    check = parser.parse_args().check
    ALL_ATTENTION_FUNCTIONS.register("pages", sparse)
    ALL_MASK_ATTENTION_FUNCTIONS.register("pages", eager_mask)
    entries, floats, offset = [], [], 0
    for name, pages in MODELS.items():
        entry, rows = record(name, pages)
        entries.append(entry | {"offset": offset})
        floats.append(rows.ravel())
        offset += rows.size
    if check:
        old = json.loads((HERE / "sparse.json").read_text())
        same = [e["name"] for e in old] == [e["name"] for e in entries]
        values = np.fromfile(HERE / "sparse.f32", "<f4")
        if not same or not np.allclose(values, np.concatenate(floats), atol=1e-5):
            sys.exit("sparse.json or sparse.f32 is not what this makes")
        return
    lines = ",\n".join(json.dumps(e) for e in entries)
    (HERE / "sparse.json").write_text(f"[\n{lines}\n]\n")
    np.concatenate(floats).astype("<f4").tofile(HERE / "sparse.f32")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The example for vLLM without vLLM: its paged attention over steps of a ragged batch; every cell of the notebooks, in
order. Run by kernels_test.py."""

import importlib.util
import json
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "python_kernels"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_vllm():
    example = load("vllm_attention_backend")
    torch.manual_seed(1)
    tokens, heads, kv_heads, dim, window = 16, 4, 2, 32, 9
    cache = torch.zeros(8, tokens, kv_heads, 2 * dim)  # as vLLM has it: a head's key and its value side by side
    keys, values = cache[..., :dim], cache[..., dim:]
    table = torch.tensor([[5, 1, 0], [2, 7, 0]], dtype=torch.int32)
    kept = [[], []]
    # A prompt of 20 and one of 3, then a step of each: lengths before, and rows of each sequence.
    for before, rows in (((0, 0), (20, 3)), ((20, 3), (1, 1)), ((21, 4), (0, 14))):
        total = sum(rows)
        query, key, value = torch.randn(total, heads, dim), torch.randn(total, kv_heads, dim), torch.randn(
            total, kv_heads, dim)
        starts = torch.tensor([0, rows[0], total], dtype=torch.int32)
        slots, lengths = [], []
        for b in range(2):
            kept[b].append((key[starts[b]:starts[b + 1]], value[starts[b]:starts[b + 1]]))
            lengths.append(before[b] + rows[b])
            slots += [int(table[b, p // tokens]) * tokens + p % tokens for p in range(before[b], lengths[b])]
        padded = torch.tensor([*slots, -1])
        example.write_rows(keys, values, torch.cat((key, key[:1] * 9)), torch.cat((value, value[:1] * 9)), padded)
        got = example.attend(query, keys, values, table, starts, torch.tensor(lengths, dtype=torch.int32), scale=0.2,
                             window=window)
        for b in range(2):
            k, v = (torch.cat([pair[i] for pair in kept[b]]).double().repeat_interleave(2, 1) for i in range(2))
            q = query[starts[b]:starts[b + 1]].double()
            at = torch.arange(before[b], lengths[b])[:, None]
            seen = (torch.arange(lengths[b]) <= at) & (torch.arange(lengths[b]) > at - window)
            scores = (torch.einsum("ihd,jhd->hij", q, k) * 0.2).masked_fill(~seen, -torch.inf)
            want = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
            error = (got[starts[b]:starts[b + 1]].double() - want).abs().max() if rows[b] else 0.0
            assert error < 3e-6, f"sequence {b}: off by {error}"
    print("vllm_attention_backend: passed without vLLM; kernels_test.py BUILD --only vllm runs it in vLLM")


def test_notebook(name):
    """The code of its cells in one program; Jupyter itself is not needed."""
    notebook = json.loads((EXAMPLES / name).read_text())
    assert notebook["nbformat"] == 4, f"{name}: nbformat {notebook['nbformat']}"
    cells, seen = [c for c in notebook["cells"] if c["cell_type"] == "code"], {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        assert cell["outputs"] == [], f"{name}: cell {number} has outputs in the repository"
        exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), seen)
    print(f"{name}: passed, {len(cells)} cells")


if __name__ == "__main__":
    test_vllm()
    test_notebook("torch.ipynb")
    test_notebook("jax.ipynb")

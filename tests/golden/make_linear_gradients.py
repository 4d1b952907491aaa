"""Gradients of linear attention as torch's autograd has them in float64, of the recurrences token by token.

    venv/bin/python tests/golden/make_linear_gradients.py [--check]

Writes linear_gradients.f32: little-endian float32, arrays one behind the other. For each rule in RULES: its inputs in
order, initial states, the gradients of outputs and of final states, then the gradients of the inputs and of the initial
states. Read by kernels/api/mr_linear_backward_test.cpp.
"""

import sys
from pathlib import Path

import numpy as np
import torch

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, CU = 2, 4, 5, 3, (0, 19, 19, 36)
SCALE = 0.75
TOKENS = CU[-1]
KEYS, VALUES = (TOKENS, KEY_HEADS, KEY_DIM), (TOKENS, HEADS, VALUE_DIM)
WIDE = (TOKENS, HEADS, KEY_DIM)
RULES = {
    "delta": {"q": KEYS, "k": KEYS, "v": VALUES, "g": (TOKENS, HEADS), "beta": (TOKENS, HEADS)},
    "scan": {"x": VALUES, "dt": (TOKENS, HEADS), "a": (HEADS,), "b": KEYS, "c": KEYS, "d": (HEADS,)},
    "wkv7": {"r": WIDE, "w": WIDE, "k": WIDE, "v": VALUES, "a": WIDE, "b": WIDE},
}


def steps(rule, i, t, h, state):
    """One token of one head: the new state, [key][value], and the output."""
    kh = h // (HEADS // KEY_HEADS)
    if rule == "delta":
        state = state * torch.exp(i["g"][t, h])
        k = i["k"][t, kh]
        state = state + torch.outer(k, i["beta"][t, h] * (i["v"][t, h] - state.T @ k))
        return state, SCALE * (state.T @ i["q"][t, kh])
    if rule == "scan":
        dt, x = i["dt"][t, h], i["x"][t, h]
        state = torch.exp(dt * i["a"][h]) * state + torch.outer(i["b"][t, kh], dt * x)
        return state, state.T @ i["c"][t, kh] + i["d"][h] * x
    read = state.T @ i["a"][t, h]
    state = torch.exp(i["w"][t, h])[:, None] * state + torch.outer(i["b"][t, h], read)
    state = state + torch.outer(i["k"][t, h], i["v"][t, h])
    return state, SCALE * (state.T @ i["r"][t, h])


def arrays():
    rng = np.random.default_rng(17)
    out = []
    for rule, shapes in RULES.items():
        draw = lambda shape, s=0.6: (rng.standard_normal(shape) * s).astype(np.float32)
        inputs = {name: draw(shape) for name, shape in shapes.items()}
        for name in {"delta": "g", "scan": "a", "wkv7": "w"}[rule]:
            inputs[name] = -np.abs(inputs[name])
        inputs["state"] = draw((len(CU) - 1, HEADS, KEY_DIM, VALUE_DIM))
        leaves = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in inputs.items()}
        d_out, d_final = draw(VALUES, 1.0), draw(inputs["state"].shape, 1.0)
        loss = torch.zeros((), dtype=torch.float64)
        for s in range(len(CU) - 1):
            for h in range(HEADS):
                state = leaves["state"][s, h]
                for t in range(CU[s], CU[s + 1]):
                    state, o = steps(rule, leaves, t, h, state)
                    loss = loss + (o * torch.tensor(d_out[t, h])).sum()
                loss = loss + (state * torch.tensor(d_final[s, h])).sum()
        loss.backward()
        out += [*inputs.values(), d_out, d_final, *(leaf.grad.numpy().astype(np.float32) for leaf in leaves.values())]
    return np.concatenate([a.reshape(-1) for a in out]).astype("<f4")


def main():
    path = Path(__file__).parent / "linear_gradients.f32"
    made = arrays()
    if "--check" not in sys.argv:
        made.tofile(path)
    elif not np.allclose(np.fromfile(path, "<f4"), made, rtol=1e-6, atol=1e-7):
        sys.exit("linear_gradients.f32 differs")


if __name__ == "__main__":
    main()

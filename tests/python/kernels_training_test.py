#!/usr/bin/env python3
"""What training needs of torch.ops.millrace beyond kernels_torch_test.py: a head's loss without its logits, layers in
eight bits, and calls that pass the recording of gradients where none is wanted. Against torch in float64.

  tests/python/kernels_training_test.py [--device cuda] [NAME ...]

Run by tests/python/kernels_test.py with the package on the path.
"""

import itertools
import sys
import warnings

import torch
import torch.nn.functional as F

import millrace_kernels.torch as mt
from kernels_torch_test import BF16, F16, F32, TYPES, close, compare, device, ops, raises, random, run_tests, strided


def test_attention_without_gradient():
    """Where no gradient can be wanted a smaller operation runs: the same bits, and it is told by requires_grad alone."""
    torch.manual_seed(34)
    for dtype, (d, e), how in itertools.product(TYPES, ((16, 24), (20, 12)),
                                                ({}, {"causal": True}, {"window": (3, 1), "softcap": 5.0, "scale": 0.3})):
        q, k, v = random(2, 5, 4, d, dtype=dtype), random(2, 7, 2, d, dtype=dtype), random(2, 7, 2, e, dtype=dtype)
        want = mt.attention(q, k, v, **how)
        assert want.requires_grad
        plain = mt.attention(q.detach(), k.detach(), v.detach(), **how)
        with torch.no_grad():
            assert torch.equal(plain, mt.attention(q, k, v, **how))
        with torch.inference_mode():
            assert torch.equal(plain, mt.attention(q, k, v, **how))
        assert torch.equal(plain, want) and not plain.requires_grad
        assert mt.attention(q.detach(), k, v.detach(), **how).requires_grad
    x = torch.randn(3, 8)
    assert not mt.rms_norm(x).requires_grad and mt.rms_norm(x.requires_grad_()).requires_grad


def test_linear_cross_entropy():
    """Forward, and on a CPU both gradients, none of whose logits are kept, against autograd of all of them."""
    torch.manual_seed(31)
    on_cpu = device() == "cpu"
    shapes = [((7,), 13, 131), ((2, 3), 64, 1009), ((1,), 1, 1), ((0,), 5, 7), ((33,), 17, 4099), ((), 3, 2)]
    for dtype, (shape, cols, vocab) in itertools.product(TYPES, shapes):
        hidden, weight = random(*shape, cols, dtype=dtype), random(vocab, cols, dtype=dtype, scale=0.3)
        if not on_cpu:
            hidden, weight = hidden.detach(), weight.detach()
        targets = torch.randint(0, vocab, shape)
        if targets.numel() > 1:
            targets.view(-1)[1] = -7
        for reduction in ("mean", "sum", "none"):
            if reduction == "mean" and targets.numel() == 0:
                continue

            def formula(x, w):
                loss = F.cross_entropy((x @ w.T).reshape(-1, vocab), targets.reshape(-1), ignore_index=-7,
                                       reduction=reduction)
                return loss.reshape(targets.shape if reduction == "none" else ())

            compare(f"linear_cross_entropy {dtype} {shape, cols, vocab} {reduction}",
                    lambda x, w: mt.linear_cross_entropy(x, w, targets, ignore_index=-7, reduction=reduction), formula,
                    (hidden, weight), dtype, 16)
    if not on_cpu:
        targets = torch.tensor([1, 2])
        try:
            compare("linear_cross_entropy on a GPU", lambda x, w: mt.linear_cross_entropy(x, w, targets),
                    lambda x, w: F.cross_entropy(x @ w.T, targets), (random(2, 8), random(9, 8)), F32, 16)
        except RuntimeError as error:  # a library without its gradient there says so
            assert "expected a CPU" in str(error), error
        return
    hidden, weight, targets = random(3, 5), random(11, 5), torch.tensor([4, 10, 0])
    compare("linear_cross_entropy, columns apart", lambda x, w: mt.linear_cross_entropy(x, w, targets),
            lambda x, w: F.cross_entropy(x @ w.T, targets), (strided(hidden), strided(weight)), F32)
    for frozen in range(2):  # one gradient alone has the bits of both
        inputs = [hidden.detach(), weight.detach()]
        inputs[1 - frozen].requires_grad_()
        alone = torch.autograd.grad(mt.linear_cross_entropy(*inputs, targets), inputs[1 - frozen])[0]
        both = torch.autograd.grad(mt.linear_cross_entropy(hidden, weight, targets), (hidden, weight))
        assert torch.equal(alone, both[1 - frozen])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of inputs that are not float64: this step is as wide as float32 wants
        assert torch.autograd.gradcheck(lambda x, w: mt.linear_cross_entropy(x, w, targets), (hidden, weight), eps=1e-2,
                                        atol=2e-3, nondet_tol=0.0)
    raises(RuntimeError, "targets", mt.linear_cross_entropy, hidden, weight, torch.tensor([1, 2, 11]))
    raises(RuntimeError, "weight has 4", mt.linear_cross_entropy, hidden, random(11, 4), targets)
    raises(RuntimeError, "another dtype", mt.linear_cross_entropy, hidden, random(11, 5, dtype=BF16), targets)
    raises(ValueError, "reduction", mt.linear_cross_entropy, hidden, weight, targets, reduction="max")


def dequantized(codes, scales, grid):
    full = scales.double().repeat_interleave(grid[0], 0).repeat_interleave(grid[1], 1)
    return codes.double() * full[:codes.shape[0], :codes.shape[1]]


def test_fp8():
    """Products of eight-bit codes against float64 of the same codes: every layout, grid and pair of types."""
    if device() != "cpu":
        return
    torch.manual_seed(32)
    for (m, n, k), ta, tb, types in itertools.product(((1, 1, 1), (5, 131, 257), (130, 3, 7), (0, 4, 3), (3, 4, 0)),
                                                      (False, True), (False, True),
                                                      (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"))):
        a, b = torch.randn((k, m) if ta else (m, k)), torch.randn((n, k) if tb else (k, n))
        grids = ((1, 128), (1, 128)) if ta else ((1, 128), (128, 128)) if m % 2 else ((128, 1), (1, 1))
        coded = [mt.quantize_fp8(x, t, g) for x, t, g in zip((a, b), types, grids)]
        exact = [dequantized(*c, g) for c, g in zip(coded, grids)]
        for x, e, t in zip((a, b), exact, types):  # half a step of 3 or 2 bits, of the largest of a block
            assert e.numel() == 0 or float((x - e).abs().max()) <= float(x.abs().max()) * (2**-4 if t == "e4m3" else 2**-3)
        for out, dtype in (("f32", F32), ("bf16", BF16), ("f16", F16)):
            got = ops.matmul_fp8(coded[0][0], coded[1][0], coded[0][1], coded[1][1], ta, tb, *grids[0], *grids[1], out)
            want = (exact[0].T if ta else exact[0]) @ (exact[1].T if tb else exact[1])
            assert got.dtype == dtype
            close(f"matmul_fp8 {m, n, k} {ta, tb} {types}", got, want, dtype)
    raises(RuntimeError, "expected each 1 or 128", ops.matmul_fp8, *(c[i] for i in (0, 1) for c in coded), b_scale_rows=64)
    raises(ValueError, "type", mt.quantize_fp8, a, "e3m4")


def test_linear_fp8():
    """A layer trained in eight bits: y and its gradients are those of the quantized operands, in float64."""
    if device() != "cpu":
        return
    torch.manual_seed(33)
    for dtype, shape, out, gradient in itertools.product(TYPES, ((5, 130), (2, 3, 256), (1, 1), (0, 7)), (3, 129),
                                                         ("e5m2", "e4m3")):
        x, weight, bias = random(*shape, dtype=dtype), random(out, shape[-1], dtype=dtype), random(out)
        y = mt.linear_fp8(x, weight, bias, gradient)
        rows = x.detach().reshape(-1, shape[-1])
        qx = dequantized(*mt.quantize_fp8(rows), (1, 128))
        qw = dequantized(*mt.quantize_fp8(weight.detach(), grid=(128, 128)), (128, 128))
        close("linear_fp8", y.reshape(-1, out), qx @ qw.T + bias.detach().double(), dtype)
        dy = torch.randn(y.shape).to(dtype)
        d_x, d_w, d_b = torch.autograd.grad(y, (x, weight, bias), dy)
        d_rows = dy.reshape(-1, out)
        qd = dequantized(*mt.quantize_fp8(d_rows, gradient), (1, 128))
        close("linear_fp8's dx", d_x.reshape(-1, shape[-1]), qd @ qw, dtype)
        close("linear_fp8's dw", d_w, qd.T @ qx, dtype)
        close("linear_fp8's db", d_b, d_rows.double().sum(0), F32, 32)
    raises(ValueError, "gradient", mt.linear_fp8, x, weight, gradient="bf16")
    compiled = torch.compile(lambda x, w: mt.linear_fp8(x, w).square().sum(), fullgraph=True, backend="aot_eager")
    x, w = random(4, 200), random(5, 200)
    want = mt.linear_fp8(x, w).square().sum()
    for a, b in zip(torch.autograd.grad(compiled(x, w), (x, w)), torch.autograd.grad(want, (x, w))):
        assert torch.equal(a, b)
    with torch.autocast("cpu", dtype=BF16):
        assert mt.linear_fp8(x, w).dtype == BF16


if __name__ == "__main__":
    sys.exit(run_tests({name: f for name, f in globals().items() if name.startswith("test_")}))

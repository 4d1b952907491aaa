#!/usr/bin/env python3
"""millrace_kernels.arrays against numpy in float64, and over DLPack where torch is there. Run by kernels_test.py."""

import copy
import pickle

import numpy as np

import millrace_kernels.arrays as ma

generator = np.random.default_rng(1)


def random(*shape, dtype=np.float32):
    return generator.standard_normal(shape).astype(dtype)


def close(name, got, want, bound=3e-6):
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape, f"{name}: {got.shape}, expected {want.shape}"
    error = np.abs(got - want).max(initial=0.0) / max(np.abs(want).max(initial=0.0), 0.05)
    assert error <= bound, f"{name}: off by {error:.3g} of the largest"


def raises(text, function, *args, **named):
    try:
        function(*args, **named)
    except (ValueError, TypeError) as error:
        assert text in str(error), f'"{error}" does not say "{text}"'
        return
    raise AssertionError(f"nothing was raised, expected: {text}")


def exact_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def main():
    for dtype, bound in ((np.float32, 3e-6), (np.float16, 4e-3)):
        for shape in ((3, 5), (2, 3, 64), (7,), (0, 4)):
            x, w, b = random(*shape, dtype=dtype), random(shape[-1]), random(shape[-1])
            x64 = x.astype(np.float64)
            if x.size:
                close("softmax", ma.softmax(x, 0.5), exact_softmax(0.5 * x64), bound)
            close("rms_norm", ma.rms_norm(x, w),
                  x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * w.astype(np.float64), bound)
            mean, var = x64.mean(-1, keepdims=True), x64.var(-1, keepdims=True)
            close("layer_norm", ma.layer_norm(x, w, b), (x64 - mean) / np.sqrt(var + 1e-5) * w + b, 4 * bound)
        a, c, bias = random(5, 7, dtype=dtype), random(9, 7, dtype=dtype), random(9)
        close("gemm", ma.gemm(a, c, transpose_b=True, bias=bias), a.astype(float) @ c.astype(float).T + bias, bound)
        turned = c[:, ::-1].T[::-1]
        close("gemm of strides", ma.gemm(a.T, turned, transpose_a=True), a.astype(float) @ c.astype(float).T, bound)
        q, k = random(2, 5, 4, 16, dtype=dtype), random(2, 7, 2, 16, dtype=dtype)
        scores = np.einsum("bihd,bjhd->bhij", q.astype(float), np.repeat(k.astype(float), 2, 2)) / 4
        seen = np.arange(7)[None] <= np.arange(5)[:, None] + 2
        want = np.einsum("bhij,bjhd->bihd", exact_softmax(np.where(seen, scores, -1e300)),
                         np.repeat(k.astype(float), 2, 2))
        close("attention", ma.attention(q, k, k, causal=True), want, bound)
    w = random(6, 64)
    back = ma.dequantize(ma.quantize(w, "q8_0"), "q8_0")
    assert np.linalg.norm(back - w) < 0.01 * np.linalg.norm(w)
    x = random(4, 6)
    into = np.empty((4, 12), np.float32)[:, ::2]
    assert ma.softmax(x, out=into) is into
    close("softmax into strides", into, exact_softmax(x.astype(float)))
    assert (ma.softmax(x, device=ma.Device(threads=1, isa="scalar")) == ma.softmax(x)).all()
    raises("weight has shape", ma.rms_norm, x, random(5))
    raises("x is int64", ma.softmax, np.arange(3))
    raises("out is", ma.softmax, x, out=np.empty((4, 5), np.float32))
    raises("do not fit", ma.gemm, x, x)
    raises("q4_9", ma.quantize, w, "q4_9")
    raises("isa", ma.Device, isa="z80")
    assert (ma.softmax(x.astype(">f4")) == ma.softmax(x)).all(), "numbers of the other byte order"
    for scalar in (np.float32(1), np.ones((), np.float32)):
        raises("x is a scalar", ma.softmax, scalar)
        raises("x is a scalar", ma.rms_norm, scalar)
    raises("type is None", ma.quantize, w, None)
    raises("expected a Device", ma.softmax, x, device="cpu")
    raises("out is a int", ma.softmax, x, out=5)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):  # two would close one device
        raises("threads of its own", copied, ma.Device(threads=1))
    raises("dim", ma.attention, *(random(1, 2, 1, 12) for _ in range(3)))
    try:
        import torch
    except ImportError:
        print("arrays: passed (no torch: DLPack by numpy alone)")
        return
    t, y = torch.randn(3, 8), torch.empty(3, 8)
    assert ma.softmax(t, out=y) is y
    close("DLPack", y.numpy(), torch.softmax(t.double(), -1).numpy())
    try:
        import ml_dtypes
    except ImportError:
        ml_dtypes = None
    if ml_dtypes is not None:
        half, into = t.bfloat16(), torch.empty(3, 8, dtype=torch.bfloat16)
        assert ma.softmax(half, out=into) is into and ma.softmax(half).dtype == ml_dtypes.bfloat16
        close("bfloat16", into.float().numpy(), torch.softmax(half.double(), -1).numpy(), 1e-2)
    print("arrays: passed")


if __name__ == "__main__":
    main()

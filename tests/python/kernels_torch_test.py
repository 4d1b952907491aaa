#!/usr/bin/env python3
"""torch.ops.millrace.* against torch in float64, forward and backward.

  tests/python/kernels_torch_test.py [NAME ...]                 every test, or those whose names contain one of these
  tests/python/kernels_torch_test.py --device cuda [NAME ...]   on a GPU

Run by tests/python/kernels_test.py with the package on the path. Shapes are odd, tensors strided, empty, of every type.
A gradient is compared with float64 autograd of the plain formula; a tolerance is so many roundings of the type.
"""

import itertools
import math
import sys
import time
import traceback
import warnings

import torch
import torch.nn.functional as F
from torch.library import opcheck

import millrace_kernels.torch as mt

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = (F32, F16, BF16)
ROUNDING = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7}
ops = torch.ops.millrace


def device():
    return torch.get_default_device().type


def random(*shape, dtype=F32, scale=1.0, grad=True):
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype).requires_grad_(grad)


def strided(x):
    """The same numbers, every second column of a wider tensor: nothing is contiguous."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] * 2, dtype=x.dtype)
    wide[..., ::2] = x.detach()
    return wide[..., ::2].requires_grad_(x.requires_grad)


def close(name, got, want, dtype, roundings=8.0, scale=0.05):
    """Within so many roundings of the type, and at least 16 of float32, of the largest number or of `scale`."""
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
    if got.numel() == 0:
        return
    bound = max(roundings * ROUNDING[dtype], 16 * ROUNDING[F32]) * max(float(want.detach().abs().max()), scale)
    error = float((got.detach().double() - want.detach()).abs().max())
    if not error <= bound:
        raise AssertionError(f"{name}: off by {error:.3g}, expected at most {bound:.3g}")


def compare(name, ours, formula, inputs, dtype, roundings=8.0, floor=0.05):
    """Forward and every gradient of ours(*inputs) against formula in float64."""
    exact = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    got, want = ours(*inputs), formula(*exact)
    got, want = (got if isinstance(got, tuple) else (got,)), (want if isinstance(want, tuple) else (want,))
    gradients = [torch.randn(w.shape, dtype=torch.float64) for w in want]
    for i, (g, w) in enumerate(zip(got, want)):
        close(f"{name} output {i}", g, w, dtype, roundings)
    leaves = [i for i, x in enumerate(inputs) if x.requires_grad]
    if not leaves:
        return
    d_got = torch.autograd.grad(got, [inputs[i] for i in leaves], [g.to(o.dtype) for g, o in zip(gradients, got)])
    d_want = torch.autograd.grad(want, [exact[i] for i in leaves],
                                 [g.to(o.dtype).double() for g, o in zip(gradients, got)])
    largest = max((float(w.abs().max()) for w in d_want if w.numel()), default=0.0)
    for i, g, w in zip(leaves, d_got, d_want):
        if g.dtype != inputs[i].dtype:
            raise AssertionError(f"{name}: the gradient of input {i} is {g.dtype}, expected {inputs[i].dtype}")
        close(f"{name} gradient {i}", g, w, dtype, 2 * roundings, max(largest, floor))


def raises(kind, text, function, *args, **named):
    try:
        function(*args, **named)
    except kind as error:
        if text not in str(error):
            raise AssertionError(f'"{error}" does not say "{text}"') from error
        return
    raise AssertionError(f"nothing was raised, expected {kind.__name__}: {text}")


# ---------------------------------------------------------------- attention


def seen_by(q_len, k_len, window):
    at = torch.arange(q_len)[:, None] + (k_len - q_len)
    key = torch.arange(k_len)[None, :]
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    if window[0] >= 0:
        seen &= key >= at - window[0]
    if window[1] >= 0:
        seen &= key <= at + window[1]
    return seen


def plain_attention(q, k, v, sinks=None, window=(-1, -1), scale=None, softcap=0.0, seen=None):
    """[seq, heads, dim] of one sequence, in the inputs' own type."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or q.shape[2]**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = seen_by(q.shape[0], k.shape[0], window)
    visible = visible if seen is None else visible & seen
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(heads, q.shape[0], 1)), 2)
    dead = torch.isinf(scores).all(2, keepdim=True)
    weights = torch.softmax(scores.masked_fill(dead, 0.0), 2).masked_fill(dead, 0.0)
    return torch.einsum("hij,jhd->ihd", weights[:, :, :k.shape[0]], v)


def test_attention_dense():
    torch.manual_seed(1)
    shapes = [(2, 5, 7, 4, 2, 16, 24), (1, 33, 33, 3, 3, 40, 40), (3, 1, 19, 4, 1, 64, 8), (1, 70, 9, 2, 1, 20, 12)]
    masks = [(False, (-1, -1)), (True, (-1, -1)), (True, (3, -1)), (False, (4, 2))]
    for dtype, (b, s, t, h, g, d, e), (causal, window), extra in itertools.product(TYPES, shapes, masks, (False, True)):
        q, k, v = random(b, s, h, d, dtype=dtype), random(b, t, g, d, dtype=dtype), random(b, t, g, e, dtype=dtype)
        sinks = random(h)
        how = {"softcap": 5.0, "scale": 0.3} if extra else {}
        inputs = (q, k, v, sinks) if extra else (q, k, v)
        right = 0 if causal else window[1]

        def formula(q, k, v, sinks=None):
            return torch.stack([plain_attention(q[i], k[i], v[i], sinks, (window[0], right), **how) for i in range(b)])

        def ours(q, k, v, sinks=None):
            return mt.attention(q, k, v, sinks=sinks, causal=causal, window=window, **how)

        compare(f"attention {dtype} {b, s, t, h, g, d, e} {causal, window, extra}", ours, formula, inputs, dtype)


def test_attention_strides_and_lse():
    torch.manual_seed(2)
    q, k, v = random(2, 4, 9, 16), random(2, 2, 11, 16), random(2, 2, 11, 16)

    def ours(q, k, v):
        return mt.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)

    def formula(q, k, v):
        return torch.stack([plain_attention(*(x[i].transpose(0, 1) for x in (q, k, v)), window=(-1, 0))
                            for i in range(2)])

    compare("attention of [batch, heads, seq, dim]", ours, formula, (q, k, v), F32)
    compare("attention, columns apart", ours, formula, tuple(strided(x) for x in (q, k, v)), F32)
    one = random(3, 5, 1, 16, grad=False)
    out, lse = mt.attention(one.expand(3, 5, 4, 16), one, one, return_lse=True)  # stride 0
    scores = torch.einsum("bid,bjd->bij", one[:, :, 0].double(), one[:, :, 0].double()) / 4
    close("lse", lse, scores.logsumexp(-1)[:, None].expand(3, 4, 5), F32)
    shifted = torch.zeros(5 * 4 * 16 + 1)[1:].view(1, 5, 4, 16)  # data at no multiple of 16 bytes
    close("unaligned", mt.attention(shifted, shifted, shifted), torch.zeros(1, 5, 4, 16).double(), F32)


def test_attention_ragged():
    torch.manual_seed(3)
    for dtype, lengths in itertools.product((F32, BF16), ([(3, 5), (0, 4), (17, 17), (2, 0), (1, 30)], [(4, 4)])):
        cu_q = torch.tensor([0, *itertools.accumulate(a for a, _ in lengths)], dtype=torch.int32)
        cu_k = torch.tensor([0, *itertools.accumulate(b for _, b in lengths)], dtype=torch.int32)
        q, k, v = (random(int(n), h, 32, dtype=dtype) for n, h in ((cu_q[-1], 4), (cu_k[-1], 2), (cu_k[-1], 2)))

        def formula(q, k, v):
            return torch.cat([plain_attention(q[cu_q[i]:cu_q[i + 1]], k[cu_k[i]:cu_k[i + 1]], v[cu_k[i]:cu_k[i + 1]],
                                              window=(-1, 0)) for i in range(len(lengths))])

        compare(f"ragged {dtype} {lengths}", lambda q, k, v: mt.attention(q, k, v, cu_q=cu_q, cu_k=cu_k, causal=True),
                formula, (q, k, v), dtype)
    bad = torch.tensor([0, 99], dtype=torch.int32)
    if device() != "cpu":
        return  # a GPU's lists are not read before the launch
    raises(RuntimeError, "cu_q", mt.attention, q, k, v, cu_q=bad, cu_k=cu_k, max_q=99, max_k=4)


def test_attention_paged():
    torch.manual_seed(4)
    tokens, lengths = 16, [37, 16, 1]
    pages = torch.randperm(9).to(torch.int32)[:9].view(3, 3)
    pool_k, pool_v = random(9, tokens, 2, 32, grad=False), random(9, tokens, 2, 32, grad=False)
    for dtype in TYPES:
        q = random(3, 2, 4, 32, dtype=dtype, grad=False)
        pk, pv = pool_k.to(dtype), pool_v.to(dtype)
        got = mt.attention_paged(q, pk, pv, pages, torch.tensor(lengths), sinks=torch.zeros(4))
        for b, length in enumerate(lengths):
            k, v = (p[pages[b].long()].reshape(-1, 2, 32)[:length].double() for p in (pk, pv))
            want = plain_attention(q[b].double(), k, v, torch.zeros(4).double(), (-1, 0))
            close(f"paged {dtype} {length}", got[b], want, dtype)
    if device() != "cpu":
        return  # a GPU's lists are not read before the launch
    raises(RuntimeError, "page_table", mt.attention_paged, q, pk, pv, pages + 7, torch.tensor(lengths))


def test_attention_block_sparse():
    torch.manual_seed(5)
    heads, s, t, side = 2, 150, 200, 64
    q_blocks, k_blocks = -(-s // side), -(-t // side)
    kept = torch.rand(heads, q_blocks, k_blocks) < 0.6
    kept[0, 1] = False  # a block of queries that sees nothing
    starts, columns = [0], []
    for row in kept.view(-1, k_blocks):
        columns += row.nonzero().flatten().tolist()
        starts.append(len(columns))
    blocks = (torch.tensor(starts, dtype=torch.int32), torch.tensor(columns, dtype=torch.int32), side, side)
    seen = kept.repeat_interleave(side, 1).repeat_interleave(side, 2)[:, :s, :t]
    q, k, v = random(1, s, heads, 16), random(1, t, heads, 16), random(1, t, heads, 16)
    compare("block-sparse", lambda q, k, v: mt.attention(q, k, v, blocks=blocks),
            lambda q, k, v: plain_attention(q[0], k[0], v[0], seen=seen)[None], (q, k, v), F32)
    raises(RuntimeError, "block_columns", ops.attention, q, k, v, block_starts=blocks[0])


def test_attention_fp8():
    torch.manual_seed(6)
    q, k, v = (random(1, n, 2, 64, dtype=BF16, grad=False) for n in (20, 300, 300))
    coded = [ops.attention_quantize(x, rows, rotate) for x, rows, rotate in ((q, 1, True), (k, 128, True),
                                                                           (v, 128, False))]
    out, _ = ops.attention_fp8(*(c for c, _ in coded), *(s for _, s in coded), window_right=0)
    want = plain_attention(q[0].double(), k[0].double(), v[0].double(), window=(-1, 0))[None]
    error = float((out.double() - want).norm() / want.norm())
    if not error < 0.06:
        raise AssertionError(f"fp8: relative error {error:.3g}")


def test_attention_empty_and_wrong():
    for shape in ((0, 3, 2, 16), (2, 0, 2, 16)):
        q = random(*shape)
        out = mt.attention(q, q, q)
        out.sum().backward()
        assert out.shape == q.shape and q.grad.shape == q.shape
    q, k = random(1, 3, 2, 16), random(1, 0, 2, 16)
    close("no keys", mt.attention(q, k, k), torch.zeros(1, 3, 2, 16).double(), F32)
    raises(RuntimeError, "head_dim", mt.attention, *(random(1, 2, 1, 264) for _ in range(3)))
    raises(RuntimeError, "k has shape", mt.attention, q, random(1, 3, 2, 24), random(1, 3, 2, 16))
    raises(RuntimeError, "k has another dtype", mt.attention, q, random(1, 3, 2, 16, dtype=BF16), q)
    raises(RuntimeError, "kv_heads", mt.attention, random(1, 2, 3, 16), q, q)
    raises(ValueError, "scale", mt.attention, q, q, q, scale=math.inf)
    raises(ValueError, "cu_k", mt.attention, *(random(4, 2, 16) for _ in range(3)), cu_q=torch.tensor([0, 4]))
    weighed = mt.attention(q, q, q, scale=0.0)
    close("scale 0", weighed, q.double().mean(1, keepdim=True).expand(1, 3, 2, 16), F32)


def test_attention_deterministic():
    torch.manual_seed(7)
    q, k, v = random(2, 65, 4, 64, dtype=BF16), random(2, 130, 2, 64, dtype=BF16), random(2, 130, 2, 64, dtype=BF16)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        out = mt.attention(q, k, v, causal=True)
        results.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other)), "threads changed a bit"


# ---------------------------------------------------------------- scaled_dot_product_attention


def test_sdpa():
    torch.manual_seed(8)
    for dtype, (shape, s, t, g), causal, scale in itertools.product(
            (F32, BF16), (((2, 4), 9, 9, 4), ((3,), 5, 12, 3), ((2, 2, 4), 12, 5, 2)), (False, True), (None, 0.2)):
        heads, lead = shape[-1], shape[:-1]
        q = random(*shape, s, 24, dtype=dtype)
        k, v = random(*lead, g, t, 24, dtype=dtype), random(*lead, g, t, 16, dtype=dtype)
        how = {"is_causal": causal, "scale": scale, "enable_gqa": heads != g}
        compare(f"sdpa {dtype} {shape, s, t, g} {causal} {scale}",
                lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, **how),
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **how), (q, k, v), dtype)
    q = random(1, 2, 5, 16)
    mask = torch.rand(5, 5) < 0.7
    mask[:, 0] = True
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = mt.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    close("sdpa with a mask", out, F.scaled_dot_product_attention(q, q, q, attn_mask=mask).double(), F32)
    assert len(seen) == 1 and "attn_mask" in str(seen[0].message), [str(w.message) for w in seen]
    mt.set_fallback("error")
    raises(NotImplementedError, "attn_mask", mt.scaled_dot_product_attention, q, q, q, attn_mask=mask)
    raises(NotImplementedError, "dropout", mt.scaled_dot_product_attention, q, q, q, dropout_p=0.1)
    mt.set_fallback("warn")
    one = q[:, :1].detach()  # torch lets one head of keys serve all, others with enable_gqa alone
    close("sdpa of one head of keys", mt.scaled_dot_product_attention(q, one, one),
          F.scaled_dot_product_attention(q, one, one).double(), F32)
    four = random(1, 4, 5, 16)
    raises(RuntimeError, "size of tensor", mt.scaled_dot_product_attention, four, four[:, :2], four[:, :2])
    raises(RuntimeError, "dropout", mt.scaled_dot_product_attention, q, q, q, dropout_p=-0.1)
    nested = torch.nested.nested_tensor([torch.randn(n, 4, 16) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    assert mt.scaled_dot_product_attention(nested, nested, nested).is_nested
    raises(ValueError, "how", mt.set_fallback, "loud")


# ---------------------------------------------------------------- rows


def exact_rms(x, weight=None, offset=0.0, eps=1e-6):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight + offset)


SHAPES = ((3, 5), (2, 3, 64), (1, 257), (4, 1), (7,), (0, 8), (2, 0, 8))


def test_norms():
    torch.manual_seed(9)
    for dtype, shape, layout in itertools.product(TYPES, SHAPES, (lambda x: x, strided)):
        cols = shape[-1]
        x, r = layout(random(*shape, dtype=dtype)), layout(random(*shape, dtype=dtype))
        w, b = random(cols), random(cols)
        name = f"{dtype} {shape}"
        floor = 100.0 if cols == 1 else 0.05  # of one column the gradient is a difference of nearly equal numbers
        compare("rms_norm " + name, mt.rms_norm, exact_rms, (x,), dtype, floor=floor)
        compare("rms_norm weight " + name, lambda x, w: mt.rms_norm(x, w, weight_offset=1.0),
                lambda x, w: exact_rms(x, w, 1.0), (x, w), dtype, floor=floor)
        compare("layer_norm " + name, lambda x, w, b: mt.layer_norm(x, w, b),
                lambda x, w, b: F.layer_norm(x, (cols,), w, b), (x, w, b), dtype, 16, floor)
        if dtype == F32:  # otherwise the sum is rounded before it is normed
            compare("add_rms_norm " + name, mt.add_rms_norm, lambda x, r, w: (exact_rms(x + r, w), x + r), (x, r, w),
                    dtype, floor=floor)
            compare("add_layer_norm " + name, mt.add_layer_norm,
                    lambda x, r, w, b: (F.layer_norm(x + r, (cols,), w, b), x + r), (x, r, w, b), dtype, 32, floor)
    x, w = random(3, 8, dtype=BF16), random(8, dtype=BF16)
    y, total = mt.add_rms_norm(x, x, w)
    want = exact_rms(total.detach().double(), w.detach().double())
    close("add_rms_norm of the rounded sum", y, want, BF16)
    total.sum().backward()  # y is not used
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    raises(RuntimeError, "weight has shape", mt.rms_norm, x, random(9))
    raises(RuntimeError, "residual has shape", mt.add_rms_norm, x, random(3, 9))
    raises(RuntimeError, "x has an unsupported dtype", mt.rms_norm, x.double())


def exact_rotary(x, positions, inv_freq, interleaved):
    angle = positions.double()[..., None] * inv_freq.double()
    c, s = torch.cos(angle)[..., None, :], torch.sin(angle)[..., None, :]
    half = inv_freq.shape[0]
    a, b = (x[..., 0:2 * half:2], x[..., 1:2 * half:2]) if interleaved else (x[..., :half], x[..., half:2 * half])
    turned = (a * c - b * s, b * c + a * s)
    first = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((first, x[..., 2 * half:]), -1)


def test_rotary():
    torch.manual_seed(10)
    for dtype, interleaved, dims in itertools.product(TYPES, (False, True), (16, 12)):
        x = random(2, 5, 3, 16, dtype=dtype)
        positions = torch.randint(0, 4000, (2, 5))
        inv_freq = 10000.0**-(torch.arange(dims // 2, dtype=torch.float64) / (dims // 2))
        compare(f"rotary {dtype} {interleaved} {dims}",
                lambda x: mt.rotary(x, positions, inv_freq, interleaved=interleaved),
                lambda x: exact_rotary(x, positions, inv_freq.float(), interleaved), (x,), dtype,
                32 if dtype == F32 else 8)
    x = random(2, 5, 3, 16)
    close("rotary, one position per column", mt.rotary(x, torch.arange(5)),
          mt.rotary(x, torch.arange(5).expand(2, 5)).double(), F32, 0)
    compare("rotary of strides", lambda x: mt.rotary(x.transpose(1, 2), torch.arange(5)),
            lambda x: exact_rotary(x.transpose(1, 2), torch.arange(5).expand(2, 5),
                                   10000.0**-(torch.arange(8).double() / 8).float(), False), (random(2, 3, 5, 16),),
            F32, 32)
    assert mt.rotary(random(0, 3, 16), torch.zeros(0)[:, None].int()[:, 0]).shape == (0, 3, 16)
    raises(TypeError, "positions", mt.rotary, x, torch.arange(5).float())


def test_activations():
    torch.manual_seed(11)
    limit, alpha = 0.8, 1.702
    alone = {"gelu": (mt.gelu, F.gelu), "silu": (mt.silu, F.silu),
             "gelu tanh": (lambda x: mt.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"))}

    def exact_clamped(g, u):
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return g * torch.sigmoid(alpha * g) * (u + 1)

    gated = {"swiglu": (mt.swiglu, lambda g, u: F.silu(g) * u), "geglu": (mt.geglu, lambda g, u: F.gelu(g) * u),
             "geglu tanh": (lambda g, u: mt.geglu(g, u, "tanh"), lambda g, u: F.gelu(g, approximate="tanh") * u),
             "clamped": (lambda g, u: mt.clamped_swiglu(g, u, alpha, limit), exact_clamped)}
    for dtype, shape, layout in itertools.product(TYPES, SHAPES, (lambda x: x, strided)):
        for name, (ours, formula) in alone.items():
            compare(f"{name} {dtype} {shape}", ours, formula, (layout(random(*shape, dtype=dtype)),), dtype)
        for name, (ours, formula) in gated.items():
            pair = layout(random(*shape, dtype=dtype)), random(*shape, dtype=dtype)
            compare(f"{name} {dtype} {shape}", ours, formula, pair, dtype)
    raises(RuntimeError, "kind", ops.activation, random(3), "relu")
    raises(ValueError, "approximate", mt.gelu, random(3), "fast")
    both = random(4, 6)
    compare("swiglu of two halves", lambda x: mt.swiglu(*x.chunk(2, -1)),
            lambda x: F.silu(x[:, :3]) * x[:, 3:], (both,), F32)


def test_softmax():
    torch.manual_seed(12)
    for dtype, shape, layout in itertools.product(TYPES, SHAPES, (lambda x: x, strided)):
        compare(f"softmax {dtype} {shape}", lambda x: mt.softmax(x, 0.7), lambda x: torch.softmax(0.7 * x, -1),
                (layout(random(*shape, dtype=dtype, scale=3.0)),), dtype)


def test_cross_entropy():
    torch.manual_seed(13)
    for dtype, shape in itertools.product(TYPES, ((5, 33), (2, 3, 1000), (1, 2), (0, 7))):
        logits = random(*shape, dtype=dtype, scale=3.0)
        targets = torch.randint(0, shape[-1], shape[:-1])
        if targets.numel() > 1:
            targets.view(-1)[1] = -100
        for reduction in ("mean", "sum", "none"):
            if reduction == "mean" and targets.numel() == 0:
                continue

            def formula(x):
                return F.cross_entropy(x.reshape(-1, shape[-1]), targets.reshape(-1),
                                       reduction=reduction).reshape(targets.shape if reduction == "none" else ())

            compare(f"cross_entropy {dtype} {shape} {reduction}",
                    lambda x: mt.cross_entropy(x, targets, reduction=reduction), formula, (logits,), dtype,
                    32)  # a difference of two numbers of the logits' size
    if device() == "cpu":
        raises(RuntimeError, "targets", mt.cross_entropy, random(2, 4), torch.tensor([1, 4]))
        raises(RuntimeError, "targets", mt.cross_entropy, random(2, 4), torch.tensor([1, 2**32]))  # 0 as an int32
    raises(ValueError, "reduction", mt.cross_entropy, random(2, 4), torch.tensor([1, 3]), reduction="max")


def test_embedding():
    torch.manual_seed(14)
    for dtype, shape in itertools.product(TYPES, ((4,), (2, 3), (), (0,))):
        tokens = torch.randint(0, 6, shape)
        compare(f"embedding {dtype} {shape}", lambda t: mt.embedding(tokens, t, 2.0), lambda t: 2.0 * t[tokens],
                (random(6, 9, dtype=dtype),), dtype)
    if device() == "cpu":
        raises(RuntimeError, "token", mt.embedding, torch.tensor([6]), random(6, 9))
        raises(RuntimeError, "token", mt.embedding, torch.tensor([-2**32]), random(6, 9))
    else:  # a GPU is not waited for
        assert bool(mt.embedding(torch.tensor([6]), random(6, 9)).isnan().all())


def test_dropout():
    x = random(64, 100)
    seed = torch.tensor([5, 7], device="cpu")
    y = mt.dropout(x, 0.3, seed=seed)
    kept = y != 0
    assert 0.65 < float(kept.float().mean()) < 0.75
    close("dropout", y, torch.where(kept, x.detach().double() / 0.7, 0.0), F32)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    close("dropout's gradient", gradient, kept.double() / 0.7, F32)
    assert torch.equal(y, mt.dropout(x, 0.3, seed=seed)) and mt.dropout(x, 0.3, training=False) is x
    torch.manual_seed(3)
    first = mt.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, mt.dropout(x, 0.5)) and not torch.equal(first, mt.dropout(x, 0.5))
    raises(ValueError, "p is", mt.dropout, x, 1.0)
    raises(RuntimeError, "seed", mt.dropout, x, 0.5, seed=torch.tensor([1]))


# ---------------------------------------------------------------- products


def test_linear():
    torch.manual_seed(15)
    for dtype, (rows, out, cols), layout in itertools.product(
            TYPES, (((5,), 7, 9), ((2, 3), 33, 65), ((1,), 1, 1), ((0,), 4, 8), ((3,), 0, 8), ((3,), 4, 0)),
            (lambda x: x, strided)):
        x, w = layout(random(*rows, cols, dtype=dtype)), layout(random(out, cols, dtype=dtype))
        name = f"linear {dtype} {rows, out, cols}"
        compare(name, mt.linear, F.linear, (x, w), dtype)
        compare(name + " bias", mt.linear, F.linear, (x, w, random(out, dtype=dtype)), dtype)
        for wanted in (0, 1):
            inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((x, w))]
            compare(name + f" gradient {wanted} alone", mt.linear, F.linear, inputs, dtype)
    for a, b in itertools.product((False, True), repeat=2):
        x, w = random(*((5, 4) if a else (4, 5))), random(*((3, 5) if b else (5, 3)))
        compare(f"matmul {a} {b}", lambda x, w: ops.matmul(x, w, a, b),
                lambda x, w: (x.T if a else x) @ (w.T if b else w), (x, w), F32)
    x, w = random(4, 5), random(5, 3)
    torch.autograd.gradgradcheck(lambda x, w: ops.matmul(x, w).tanh(), (x, w), eps=1e-2, atol=2e-2, rtol=2e-2,
                                 nondet_tol=0.0, check_fwd_over_rev=False)
    raises(RuntimeError, "another dtype", mt.linear, random(2, 3), random(4, 3, dtype=BF16))
    raises(RuntimeError, "share", mt.linear, random(2, 3), random(4, 5))


def test_quantized():
    if device() != "cpu":
        raises(RuntimeError, "cpu device", mt.quantize, random(3, 64, grad=False), "q8_0")
        return
    torch.manual_seed(16)
    # The relative error of normally distributed weights: half a step of so many bits, with room.
    bounds = {"q8_0": 0.01, "q4_0": 0.11, "q4_1": 0.1, "q5_0": 0.06, "q5_1": 0.05, "q4_k": 0.1, "q5_k": 0.05,
              "q6_k": 0.03, "mxfp4": 0.16, "q4_z": 0.1, "fp8": 0.04, "int8": 0.01, "int4": 0.11}
    for type, bound in bounds.items():
        w, x = random(37, 256, grad=False), random(2, 3, 256)
        bias = random(37)
        values, scales = mt.quantize(w, type)
        plain = mt.dequantize(values, type, scales)
        error = float((plain - w).norm() / w.norm())
        assert error < bound, f"{type}: relative error {error:.3g}"
        name = mt._quantized.type_named(type)
        got = ops.linear_quantized(x, values, name, scales, bias)
        want = F.linear(x.double(), plain.double(), bias.double())
        # Activations are rounded to 8 bits per block of 32 on the way.
        off = float((got.double() - want).detach().norm() / want.detach().norm())
        assert off < 0.012, f"linear_quantized {type}: relative error {off:.3g}"
        dy = torch.randn(2, 3, 37)
        d_x, d_bias = torch.autograd.grad(got, (x, bias), dy)
        close(f"{type} dx", d_x, dy.double() @ plain.double(), F32)
        close(f"{type} dbias", d_bias, dy.double().sum((0, 1)), F32)
    raises(ValueError, "nvfp4", mt.quantize, w, "nvfp4")
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(32, 32), "lm_head": torch.nn.Linear(32, 32)})
    assert mt.quantize_(model, "q8_0", skip="lm_head") == 1 and model["lm_head"].__class__ is torch.nn.Linear
    raises(ValueError, "int4_128", mt.quantize_, model, "int5")
    raises(RuntimeError, "", mt.quantize, random(3, 40, grad=False), "q8_0")
    raises(RuntimeError, "columns", ops.linear_quantized, random(2, 64), mt.quantize(w, "q8_0")[0], "q8_0")
    raises(RuntimeError, "scales", ops.linear_quantized, random(2, 256), mt.quantize(w, "fp8")[0], "f8_e4m3")
    split = ops.quantize(w, "mxfp4")
    codes = split.view(37, 8, 17)
    got = ops.dequantize(codes[..., 1:].reshape(37, -1).contiguous(), "mxfp4_split", codes[..., 0].contiguous())
    assert got.shape == w.shape


def exact_experts(x, weights, gate, up, down, biases, chosen, clamped):
    y = torch.zeros_like(x)
    for r, s in itertools.product(range(chosen.shape[0]), range(chosen.shape[1])):
        e = int(chosen[r, s])
        g, u = gate[e] @ x[r] + biases[0][e], up[e] @ x[r] + biases[1][e]
        if clamped:
            g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
            h = g * torch.sigmoid(1.702 * g) * (u + 1)
        else:
            h = F.silu(g) * u
        y = y + torch.nn.functional.one_hot(torch.tensor(r), x.shape[0])[:, None] * (
            weights[r, s] * (down[e] @ h + biases[2][e]))
    return y


def test_experts():
    torch.manual_seed(18)
    rows, hidden, ffn, count, k = 7, 32, 64, 5, 2
    scores = random(rows, count)
    for softmax_all in (False, True):
        chosen, _ = mt.route(scores, k, softmax_all)
        want, index = scores.detach().topk(k)
        assert torch.equal(index.int(), chosen)

        def formula(s):
            return torch.softmax(s, -1).gather(1, index) if softmax_all else torch.softmax(s.gather(1, index), -1)

        compare(f"route {softmax_all}", lambda s: mt.route(s, k, softmax_all)[1], formula, (scores,), F32)
    chosen, weights = (t.detach() for t in mt.route(scores, k))
    if device() != "cpu":
        raises(RuntimeError, "experts_packed", mt.experts, random(rows, hidden), chosen, weights,
               *(random(count, 32, 32) for _ in range(3)))
        return
    weights.requires_grad_()
    for clamped in (False, True):
        x, gate, up = random(rows, hidden), random(count, ffn, hidden, scale=0.3), random(count, ffn, hidden, scale=0.3)
        down = random(count, hidden, ffn, scale=0.3)
        biases = random(count, ffn), random(count, ffn), random(count, hidden)
        name = "clamped_swiglu" if clamped else "swiglu"

        def ours(x, w, g, u, d, *b):
            return mt.experts(x, chosen, w, g, u, d, gate_bias=b[0], up_bias=b[1], down_bias=b[2], activation=name)

        compare(f"experts {name}", ours, lambda x, w, g, u, d, *b: exact_experts(x, w, g, u, d, b, chosen, clamped),
                (x, weights, gate, up, down, *biases), F32, 64)
    coded = [ops.quantize(w.detach(), "mxfp4") for w in (gate, up, down)]
    plain = [ops.dequantize(w, "mxfp4") for w in coded]
    got = mt.experts(x, chosen, weights, *coded, type="mxfp4")
    none = [torch.zeros(count, n).double() for n in (ffn, ffn, hidden)]
    want = exact_experts(x.double(), weights.double(), *(p.double() for p in plain), none, chosen, False)
    off = float((got.double() - want).detach().norm() / want.detach().norm())
    assert off < 0.02, off
    d_got = torch.autograd.grad(got, (x, weights), torch.ones_like(got))
    d_want = torch.autograd.grad(want, (x, weights), torch.ones_like(want))
    for a, b in zip(d_got, d_want):
        close("experts of mxfp4, gradient", a, b.double(), F32, 64)
    assert mt.experts(x[:0], chosen[:0], weights[:0], gate, up, down).shape == (0, hidden)
    raises(RuntimeError, "gate, up and down", mt.experts, x, chosen, weights, gate, up, gate)
    raises(RuntimeError, "k is", mt.route, scores, 6)


def test_sample():
    torch.manual_seed(19)
    logits = random(6, 50, grad=False)
    assert torch.equal(mt.sample(logits, temperature=0.0), logits.argmax(-1).int())
    top = logits.topk(3).indices
    for _ in range(20):
        drawn = mt.sample(logits, top_k=3)
        assert bool((top == drawn[:, None]).any(1).all())
    probabilities = torch.softmax(logits[:1].double(), -1)[0]
    counts = torch.bincount(mt.sample(logits[:1].expand(20000, 50)).long(), minlength=50) / 20000
    assert float((counts - probabilities).abs().max()) < 0.012
    u = torch.rand(6, dtype=torch.float64)
    alone = torch.cat([mt.sample(logits[i:i + 1], uniform=u[i:i + 1], top_p=0.9) for i in range(6)])
    assert torch.equal(alone, mt.sample(logits, uniform=u, top_p=0.9))
    how = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    assert torch.equal(mt.sample(logits, uniform=u, **how), mt.sample(logits, uniform=u, **{**how, "top_p": [0.9] * 6}))
    assert mt.sample(torch.full((1, 4), math.nan)).tolist() == [-1]
    assert mt.sample(torch.full((1, 4), -math.inf)).tolist() == [-2]
    assert mt.sample(logits[:0]).shape == (0,)
    raises(ValueError, "top_k", mt.sample, logits, top_k=[1, 2])
    raises(RuntimeError, "top_k", mt.sample, logits, top_k=1 << 40)
    raises(RuntimeError, "temperature", mt.sample, logits, temperature=-1.0)


# ---------------------------------------------------------------- torch's own tools


def samples():
    """Arguments of every operation, differentiable where it is."""
    q, k, v, sinks = random(1, 4, 2, 16), random(1, 6, 1, 16), random(1, 6, 1, 8), random(2)
    cu = torch.tensor([0, 2, 4], dtype=torch.int32)
    ragged = [random(4, 2, 16) for _ in range(3)]
    plain = [t.detach() for t in (q, k, v, sinks)]
    out, lse = ops.attention(*plain)
    x, r, w, b = random(3, 8), random(3, 8), random(8), random(8)
    d = [t.detach() for t in (x, r, w)]
    tokens = torch.tensor([1, 0, 1], dtype=torch.int32)
    weights, chosen = (t.detach() for t in ops.route(d[0], 2))
    gate, up, down = random(8, 32, 32), random(8, 32, 32), random(8, 32, 32)
    wide = random(3, 32)
    bytes_ = ops.quantize(random(5, 32, grad=False).cpu(), "q8_0")
    block = mt.pack(bytes_, "q8_0", device=device())
    f16 = [random(1, 4, 2, 16, dtype=F16, grad=False)]
    coded, scales = ops.attention_quantize(f16[0], 1, True)
    blocked, block_scales = ops.attention_quantize(f16[0], 128)
    pool = random(3, 16, 1, 16, grad=False)
    paged = plain[0], pool, pool, torch.tensor([[0, 2]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    rows = [torch.tensor(v, dtype=t, device="cpu") for v, t in (([0.1, 0.5, 0.9], torch.float64), ([1.0] * 3, F32),
                                                 ([0] * 3, torch.int32), ([0.9] * 3, F32), ([0.0] * 3, F32))]
    four_bits = torch.randint(0, 256, (8, 64), dtype=torch.uint8), torch.full((8, 4), 127, dtype=torch.uint8)
    packed = ops.lowbit_repack(*four_bits, None, "mxfp4", "rows", 8, 128)
    return {
        "lowbit_repack": [(*four_bits, None, "mxfp4", "rows", 8, 128)],
        "lowbit_linear": [(random(3, 128, dtype=BF16), packed, "mxfp4", 8, 128, 1.0, random(8))],
        "attention": [(q, k, v), (q, k, v, sinks), (*ragged, None, cu, cu, 2, 2)],
        "attention_plain": [(*plain,), (*[t.detach() for t in ragged], None, cu, cu, 2, 2)],
        "attention_dense": [(*plain[:3],), (*plain, False, True, 0.3, 5.0, 2, 0), (*[plain[0]] * 3, None, True, True)],
        "attention_dense_lse": [(q, k, v), (q, k, v, sinks, False, True, 0.3, 5.0, 2, 0), (q, q, q, None, True, True)],
        "norm_plain": [(d[0], d[2]), (d[0], d[2], d[2], 1e-5, 0.0, True)],
        "add_norm_plain": [(d[0], d[1], d[2]), (d[0], d[1], d[2], d[2], True, 1e-5)],
        "attention_backward": [(torch.randn(out.shape), *plain[:3], out, lse, plain[3])],
        "attention_fp8": [(coded, blocked, blocked, scales, block_scales, block_scales)],
        "attention_quantize": [(f16[0], 1, True), (f16[0], 128)],
        "attention_paged": [paged], "attention_paged_plain": [paged],
        "rms_norm": [(x, w), (x,)], "layer_norm": [(x, w, b), (x,)], "add_rms_norm": [(x, r, w)],
        "add_layer_norm": [(x, r, w, b)],
        "norm_backward": [(d[1], d[0], d[2], None, torch.ones(3), None, 0.0, True, False)],
        "rotary": [(random(3, 2, 8), tokens, torch.tensor([1.0, 0.1, 0.01]))],
        "activation": [(x, "gelu")], "activation_backward": [(d[1], d[0], "silu")],
        "gated_activation": [(x, r, "swiglu")], "gated_activation_backward": [(d[1], d[0], d[1], "geglu")],
        "softmax": [(x, 2.0)], "softmax_backward": [(d[1], torch.softmax(d[0], -1))],
        "dropout": [(x, 0.5, torch.tensor([3, 4], device="cpu"))],
        "cross_entropy": [(x, tokens), *([(x, tokens.long(), -100, 1), (x, tokens, 1, 2)] if device() == "cpu" else [])],
        "cross_entropy_backward": [(torch.ones(3), d[0], tokens, d[0].logsumexp(-1))],
        "linear_cross_entropy": [(x, random(5, 8), tokens), (x, random(5, 8), tokens.long(), -100, 1)],
        "linear_cross_entropy_backward": [(torch.ones(3), d[0], random(5, 8, grad=False), tokens, torch.full((3,), 2.5))],
        "linear_fp8": [(x, random(5, 8), random(5), "e5m2"), (x, random(5, 8), None, "e4m3")],
        "matmul_fp8": [(d[0].to(torch.float8_e4m3fn), d[1].to(torch.float8_e5m2), torch.ones(3, 1), torch.ones(1, 1),
                        False, True)],
        "embedding": [(tokens, x)], "embedding_backward": [(d[0], tokens, 5)],
        "linear": [(x, random(5, 8), random(5)), (x, random(5, 8))], "matmul": [(x, random(8, 4))],
        "quantize": [(random(2, 64, grad=False), "q4_0")], "dequantize": [(bytes_, "q8_0")],
        "linear_quantized": [(wide, bytes_, "q8_0", None, random(5))],
        "weight_pack": [(random(5, 32, grad=False).cpu(), torch.empty(0), "f32")],
        "weight_unpack": [(block.packed, "q8_0", 5, 32)],
        "linear_packed": [(wide, block.packed, "q8_0", 5, 32, random(5))],
        "experts_packed": [(wide.detach(), chosen, weights.detach(), *(mt.pack(w).packed for w in (gate, up, down)), "f32", 8,
                            32)],
        "route": [(x, 2), (x, 2, True)],
        "experts": [(wide, chosen, weights.requires_grad_(), gate, up, down)],
        "experts_backward": [(wide.detach(), wide.detach(), chosen, weights.detach(), gate.detach(), up.detach(),
                              down.detach(), None, None, None, "", "swiglu", 1.702, 7.0, True)],
        "sample": [(d[0], *rows)], "sample_alike": [(d[0], rows[0], 0.8, 3, 0.9, 0.1), (d[0], rows[0][0], 1.0, 0, 1.0, 0.0)],
    }


def defined_operations():
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("millrace::")}
    return {name.removeprefix("millrace::") for name in names}


def test_opcheck():
    torch.manual_seed(20)
    given = samples()
    if device() != "cpu":  # what a GPU refuses
        for name in ("quantize", "dequantize", "linear_quantized", "experts", "experts_backward", "linear_cross_entropy",
                     "linear_cross_entropy_backward", "linear_fp8", "matmul_fp8"):
            given[name] = []
    missing = defined_operations() - set(given)
    assert not missing, f"no sample of {sorted(missing)}"
    # torch's check of the schema compares inputs before and after, which torch itself cannot do with float8.
    fewer = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for name, calls in given.items():
        for args in calls:
            named = {"test_utils": fewer} if name in ("attention_fp8", "attention_quantize", "matmul_fp8") else {}
            opcheck(getattr(ops, name).default, args, **named)


# Activations or weights are rounded on the way, and differences of what comes out are not small ones of what went in:
# their gradients are compared with float64 of the rounded numbers (test_quantized, kernels_training_test, kernels_lowbit_test).
ROUNDED = {"linear_quantized", "linear_packed", "lowbit_linear", "linear_fp8"}


def test_gradcheck():
    """Every gradient against differences of the operation itself, as exactly as float32 lets them be taken."""
    torch.manual_seed(23)
    recorded, given = set(mt._autograd.RECORDED), samples()
    assert ROUNDED < recorded and recorded < defined_operations()
    if device() != "cpu":
        recorded -= {"experts", "linear_cross_entropy"}  # a GPU refuses these, or their gradients
    for name in sorted(recorded - ROUNDED):
        for args in given[name]:

            def outputs(*args):
                made = getattr(ops, name)(*args)
                return tuple(x for x in (made if isinstance(made, tuple) else (made,)) if x.requires_grad)

            if not outputs(*args):
                raise AssertionError(f"{name}: a sample without a gradient")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of inputs that are not float64: this step is as wide as float32 wants
                many = sum(x.numel() for x in args if isinstance(x, torch.Tensor) and x.requires_grad) > 1000
                assert torch.autograd.gradcheck(outputs, args, eps=1e-2, atol=5e-3, rtol=5e-3, nondet_tol=0.0,
                                                fast_mode=many), name


def test_compile():
    torch.manual_seed(21)

    def block(x, w, q_weight, gate_weight, up_weight, targets):
        h, total = mt.add_rms_norm(x, x, w)
        heads = mt.rotary(mt.linear(h, q_weight).view(*h.shape[:-1], 4, 8), torch.arange(x.shape[1], device=x.device))
        y = mt.scaled_dot_product_attention(*(heads.transpose(1, 2),) * 3, is_causal=True).transpose(1, 2).flatten(2)
        z = total + mt.swiglu(mt.linear(y, gate_weight), mt.linear(y, up_weight))
        return mt.cross_entropy(mt.softmax(mt.gelu(z)), targets)

    inputs = [random(2, 6, 32), random(32), *(random(32, 32, scale=0.2) for _ in range(3))]
    targets = torch.randint(0, 32, (2, 6))
    want = block(*inputs, targets)
    d_want = torch.autograd.grad(want, inputs)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = compiled(*inputs, targets)
    for a, b in zip((got, *torch.autograd.grad(got, inputs)), (want, *d_want)):
        close("compiled", a, b.double(), F32, 32)
    longer = [random(2, 9, 32), *inputs[1:]]
    close("compiled, another length", compiled(*longer, torch.randint(0, 32, (2, 9))).isfinite().double(),
          torch.ones(()).double(), F32)


def test_inductor():
    """The same with torch's own code generator, whose compiling takes long: one short function."""
    compiled = torch.compile(lambda x, w: mt.rms_norm(x, w) * 2, fullgraph=True)
    x, w = random(3, 8), random(8)
    compare("inductor", compiled, lambda x, w: exact_rms(x, w) * 2, (x, w), F32)


def run_tests(tests):
    """Those that the command line names, or all of them: the status."""
    wanted = sys.argv[1:]
    if wanted[:1] == ["--device"]:
        torch.set_default_device(wanted[1])
        wanted = wanted[2:]
    chosen = {name: f for name, f in tests.items() if not wanted or any(w in name for w in wanted)}
    if not chosen:
        sys.exit(f"no test is called {wanted}: {', '.join(tests)}")
    failed = 0
    for name, function in chosen.items():
        start = time.perf_counter()
        try:
            function()
            print(f"{name}: passed, {time.perf_counter() - start:.1f} s", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"{name}: FAILED", flush=True)
    print(f"torch {torch.__version__} on {device()}: {len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_tests({name: f for name, f in globals().items() if name.startswith("test_")}))

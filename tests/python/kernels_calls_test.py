#!/usr/bin/env python3
"""How torch.ops.millrace.* are called: under autocast, for derivatives that are not there, with meta tensors and
subclasses, from threads and forks. Against torch in float64.

  tests/python/kernels_calls_test.py [--device cuda] [NAME ...]

Run by tests/python/kernels_test.py with the package on the path.
"""

import sys

import torch
import torch.nn.functional as F

import millrace_kernels.torch as mt
from kernels_torch_test import BF16, F32, close, device, exact_rotary, ops, raises, random, run_tests


def test_autocast():
    x, w = random(3, 16), random(8, 16)
    with torch.autocast(device(), dtype=BF16):
        y = mt.linear(x, w)
        assert y.dtype == BF16 and mt.rms_norm(x).dtype == F32
        out = mt.attention(*(random(1, 3, 2, 16) for _ in range(3)))
        assert out.dtype == BF16
    y.sum().backward()
    assert x.grad.dtype == F32 and w.grad.dtype == F32
    close("autocast", y, F.linear(x.to(BF16).double(), w.to(BF16).double()), BF16)


def test_derivatives_that_are_not_there():
    """Refused: torch would take them for zero."""
    x, w, q = random(3, 8), random(8), random(1, 4, 2, 8)
    heads = q.transpose(1, 2)
    targets = torch.tensor([1, 2, 3])

    def squares(f, *args):
        first = torch.autograd.grad(f(*args).pow(2).sum(), args, create_graph=True)
        return sum((g**2).sum() for g in first)

    def twice(f, *args):
        return torch.autograd.grad(squares(f, *args) + sum(a.sum() for a in args), args)

    def forward(f, *args):
        with torch.autograd.forward_ad.dual_level():
            return f(*(torch.autograd.forward_ad.make_dual(a.detach(), torch.ones_like(a)) for a in args))

    for f, args in ((mt.rms_norm, (x, w)), (mt.layer_norm, (x, w)), (lambda x: mt.add_rms_norm(x, x)[0], (x,)),
                    (mt.gelu, (x,)), (mt.swiglu, (x, x)), (mt.softmax, (x,)), (ops.softmax.default, (x,)),
                    (lambda x: mt.cross_entropy(x, targets), (x,)), (lambda q: mt.attention(q, q, q), (q,)),
                    (lambda q: mt.attention(q, q, q, sinks=torch.zeros(2)), (q,)),
                    (lambda q: mt.scaled_dot_product_attention(q, q, q), (heads,))):
        raises(NotImplementedError, "has no second derivative", twice, f, *args)
        assert torch.autograd.grad(f(*args).sum(), args, create_graph=True)[0].shape == args[0].shape
        if f is not ops.softmax.default:
            raises(NotImplementedError, "in forward mode", forward, f, *args)
    for name, f, plain, args in (("linear", mt.linear, F.linear, (x, random(5, 8))),
                                 ("rotary", lambda q: mt.rotary(q, torch.arange(4)),
                                  lambda q: exact_rotary(q, torch.arange(4)[None], 10000.0**-(torch.arange(4) / 4), False),
                                  (q,))):
        for got, want in zip(twice(f, *args), twice(plain, *(a.detach().double().requires_grad_() for a in args))):
            close(f"{name}, its second derivative", got, want, F32, 64)


def test_same_bits_without_a_gradient():
    """What is called where no gradient is wanted is another operation, or another way: it computes the same."""
    torch.manual_seed(30)
    q, k, v, sinks = random(2, 5, 4, 24), random(2, 9, 2, 24), random(2, 9, 2, 12), random(4)
    x, r, w, b, m = random(3, 40), random(3, 40), random(40), random(40), random(7, 40)
    heads = [t.transpose(1, 2) for t in (random(2, 6, 3, 16), random(2, 6, 3, 16), random(2, 6, 3, 16))]
    targets = torch.tensor([3, -100, 6])
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 9])
    blocks = torch.arange(2 * 4 + 1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), 64, 64
    for name, f in {
            "attention": lambda: mt.attention(q, k, v), "causal": lambda: mt.attention(q, k, v, causal=True),
            "window": lambda: mt.attention(q, k, v, causal=True, window=[3, 5], softcap=2.0, scale=0.3),
            "sinks": lambda: mt.attention(q, k, v, sinks=sinks), "scale 0": lambda: mt.attention(q, k, v, scale=0),
            "odd heads": lambda: mt.attention(q[..., :20], k[..., :20], v[..., :9], sinks=sinks, causal=True),
            "ragged": lambda: mt.attention(q[0], k[0], v[0], cu_q=cu_q, cu_k=cu_k, sinks=sinks, causal=True),
            "ragged, odd heads": lambda: mt.attention(q[0, ..., :20], k[0, ..., :20], v[0, ..., :9], cu_q=cu_q, cu_k=cu_k),
            "ragged, lse": lambda: mt.attention(q[0], k[0], v[0], cu_q=cu_q, cu_k=cu_k, return_lse=True)[0],
            "odd heads, lse": lambda: mt.attention(q[..., :20], k[..., :20], v[..., :9], return_lse=True)[0],
            "blocks": lambda: mt.attention(q, k, v, blocks=blocks, window=(4, 2)),
            "sdpa": lambda: mt.scaled_dot_product_attention(*heads, is_causal=True),
            "add_rms_norm": lambda: torch.stack(mt.add_rms_norm(x, r, w, 1e-3, 1.0)),
            "add_layer_norm": lambda: torch.stack(mt.add_layer_norm(x, r, w, b, 1e-3)),
            "rms_norm": lambda: mt.rms_norm(x, w, 1e-3, 1.0), "layer_norm": lambda: mt.layer_norm(x, w, b, 1e-3),
            "linear": lambda: mt.linear(x, m, m[:, 0]), "softmax": lambda: mt.softmax(x, 2.0),
            "cross_entropy": lambda: mt.cross_entropy(mt.linear(x, m), targets)}.items():
        recorded = f()
        with torch.no_grad():
            plain = f()
        assert recorded.requires_grad and not plain.requires_grad, f"{name}: what has a gradient"
        assert torch.equal(recorded, plain), f"{name}: without a gradient it is off by {(recorded - plain).abs().max():.3g}"


def test_whole_numbers_of_every_type():
    torch.manual_seed(31)
    logits, table = random(4, 9), random(9, 6)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        tokens = torch.tensor([8, 0, 3, 3], dtype=dtype)
        if dtype.is_signed:
            close(f"cross_entropy {dtype}", mt.cross_entropy(logits, tokens, ignore_index=3),
                  F.cross_entropy(logits.double(), tokens.long(), ignore_index=3), F32)
        close(f"embedding {dtype}", mt.embedding(tokens, table), table.double()[tokens.long()], F32)
        apart = torch.stack((tokens, tokens), 1)[:, 0]  # every second element
        assert torch.equal(mt.embedding(apart, table), mt.embedding(tokens, table))
        q = random(4, 2, 8, grad=False)
        assert torch.equal(mt.rotary(q, tokens), mt.rotary(q, tokens.to(torch.int32)))
    raises(TypeError, "tokens has dtype torch.float32", mt.embedding, torch.ones(2), table)
    cu = torch.tensor([0, 1, 4])
    rows = random(4, 2, 8)
    assert torch.equal(mt.attention(rows, rows, rows, cu_q=cu, cu_k=cu),
                       mt.attention(rows, rows, rows, cu_q=cu.int(), cu_k=cu.int()))


def test_reductions():
    torch.manual_seed(32)
    logits, targets = random(5, 7), torch.tensor([1, -100, 6, 0, -100])
    losses = ((mt.cross_entropy, (logits,)), (mt.linear_cross_entropy, (random(5, 6), random(7, 6))))
    for f, args in losses[:2 if device() == "cpu" else 1]:  # the head's gradient is a CPU's alone
        each = f(*args, targets, reduction="none")
        assert each.shape == (5,) and float(each[1].detach()) == 0.0
        for name, want in (("sum", each.double().sum()), ("mean", each.double().sum() / 3)):
            got = f(*args, targets, reduction=name)
            assert got.shape == () and got.dtype == F32
            close(name, got, want, F32)
            whole = torch.autograd.grad(3.0 * got, args, retain_graph=True)
            rows = torch.autograd.grad(3.0 * want.float(), args, retain_graph=True)
            for g, r in zip(whole, rows):
                close(f"{name}, its gradient", g, r.double(), F32)
        assert f(*args, torch.full((5,), -100)).isnan(), "the mean of no targets is torch's"
        assert float(f(*args, torch.full((5,), -100), reduction="sum").detach()) == 0.0
        empty = [a[:0] if a.shape[0] == 5 else a for a in args]
        assert f(*empty, targets[:0]).isnan() and f(*empty, targets[:0], reduction="none").shape == (0,)


def test_what_is_kept_between_calls():
    """Frequencies are made once: not of a kind that later calls cannot use."""
    x, positions, logits = random(4, 2, 24), torch.arange(4), torch.randn(2, 5)
    with torch.inference_mode():
        mt.rotary(x.detach(), positions, base=777.0)
    mt.rotary(x, positions, base=777.0).sum().backward()
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = mt.rotary(torch.empty(4, 2, 24, device=device()), torch.zeros(4, dtype=torch.int32, device=device()), base=77.0)
        assert fake.shape == (4, 2, 24)
    close("frequencies", mt.rotary(x, positions, base=77.0),
          exact_rotary(x.double(), positions, 77.0**-(torch.arange(12) / 12), False), F32)
    one = mt.sample(logits, temperature=0.0)
    assert torch.equal(one, mt.sample(logits, temperature=[0.0, 0.0], top_k=torch.tensor(0), top_p=1, min_p=torch.zeros(2)))


def test_torch_s_own_ways_with_gradients():
    """Recomputing, saving elsewhere, changing what is saved, going backward twice; messages name the operation."""
    from torch.utils.checkpoint import checkpoint
    x, q = random(2, 8), random(1, 3, 2, 8)
    plain = torch.autograd.grad(mt.swiglu(mt.rms_norm(x), x).sum(), x)[0]
    again = checkpoint(lambda x: mt.swiglu(mt.rms_norm(x), x), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.sum(), x)[0], plain)
    with torch.autograd.graph.save_on_cpu():
        out = mt.attention(q, q, q).sum()
    first = torch.autograd.grad(out, q, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, q)[0], first)
    k = random(1, 3, 2, 8, grad=False)
    out = mt.attention(q, k, k)
    k.zero_()
    raises(RuntimeError, "modified by an inplace operation", out.sum().backward)
    out = mt.attention(q, q, q)
    assert "millrace_attention_dense_lse" in repr(out.grad_fn)
    out.mul_(2)
    raises(RuntimeError, "modified by an inplace operation", out.sum().backward)


def test_meta_and_subclasses():
    with torch.device("meta"):
        assert mt.attention(torch.empty(2, 3, 4, 16), torch.empty(2, 5, 2, 16), torch.empty(2, 5, 2, 8)).shape == (
            2, 3, 4, 8)
        assert mt.rms_norm(torch.empty(2, 8)).shape == (2, 8)
    with torch.inference_mode():
        close("inference mode", mt.silu(torch.ones(3)), F.silu(torch.ones(3).double()), F32)


def test_threads_and_fork():
    import os
    import threading
    x = torch.randn(64, 512)
    want = mt.softmax(x)
    wrong = []

    def work():
        for _ in range(50):
            if not torch.equal(mt.softmax(x), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, "another result in a thread"
    if device() != "cpu":
        return  # CUDA does not go on in a forked process
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(mt.softmax(x), want) else 1)
    assert os.waitpid(child, 0)[1] == 0, "a forked process computes something else"


if __name__ == "__main__":
    sys.exit(run_tests({name: f for name, f in globals().items() if name.startswith("test_")}))

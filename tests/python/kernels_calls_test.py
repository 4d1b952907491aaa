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

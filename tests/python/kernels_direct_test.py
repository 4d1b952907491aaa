#!/usr/bin/env python3
"""Calls past torch's dispatcher: the same bits as through it for every operation, whoever looks on sees them, nothing is
kept that should go, and what torch would refuse is refused.

  tests/python/kernels_direct_test.py [--device cuda] [NAME ...]

Run by tests/python/kernels_test.py with the package on the path.
"""

import gc
import sys
import weakref

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import millrace_kernels.torch as mt
from kernels_torch_test import BF16, F32, close, defined_operations, device, ops, raises, random, run_tests, samples
from millrace_kernels.torch._direct_call import _function_modes_matter, _module, direct

PYTHON_S = {"experts_backward", "weight_unpack", "linear_fp8"}  # operations that are written in Python
ONLY_CPU = ("quantize", "dequantize", "linear_quantized", "experts", "experts_backward", "linear_cross_entropy",
            "linear_cross_entropy_backward", "linear_fp8", "matmul_fp8")


class Handed(Exception):
    """A call did not go past the dispatcher."""


def handed_on(*args):
    raise Handed


def way_of(name, results=None):
    return direct(name, range(32), results, handed_on)


def goes_directly(name, *args):
    try:
        way_of(name)(*args)
    except Handed:
        return False
    return True


def as_bytes(x):
    return x.reshape(-1).view(torch.uint8)


def detached(args):
    return tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)


def test_every_operation_gives_the_same():
    torch.manual_seed(40)
    given = samples()
    assert set(given) == defined_operations(), "an operation has no sample, or a sample no operation"
    for name, calls in given.items():
        if device() != "cpu" and name in ONLY_CPU:
            continue
        at_once, through = way_of(name), getattr(ops, name)
        assert (at_once is handed_on) == (name in PYTHON_S), f"{name}: which way there is"
        for args in map(detached, calls if at_once is not handed_on else ()):
            got, want = at_once(*args), through(*args)
            for g, w in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (got, want)), strict=True):
                assert g.dtype == w.dtype and g.shape == w.shape and g.stride() == w.stride(), name
                assert torch.equal(as_bytes(g), as_bytes(w)), f"{name}: other bits"


def test_results():
    x = random(3, 8, grad=False)
    y, rstd = way_of("rms_norm")(x)
    assert torch.equal(way_of("rms_norm", 1)(x), y)
    assert [t.shape for t in way_of("add_layer_norm", 2)(x, x)] == [x.shape] * 2
    assert rstd.shape == (3,) and not y.requires_grad
    with torch.inference_mode():
        assert way_of("activation")(x, "silu").is_inference()


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Logged(torch.Tensor):
    seen = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Softmax(torch.nn.Module):
    def forward(self, x):
        return mt.softmax(x)


def test_who_looks_on_sees():
    x = random(3, 8, grad=False)
    if device() == "cpu":
        assert goes_directly("softmax", x)
    before = torch.get_default_device()
    torch.set_default_device(device())
    assert not _function_modes_matter() and goes_directly("softmax", x), "a default device is nobody"
    torch.set_default_device(before if device() == "cpu" else device())
    with Seen() as seen:
        assert not goes_directly("softmax", x)
        mt.softmax(x)
    assert "millrace::softmax" in seen.names, seen.names
    with Asked() as asked:
        assert _function_modes_matter() and not goes_directly("softmax", x)
        mt.softmax(x)
    assert asked.count > 0
    own = x.as_subclass(Logged)
    assert not goes_directly("softmax", own) and isinstance(mt.softmax(own), Logged) and Logged.seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as told:
        mt.rms_norm(x)
    assert any(event.key.startswith("millrace::") for event in told.key_averages())
    with torch.autocast(device(), dtype=BF16):
        assert not goes_directly("softmax", x)
    traced = torch.jit.trace(lambda x: mt.softmax(x), x)
    assert "millrace::softmax" in str(traced.graph)
    exported = torch.export.export(Softmax(), (x,), strict=False)
    assert "millrace.softmax" in str(exported.graph), exported.graph
    with torch.autograd.forward_ad.dual_level():
        assert not goes_directly("softmax", x)
    under_vmap = []
    torch.func.vmap(lambda row: (under_vmap.append(goes_directly("softmax", row)), row)[1])(x)
    assert under_vmap == [False]


def test_gradients_are_handed_on():
    x, w = random(3, 8), random(8)
    assert not goes_directly("norm_plain", x.detach(), w) and goes_directly("norm_plain", x.detach(), w.detach())
    with torch.no_grad():
        assert goes_directly("norm_plain", x, torch.nn.Parameter(w.detach()))
    assert mt.rms_norm(x, w).requires_grad and mt.rms_norm(x.detach(), w).requires_grad
    assert not mt.rms_norm(x.detach(), w.detach()).requires_grad


def test_last_dimensions_of_a_step():
    way = direct("attention_dense", (0, 1, 2), None, handed_on, 3, 8)
    eights, odd = random(1, 2, 2, 16, grad=False), random(1, 2, 2, 12, grad=False)
    assert torch.equal(way(eights, eights, eights), ops.attention_dense(eights, eights, eights))
    for args in ((odd, odd, eights), (eights, eights, odd), (eights, odd, eights), (eights[0, 0, 0, 0],) * 3):
        raises(Handed, "", way, *args)
    raises(ValueError, "stepped", direct, "softmax", (), None, handed_on, 2)  # its second argument is a number
    raises(ValueError, "stepped", direct, "softmax", (), None, handed_on, 1, 0)


def test_unusual_tensors():
    """Numbers of the other sign than stored, no storage, no strides: torch's to convert or refuse."""
    z = torch.randn(3, 8, 2, dtype=F32)
    negated = torch.view_as_complex(z).conj().imag
    assert negated.is_neg() and not goes_directly("activation", negated, "silu")
    close("negated", mt.silu(negated), F.silu(-z[..., 1].double()), F32)
    meta = torch.empty(3, 8, device="meta")
    assert not goes_directly("softmax", meta) and mt.softmax(meta).device.type == "meta"
    raises(Exception, "", mt.softmax, torch.eye(3).to_sparse())
    raises(Exception, "", mt.softmax, torch.eye(3).to_sparse_csr())
    for wrong in (None, 5, "x", [1.0]):
        raises(Exception, "", mt.softmax, wrong)
    raises(RuntimeError, "unsupported dtype", mt.softmax, torch.ones(2, 2, dtype=torch.complex64))
    raises(Exception, "", mt.softmax, random(3, 8, grad=False), "a")
    raises(Exception, "", mt.rms_norm, random(3, 8, grad=False), None, 10**400)
    raises(Exception, "", ops.route, random(3, 8, grad=False), 1 << 80)
    raises(Exception, "", lambda: way_of("softmax")())
    raises(Handed, "", way_of("softmax"), random(2, 2, grad=False), 1.0, 1.0)


def test_errors_are_the_same():
    x = random(3, 8, grad=False)
    for name, args in (("norm_plain", (x, x)), ("activation", (x, "relu")), ("route", (x, 9)),
                       ("linear", (x, x[:, :5])), ("softmax", (x.double(),))):
        messages = []
        for call in (way_of(name), getattr(ops, name)):
            try:
                call(*args)
            except RuntimeError as error:
                messages.append(str(error).splitlines()[0])
        assert len(messages) == 2 and messages[0] == messages[1] and name in messages[0], messages


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_nothing_is_kept():
    x, cu = random(4, 2, 16, grad=False), torch.tensor([0, 2, 4], dtype=torch.int32)
    calls = (lambda: mt.silu(x), lambda: mt.attention(x, x, x, cu_q=cu, cu_k=cu, sinks=torch.zeros(2)),
             lambda: mt.attention(x[None, ..., :12], x[None, ..., :12], x[None, ..., :12]), lambda: mt.route(x[:, 0], 3), lambda: ops.activation(x, "silu"), lambda: mt.rms_norm(x, x[0, 0]))
    wrong = (lambda: ops.activation(x, "relu"), lambda: mt.rms_norm(x, x[0]), lambda: mt.softmax(x.double()))

    def many(count):
        for _ in range(count):
            for call in calls:
                call()
            for call in wrong:
                raises(RuntimeError, "", call)

    many(300)
    gc.collect()
    before = resident_bytes()
    many(6000)
    gc.collect()
    grown = resident_bytes() - before
    assert grown < 1 << 20, f"{grown} bytes more after {6000 * (len(calls) + len(wrong))} calls"
    gone = weakref.ref(mine := torch.randn(3, 8))
    made = mt.silu(mine)
    out = weakref.ref(made)
    del mine, made
    assert gone() is None and out() is None


if __name__ == "__main__":
    sys.exit(run_tests({name: f for name, f in globals().items() if name.startswith("test_")}))

#!/usr/bin/env python3
"""Every function of millrace_kernels.torch as torch's own tools see it: compiled without a break, at lengths of its own
too; on meta tensors; under autocast; under torch.func's transforms.

  tests/python/kernels_functions_test.py [--device cuda] [NAME ...]

Run by tests/python/kernels_test.py with the package on the path.
"""

import functools
import sys

import torch
import torch.nn.functional as F

import millrace_kernels.torch as mt
from kernels_torch_test import BF16, F32, close, device, exact_rms, random, raises, run_tests

# What prepares weights or says how, once and before a model runs: not called in what is compiled.
PREPARE = {"PackedWeight", "lowbit_quantize", "pack", "quantize_", "register_attention", "set_fallback"}
ONLY_CPU = {"QuantizedLinear", "dequantize", "experts", "experts of bytes", "linear_cross_entropy", "linear_fp8", "quantize"}
IN_AUTOCAST_S_TYPE = {"attention", "attention, ragged", "attention of blocks", "attention_paged", "linear", "linear_fp8",
                      "scaled_dot_product_attention"}


def words(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def cases(batch=3):
    """Name -> (function of tensors, those tensors). The first has `batch` rows in front; others fit it. The modules have
    the same weights every time."""
    torch.manual_seed(7)
    four = mt.LowBitLinear(torch.nn.Linear(128, 64, device=device()), "nvfp4")
    eight = torch.nn.Linear(32, 24)
    torch.manual_seed(8 + batch)
    q, k, v = random(batch, 5, 4, 16), random(batch, 7, 2, 16), random(batch, 7, 2, 16)
    heads = random(batch, 4, 5, 16)
    x, r, w, b = random(batch, 32), random(batch, 32), random(32), random(32)
    m, scores, targets = random(24, 32), random(batch, 4), words(*(i % 24 for i in range(batch)), dtype=torch.int64)
    rows, cu = random(2 * batch, 2, 16), torch.arange(0, 2 * batch + 1, 2, dtype=torch.int32)
    blocks = torch.arange(4 * batch + 1, dtype=torch.int32), torch.zeros(4 * batch, dtype=torch.int32)
    pool = random(4, 16, 2, 16, grad=False)
    packed = mt.pack(m.detach())
    gate, up, down = (random(4, 32, 32) for _ in range(3))
    bytes_of = [mt.quantize(t.detach().cpu(), "q8_0")[0] for t in (gate, up, down)] if device() == "cpu" else []
    packed_experts = [mt.pack(t.detach()) for t in (gate, up, down)]
    weights, chosen = torch.full((batch, 2), 0.5), words(*([0, 2] * batch)).view(batch, 2)
    seed, drawn = words(3, 4, dtype=torch.int64).cpu(), torch.rand(batch, dtype=torch.float64, device="cpu")
    made = {
        "attention": (lambda q, k, v, s: mt.attention(q, k, v, causal=True, window=(3, -1), sinks=s), q, k, v, random(4)),
        "attention, ragged": (lambda x, cu: mt.attention(x, x, x, cu_q=cu, cu_k=cu, max_q=2, max_k=2), rows, cu),
        "attention of blocks": (lambda q, starts, columns: mt.attention(q, q, q, blocks=(starts, columns, 64, 64)), q, *blocks),
        "attention_paged": (mt.attention_paged, q.detach(), pool, pool, torch.zeros(batch, 2, dtype=torch.int32),
                            torch.full((batch,), 20, dtype=torch.int32)),
        "scaled_dot_product_attention": (lambda q: mt.scaled_dot_product_attention(q, q, q, is_causal=True), heads),
        "rms_norm": (mt.rms_norm, x, w), "layer_norm": (mt.layer_norm, x, w, b),
        "add_rms_norm": (mt.add_rms_norm, x, r, w), "add_layer_norm": (mt.add_layer_norm, x, r, w, b),
        "rotary": (mt.rotary, q, torch.arange(5)),
        "gelu": (lambda x: mt.gelu(x, "tanh"), x), "silu": (mt.silu, x), "swiglu": (mt.swiglu, x, r),
        "geglu": (mt.geglu, x, r), "clamped_swiglu": (mt.clamped_swiglu, x, r), "softmax": (mt.softmax, x),
        "dropout": (lambda x, seed: mt.dropout(x, 0.3, seed=seed), x, seed),
        "cross_entropy": (mt.cross_entropy, x, targets),
        "linear_cross_entropy": (mt.linear_cross_entropy, x, m, targets),
        "embedding": (mt.embedding, targets, m), "linear": (mt.linear, x, m, random(24)),
        "linear_fp8": (mt.linear_fp8, x, m, random(24)),
        "quantize_fp8": (mt.quantize_fp8, x.detach()),
        "quantize": (lambda x: mt.quantize(x, "q8_0")[0], x.detach()),
        "dequantize": (lambda codes: mt.dequantize(codes, "q8_0"), *bytes_of[:1]),
        "packed_linear": (lambda x, p, b: mt.packed_linear(x, mt.PackedWeight(p, "f32", (24, 32)), b), x, packed.packed,
                          random(24)),
        "route": (lambda s: mt.route(s, 2)[::-1], scores),
        "experts": (lambda x, c, w, *e: mt.experts(x, c, w, *e), x, chosen, weights.clone().requires_grad_(), gate, up, down),
        "experts of bytes": (lambda x, c, w, *e: mt.experts(x, c, w, *e, type="q8_0"), x, chosen, weights, *bytes_of),
        "experts, packed": (lambda x, c, w, *e: mt.experts(x, c, w, *(mt.PackedWeight(p, "f32", (4, 32, 32)) for p in e)),
                            x.detach(), chosen, weights, *(p.packed for p in packed_experts)),
        "sample": (lambda x, u: mt.sample(x, top_k=3, top_p=0.9, uniform=u), x.detach(), drawn),
        "LowBitLinear": (four, random(batch, 128)),
    }
    if device() == "cpu":
        made["QuantizedLinear"] = (mt.QuantizedLinear(eight, "q8_0"), x)
        return made
    return {name: case for name, case in made.items() if name not in ONLY_CPU}


def outputs(made):
    return made if isinstance(made, tuple) else (made,)


def gradients(f, args):
    """Results, and the gradients of their sum that there are."""
    made = outputs(f(*args))
    total = [y.float().pow(2).sum() for y in made if y.requires_grad]
    leaves = [a for a in args if a.requires_grad]
    return (*made, *(torch.autograd.grad(sum(total), leaves) if total else ()))


def same(name, got, want):
    assert len(got) == len(want), f"{name}: {len(got)} results, expected {len(want)}"
    for i, (g, w) in enumerate(zip(got, want)):
        assert g.dtype == w.dtype and g.shape == w.shape, f"{name}: {g.dtype} {list(g.shape)}, expected {w.dtype} {list(w.shape)}"
        assert torch.equal(g.reshape(-1).view(torch.uint8), w.reshape(-1).view(torch.uint8)), f"{name}: result {i} has other bits"


def test_every_function_is_here():
    named = {name.split(",")[0].split(" of ")[0] for name in cases()} | (set() if device() == "cpu" else ONLY_CPU)
    public = set(mt.__all__) - PREPARE
    assert named == public, f"{sorted(named ^ public)} is in one of them alone"


def test_compiled_whole():
    """torch.compile(fullgraph=True), forward and backward, the same bits; then of another batch, by one dynamic graph."""
    for name in cases():
        torch.compiler.reset()
        compiled = None
        for batch in (3, 5, 6):  # the second time torch makes sizes symbols, and the third it must not look again
            f, *args = cases(batch)[name]
            compiled = compiled or torch.compile(getattr(f, "forward", f), fullgraph=True, backend="aot_eager")
            torch._dynamo.config.error_on_recompile = batch == 6
            try:
                got = gradients(compiled, args)
            finally:
                torch._dynamo.config.error_on_recompile = False
            same(f"{name}, batch {batch}", got, gradients(f, args))


def test_meta():
    """Shapes and types without numbers."""
    for name, (f, *args) in cases().items():
        want = outputs(f(*args))
        on_meta = [a if name in ("dropout", "sample") and a.dtype in (torch.int64, torch.float64) else a.detach().to("meta")
                   for a in args]
        if isinstance(f, torch.nn.Module):
            f = f.to("meta")
        for g, w in zip(outputs(f(*on_meta)), want, strict=True):
            assert g.device.type == "meta" and g.dtype == w.dtype and g.shape == w.shape, f"{name}: {g.dtype} {g.shape}"


def test_autocast():
    """Products and attention in autocast's type, the rest in its own; every gradient in the type of what it is of."""
    for name, (f, *args) in cases().items():
        want = outputs(f(*args))
        with torch.autocast(device(), dtype=BF16):
            got = outputs(f(*args))
        for g, w in zip(got, want, strict=True):
            kind = BF16 if name in IN_AUTOCAST_S_TYPE and w.is_floating_point() and g is got[0] else w.dtype
            assert g.dtype == kind, f"{name}: {g.dtype}, expected {kind}"
            if w.is_floating_point() and w.dtype.itemsize > 1:
                close(f"{name} under autocast", g, w.double(), BF16, 16)
        leaves = [a for a in args if a.requires_grad]
        total = [y.float().sum() for y in got if y.requires_grad]
        for a, d in zip(leaves, torch.autograd.grad(sum(total), leaves) if total else ()):
            assert d.dtype == a.dtype, f"{name}: a gradient is {d.dtype}, expected {a.dtype}"


def test_func_grad():
    """torch.func.grad and vjp are what backward() gives; a second derivative is refused there as well."""
    for name, (f, *args) in cases().items():
        where = tuple(i for i, a in enumerate(args) if a.requires_grad)
        if not where:
            continue

        def total(*args, f=f):
            return sum(y.float().pow(2).sum() for y in outputs(f(*args)) if y.is_floating_point())

        want = torch.autograd.grad(total(*args), [args[i] for i in where])
        plain = [a.detach() for a in args]
        same(f"torch.func.grad of {name}", torch.func.grad(total, where)(*plain), want)
        one, = (torch.func.vjp(lambda x: total(*plain[:where[0]], x, *plain[where[0] + 1:]), plain[where[0]])[1](
            torch.ones(())))
        same(f"torch.func.vjp of {name}", (one,), want[:1])
    x, w = random(3, 8, grad=False), random(8, grad=False)
    twice = torch.func.jacrev(torch.func.jacrev(lambda x: mt.rms_norm(x, w).pow(3).sum()))
    raises(NotImplementedError, "millrace::rms_norm has no second derivative", twice, x)
    raises(NotImplementedError, "forward mode", torch.func.hessian(lambda x: mt.rms_norm(x, w).pow(3).sum()), x)
    want = torch.func.jacrev(torch.func.jacrev(lambda m: F.linear(x.double(), m).pow(3).sum()))(w[None].double())
    close("jacrev twice", torch.func.jacrev(torch.func.jacrev(lambda m: mt.linear(x, m).pow(3).sum()))(w[None]), want, F32, 64)
    raises(NotImplementedError, "in forward mode", torch.func.jvp, mt.silu, (x,), (x,))
    with torch.autocast(device(), dtype=BF16):
        d = torch.func.grad(lambda m: mt.linear(x, m).float().pow(2).sum())(random(4, 8, grad=False))
    assert d.dtype == F32


def test_vmap():
    """Each example by itself gives the same bits; gradients of every example, and of a model's parameters."""
    if device() != "cpu":
        return  # the library's operations are called for each example, and tensors of a batch lie where they lie
    for name, (f, *args) in cases().items():
        if name == "attention, ragged" or name.startswith("quantize") or isinstance(f, torch.nn.Module):
            continue
        args = [a.detach() for a in args]
        at = 0
        pair = torch.stack((args[at], args[at].flip(0)))
        mapped = torch.func.vmap(f, (0, *(None,) * (len(args) - 1)))
        each = [outputs(f(one, *args[1:])) for one in pair]
        same(f"vmap of {name}", outputs(mapped(pair, *args[1:])), [torch.stack(both) for both in zip(*each)])
    x, w = random(4, 3, 8, grad=False), random(8, grad=False)

    def loss(norm, w, x):
        return norm(x, w).pow(2).sum()

    got = torch.func.vmap(torch.func.grad(functools.partial(loss, mt.rms_norm)), (None, 0))(w, x)
    want = torch.func.vmap(torch.func.grad(functools.partial(loss, exact_rms)), (None, 0))(w.double(), x.double())
    close("a gradient of every example", got, want, F32, 32)
    own = random(4, 8)
    got = torch.autograd.grad(torch.func.vmap(mt.rms_norm)(x, own).pow(2).sum(), own)[0]
    want = torch.stack([torch.autograd.grad(mt.rms_norm(x[i], own[i]).pow(2).sum(), own)[0][i] for i in range(4)])
    close("a gradient through vmap", got, want.double(), F32, 32)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            return mt.gelu(mt.linear(mt.rms_norm(x, self.scale), self.inside.weight, self.inside.bias))

    model = Block()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).pow(2).sum()

    many = torch.func.vmap(torch.func.grad(of_one), (None, 0))(parameters, x)
    for i in range(4):
        alone = torch.autograd.grad(model(x[i]).pow(2).sum(), list(model.parameters()))
        for (name, _), d in zip(model.named_parameters(), alone):
            close(f"gradient of {name} by example {i}", many[name][i], d.double(), F32, 32)


def test_exported():
    """torch.export keeps the operations in the graph, and what is loaded gives the same."""
    for name in ("attention", "rms_norm", "swiglu", "linear", "rotary"):
        f, *args = cases()[name]

        class Module(torch.nn.Module):
            def forward(self, *args, f=f):
                return f(*args)

        plain = tuple(a.detach() for a in args)
        program = torch.export.export(Module(), plain)
        assert any("millrace" in str(node.target) for node in program.graph.nodes), f"{name}: {program.graph}"
        same(f"{name}, exported", outputs(program.module()(*plain)), outputs(f(*plain)))


if __name__ == "__main__":
    sys.exit(run_tests({name: f for name, f in globals().items() if name.startswith("test_")}))

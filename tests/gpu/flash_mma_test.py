#!/usr/bin/env python3
"""The mma.sync attention kernels against torch in float64: layouts x masks x head sizes x types, odd lengths (0 and 1
among them), forward and backward. Outputs and workspace are poisoned, and what lies between rows must stay poison.

    flash_mma_test.py LIBRARY [--bench] [--types f32,f16,bf16] [--cases N]

LIBRARY: a shared library of tests/gpu/flash_mma_driver.cpp and kernels/cuda/attention/flash_*_mma.cu. Without torch or
a GPU: SKIPPED, status 0.
"""

import ctypes
import math
import random
import sys

try:
    import torch
except ImportError:
    torch = None

F32, F16, BF16 = 0, 1, 2
TYPES = {"f32": F32, "f16": F16, "bf16": BF16}
# |x - oracle| / |oracle| of a whole tensor: operands and probabilities are rounded to 24, 11 or 8 bits.
# Where a row sees one key, d_q and d_k are what two equal numbers differ by.
BOUNDS = {"f32": (4e-6, 2e-4), "f16": (2e-3, 4e-3), "bf16": (1.2e-2, 2.5e-2)}  # forward, backward
POISON = 31744.0  # exact in all types


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("seq", ctypes.c_int64), ("head", ctypes.c_int64)]


class Blocks(ctypes.Structure):
    _fields_ = [("block_q", ctypes.c_int32), ("block_k", ctypes.c_int32), ("q_blocks", ctypes.c_int32),
                ("row_starts", ctypes.c_void_p), ("columns", ctypes.c_void_p)]


class Problem(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in
                ("type", "batch", "heads", "kv_heads", "head_dim", "value_dim", "max_q", "max_k")]
    _fields_ += [("cu_q", ctypes.c_void_p), ("cu_k", ctypes.c_void_p), ("pages", ctypes.c_void_p),
                 ("pages_stride", ctypes.c_int64), ("page_tokens", ctypes.c_int32), ("k_lengths", ctypes.c_void_p),
                 ("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("window_left", ctypes.c_int32),
                 ("window_right", ctypes.c_int32), ("sinks", ctypes.c_void_p), ("blocks", ctypes.POINTER(Blocks)),
                 ("q_scales", ctypes.c_void_p), ("k_scales", ctypes.c_void_p), ("v_scales", ctypes.c_void_p)]


class Gradients(ctypes.Structure):
    _fields_ = [("d_out", Tensor), ("d_q", Tensor), ("d_k", Tensor), ("d_v", Tensor), ("d_sinks", ctypes.c_void_p),
                ("deterministic", ctypes.c_int32)]


class Rows:
    """A tensor [batch, seq, heads, dim] (ragged: batch 1) in a poisoned buffer, with room between rows."""

    def __init__(self, batch, seq, heads, dim, dtype, order, fill=None):
        row = dim + 8
        sizes = {"b": batch, "s": seq, "h": heads}
        strides, step = {}, row
        for axis in reversed(order):  # "bsh" or "bhs": the last is the fastest
            strides[axis] = step
            step *= max(1, sizes[axis])
        self.buffer = torch.full((step + 8,), POISON, device="cuda", dtype=dtype)
        self.view = self.buffer.as_strided((batch, seq, heads, dim), (strides["b"], strides["s"], strides["h"], 1))
        if fill is not None:
            self.view.copy_(fill)
        self.c = Tensor(self.buffer.data_ptr(), strides["b"], strides["s"], strides["h"])

    def untouched(self):
        """Nothing but the rows was written."""
        copy = self.buffer.clone()
        copy.as_strided(self.view.shape, self.view.stride()).fill_(POISON)
        return bool((copy == POISON).all())


def mask_of(case, b, lq, lk):
    """[heads, lq, lk]: who sees whom."""
    i = torch.arange(lq, device="cuda")[:, None] + lk - lq
    j = torch.arange(lk, device="cuda")[None, :]
    seen = torch.ones(lq, lk, dtype=torch.bool, device="cuda")
    if case["left"] >= 0:
        seen &= j >= i - case["left"]
    if case["right"] >= 0:
        seen &= j <= i + case["right"]
    seen = seen[None].repeat(case["heads"], 1, 1)
    if case["blocks"]:
        block_q, block_k = case["blocks"]
        listed = case["listed"][b].to("cuda")  # [heads, q_blocks, k_blocks]
        wide = listed.repeat_interleave(block_q, 1).repeat_interleave(block_k, 2)
        seen &= wide[:, :lq, :lk]
    return seen


def oracle(case, q, k, v, sinks, b):
    """float64 out [lq, heads, value_dim] and lse [heads, lq] of one sequence; q, k, v [len, heads, dim]."""
    group = case["heads"] // case["kv_heads"]
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * case["scale"]
    if case["softcap"] > 0:
        scores = case["softcap"] * torch.tanh(scores / case["softcap"])
    scores = scores.masked_fill(~mask_of(case, b, q.shape[1], k.shape[1]), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[1], 1)], 2)
    if scores.shape[2] == 0:
        return torch.zeros(q.shape[1], q.shape[0], v.shape[2], dtype=torch.float64, device="cuda"), \
            torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device="cuda")
    lse = torch.logsumexp(scores, 2)
    p = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[:, :, None])[:, :, :k.shape[1]]
    return (p @ v).transpose(0, 1), lse


def error_of(x, expected):
    if expected.numel() == 0:
        return 0.0
    norm = expected.norm().item()
    difference = (x.double() - expected).norm().item()
    return difference / norm if norm > 0 else difference


class Case:
    """One call: its tensors, its problem, its oracle."""

    def __init__(self, case, seed):
        self.case = case
        torch.manual_seed(seed)
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[case["type"]]
        lengths_q, lengths_k = case["q"], case["k"]
        self.batch, self.paged = len(lengths_q), case["layout"] == "paged"
        self.ragged = case["layout"] in ("ragged", "paged")
        order = "bhs" if case["layout"] == "bhsd" else "bsh"
        heads, kv_heads, dim, vdim = case["heads"], case["kv_heads"], case["dim"], case["vdim"]
        case["scale"] = case.get("scale", 1 / math.sqrt(dim))
        shape_q = (1, sum(lengths_q)) if self.ragged else (self.batch, lengths_q[0])
        shape_k = (1, sum(lengths_k)) if self.ragged else (self.batch, lengths_k[0])
        draw = lambda rows, n, d: torch.randn(*rows, n, d, device="cuda", dtype=torch.float32)  # noqa: E731
        self.q = Rows(*shape_q, heads, dim, dtype, order, draw(shape_q, heads, dim) * 2)
        self.out = Rows(*shape_q, heads, vdim, dtype, order)
        self.d_out = Rows(*shape_q, heads, vdim, dtype, order, draw(shape_q, heads, vdim))
        self.k = Rows(*shape_k, kv_heads, dim, dtype, order, draw(shape_k, kv_heads, dim))
        self.v = Rows(*shape_k, kv_heads, vdim, dtype, order, draw(shape_k, kv_heads, vdim))
        self.lse = torch.full((max(1, heads * shape_q[0] * shape_q[1]),), POISON, device="cuda")
        self.sinks = torch.randn(heads, device="cuda") if case["sinks"] else None
        self.starts_q = [sum(lengths_q[:b]) for b in range(self.batch + 1)]
        self.starts_k = [sum(lengths_k[:b]) for b in range(self.batch + 1)]
        self.keep = []
        self.make_problem(dtype)

    def int32(self, values):
        self.keep.append(torch.tensor(values, dtype=torch.int32, device="cuda"))
        return self.keep[-1].data_ptr()

    def make_problem(self, dtype):
        c = self.case
        p = self.problem = Problem()
        p.type, p.batch, p.heads, p.kv_heads = TYPES[c["type"]], self.batch, c["heads"], c["kv_heads"]
        p.head_dim, p.value_dim, p.max_q, p.max_k = c["dim"], c["vdim"], max(c["q"]), max(c["k"])
        p.scale, p.softcap, p.window_left, p.window_right = c["scale"], c["softcap"], c["left"], c["right"]
        p.sinks = self.sinks.data_ptr() if self.sinks is not None else None
        if self.ragged:
            p.cu_q, p.cu_k = self.int32(self.starts_q), self.int32(self.starts_k)
        if self.paged:
            self.make_pages(p, dtype)
        if c["blocks"]:
            self.make_blocks(p)

    def make_pages(self, p, dtype):
        c, size = self.case, 16
        counts = [(n + size - 1) // size for n in c["k"]]
        order = list(range(sum(counts) + 3))
        random.Random(5).shuffle(order)
        stride = max(counts) + 1
        table = [[-1] * stride for _ in range(self.batch)]
        pool_k = Rows(len(order), size, c["kv_heads"], c["dim"], dtype, "bsh")
        pool_v = Rows(len(order), size, c["kv_heads"], c["vdim"], dtype, "bsh")
        for pool in (pool_k, pool_v):
            pool.view.fill_(math.nan)  # of other sequences
        for b in range(self.batch):
            for i in range(counts[b]):
                page = table[b][i] = order.pop()
                rows = min(size, c["k"][b] - i * size)
                at = self.starts_k[b] + i * size
                pool_k.view[page, :rows] = self.k.view[0, at:at + rows]
                pool_v.view[page, :rows] = self.v.view[0, at:at + rows]
        p.pages, p.pages_stride, p.page_tokens = self.int32(sum(table, [])), stride, size
        p.k_lengths, p.cu_k = self.int32(c["k"]), None
        self.pool_k, self.pool_v = pool_k, pool_v

    def make_blocks(self, p):
        c = self.case
        block_q, block_k = c["blocks"]
        q_blocks, k_blocks = -(-max(c["q"]) // block_q), -(-max(c["k"]) // block_k)
        generator = torch.Generator().manual_seed(3)
        c["listed"] = torch.rand(self.batch, c["heads"], q_blocks, k_blocks, generator=generator) < 0.4
        rows, columns = [0], []
        for listed in c["listed"].flatten(0, 2):
            columns += listed.nonzero().flatten().tolist()
            rows.append(len(columns))
        self.blocks = Blocks(block_q, block_k, q_blocks, self.int32(rows), self.int32(columns + [0]))
        p.blocks = ctypes.pointer(self.blocks)

    def sequence(self, rows, b, starts):
        return rows.view[0, starts[b]:starts[b + 1]] if self.ragged else rows.view[b]

    def lse_of(self, b):
        heads, n = self.case["heads"], self.case["q"][b]
        if self.ragged:
            return self.lse.view(heads, -1)[:, self.starts_q[b]:self.starts_q[b] + n]
        return self.lse[:self.batch * heads * n].view(self.batch, heads, n)[b] if n else self.lse[:0].view(heads, 0)

    def forward(self, library):
        k, v = (self.pool_k, self.pool_v) if self.paged else (self.k, self.v)
        call(library, library.flash_mma_forward(
            ctypes.byref(self.problem), ctypes.byref(self.q.c), ctypes.byref(k.c), ctypes.byref(v.c),
            ctypes.byref(self.out.c), ctypes.c_void_p(self.lse.data_ptr()), None))

    def check_forward(self):
        worst = 0.0
        for b in range(self.batch):
            of = lambda rows, starts: self.sequence(rows, b, starts).double()  # noqa: E731, B023
            sinks = self.sinks.double() if self.sinks is not None else None
            out, lse = oracle(self.case, of(self.q, self.starts_q), of(self.k, self.starts_k),
                              of(self.v, self.starts_k), sinks, b)
            worst = max_nan(worst, error_of(self.sequence(self.out, b, self.starts_q), out))
            got = self.lse_of(b).double()
            if not bool(((got == -math.inf) == (lse == -math.inf)).all()):
                return math.inf
            finite = lse != -math.inf
            worst = max_nan(worst, error_of(got[finite] - lse[finite] + 1, torch.ones_like(lse[finite])))
        return worst if self.out.untouched() else math.inf

    def backward(self, library):
        c = self.case
        dtype, order = self.q.view.dtype, "bhs" if c["layout"] == "bhsd" else "bsh"
        make = lambda like: Rows(*like.view.shape, dtype, order)  # noqa: E731
        self.d_q, self.d_k, self.d_v = make(self.q), make(self.k), make(self.v)
        self.d_sinks = torch.full((c["heads"],), POISON, device="cuda")
        size = library.flash_mma_backward_workspace(ctypes.byref(self.problem))
        workspace = torch.full((size // 4 + 64,), math.nan, device="cuda")
        g = Gradients(self.d_out.c, self.d_q.c, self.d_k.c, self.d_v.c,
                      self.d_sinks.data_ptr() if self.sinks is not None else None, 1)
        call(library, library.flash_mma_backward(
            ctypes.byref(self.problem), ctypes.byref(self.q.c), ctypes.byref(self.k.c), ctypes.byref(self.v.c),
            ctypes.byref(self.out.c), ctypes.c_void_p(self.lse.data_ptr()), ctypes.byref(g),
            ctypes.c_void_p(workspace.data_ptr()), None))
        if not bool(workspace[size // 4:].isnan().all()):
            raise RuntimeError("wrote behind the workspace")

    def check_backward(self):
        worst, names = 0.0, ""
        sinks = self.sinks.double().requires_grad_() if self.sinks is not None else None
        scale_of = {"d_q": 0.0, "d_k": 0.0, "d_v": 0.0}
        errors = dict(scale_of)
        for b in range(self.batch):
            q, k, v = (self.sequence(rows, b, starts).double().requires_grad_()
                       for rows, starts in ((self.q, self.starts_q), (self.k, self.starts_k), (self.v, self.starts_k)))
            out, _ = oracle(self.case, q, k, v, sinks, b)
            if out.requires_grad:
                (out * self.sequence(self.d_out, b, self.starts_q).double()).sum().backward()
            for name, x, rows, starts in (("d_q", q, self.d_q, self.starts_q), ("d_k", k, self.d_k, self.starts_k),
                                          ("d_v", v, self.d_v, self.starts_k)):
                expected = x.grad if x.grad is not None else torch.zeros_like(x)
                got = self.sequence(rows, b, starts).double()
                errors[name] += (got - expected).square().sum().item()
                scale_of[name] += expected.square().sum().item()
        for name, error in errors.items():
            relative = math.sqrt(error / scale_of[name]) if scale_of[name] > 0 else math.sqrt(error)
            if not relative <= worst:
                worst, names = relative, name
        if sinks is not None:
            expected = sinks.grad if sinks.grad is not None else torch.zeros_like(sinks)
            relative = error_of(self.d_sinks, expected)
            if not relative <= worst:
                worst, names = relative, "d_sinks"
        for name in ("d_q", "d_k", "d_v"):
            if not getattr(self, name).untouched():
                return math.inf, name + " between rows"
        return worst, names


def max_nan(a, b):
    return math.nan if math.isnan(b) else max(a, b)


def call(library, status):
    if status != 0:
        raise RuntimeError(library.flash_mma_last_error().decode())


def cases(count, types):
    """Every value of every axis, drawn at random but the same each time."""
    r = random.Random(23)
    found = []
    for i in range(count):
        layout = ("bshd", "bhsd", "ragged", "paged")[i % 4]
        dim, vdim = r.choice([(64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (8, 8), (72, 72), (80, 40),
                              (64, 64)])
        heads, kv_heads = r.choice([(4, 4), (6, 2), (5, 1), (2, 2), (14, 2)])
        if layout in ("ragged", "paged"):
            q = [r.choice([0, 1, 5, 64, 65, 130, 200]) for _ in range(3)] + [33]
            k = [r.choice([0, 1, 7, 64, 100, 129, 300]) for _ in range(3)] + [70]
        else:
            q, k = [r.choice([1, 3, 64, 100, 193])] * 2, [r.choice([1, 0, 64, 77, 257, 300])] * 2
        left, right = r.choice([(-1, -1), (-1, 0), (-1, 0), (30, 0), (17, 9), (-1, 5), (100, -1), (0, 0)])
        found.append(dict(type=types[i // 4 % len(types)], layout=layout, dim=dim, vdim=vdim, heads=heads,
                          kv_heads=kv_heads, q=q, k=k, left=left, right=right, sinks=r.random() < 0.4,
                          softcap=r.choice([0.0, 0.0, 0.0, 3.0]),
                          blocks=r.choice([None, None, (64, 64), (128, 64), (64, 128), (128, 128)])))
    return found


def run_case(library, case, seed):
    """(forward error, backward error or None, which gradient)."""
    one = Case(case, seed)
    one.forward(library)
    torch.cuda.synchronize()
    forward = one.check_forward()
    first = one.out.buffer.clone()
    one.forward(library)
    if not torch.equal(first, one.out.buffer):
        raise RuntimeError("two runs of forward have different bits")
    if one.paged:
        return forward, None, ""
    one.backward(library)
    torch.cuda.synchronize()
    backward, name = one.check_backward()
    before = [one.d_q.buffer.clone(), one.d_k.buffer.clone(), one.d_v.buffer.clone(), one.d_sinks.clone()]
    one.backward(library)
    after = [one.d_q.buffer, one.d_k.buffer, one.d_v.buffer, one.d_sinks]
    if not all(torch.equal(x, y) for x, y in zip(before, after)):
        raise RuntimeError("two runs of backward have different bits")
    return forward, backward, name


def test(library, count, types):
    failed, worst = 0, {}
    for i, case in enumerate(cases(count, types)):
        bound = BOUNDS[case["type"]]
        try:
            forward, backward, name = run_case(library, case, i)
        except Exception as error:  # the next case may still say something
            failed += 1
            print(f"FAILED case {i}: {error}: {case}"[:400], flush=True)
            if "CUDA error" in str(error):
                break
            continue
        finally:
            case.pop("listed", None)
        key = case["type"]
        worst[key] = tuple(max(a, b) for a, b in zip(worst.get(key, (0, 0)), (forward, backward or 0)))
        if not forward <= bound[0] or backward is not None and not backward <= bound[1]:
            failed += 1
            print(f"FAILED case {i}: forward {forward:.2e} backward {backward} {name}: {case}"[:400], flush=True)
    shown = ", ".join(f"{t}: {f:.1e} forward, {b:.1e} backward" for t, (f, b) in worst.items())
    print(f"flash_mma_test: {count} cases, {failed} failed; worst {shown}", flush=True)
    return failed


def timed(run):
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10


def bench(library):
    for kind, dim, heads, kv_heads, n, causal in (("f16", 64, 32, 32, 4096, True), ("bf16", 128, 16, 16, 4096, False),
                                                  ("bf16", 128, 16, 16, 4096, True), ("f16", 256, 8, 8, 4096, False)):
        case = dict(type=kind, layout="bhsd", dim=dim, vdim=dim, heads=heads, kv_heads=kv_heads, q=[n] * 2, k=[n] * 2,
                    left=-1, right=0 if causal else -1, sinks=False, softcap=0.0, blocks=None)
        one = Case(case, 1)
        flops = 4 * 2 * n * n * dim * heads * (0.5 if causal else 1.0)
        forward = timed(lambda: one.forward(library))
        backward = timed(lambda: one.backward(library))
        q, k, v = (x.view.transpose(1, 2).contiguous().requires_grad_() for x in (one.q, one.k, one.v))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            peer = timed(lambda: sdpa(q, k, v, is_causal=causal))
            out = sdpa(q, k, v, is_causal=causal)
            grad = torch.randn_like(out)
            peer_back = timed(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        tflops = lambda ms, of=1.0: flops * of / ms / 1e9  # noqa: E731
        print(f"{kind} d{dim} {n} {'causal' if causal else 'full'}: forward {tflops(forward):.0f} TFLOP/s (torch flash "
              f"{tflops(peer):.0f}), backward {tflops(backward, 2.5):.0f} (torch flash {tflops(peer_back, 2.5):.0f})",
              flush=True)


def main():
    if torch is None or not torch.cuda.is_available():
        print("*** SKIPPED: the mma.sync attention kernels were not tested: no torch, or it finds no GPU ***")
        return 0
    library = ctypes.CDLL(sys.argv[1])
    library.flash_mma_backward_workspace.restype = ctypes.c_size_t
    library.flash_mma_last_error.restype = ctypes.c_char_p
    option = lambda name, default: sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default  # noqa: E731
    if "--bench" in sys.argv:
        bench(library)
        return 0
    return 1 if test(library, int(option("--cases", "120")), option("--types", "f32,f16,bf16").split(",")) else 0


if __name__ == "__main__":
    sys.exit(main())

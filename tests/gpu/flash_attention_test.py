#!/usr/bin/env python3
"""Attention over tensors (millrace/kernels/flash_attention.h) of a GPU against torch in float64, forward and backward:
head sizes, types, layouts (dense both ways, ragged, paged), masks, sinks, soft cap, grouped heads, block-sparse lists,
odd lengths with 0 and 1. Outputs, workspaces and whatever lies past a sequence's end are NaN before the call, and what
lies between rows has to be as it was.

    flash_attention_test.py LIBRARY [--what backward] [--match 'd128 .* causal'] [--part 0/3] [--runs 100]
                                                                                   needs torch and a GPU

The oracle takes what the kernel takes and computes in float64. Bounds are relative to norms over a head: probabilities
and outputs are rounded to the type (2^-9 of bf16, 2^-12 of f16), which leaves errors near half of that; a score's error
in float32 is far below. A gradient is a product of two rounded factors, and its terms cancel (check_backward).
Ends with 77, loudly, where torch or a GPU is missing.
"""
import argparse
import ctypes
import itertools
import math
import os
import re
import sys

SKIPPED = 77
BF16, F16, E4M3 = 2, 1, 3
NAN_CODE = 0x7F  # of E4M3
P, I, L, F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Tensor(ctypes.Structure):
    _fields_ = [("data", P), ("batch_stride", L), ("seq_stride", L), ("head_stride", L)]


class Blocks(ctypes.Structure):
    _fields_ = [("block_q", I), ("block_k", I), ("q_blocks", I), ("row_starts", P), ("columns", P)]


class Problem(ctypes.Structure):
    _fields_ = [("type", I), ("batch", I), ("heads", I), ("kv_heads", I), ("head_dim", I), ("value_dim", I),
                ("max_q", I), ("max_k", I), ("cu_q", P), ("cu_k", P), ("pages", P), ("pages_stride", L),
                ("page_tokens", I), ("k_lengths", P), ("scale", F), ("softcap", F), ("window_left", I),
                ("window_right", I), ("sinks", P), ("blocks", P), ("q_scales", P), ("k_scales", P), ("v_scales", P)]


class QuantizeArgs(ctypes.Structure):
    _fields_ = [("type", I), ("batch", I), ("seq", I), ("heads", I), ("dim", I), ("x", Tensor), ("codes", Tensor),
                ("scales", P), ("rows_per_scale", I), ("rotate", I)]


class Gradients(ctypes.Structure):
    _fields_ = [("d_out", Tensor), ("d_q", Tensor), ("d_k", Tensor), ("d_v", Tensor), ("d_sinks", P),
                ("deterministic", I)]


def skip(why):
    print(f"\n*** SKIPPED: attention over tensors was not compared with torch: {why} ***\n", file=sys.stderr)
    sys.exit(SKIPPED)


class Library:
    """The C functions; a status that is not MR_OK is an exception with mr_last_error()."""

    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        self.c.mr_last_error.restype = ctypes.c_char_p
        self.device = P()
        self.check(self.c.mr_device_open(b"cuda", None, ctypes.byref(self.device)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(f"status {status}: {self.c.mr_last_error().decode()}")

    def workspace(self, torch, problem, backward=None):
        need = ctypes.c_size_t()
        if backward is None:
            self.check(self.c.mr_flash_forward_workspace_bytes(self.device, ctypes.byref(problem), ctypes.byref(need)))
        else:
            self.check(self.c.mr_flash_backward_workspace_bytes(self.device, ctypes.byref(problem), I(backward),
                                                                ctypes.byref(need)))
        return torch.full((max(need.value, 1),), 0xFF, dtype=torch.uint8, device="cuda")

    def forward(self, torch, problem, q, k, v, out, lse, workspace):
        stream = P(torch.cuda.current_stream().cuda_stream)
        self.check(self.c.mr_flash_forward(self.device, ctypes.byref(problem), q, k, v, out, P(lse),
                                           P(workspace.data_ptr()), ctypes.c_size_t(workspace.numel()), stream))

    def quantize(self, torch, x, rows_per_scale, rotate):
        """Codes and scales of x [batch, seq, heads, dim]."""
        batch, seq, heads, dim = x.shape
        codes = torch.full(x.shape, 0xFF, dtype=torch.uint8, device="cuda")
        shape = (batch, seq, heads) if rows_per_scale == 1 else (batch, heads, -(-seq // rows_per_scale))
        scales = torch.full(shape, math.nan, device="cuda")
        args = QuantizeArgs(BF16 if x.dtype == torch.bfloat16 else F16, batch, seq, heads, dim, tensor_of(x, (0, 1, 2)),
                            tensor_of(codes, (0, 1, 2)), scales.data_ptr(), rows_per_scale, rotate)
        self.check(self.c.mr_flash_quantize(self.device, ctypes.byref(args), P(torch.cuda.current_stream().cuda_stream)))
        return codes, scales

    def backward(self, torch, problem, q, k, v, out, lse, gradients, workspace):
        stream = P(torch.cuda.current_stream().cuda_stream)
        self.check(self.c.mr_flash_backward(self.device, ctypes.byref(problem), q, k, v, out, P(lse),
                                            ctypes.byref(gradients), P(workspace.data_ptr()),
                                            ctypes.c_size_t(workspace.numel()), stream))


def tensor_of(x, order):
    """The C view of x; order says which of its dimensions are batch (None: ragged), seq and head."""
    b, s, h = order
    return Tensor(x.data_ptr(), 0 if b is None else x.stride(b), x.stride(s), x.stride(h))


# ---------------------------------------------------------------- oracle


def visible(torch, nq, nk, left, right):
    i = torch.arange(nq, device="cuda")[:, None] + (nk - nq)
    j = torch.arange(nk, device="cuda")[None, :]
    seen = torch.ones(nq, nk, dtype=torch.bool, device="cuda")
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def oracle(torch, q, k, v, scale, softcap, seen, sinks):
    """q [heads, nq, d], k and v [kv_heads, nk, d] in float64; seen [nq, nk] or [heads, nq, nk]."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = scale * q @ k.transpose(1, 2)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(-1, s.shape[1], 1)], 2)
    lse = torch.logsumexp(s, 2) if s.shape[2] > 0 else torch.full(s.shape[:2], -math.inf, device="cuda").double()
    base = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    p = torch.exp(s - base[..., None])
    return p[..., :k.shape[1]] @ v, lse


# ---------------------------------------------------------------- a case


class Case:
    """One call. lens: (queries, keys) of each sequence; of dense layouts all are the same."""

    def __init__(self, layout="bshd", dtype="bf16", dims=(128, 128), heads=(2, 1), lens=((128, 128),), left=-1,
                 right=-1, sinks=False, softcap=0.0, page=16, sparse=None, seed=0, scale=0.0):
        self.layout, self.dtype, self.dims, self.heads, self.lens = layout, dtype, dims, heads, list(lens)
        self.left, self.right, self.sinks, self.softcap, self.page = left, right, sinks, softcap, page
        self.sparse, self.seed, self.scale = sparse, seed, scale

    def __str__(self):
        lens = ",".join(f"{a}x{b}" for a, b in self.lens[:4]) + (",.." if len(self.lens) > 4 else "")
        mask = "causal" if (self.left, self.right) == (-1, 0) else f"window {self.left},{self.right}"
        page = self.page if self.layout == "paged" else ""
        return (f"{self.layout}{page} {self.dtype} d{self.dims[0]}/{self.dims[1]} h{self.heads[0]}/{self.heads[1]} "
                f"{lens} {mask}{' sinks' if self.sinks else ''}"
                f"{f' cap {self.softcap:g}' if self.softcap else ''}{f' sparse {self.sparse}' if self.sparse else ''}")


class Run:
    """The case's memory: padded rows, guards between and after them, everything that nobody wrote NaN."""

    def __init__(self, torch, case):
        self.torch, self.case = torch, case
        torch.manual_seed(case.seed + 17)
        self.codes = case.dtype == "e4m3"
        self.type = torch.float16 if case.dtype == "f16" else torch.bfloat16
        self.h, self.hk = case.heads
        self.d, self.dv = case.dims
        self.batch = len(case.lens)
        self.max_q, self.max_k = max(a for a, _ in case.lens), max(b for _, b in case.lens)
        p = self.problem = Problem()
        p.type = {"bf16": BF16, "f16": F16, "e4m3": E4M3}[case.dtype]
        p.batch, p.heads, p.kv_heads, p.head_dim, p.value_dim = self.batch, self.h, self.hk, self.d, self.dv
        p.max_q, p.max_k, p.softcap = self.max_q, self.max_k, case.softcap
        p.scale = case.scale or 1 / math.sqrt(self.d)
        p.window_left, p.window_right = case.left, case.right
        self.keep = []
        self.sinks = torch.randn(self.h, device="cuda") * 2 if case.sinks else None
        if self.sinks is not None:
            p.sinks = self.sinks.data_ptr()
        self.q, self.q_rows = self.rows(self.h, self.d, 0, self.codes)
        self.out, self.out_rows = self.rows(self.h, self.dv, 0)
        self.k, self.k_rows = self.rows(self.hk, self.d, 1, self.codes)
        self.v, self.v_rows = self.rows(self.hk, self.dv, 1, self.codes)
        for b in range(self.batch):
            for rows in (self.q_rows, self.k_rows, self.v_rows):
                x = rows(b)
                drawn = torch.randn(x.shape, device="cuda") * 1.5
                x.copy_(drawn.to(torch.float8_e4m3fn).view(torch.uint8) if self.codes else drawn)
        if self.ragged:
            for which, name in ((0, "cu_q"), (1, "cu_k")):
                cu = self.ints(list(itertools.accumulate([0] + [n[which] for n in case.lens])))
                setattr(p, name, cu.data_ptr())
        if self.codes:
            self.make_scales()
        total_q = sum(a for a, _ in case.lens)
        shape = (self.h, total_q) if self.ragged or case.layout == "ragged-paged" else (self.batch, self.h, self.max_q)
        self.lse = torch.full(shape, math.nan, device="cuda")
        if case.sparse:
            self.make_blocks()

    @property
    def ragged(self):
        return self.case.layout == "ragged"

    def ints(self, x):
        t = self.torch.tensor(x, dtype=self.torch.int32, device="cuda")
        self.keep.append(t)
        return t

    def make_scales(self):
        """Of codes: any positive numbers, a row's of q and a block's of k and v; NaN where there is no row or key."""
        torch, blocks = self.torch, max(1, -(-self.max_k // 128))
        draw = lambda *shape: torch.exp(torch.randn(*shape, device="cuda") * 0.3)
        rows = sum(a for a, _ in self.case.lens) if self.ragged else self.batch * max(self.max_q, 1)
        self.q_scales = draw(max(rows, 1), self.h)
        self.k_scales, self.v_scales = draw(self.batch, self.hk, blocks), draw(self.batch, self.hk, blocks) * 0.01
        for b, (_, n) in enumerate(self.case.lens):
            self.k_scales[b, :, -(-n // 128):], self.v_scales[b, :, -(-n // 128):] = math.nan, math.nan
        for name in ("q_scales", "k_scales", "v_scales"):
            setattr(self.problem, name, getattr(self, name).data_ptr())

    def numbers(self, b):
        """q, k and v of sequence b as float64: what its elements or codes stand for."""
        if not self.codes:
            return [rows(b).double() for rows in (self.q_rows, self.k_rows, self.v_rows)]
        torch, (nq, nk) = self.torch, self.case.lens[b]
        first = sum(a for a, _ in self.case.lens[:b]) if self.ragged else b * self.max_q
        scales = [self.q_scales[first:first + nq].T] + [x[b].repeat_interleave(128, 1)[:, :nk]
                                                        for x in (self.k_scales, self.v_scales)]
        found = []
        for rows, scale in zip((self.q_rows, self.k_rows, self.v_rows), scales):
            x = rows(b)
            x = (x.raw() if hasattr(x, "raw") else x).contiguous().view(torch.float8_e4m3fn)
            found.append(x.double() * scale[..., None].double())
        return found

    def rows(self, heads, dim, which, codes=False):
        """A NaN-filled tensor of the layout and a function that gives sequence b's [heads, n, dim] of it."""
        torch, lens, pad = self.torch, [n[which] for n in self.case.lens], 16
        longest = max(max(lens), 1)
        if codes:
            pad += -dim % 16
            new = lambda *shape: torch.full(shape, NAN_CODE, dtype=torch.uint8, device="cuda")
        else:
            new = lambda *shape: torch.full(shape, math.nan, dtype=self.type, device="cuda")
        if self.case.layout == "paged" and which == 1:
            return self.paged_rows(new, heads, dim, lens)
        if self.ragged:
            x = new(sum(lens) + 64, heads, dim + pad)
            starts = list(itertools.accumulate([0] + lens))
            self.order = (None, 0, 1)
            return x, lambda b: x[starts[b]:starts[b] + lens[b], :, :dim].transpose(0, 1)
        if self.case.layout == "bhsd":
            x = new(self.batch, heads, longest + 3, dim + pad)
            return x, lambda b: x[b, :, :lens[b], :dim]
        x = new(self.batch, longest + 3, heads, dim + pad)
        return x, lambda b: x[b, :lens[b], :, :dim].transpose(0, 1)

    def paged_rows(self, new, heads, dim, lens):
        torch, page = self.torch, self.case.page
        per = max(1, (max(lens) + page - 1) // page)
        if not hasattr(self, "table"):
            order = torch.randperm(self.batch * per, device="cuda").int() + 1
            self.table = order.view(self.batch, per).contiguous()
            p = self.problem
            p.pages, p.pages_stride, p.page_tokens = self.table.data_ptr(), per, page
            p.k_lengths = self.ints(lens).data_ptr()
        x = new(self.batch * per + 2, page, heads, -(-dim // 16) * 16 + 16)
        table = self.table.long()

        class PagedRows:
            def __init__(self, b):
                self.b, self.shape = b, (heads, lens[b], dim)

            def index(self):
                j = torch.arange(lens[self.b], device="cuda")
                return table[self.b][j // page], j % page

            def copy_(self, y):
                a, b = self.index()
                x[a, b, :, :dim] = y.transpose(0, 1).to(x.dtype)

            def raw(self):
                a, b = self.index()
                return x[a, b, :, :dim].transpose(0, 1)

            def double(self):
                return self.raw().double()
        return x, PagedRows

    def view(self, x, which):
        if self.case.layout == "paged" and which == 1:
            return tensor_of(x, (0, 1, 2))
        if self.ragged:
            return tensor_of(x, (None, 0, 1))
        return tensor_of(x, (0, 2, 1) if self.case.layout == "bhsd" else (0, 1, 2))

    def make_blocks(self):
        bq, bk, share = self.case.sparse
        nq, nk = max(1, -(-self.max_q // bq)), max(1, -(-self.max_k // bk))
        torch = self.torch
        self.block_map = torch.rand(self.batch, self.h, nq, nk, device="cuda") < share
        starts, columns = [0], []
        for b, h, m in itertools.product(range(self.batch), range(self.h), range(nq)):
            here = self.block_map[b, h, m].nonzero()[:, 0].tolist()
            here = [n for n in here if n * bk < self.case.lens[b][1]]
            columns += here
            starts.append(len(columns))
        self.blocks = Blocks(bq, bk, nq, self.ints(starts).data_ptr(), self.ints(columns + [0]).data_ptr())
        self.problem.blocks = ctypes.cast(ctypes.pointer(self.blocks), P)

    def seen(self, b):
        nq, nk = self.case.lens[b]
        seen = visible(self.torch, nq, nk, self.case.left, self.case.right)
        if not self.case.sparse:
            return seen
        bq, bk, _ = self.case.sparse
        blocks = self.block_map[b].repeat_interleave(bq, 1).repeat_interleave(bk, 2)
        return seen & blocks[:, :nq, :nk]

    def lse_of(self, b):
        nq = self.case.lens[b][0]
        if self.ragged:
            start = sum(a for a, _ in self.case.lens[:b])
            return self.lse[:, start:start + nq]
        return self.lse[b, :, :nq]


def relative(torch, got, want, floor=0.0):
    """The largest error over norm of any head, and where: NaN counts as infinite."""
    if want.numel() == 0:
        return 0.0, None
    error = (got.double() - want).abs()
    error = torch.where(torch.isnan(error), torch.full_like(error, math.inf), error)
    share = error.flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp_min(max(floor, 1e-30))
    h = int(torch.nan_to_num(share, nan=math.inf).argmax())
    at = int(error[h].flatten().argmax())
    inner = error.shape[2]
    return float(share[h]), f"head {h} row {at // inner} column {at % inner}: {error[h].max():.3g}"


def guards_kept(torch, run, x, rows, which):
    """Whatever is not a row of a sequence is NaN still."""
    mask = torch.ones_like(x, dtype=torch.bool)
    lens = [n[which] for n in run.case.lens]
    dim = run.dv if x is run.out else x.shape[-1] - 16
    if run.ragged:
        mask[:sum(lens), :, :dim] = False
    else:
        for b, n in enumerate(lens):
            if run.case.layout == "bhsd":
                mask[b, :, :n, :dim] = False
            else:
                mask[b, :n, :, :dim] = False
    return bool(torch.isnan(x[mask]).all())


# Probabilities are rounded to E4M3, three bits of mantissa: 2.6e-2 of each on average.
FP8_BOUND = 4e-2


def check_forward(torch, library, case):
    """None, or what is wrong."""
    run = Run(torch, case)
    workspace = library.workspace(torch, run.problem)
    call = lambda: library.forward(torch, run.problem, run.view(run.q, 0), run.view(run.k, 1), run.view(run.v, 1),
                                   run.view(run.out, 0), run.lse.data_ptr(), workspace)
    call()
    torch.cuda.synchronize()
    bound = {"bf16": 5e-3, "f16": 8e-4, "e4m3": FP8_BOUND}[case.dtype]
    faults = []
    for b in range(run.batch):
        want, lse = oracle(torch, *run.numbers(b), run.problem.scale, case.softcap, run.seen(b), run.sinks)
        error, at = relative(torch, run.out_rows(b), want, 1e-6)
        if not error <= bound:
            faults.append(f"out of sequence {b}: {error:.2e} of its norm, {at}")
        got = run.lse_of(b).double()
        close = 2e-3 if case.dtype == "e4m3" else 2e-5  # tensor cores add products of 8 bits with 14 bits
        near = torch.where(torch.isinf(lse), got == lse, (got - lse).abs() <= close * (1 + lse.abs()) + 1e-4)
        if not bool(near.all()):
            h, i = (~near).nonzero()[0].tolist()
            faults.append(f"lse of sequence {b} head {h} row {i}: {got[h, i]:.6f} for {lse[h, i]:.6f}, "
                          f"{int((~near).sum())} of {near.numel()}")
    if not guards_kept(torch, run, run.out, run.out_rows, 0):
        faults.append("written past a row or a sequence")
    return "; ".join(faults[:3]) or None


def check_backward(torch, library, case, runs):
    """None, or what is wrong: both modes against autograd in float64; the deterministic one bit by bit `runs` times."""
    run = Run(torch, case)
    workspace = library.workspace(torch, run.problem)
    views = [run.view(run.q, 0), run.view(run.k, 1), run.view(run.v, 1), run.view(run.out, 0)]
    library.forward(torch, run.problem, *views, run.lse.data_ptr(), workspace)
    run.d_out, d_out_rows = run.rows(run.h, run.dv, 0)
    grads = [run.rows(run.h, run.d, 0), run.rows(run.hk, run.d, 1), run.rows(run.hk, run.dv, 1)]
    for b in range(run.batch):
        x = d_out_rows(b)
        x.copy_(torch.randn(x.shape, device="cuda"))
    want = [[], [], []]
    want_sinks, sinks_noise = None, 0
    for b in range(run.batch):
        q, k, v = (rows(b).double().requires_grad_() for rows in (run.q_rows, run.k_rows, run.v_rows))
        sinks = run.sinks.double().requires_grad_() if case.sinks else None
        out, lse = oracle(torch, q, k, v, run.problem.scale, case.softcap, run.seen(b), sinks)
        out.backward(torch.nan_to_num(d_out_rows(b).double()))
        for i, x in enumerate((q, k, v)):
            want[i].append(x.grad if x.grad is not None else torch.zeros_like(x))
        if case.sinks:
            d_sinks = sinks.grad if sinks.grad is not None else torch.zeros_like(sinks)
            want_sinks = d_sinks if want_sinks is None else want_sinks + d_sinks
            # Of dO . O, whose O was rounded: what is left where rows cancel.
            share = torch.exp(sinks[:, None] - lse).detach()[..., None]
            terms = share * out.detach() * torch.nan_to_num(d_out_rows(b).double())
            sinks_noise = sinks_noise + terms.square().sum((1, 2))
    bound = 1.5e-2 if case.dtype == "bf16" else 3e-3
    faults = []
    for deterministic in (1, 0):
        first = None
        for again in range(runs if deterministic else 1):
            got_sinks = torch.full((run.h,), math.nan, device="cuda")
            for x, _ in grads:
                x.fill_(math.nan)
            workspace = library.workspace(torch, run.problem, deterministic)
            g = Gradients(run.view(run.d_out, 0), run.view(grads[0][0], 0), run.view(grads[1][0], 1),
                          run.view(grads[2][0], 1), got_sinks.data_ptr() if case.sinks else None, deterministic)
            library.backward(torch, run.problem, *views, run.lse.data_ptr(), g, workspace)
            torch.cuda.synchronize()
            bits = [x.clone().view(torch.int16) for x, _ in grads] + [got_sinks.clone().view(torch.int32)]
            if first is None:
                first = bits
            elif not all(bool((a == b).all()) for a, b in zip(first, bits)):
                faults.append(f"run {again} has other bits")
                break
        mode = "deterministic" if deterministic else "atomic"
        for i, name in enumerate(("dQ", "dK", "dV")):
            # Terms of dS cancel, all of them in a row that sees one key alone, and what is left is the noise of
            # dO . O rounded. So norms count from a quarter of what terms are: dP is about |dO| 1.5, entries of q, k
            # and v being 1.5, and scale |k| is 1.5.
            for b in range(run.batch):
                terms = float(d_out_rows(b).double().norm()) * (1.5 * 1.5 if i < 2 else 1)
                floor = terms / math.sqrt(run.h if i == 0 else run.hk) / 4  # of a head
                error, at = relative(torch, grads[i][1](b), want[i][b], floor)
                if not error <= bound:
                    faults.append(f"{mode} {name} of sequence {b}: {error:.2e} of its norm, {at}")
            if not guards_kept(torch, run, grads[i][0], None, min(i, 1)):
                faults.append(f"{mode} {name} written past a row or a sequence")
        if case.sinks:
            error = float((got_sinks.double() - want_sinks).abs().max() / want_sinks.abs().max().clamp_min(1e-2))
            noise = (2.0**-9 if case.dtype == "bf16" else 2.0**-12) * sinks_noise.sqrt()
            if not bool(((got_sinks.double() - want_sinks).abs() <=
                         bound * want_sinks.abs().max().clamp_min(1e-2) + 4 * noise).all()):
                faults.append(f"{mode} dSink: {error:.2e}")
    return "; ".join(faults[:3]) or None


def backward_cases():
    for case in forward_cases():
        if case.layout != "paged" and max(case.dims) <= 128:
            yield case
    # Long lists, and blocks that nobody lists.
    for n, (block, d) in enumerate(itertools.product([(64, 64), (64, 128), (128, 64), (128, 128)], [64, 128])):
        yield Case(dims=(d, d), dtype=("bf16", "f16")[n % 2], heads=((4, 2), (3, 3))[n % 2], lens=((5000, 4500),),
                   right=(-1, 0)[n // 2 % 2], sinks=n % 3 == 0, sparse=(*block, (0.1, 0.02)[n % 2]), seed=n)


def forward_cases():
    dims = [(64, 64), (128, 128), (96, 96), (192, 128), (256, 256)]
    masks = [(-1, -1), (-1, 0), (128, 0), (100, 37), (0, 0), (-1, 33)]
    dense = [((1, 1),), ((1, 300),), ((257, 257), ) * 2, ((333, 501),), ((500, 130),), ((64, 0),), ((0, 64),),
             ((1000, 1000),)]
    ragged = [((1, 1), (0, 5), (300, 300), (7, 0), (129, 400), (192, 128)), ((0, 0), (513, 513), (50, 20), (1, 999))]
    n = 0
    for (d, dtype) in itertools.product(dims, ("bf16", "f16")):
        for left, right in masks:
            for kind in range(4):
                n += 1
                common = dict(dims=d, dtype=dtype, left=left, right=right, sinks=n % 2 == 0,
                              softcap=(0.0, 20.0, 0.0)[n % 3], seed=n,
                              heads=((2, 1), (3, 3), (8, 2), (4, 1))[n // 2 % 4])
                if kind < 2:
                    yield Case(("bshd", "bhsd")[kind], lens=dense[n % len(dense)], **common)
                elif kind == 2:
                    yield Case("ragged", lens=ragged[n % 2], **common)
                else:
                    lens = (((130, 300), (130, 7), (130, 0), (130, 1000)), ((1, 513), (1, 16)))[n % 2]
                    yield Case("paged", lens=lens, page=(16, 48, 64, 256)[n // 2 % 4], **common)
    # More items than CTAs, so that a CTA goes from one to the next, and negative scales.
    for d in dims:
        yield Case(dims=d, lens=((1500, 1500),) * 3, heads=(16, 4), right=0, sinks=True, seed=5)
        yield Case("ragged", dims=d, lens=((700, 700), (0, 3), (1900, 2000), (33, 900)), heads=(8, 8), seed=6)
    yield Case(lens=((200, 200),), scale=-0.1)
    # Windows of which a tile's keys are one tile, or few: from every alignment, cut at both ends.
    shapes = [((1000, 1000),) * 2, ((37, 501),), ((500, 132),), ((600, 0),), ((40, 40),), ((1000, 1003),)]
    for n, (heads, (left, right), lens) in enumerate(itertools.product(
            [(64, 8), (16, 4), (4, 2)], [(127, 0), (100, 27), (64, 20), (3, 3), (1023, 0)], shapes)):
        yield Case(("bshd", "bhsd", "ragged")[n % 3], dims=(64, 64), dtype=("bf16", "f16")[n % 2], heads=heads,
                   lens=lens + ((0, 5), (7, 0), (129, 400)) if n % 3 == 2 else lens, left=left, right=right,
                   sinks=n % 2 == 0, softcap=(0.0, 0.0, 20.0)[n // 2 % 3], seed=n)
    # Few rows, whose keys are split, and head sizes between those that have tiles of their own.
    for n, (d, dtype) in enumerate(itertools.product([(64, 64), (128, 128), (256, 256), (96, 96)], ("bf16", "f16"))):
        yield Case(dims=d, dtype=dtype, lens=((1, 5000),) * 2, heads=(16, 2), right=0, sinks=n % 2 == 0, seed=n)
        yield Case("paged", dims=d, dtype=dtype, lens=((2, 3000), (2, 1), (2, 1024), (2, 1025), (2, 0)), heads=(8, 2),
                   right=0, sinks=n % 2 == 1, page=(64, 16)[n % 2], seed=n)
        yield Case("ragged", dims=d, dtype=dtype, lens=((1, 2500), (0, 9), (4, 2000), (3, 2)), heads=(4, 1), left=1500,
                   right=0, softcap=(0, 15.0)[n % 2], seed=n)
    for n, d in enumerate([(72, 72), (40, 80), (16, 8), (120, 104), (136, 64), (200, 248)]):
        yield Case(("bshd", "ragged")[n % 2], dims=d, lens=((300, 300), (300, 300)), heads=(4, 2), right=0, seed=n)
    # Lists of blocks.
    for n, (block, d) in enumerate(itertools.product([(64, 64), (64, 128), (128, 64), (128, 128)], [64, 128])):
        yield Case(("bshd", "ragged")[n % 2], dims=(d, d), dtype=("bf16", "f16")[n // 2 % 2], heads=(4, 2),
                   lens=((700, 700), (700, 700)) if n % 2 == 0 else ((65, 333), (0, 0), (500, 129)),
                   right=(-1, 0)[n // 4], sinks=n % 3 == 0, sparse=(*block, 0.4), seed=n)


class Fp8Case:
    """(batch, queries, keys, heads, kv_heads, dim, value_dim) of E4M3 codes."""

    def __init__(self, shape, causal, rotate, outliers, seed):
        self.shape, self.causal, self.rotate, self.outliers, self.seed = shape, causal, rotate, outliers, seed

    def __str__(self):
        return f"fp8 {self.shape} {'causal' if self.causal else 'full'} rotate {self.rotate} outliers {self.outliers}"


def fp8_cases():
    shapes = [(1, 5, 7, 2, 1, 64, 64), (2, 130, 300, 4, 2, 128, 128), (1, 257, 129, 2, 2, 96, 48), (1, 64, 1000, 8, 1, 256, 256),
              (2, 1, 4000, 16, 2, 128, 128), (1, 1025, 1025, 2, 2, 128, 128)]
    for n, shape in enumerate(shapes):
        for causal, rotate, outliers in itertools.product((False, True), (0, 1), (False, True)):
            yield Fp8Case(shape, causal, rotate, outliers, n)
    for case in forward_cases():
        if case.dtype == "bf16":
            case.dtype = "e4m3"
            yield case


def rotated(torch, x):
    """x H / sqrt(n) for every n neighbours of the last dimension, in float64."""
    n = x.shape[-1] & -x.shape[-1]
    h = torch.ones(1, 1, dtype=torch.float64, device=x.device)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (x.double().unflatten(-1, (-1, n)) @ h / math.sqrt(n)).flatten(-2)


def check_fp8(torch, library, case):
    """None, or what is wrong: codes against their definition, attention against float64 over what the codes mean, and
    against float64 over the tensors themselves."""
    batch, nq, nk, heads, kv_heads, dim, value_dim = case.shape
    torch.manual_seed(case.seed)
    draw = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731

    def tensor(*shape):
        x = draw(*shape)
        if case.outliers:
            x = x + 10 * draw(*shape) * (torch.rand(*shape, device="cuda") < 1e-3)
        return x.bfloat16()

    q, k, v = tensor(batch, nq, heads, dim), tensor(batch, nk, kv_heads, dim), tensor(batch, nk, kv_heads, value_dim)
    faults, coded = [], []
    for name, x, rows, rotate in (("q", q, 1, case.rotate), ("k", k, 128, case.rotate), ("v", v, 128, 0)):
        codes, scales = library.quantize(torch, x, rows, rotate)
        exact = rotated(torch, x) if rotate else x.double()
        per_row = scales if rows == 1 else scales.repeat_interleave(128, 2)[:, :, :x.shape[1]].transpose(1, 2)
        plain = codes.view(torch.float8_e4m3fn).double() * per_row[..., None].double()
        top = exact.abs().amax(-1) if rows == 1 else None
        if top is not None and not bool(((scales.double() * 448 - top).abs() <= 1e-5 * top).all()):
            faults.append(f"{name}: a scale is not the largest magnitude / 448")
        # Half a step of three bits of mantissa, or of the smallest number.
        if not bool(((plain - exact).abs() <= exact.abs() * 2.0**-4 * 1.001 + per_row[..., None] * 2.0**-9).all()):
            faults.append(f"{name}: a code is not the nearest")
        coded.append((codes, scales, plain))
    p = Problem(type=3, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=value_dim, max_q=nq, max_k=nk,
                window_left=-1, window_right=0 if case.causal else -1, scale=1 / math.sqrt(dim),
                q_scales=coded[0][1].data_ptr(), k_scales=coded[1][1].data_ptr(), v_scales=coded[2][1].data_ptr())
    out = torch.full((batch, nq, heads, value_dim), math.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((batch, heads, nq), math.nan, device="cuda")
    views = [tensor_of(x, (0, 1, 2)) for x in (coded[0][0], coded[1][0], coded[2][0], out)]
    library.forward(torch, p, *views, lse.data_ptr(), library.workspace(torch, p))
    torch.cuda.synchronize()
    seen = visible(torch, nq, nk, -1, p.window_right)
    for b in range(batch):
        for what, bound, tensors in (("its codes", FP8_BOUND, [c[2][b] for c in coded]),
                                     ("its tensors", 0.35 if case.outliers else 0.12, [x[b].double() for x in (q, k, v)])):
            want, _ = oracle(torch, *(x.transpose(0, 1) for x in tensors), p.scale, 0.0, seen, None)
            error, at = relative(torch, out[b].transpose(0, 1), want, 1e-6)
            if not error <= bound:
                faults.append(f"sequence {b}: {error:.2e} from {what}, {at}")
    return "; ".join(faults[:3]) or None


def selected(cases, match, part):
    index, parts = (int(x) for x in part.split("/"))
    for i, case in enumerate(cases):
        if i % parts == index and (not match or re.search(match, str(case))):
            yield case


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("library")
    parser.add_argument("--match", default="")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--what", default="forward")
    parser.add_argument("--runs", type=int, default=3, help="of the deterministic mode, which have to be bit-equal")
    parser.add_argument("--show", type=int, default=12, help="failures that are printed")
    parser.add_argument("--done", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--failed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        skip("torch is not installed")
    if not torch.cuda.is_available():
        skip("torch finds no GPU")
    library = Library(options.library)
    done = options.done
    failed = options.failed
    cases = {"forward": forward_cases, "backward": backward_cases, "fp8": fp8_cases}[options.what]()
    for case in itertools.islice(selected(cases, options.match, options.part), done, None):
        done += 1
        try:
            if options.what == "forward":
                fault = check_forward(torch, library, case)
            elif options.what == "fp8":
                check = check_fp8 if isinstance(case, Fp8Case) else check_forward
                fault = check(torch, library, case)
            else:
                fault = check_backward(torch, library, case, options.runs)
        except RuntimeError as error:
            fault = str(error).split("\n")[0][:200]
        if fault:
            failed += 1
            if failed <= options.show:
                print(f"FAILED {case}: {fault}", flush=True)
            if "CUDA error" in fault:  # the context is lost: the other cases get a new process
                sys.stdout.flush()
                again = [x for x in sys.argv if not x.startswith(("--done=", "--failed="))]
                os.execv(sys.executable, [sys.executable, *again, f"--done={done}", f"--failed={failed}"])
    print(f"{done} cases ({options.what} {options.match}), {failed} failed", flush=True)
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())

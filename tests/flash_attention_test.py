#!/usr/bin/env python3
"""Attention over tensors (millrace/kernels/flash_attention.h) on a CPU against torch in float64, by the C API.

  tests/flash_attention_test.py LIBRARY [--isa NAME] [--cases N] [--seed N]

LIBRARY is libmillrace_kernels.so. Forward and, where there is one, backward of fixed corner cases and of random
combinations of type, layout, mask, head sizes and odd lengths. Outputs and workspaces are poisoned before each call,
and what lies around the outputs must stay. Status 77, and a line, where torch is not installed.
"""

import argparse
import ctypes
import math
import random
import sys

try:
    import torch
except ImportError:
    print("SKIPPED: torch is not installed; kernels_api_test compares with the reference")
    sys.exit(77)

F32, F16, BF16, FP8 = 0, 1, 2, 3
NAMES = {F32: "f32", F16: "f16", BF16: "bf16", FP8: "fp8"}
TORCH = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, FP8: torch.float8_e4m3fn}
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
# Of the largest number of a tensor (of all gradients): float32 sums; in backward `out` is read as it was rounded.
FORWARD_ERROR = {F32: 2e-6, F16: 2e-6, BF16: 2e-6}
BACKWARD_ERROR = {F32: 1e-5, F16: 1e-3, BF16: 8e-3}
AMX_ERROR = 2.0**-8  # of the largest value: weights are rounded to bf16 before they meet the values
POISON = 0xFF
GUARD = 4096  # bytes around an output


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("batch_stride", ctypes.c_int64), ("seq_stride", ctypes.c_int64),
                ("head_stride", ctypes.c_int64)]


class Blocks(ctypes.Structure):
    _fields_ = [("block_q", ctypes.c_int32), ("block_k", ctypes.c_int32), ("q_blocks", ctypes.c_int32),
                ("row_starts", ctypes.c_void_p), ("columns", ctypes.c_void_p)]


class Problem(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("batch", ctypes.c_int32), ("heads", ctypes.c_int32),
                ("kv_heads", ctypes.c_int32), ("head_dim", ctypes.c_int32), ("value_dim", ctypes.c_int32),
                ("max_q", ctypes.c_int32), ("max_k", ctypes.c_int32), ("cu_q", ctypes.c_void_p),
                ("cu_k", ctypes.c_void_p), ("pages", ctypes.c_void_p), ("pages_stride", ctypes.c_int64),
                ("page_tokens", ctypes.c_int32), ("k_lengths", ctypes.c_void_p), ("scale", ctypes.c_float),
                ("softcap", ctypes.c_float), ("window_left", ctypes.c_int32), ("window_right", ctypes.c_int32),
                ("sinks", ctypes.c_void_p), ("blocks", ctypes.POINTER(Blocks)), ("q_scales", ctypes.c_void_p),
                ("k_scales", ctypes.c_void_p), ("v_scales", ctypes.c_void_p)]


class Gradients(ctypes.Structure):
    _fields_ = [("d_out", Tensor), ("d_q", Tensor), ("d_k", Tensor), ("d_v", Tensor), ("d_sinks", ctypes.c_void_p),
                ("deterministic", ctypes.c_int32)]


class Options(ctypes.Structure):
    _fields_ = [("threads", ctypes.c_int32), ("isa", ctypes.c_char_p)]


class QuantizeArgs(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("batch", ctypes.c_int32), ("seq", ctypes.c_int32),
                ("heads", ctypes.c_int32), ("dim", ctypes.c_int32), ("x", Tensor), ("codes", Tensor),
                ("scales", ctypes.c_void_p), ("rows_per_scale", ctypes.c_int32), ("rotate", ctypes.c_int32)]


class Library:
    def __init__(self, path, isa, threads):
        self.c = ctypes.CDLL(path)
        self.c.mr_last_error.restype = ctypes.c_char_p
        self.c.mr_device_description.restype = ctypes.c_char_p
        self.device = ctypes.c_void_p()
        options = Options(threads, isa.encode() if isa else None)
        self.check(self.c.mr_device_open(b"cpu", ctypes.byref(options), ctypes.byref(self.device)))
        self.name = self.c.mr_device_description(self.device).decode()
        self.has_bf16_tiles = ", amx," in self.name

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.c.mr_last_error().decode())

    def workspace(self, function, problem, *more):
        needed = ctypes.c_size_t()
        self.check(function(self.device, ctypes.byref(problem), *more, ctypes.byref(needed)))
        memory = torch.full((needed.value + 256,), POISON, dtype=torch.uint8)
        return memory, ctypes.c_void_p((memory.data_ptr() + 255) // 256 * 256), needed

    def forward(self, problem, q, k, v, out, lse):
        memory, at, needed = self.workspace(self.c.mr_flash_forward_workspace_bytes, problem)
        self.check(self.c.mr_flash_forward(self.device, ctypes.byref(problem), q, k, v, out, ctypes.c_void_p(lse), at,
                                           needed, None))
        del memory

    def backward(self, problem, q, k, v, out, lse, gradients):
        memory, at, needed = self.workspace(self.c.mr_flash_backward_workspace_bytes, problem,
                                            gradients.deterministic)
        self.check(self.c.mr_flash_backward(self.device, ctypes.byref(problem), q, k, v, out, ctypes.c_void_p(lse),
                                            ctypes.byref(gradients), at, needed, None))
        del memory

    def quantize(self, x, per_scale, rotate):
        """x [batch, seq, heads, dim] -> codes of the same shape and scales."""
        batch, seq, heads, dim = x.shape
        codes = torch.empty(x.shape, dtype=torch.uint8)
        shape = (batch, seq, heads) if per_scale == 1 else (batch, heads, (seq + 127) // 128)
        scales = torch.full(shape, math.nan)
        args = QuantizeArgs(BF16 if x.dtype == torch.bfloat16 else F16, batch, seq, heads, dim, described(x),
                            described(codes), scales.data_ptr(), per_scale, rotate)
        self.check(self.c.mr_flash_quantize(self.device, ctypes.byref(args), None))
        return codes.view(torch.float8_e4m3fn), scales


def described(x):
    return Tensor(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


class Output:
    """A poisoned tensor [batch, seq, heads, dim] with a guard on both sides; order bhsd lays heads before seq."""

    def __init__(self, shape, dtype, order):
        size = math.prod(shape) * dtype.itemsize
        self.memory = torch.full((size + 2 * GUARD,), POISON, dtype=torch.uint8)
        self.skip = GUARD + -self.memory.data_ptr() % 16
        flat = self.memory[self.skip:self.skip + size].view(dtype)
        self.x = arranged_view(flat, shape, order)
        self.size = size

    def guards_stand(self):
        return bool((self.memory[:self.skip] == POISON).all() and
                    (self.memory[self.skip + self.size:] == POISON).all())


def arranged_view(flat, shape, order):
    if order == "bhsd":
        return flat.view(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    return flat.view(shape)


def arranged(x, order):
    flat = torch.empty(x.numel() + 16, dtype=x.dtype)
    skip = -flat.data_ptr() % 16 // x.dtype.itemsize
    to = arranged_view(flat[skip:skip + x.numel()], x.shape, order)
    to.copy_(x)
    return to


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


class Case:
    """A problem with its tensors. lengths: (queries, keys) of every sequence."""

    def __init__(self, rng, type, lengths, heads, kv_heads, dim, value_dim, layout, window=(-1, -1), sinks=False,
                 softcap=0.0, scale=0.0, block=None, page=16, rotate=0, heads_first=False):
        self.type, self.lengths, self.heads, self.kv_heads = type, lengths, heads, kv_heads
        self.dim, self.value_dim, self.layout, self.window = dim, value_dim, layout, window
        self.softcap, self.scale, self.block, self.page, self.rotate = softcap, scale, block, page, rotate
        self.order = "bhsd" if layout == "bhsd" or heads_first else "bshd"
        self.batch = len(lengths)
        self.max_q = max((q for q, _ in lengths), default=0)
        self.max_k = max((k for _, k in lengths), default=0)
        self.rng = rng
        self.seed = rng.randrange(1 << 30)
        self.sinks = torch.randn(heads, generator=self.generator(9)) if sinks else None

    def __str__(self):
        return (f"{NAMES[self.type]} {self.layout} {self.order} {self.lengths} heads {self.heads}/{self.kv_heads} "
                f"dims {self.dim}/{self.value_dim} window {self.window} sinks {self.sinks is not None} "
                f"softcap {self.softcap} scale {self.scale} blocks {self.block} page {self.page}")

    def generator(self, which):
        return torch.Generator().manual_seed(self.seed + which)

    def random(self, which, rows, heads, dim):
        x = torch.randn(self.batch_dim(), rows, heads, dim, generator=self.generator(which))
        return x if self.type in (F32, FP8) else x.to(TORCH[self.type])

    def batch_dim(self):
        return 1 if self.layout == "ragged" else self.batch

    def rows(self, side):
        if self.layout == "ragged":
            return sum(l[side] for l in self.lengths)
        return self.max_q if side == 0 else self.max_k

    def starts(self, side):
        out = [0]
        for l in self.lengths:
            out.append(out[-1] + l[side])
        return int32(out)

    def block_lists(self):
        block_q, block_k, keep = self.block
        q_blocks, k_blocks = -(-self.max_q // block_q), -(-self.max_k // block_k)
        starts, columns, dense = [0], [], torch.zeros(self.batch, self.heads, q_blocks, k_blocks, dtype=torch.bool)
        for b in range(self.batch):
            for h in range(self.heads):
                for m in range(q_blocks):
                    kept = [n for n in range(k_blocks) if self.rng.random() < keep]
                    columns += kept
                    starts.append(len(columns))
                    dense[b, h, m, kept] = True
        return q_blocks, int32(starts), int32(columns + [0]), dense


def visible(case, b, dense_blocks):
    """[heads, q_len, k_len]"""
    q_len, k_len = case.lengths[b]
    position = torch.arange(q_len)[:, None] + (k_len - q_len)
    key = torch.arange(k_len)[None, :]
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    if case.window[0] >= 0:
        seen &= key >= position - case.window[0]
    if case.window[1] >= 0:
        seen &= key <= position + case.window[1]
    seen = seen.expand(case.heads, q_len, k_len).clone()
    if dense_blocks is not None:
        wide = dense_blocks[b].repeat_interleave(case.block[0], 1).repeat_interleave(case.block[1], 2)
        seen &= wide[:, :q_len, :k_len]
    return seen


def attend(case, b, q, k, v, sinks, dense_blocks):
    """One sequence in float64: q [q_len, heads, dim] -> out [q_len, heads, value_dim], lse [heads, q_len]."""
    group = case.heads // case.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * (case.scale or case.dim**-0.5)
    if case.softcap > 0:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    seen = visible(case, b, dense_blocks)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        full = torch.cat([scores, sink], 2)
        lse = torch.logsumexp(full, 2)
        weights = torch.softmax(full, 2)[..., :-1]
    else:
        some = seen.any(2, keepdim=True)
        lse = torch.logsumexp(scores, 2) if scores.shape[2] else torch.full(scores.shape[:2], -math.inf)
        weights = torch.softmax(scores.masked_fill(~some, 0.0), 2) * some
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def largest_of(*tensors):
    finite = [x[x.isfinite()].abs().max().item() for x in tensors if x.isfinite().any()]
    return max(finite, default=0.0)


def worst(got, want, rounding, error, largest=None):
    """How far the worst element is beyond its bound: at most 1 is right. error: of `largest`, or of want's largest."""
    got, want = got.double(), want.double()
    if got.numel() == 0:
        return 0.0
    same = (got == want)  # infinities
    largest = largest_of(want) if largest is None else largest
    bound = rounding * want.abs() + error * largest + 1e-30
    off = torch.where(same, 0.0, (got - want).abs() / bound)
    return math.inf if off.isnan().any() else off.max().item()


class Run:
    """One case through the library: tensors as they lie, and as float64 leaves of torch's graph."""

    def __init__(self, library, case):
        self.library, self.case = library, case
        self.order = case.order
        self.keep = []
        self.q, self.k, self.v = (case.random(0, case.rows(0), case.heads, case.dim),
                                  case.random(1, case.rows(1), case.kv_heads, case.dim),
                                  case.random(2, case.rows(1), case.kv_heads, case.value_dim))
        self.dense_blocks = None
        self.problem = p = Problem(case.type, case.batch, case.heads, case.kv_heads, case.dim, case.value_dim,
                                   case.max_q, case.max_k, scale=case.scale, softcap=case.softcap,
                                   window_left=case.window[0], window_right=case.window[1])
        if case.sinks is not None:
            p.sinks = case.sinks.data_ptr()
        if case.layout == "ragged":
            p.cu_q, p.cu_k = self.pointer(case.starts(0)), self.pointer(case.starts(1))
        if case.block is not None:
            q_blocks, starts, columns, self.dense_blocks = case.block_lists()
            blocks = Blocks(case.block[0], case.block[1], q_blocks, self.pointer(starts), self.pointer(columns))
            self.keep.append(blocks)
            p.blocks = ctypes.pointer(blocks)
        self.leaves = [x.double() for x in (self.q, self.k, self.v)]
        if case.type == FP8:
            self.quantize()
        self.q, self.k, self.v = (arranged(x, self.order) for x in (self.q, self.k, self.v))
        self.tensors = [described(x) for x in (self.q, self.k, self.v)]
        if case.layout == "paged":
            self.page()
        for leaf in self.leaves:
            leaf.requires_grad_(True)

    def pointer(self, x):
        self.keep.append(x)
        return x.data_ptr()

    def quantize(self):
        made = [self.library.quantize(x.bfloat16(), per, rotate)
                for x, per, rotate in ((self.q, 1, self.case.rotate), (self.k, 128, self.case.rotate),
                                       (self.v, 128, 0))]
        (self.q, qs), (self.k, ks), (self.v, vs) = made
        p = self.problem
        p.q_scales, p.k_scales, p.v_scales = (self.pointer(s) for s in (qs, ks, vs))
        rows = self.case.rows(1)
        self.leaves = [self.q.double() * qs.double()[..., None]]
        for codes, scales in ((self.k, ks), (self.v, vs)):
            wide = scales.double().repeat_interleave(128, 2)[:, :, :rows].transpose(1, 2)
            self.leaves.append(codes.double() * wide[..., None])

    def page(self):
        case, tokens = self.case, self.case.page
        per = -(-case.max_k // tokens)
        order = torch.randperm(case.batch * per + 3, generator=case.generator(5)).to(torch.int32)
        table = order[:case.batch * per].reshape(case.batch, per).contiguous()
        self.problem.pages, self.problem.pages_stride = self.pointer(table), per
        self.problem.page_tokens = tokens
        self.problem.k_lengths = self.pointer(int32([k for _, k in case.lengths]))
        for i, x in ((1, self.k), (2, self.v)):
            # Rows that no sequence has are NaN in every type.
            pool = torch.full((len(order), tokens, case.kv_heads, x.shape[3]), 0, dtype=x.dtype)
            pool.view(torch.uint8).fill_(POISON)
            pool = arranged(pool, "bshd")
            for b in range(case.batch):
                for j in range(case.lengths[b][1]):
                    pool[table[b, j // tokens], j % tokens] = x[b, j]
            self.keep.append(pool)
            self.tensors[i] = described(pool)

    def sequence(self, x, side, b):
        """Rows of sequence b of [batch or 1, rows, heads, dim]."""
        if self.case.layout == "ragged":
            first = sum(l[side] for l in self.case.lengths[:b])
            return x[0, first:first + self.case.lengths[b][side]]
        return x[b, :self.case.lengths[b][side]]

    def lse_of(self, lse, b):
        if self.case.layout == "ragged":
            first = sum(l[0] for l in self.case.lengths[:b])
            return lse.view(self.case.heads, -1)[:, first:first + self.case.lengths[b][0]]
        return lse.view(self.case.batch, self.case.heads, -1)[b, :, :self.case.lengths[b][0]]

    def forward(self):
        case = self.case
        out_type = BF16 if case.type == FP8 else case.type
        shape = (case.batch_dim(), case.rows(0), case.heads, case.value_dim)
        self.out = Output(shape, TORCH[out_type], self.order)
        self.lse = torch.full((shape[0] * shape[1] * case.heads,), math.nan)
        self.library.forward(self.problem, *self.tensors, described(self.out.x), self.lse.data_ptr())
        sinks = None
        self.sinks = None
        if case.sinks is not None:
            self.sinks = sinks = case.sinks.double().requires_grad_(True)
        self.want = [attend(case, b, *(self.sequence(x, side, b) for x, side in zip(self.leaves, (0, 1, 1))), sinks,
                            self.dense_blocks) for b in range(case.batch)]
        bad = 0.0 if self.out.guards_stand() else math.inf
        error, largest = FORWARD_ERROR[out_type], None
        if self.library.has_bf16_tiles and case.type == BF16:
            error, largest = AMX_ERROR, largest_of(self.leaves[2])
        for b, (out, lse) in enumerate(self.want):
            bad = max(bad, worst(self.sequence(self.out.x, 0, b), out, ROUNDING[out_type], error, largest),
                      worst(self.lse_of(self.lse, b), lse, 2e-7, 2e-6))
        return bad

    def backward(self):
        case = self.case
        d_out = case.random(3, case.rows(0), case.heads, case.value_dim)
        loss = sum((out * self.sequence(d_out.double(), 0, b)).sum() for b, (out, _) in enumerate(self.want))
        wanted = list(self.leaves) + ([self.sinks] if self.sinks is not None else [])
        grads = [None] * len(wanted)
        if isinstance(loss, torch.Tensor):
            grads = list(torch.autograd.grad(loss, wanted, allow_unused=True))
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads)]
        made = [Output(tuple(x.shape), TORCH[case.type], self.order) for x in self.leaves]
        d_sinks = torch.full((case.heads,), math.nan)
        placed = arranged(d_out, self.order)
        g = Gradients(described(placed), *(described(m.x) for m in made),
                      d_sinks.data_ptr() if self.sinks is not None else None, 1)
        self.library.backward(self.problem, *self.tensors, described(self.out.x), self.lse.data_ptr(), g)
        error = BACKWARD_ERROR[case.type]
        bad = 0.0 if all(m.guards_stand() for m in made) else math.inf
        # dS is a difference, which may be zero where its terms are not: they are as large as dV's.
        largest = largest_of(*grads)
        for m, want in zip(made, grads):
            bad = max(bad, worst(m.x, want, ROUNDING[case.type], error, largest))
        if self.sinks is not None:
            bad = max(bad, worst(d_sinks, grads[3], 1e-6, error, largest))
        return bad


def fixed_cases(rng):
    for layout in ("bshd", "bhsd", "ragged"):
        for lengths in ([], [(0, 0)], [(0, 5)], [(5, 0)], [(1, 1)], [(1, 200)], [(130, 67)], [(1, 900)], [(300, 700)]):
            if layout == "ragged" and lengths:
                lengths = lengths + [(3, 7), (0, 9), (65, 64)]
            yield Case(rng, F32, lengths, 4, 2, 64, 64, layout, (-1, 0), True, heads_first=layout == "ragged")
    for type in (F32, F16, BF16):
        for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (8, 24), (40, 72)):
            yield Case(rng, type, [(70, 133)], 4, 2, *dims, "bshd", (-1, 0))
    yield Case(rng, BF16, [(9, 150)], 80, 1, 64, 64, "bshd", (-1, 0), True)  # more heads of a group than lanes
    yield Case(rng, FP8, [(70, 300), (70, 300)], 4, 2, 128, 128, "bshd", (-1, 0), True)


def random_case(rng):
    type = rng.choice((F32, F16, BF16, FP8))
    layout = rng.choice(("bshd", "bhsd", "ragged", "paged"))
    if type == FP8 and layout == "ragged":
        layout = "bshd"  # a scale a block of a sequence's positions: quantize() lays out dense ones
    lengths = [0, 1, 2, 15, 17, 63, 64, 65, 100, 129, 193]
    if layout in ("bshd", "bhsd"):
        sequences = [(rng.choice(lengths), rng.choice(lengths))] * rng.choice((1, 2))
    elif layout == "paged":
        q_len = rng.choice(lengths)
        sequences = [(q_len, rng.choice(lengths)) for _ in range(rng.choice((1, 3)))]
    else:
        sequences = [(rng.choice(lengths), rng.choice(lengths)) for _ in range(rng.choice((1, 2, 4)))]
    kv_heads = rng.choice((1, 2, 3))
    dim = rng.choice((16, 48, 64, 96, 128))
    value_dim = dim if rng.random() < 0.7 else rng.choice((16, 64, 128))
    window = rng.choice(((-1, -1), (-1, 0), (-1, 0), (16, 0), (70, 0), (5, 9), (-1, 30), (40, -1), (0, 0)))
    block = None if rng.random() < 0.7 else (rng.choice((64, 128)), rng.choice((64, 128)), 0.6)
    return Case(rng, type, sequences, kv_heads * rng.choice((1, 2, 5)), kv_heads, dim, value_dim, layout, window,
                sinks=rng.random() < 0.5, softcap=rng.choice((0.0, 0.0, 2.0, 30.0)), scale=rng.choice((0.0, 0.3)),
                block=block, page=rng.choice((16, 64, 48)), rotate=rng.randrange(2),
                heads_first=layout == "ragged" and rng.random() < 0.5)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--isa")
    parser.add_argument("--cases", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # One thread takes several tiles of a sequence at once, three take fewer.
    libraries = [Library(options.library, options.isa, threads) for threads in (1, 3)]
    rng = random.Random(options.seed)
    cases = list(fixed_cases(rng)) + [random_case(rng) for _ in range(options.cases)]
    wrong = backwards = 0
    for i, case in enumerate(cases):
        try:
            run = Run(libraries[i % 2], case)
            found = {"forward": run.forward()}
            if case.type != FP8 and case.layout != "paged":
                found["backward"] = run.backward()
                backwards += 1
        except RuntimeError as error:
            found = {str(error): math.inf}
        for what, off in found.items():
            if not off <= 1.0:
                wrong += 1
                print(f"WRONG {what}: {off:.3g} of what it may be off: {case}", flush=True)
    print(f"{libraries[1].name}: {len(cases)} cases, {backwards} with backward, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

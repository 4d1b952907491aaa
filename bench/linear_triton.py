"""Chunked SSD (Mamba-2's paper, section 6) in Triton, forwards and backwards, as a peer of bench/linear_bench.cu.

Own code after the paper's four steps, with the split of kernels that mamba_ssm has: products of a chunk alone,
states of chunks, a pass over chunks, what rows read. Inputs bf16 (dt and a float32), sums float32. Linear attention
without gates is the same with gated=False: a group for each head, dt of one, nothing decays."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rows(ptr, base, stride, L: tl.constexpr, D: tl.constexpr):
    return tl.load(ptr + base + tl.arange(0, L)[:, None] * stride + tl.arange(0, D)[None, :])


@triton.jit
def _gates(dt_ptr, a_ptr, first, h, H, L: tl.constexpr, GATED: tl.constexpr):
    if GATED:
        dt = tl.load(dt_ptr + (first + tl.arange(0, L)) * H + h)
        return dt, tl.cumsum(dt * tl.load(a_ptr + h))
    return tl.full((L,), 1.0, tl.float32), tl.zeros((L,), tl.float32)


@triton.jit
def _last(log, L: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, L) == L - 1, log, 0.0))


@triton.jit
def _products(b, c, out, G, L: tl.constexpr, N: tl.constexpr):  # C B^T of a chunk and group
    chunk, g = tl.program_id(0), tl.program_id(1)
    at = (chunk * L * G + g) * N
    x = tl.dot(_rows(c, at, G * N, L, N), tl.trans(_rows(b, at, G * N, L, N)))
    to = out + (chunk * G + g) * L * L + tl.arange(0, L)[:, None] * L + tl.arange(0, L)[None, :]
    tl.store(to, x.to(tl.bfloat16))


@triton.jit
def _chunk_state(x, dt, a, b, out, lasts, H, G, L: tl.constexpr, N: tl.constexpr, P: tl.constexpr, GATED: tl.constexpr,
                 BACKWARDS: tl.constexpr):  # B^T (e(last) dt x), or C^T (e dO)
    chunk, h = tl.program_id(0), tl.program_id(1)
    d, log = _gates(dt, a, chunk * L, h, H, L, GATED)
    last = _last(log, L)
    weight = tl.exp(log) if BACKWARDS else tl.exp(last - log) * d
    rows = _rows(x, (chunk * L * H + h) * P, H * P, L, P)
    if GATED:
        rows = (rows * weight[:, None]).to(tl.bfloat16)
    keys = _rows(b, (chunk * L * G + h // (H // G)) * N, G * N, L, N)
    state = tl.dot(tl.trans(keys), rows)
    tl.store(out + (chunk * H + h) * N * P + tl.arange(0, N)[:, None] * P + tl.arange(0, P)[None, :], state)
    tl.store(lasts + chunk * H + h, last)


@triton.jit
def _pass(states, lasts, out, H, chunks, SIZE: tl.constexpr, BLOCK: tl.constexpr, BACKWARDS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, s = tl.program_id(1), tl.program_id(2)
    state = tl.zeros((BLOCK,), tl.float32)
    for i in range(chunks):
        chunk = s * chunks + (chunks - 1 - i if BACKWARDS else i)
        entry = chunk * H + h
        tl.store(out + entry * SIZE + at, state.to(tl.bfloat16))
        state = state * tl.exp(tl.load(lasts + entry)) + tl.load(states + entry * SIZE + at)


@triton.jit
def _scan(x, dt, a, c, products, states, out, H, G, L: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
          GATED: tl.constexpr):
    chunk, h = tl.program_id(0), tl.program_id(1)
    g = h // (H // G)
    d, log = _gates(dt, a, chunk * L, h, H, L, GATED)
    keys = _rows(c, (chunk * L * G + g) * N, G * N, L, N)
    state = _rows(states, (chunk * H + h) * N * P, P, N, P)
    o = tl.dot(keys, state)
    i, j = tl.arange(0, L)[:, None], tl.arange(0, L)[None, :]
    cb = tl.load(products + (chunk * G + g) * L * L + i * L + j)
    if GATED:
        o *= tl.exp(log)[:, None]
        cb = (cb * tl.exp(tl.minimum(log[:, None] - log[None, :], 0.0)) * d[None, :]).to(tl.bfloat16)
    cb = tl.where(i >= j, cb, 0.0)
    o += tl.dot(cb, _rows(x, (chunk * L * H + h) * P, H * P, L, P))
    to = out + (chunk * L * H + h) * P + i * (H * P) + tl.arange(0, P)[None, :]
    tl.store(to, o.to(tl.bfloat16))


@triton.jit
def _dx(x, d_out, dt, a, b, products, d_states, dx, ddt, H, G, L: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
        GATED: tl.constexpr):
    chunk, h = tl.program_id(0), tl.program_id(1)
    g = h // (H // G)
    d, log = _gates(dt, a, chunk * L, h, H, L, GATED)
    keys = _rows(b, (chunk * L * G + g) * N, G * N, L, N)
    dw = tl.dot(keys, _rows(d_states, (chunk * H + h) * N * P, P, N, P))
    j, i = tl.arange(0, L)[:, None], tl.arange(0, L)[None, :]
    cb = tl.load(products + (chunk * G + g) * L * L + i * L + j)
    if GATED:
        dw *= tl.exp(_last(log, L) - log)[:, None]
        cb = (cb * tl.exp(tl.minimum(log[None, :] - log[:, None], 0.0))).to(tl.bfloat16)
    cb = tl.where(i >= j, cb, 0.0)
    at = (chunk * L * H + h) * P
    dw += tl.dot(cb, _rows(d_out, at, H * P, L, P))
    to = dx + at + j * (H * P) + tl.arange(0, P)[None, :]
    tl.store(to, (dw * d[:, None]).to(tl.bfloat16))
    if GATED:
        tl.store(ddt + (chunk * L + tl.arange(0, L)) * H + h, tl.sum(dw * _rows(x, at, H * P, L, P), 1))


@triton.jit
def _dbc(x, d_out, dt, a, b, c, products, states, d_states, db, dc, dlog, H, G, SPLIT: tl.constexpr, L: tl.constexpr,
         N: tl.constexpr, P: tl.constexpr, GATED: tl.constexpr):
    chunk, g, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_at = (chunk * L * G + g) * N
    i, j = tl.arange(0, L)[:, None], tl.arange(0, L)[None, :]
    b_rows, c_rows = _rows(b, key_at, G * N, L, N), _rows(c, key_at, G * N, L, N)
    sum_b = tl.zeros((L, N), tl.float32)
    sum_c = tl.zeros((L, N), tl.float32)
    sum_cb = tl.zeros((L, L), tl.float32)
    cb = tl.load(products + (chunk * G + g) * L * L + i * L + j)
    heads = H // G // SPLIT
    for k in range(heads):
        h = g * (H // G) + part * heads + k
        d, log = _gates(dt, a, chunk * L, h, H, L, GATED)
        at = (chunk * L * H + h) * P
        rows, out = _rows(x, at, H * P, L, P), _rows(d_out, at, H * P, L, P)
        state = _rows(states, (chunk * H + h) * N * P, P, N, P)
        d_state = _rows(d_states, (chunk * H + h) * N * P, P, N, P)
        read, write, seg = tl.dot(out, tl.trans(state)), tl.dot(rows, tl.trans(d_state)), tl.dot(out, tl.trans(rows))
        if GATED:
            last = _last(log, L)
            read *= tl.exp(log)[:, None]
            write *= (tl.exp(last - log) * d)[:, None]
            seg *= tl.exp(tl.minimum(log[:, None] - log[None, :], 0.0)) * d[None, :]
            seg = tl.where(i >= j, seg, 0.0)
            pair = seg * cb
            writes = tl.sum(write * b_rows, 1)
            of = tl.sum(read * c_rows, 1) - writes + tl.sum(pair, 1) - tl.sum(pair, 0)
            end = tl.sum(writes) + tl.exp(last) * tl.sum(tl.sum(state.to(tl.float32) * d_state, 1))
            of += tl.where(tl.arange(0, L) == L - 1, end, 0.0)
            tl.store(dlog + (chunk * L + tl.arange(0, L)) * H + h, of)
        else:
            seg = tl.where(i >= j, seg, 0.0)
        sum_c += read
        sum_b += write
        sum_cb += seg
    pairs = sum_cb.to(tl.bfloat16)
    sum_c += tl.dot(pairs, b_rows)
    sum_b += tl.dot(tl.trans(pairs), c_rows)
    to = part * tl.num_programs(0) * L * G * N + key_at + i * (G * N) + tl.arange(0, N)[None, :]
    tl.store(dc + to, sum_c)
    tl.store(db + to, sum_b)


@triton.jit
def _d_gates(dlog, dt, a, ddt, da, H, L: tl.constexpr):
    chunk, h = tl.program_id(0), tl.program_id(1)
    at = (chunk * L + tl.arange(0, L)) * H + h
    of = tl.cumsum(tl.load(dlog + at), reverse=True)
    tl.store(ddt + at, tl.load(ddt + at) + of * tl.load(a + h))
    tl.store(da + chunk * H + h, tl.sum(of * tl.load(dt + at)))


class Ssd:
    """x [S, T, H, P], b and c [S, T, G, N] in bf16, dt [S, T, H] and a [H] in float32; T a multiple of `chunk`."""

    def __init__(self, x, dt, a, b, c, chunk=64, gated=True, split=1, warps=4):
        self.x, self.dt, self.a, self.b, self.c, self.split = x, dt, a, b, c, split
        (self.S, self.T, self.H, self.P), (self.G, self.N) = x.shape, b.shape[2:]
        self.chunks = self.T // chunk
        new = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device=x.device)
        every = self.S * self.chunks
        self.products = new(every, self.G, chunk, chunk)
        self.raw = new(every, self.H, self.N, self.P, dtype=torch.float32)
        self.states, self.d_states = new(every, self.H, self.N, self.P), new(every, self.H, self.N, self.P)
        self.lasts = new(every, self.H, dtype=torch.float32)
        self.out, self.dx = torch.empty_like(x), torch.empty_like(x)
        self.ddt, self.dlog = new(self.S, self.T, self.H, dtype=torch.float32), new(self.S, self.T, self.H,
                                                                                   dtype=torch.float32)
        self.da_parts = new(every, self.H, dtype=torch.float32)
        self.db, self.dc = (new(split, *b.shape, dtype=torch.float32) for _ in range(2))
        self.chunk, self.gated = chunk, gated
        self.sizes = dict(L=chunk, N=self.N, P=self.P, GATED=gated, num_warps=warps)

    def _states(self, rows, keys, out, backwards):
        size = self.N * self.P
        _chunk_state[(self.S * self.chunks, self.H)](rows, self.dt, self.a, keys, self.raw, self.lasts, self.H, self.G,
                                                    BACKWARDS=backwards, **self.sizes)
        _pass[(size // 512, self.H, self.S)](self.raw, self.lasts, out, self.H, self.chunks, SIZE=size, BLOCK=512,
                                            BACKWARDS=backwards)

    def forward(self):
        _products[(self.S * self.chunks, self.G)](self.b, self.c, self.products, self.G, L=self.chunk, N=self.N)
        self._states(self.x, self.b, self.states, False)
        _scan[(self.S * self.chunks, self.H)](self.x, self.dt, self.a, self.c, self.products, self.states, self.out,
                                             self.H, self.G, **self.sizes)
        return self.out

    def backward(self, d_out):
        every = self.S * self.chunks
        self._states(d_out, self.c, self.d_states, True)
        _dx[(every, self.H)](self.x, d_out, self.dt, self.a, self.b, self.products, self.d_states, self.dx, self.ddt,
                             self.H, self.G, **self.sizes)
        _dbc[(every, self.G, self.split)](self.x, d_out, self.dt, self.a, self.b, self.c, self.products, self.states,
                                         self.d_states, self.db, self.dc, self.dlog, self.H, self.G, SPLIT=self.split,
                                         **{**self.sizes, 'num_warps': 8})
        if self.gated:
            _d_gates[(every, self.H)](self.dlog, self.dt, self.a, self.ddt, self.da_parts, self.H, L=self.chunk)
        return self.dx, self.ddt, self.da_parts.sum(0), self.db.sum(0), self.dc.sum(0)

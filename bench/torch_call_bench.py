#!/usr/bin/env python3
"""What a call from torch costs beside torch's own: tensors so small that computing them takes next to nothing.

  bench/torch_call_bench.py [--device cuda] [NAME ...]      with millrace_kernels on the path
  bench/torch_call_bench.py --large [--device cuda]         large tensors beside the C API on the same memory

Microseconds of this thread's processor time per call, the least of many short runs, ours and torch's in turn in one
process; on a GPU the calls are queued and not waited for. "grad": inputs require one, forward alone. On a CPU also what
the C API takes of each call of ours (capi_share.py), by itself and again and again with the same arguments, and the rest:
what it costs to call it from torch.
"""

import argparse
import ctypes
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import capi_share
import millrace_kernels
import millrace_kernels.torch as mt


def cases(device):
    def random(*shape, grad=False):
        return torch.randn(*shape, device=device, requires_grad=grad)

    made = {}
    for grad in (False, True):
        q, k, v = (random(1, 1, 1, 16, grad=grad) for _ in range(3))
        x, w, b, r = random(1, 16, grad=grad), random(16, grad=grad), random(16, grad=grad), random(1, 16, grad=grad)
        m = random(16, 16, grad=grad)
        logits, targets = random(1, 16, grad=grad), torch.zeros(1, dtype=torch.int64, device=device)
        of = {
            "attention": (lambda q=q, k=k, v=v: mt.attention(q, k, v),
                          lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v)),
            "scaled_dot_product_attention": (lambda q=q, k=k, v=v: mt.scaled_dot_product_attention(q, k, v),
                                             lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v)),
            "rms_norm": (lambda x=x, w=w: mt.rms_norm(x, w), lambda x=x, w=w: F.rms_norm(x, (16,), w)),
            "layer_norm": (lambda x=x, w=w, b=b: mt.layer_norm(x, w, b),
                           lambda x=x, w=w, b=b: F.layer_norm(x, (16,), w, b)),
            "add_rms_norm": (lambda x=x, r=r, w=w: mt.add_rms_norm(x, r, w),
                             lambda x=x, r=r, w=w: F.rms_norm(x + r, (16,), w)),
            "linear": (lambda x=x, m=m: mt.linear(x, m), lambda x=x, m=m: F.linear(x, m)),
            "linear with bias": (lambda x=x, m=m, b=b: mt.linear(x, m, b), lambda x=x, m=m, b=b: F.linear(x, m, b)),
            "gelu": (lambda x=x: mt.gelu(x), lambda x=x: F.gelu(x)),
            "swiglu": (lambda x=x, r=r: mt.swiglu(x, r), lambda x=x, r=r: F.silu(x) * r),
            "softmax": (lambda x=x: mt.softmax(x), lambda x=x: torch.softmax(x, -1)),
            "cross_entropy": (lambda x=logits: mt.cross_entropy(x, targets),
                              lambda x=logits: F.cross_entropy(x, targets)),
        }
        made.update({f"{name}{', grad' if grad else ''}": pair for name, pair in of.items()})
    made.update(without_gradient(random, device))
    return made


def without_gradient(random, device):
    """The calls that are timed where no gradient is wanted alone; torch has nothing of its own beside most of them."""
    on_cpu = device == "cpu"
    x, m, logits, scores = random(1, 32), random(32, 32), random(1, 16), random(1, 4)
    targets, tokens = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
    heads, positions, frequencies = random(1, 1, 16), tokens, random(8)
    rows, starts = random(2, 1, 16), torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    q, pages = random(1, 1, 1, 16), random(2, 16, 1, 16)
    table, lengths = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([[0, 1]], [20]))
    drawn, seed = torch.rand(1, dtype=torch.float64), torch.tensor([1, 2])
    packed = mt.pack(m)
    chosen, shares = mt.route(scores, 2)
    gate, up, down = (mt.pack(random(4, 32, 32)) for _ in range(3))
    made = {
        "attention, return_lse": (lambda: mt.attention(q, q, q, return_lse=True), None),
        "attention, ragged": (lambda: mt.attention(rows, rows, rows, cu_q=starts, cu_k=starts, max_q=1, max_k=1), None),
        "attention_paged": (lambda: mt.attention_paged(q, pages, pages, table, lengths), None),
        "rotary": (lambda: mt.rotary(heads, positions, frequencies), None),
        "rotary, frequencies made": (lambda: mt.rotary(heads, positions), None),
        "add_layer_norm": (lambda: mt.add_layer_norm(x, x, x[0], x[0]), lambda: F.layer_norm(x + x, (32,), x[0], x[0])),
        "silu": (lambda: mt.silu(x), lambda: F.silu(x)),
        "geglu": (lambda: mt.geglu(x, x), lambda: F.gelu(x) * x),
        "clamped_swiglu": (lambda: mt.clamped_swiglu(x, x), None),
        "linear_cross_entropy": (lambda: mt.linear_cross_entropy(x, m, targets),
                                 lambda: F.cross_entropy(F.linear(x, m), targets)),
        "embedding": (lambda: mt.embedding(tokens, m), lambda: F.embedding(tokens, m)),
        "dropout": (lambda: mt.dropout(x, 0.5, seed=seed), lambda: F.dropout(x, 0.5)),
        "packed_linear": (lambda: mt.packed_linear(x, packed), None),
        "packed_linear with bias": (lambda: mt.packed_linear(x, packed, x[0]), None),
        "route": (lambda: mt.route(scores, 2), None),
        "experts, packed": (lambda: mt.experts(x, chosen, shares, gate, up, down), None),
        "sample, greedy": (lambda: mt.sample(logits, temperature=0.0, uniform=drawn), lambda: logits.argmax(-1)),
        "sample": (lambda: mt.sample(logits, top_k=4, top_p=0.9), None),
    }
    four = mt.LowBitLinear(torch.nn.Linear(128, 64, device=device).requires_grad_(False), "nvfp4")
    wide = random(1, 128).bfloat16()
    made["LowBitLinear"] = (lambda: four(wide), None)
    if on_cpu:
        eight = mt.QuantizedLinear(torch.nn.Linear(32, 32).requires_grad_(False), "q8_0")
        made["QuantizedLinear"] = (lambda: eight(x), None)
        experts = [random(4, 32, 32) for _ in range(3)]
        made["experts"] = (lambda: mt.experts(x, chosen, shares, *experts), None)
        made["attention, ragged, longest not told"] = (lambda: mt.attention(rows, rows, rows, cu_q=starts, cu_k=starts), None)
    return made


def least(functions, device, runs=60, calls=200):
    """Microseconds per call of each, run in turn."""
    best = [float("inf")] * len(functions)
    for _ in range(runs):
        for i, f in enumerate(functions):
            start = time.thread_time()
            for _ in range(calls):
                f()
            best[i] = min(best[i], (time.thread_time() - start) / calls * 1e6)
            if device == "cuda":
                torch.cuda.synchronize()
    return best


def gpu_times(functions, calls=20, runs=15):
    """Microseconds per call of each by the GPU's clock, the median of runs in turn."""
    taken = [[] for _ in functions]
    for run in range(runs + 2):
        for f, times in zip(functions, taken):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                f()
            end.record()
            end.synchronize()
            if run >= 2:
                times.append(begin.elapsed_time(end) / calls * 1e3)
    return [statistics.median(times) for times in taken]


class Capi:
    """The C API by ctypes, on tensors of torch."""

    def __init__(self, device):
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))
        import flash_attention_test as flash
        import fused_ops
        import gemm_test

        self.flash, self.fused, self.gemm_args = flash, fused_ops, gemm_test.Args
        self.c, self.device, self.on = ctypes.CDLL(str(millrace_kernels.library_path())), ctypes.c_void_p(), device
        self.types = {torch.float32: gemm_test.F32, torch.bfloat16: gemm_test.BF16}
        options = (ctypes.c_int * 4)(torch.get_num_threads())  # mr_device_options: threads, then a pointer
        self.check(self.c.mr_device_open(device.encode(), options if device == "cpu" else None, ctypes.byref(self.device)))

    def check(self, status):
        if status != 0:
            raise RuntimeError(f"the C API says {status}")

    def stream(self):
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if self.on == "cuda" else None)

    def workspace(self, ask, args):
        need = ctypes.c_size_t()
        self.check(ask(self.device, ctypes.byref(args), ctypes.byref(need)))
        kept = torch.empty(need.value + 256, dtype=torch.uint8, device=self.on)
        return kept, ctypes.c_void_p(-(-kept.data_ptr() // 256) * 256), need

    def attention(self, q, k, v, out):
        batch, seq, heads, dim = q.shape
        problem = self.flash.Problem(type=self.flash.BF16, batch=batch, heads=heads, kv_heads=heads, head_dim=dim, value_dim=dim,
                                     max_q=seq, max_k=seq, window_left=-1, window_right=0)
        views = [self.flash.tensor_of(t, (0, 1, 2)) for t in (q, k, v, out)]
        kept, data, need = self.workspace(self.c.mr_flash_forward_workspace_bytes, problem)
        return lambda: self.check(self.c.mr_flash_forward(self.device, ctypes.byref(problem), *views, ctypes.c_void_p(None),
                                                          data, need, self.stream())) or kept

    def product(self, x, w, y):
        """x [m, k] times w [n, k] transposed."""
        args = self.gemm_args(type=self.types[x.dtype], m=x.shape[0], n=w.shape[0], k=x.shape[1], a=x.data_ptr(), lda=x.stride(0),
                              b=w.data_ptr(), ldb=w.stride(0), transpose_b=1, out_type=self.types[y.dtype], c=y.data_ptr(),
                              ldc=y.stride(0), alpha=1.0)
        kept, data, need = self.workspace(self.c.mr_gemm_workspace_bytes, args)
        return lambda: self.check(self.c.mr_gemm(self.device, ctypes.byref(args), data, need, self.stream())) or kept

    def rms_norm(self, x, y):
        norm = self.fused.NormArgs(kind=self.fused.RMS, rows=x.shape[0], cols=x.shape[1], eps=1e-6,
                                   x=self.fused.Rows(x.data_ptr(), self.types[x.dtype], 0),
                                   y=self.fused.Rows(y.data_ptr(), self.types[x.dtype], 0))
        return lambda: self.check(self.c.mr_norm(self.device, ctypes.byref(norm), self.stream()))


def large(device):
    capi = Capi(device)
    rows, (batch, seq, heads) = (8192, (4, 4096, 16)) if device == "cuda" else (1024, (1, 1024, 8))
    x, w = (torch.randn(rows, rows, device=device, dtype=torch.bfloat16) for _ in range(2))
    q, k, v = (torch.randn(batch, seq, heads, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    tall = x if device == "cuda" else x.repeat(8, 1)  # milliseconds: what a call costs is another table's
    y, normed, out = torch.empty_like(x), torch.empty_like(tall), torch.empty_like(q)
    pairs = {
        f"attention {batch} x {seq} x {heads} x 128, causal": (lambda: mt.attention(q, k, v, causal=True),
                                                               capi.attention(q, k, v, out)),
        f"linear {rows} x {rows} x {rows}": (lambda: mt.linear(x, w), capi.product(x, w, y)),
        f"rms_norm {tall.shape[0]} x {rows}": (lambda: mt.rms_norm(tall), capi.rms_norm(tall, normed)),
    }
    where = torch.cuda.get_device_name() if device == "cuda" else f"a CPU, {torch.get_num_threads()} thread"
    print(f"torch {torch.__version__} on {where}, bf16: us through torch, by the C API, ratio")
    for name, pair in pairs.items():
        ours, c = gpu_times(pair) if device == "cuda" else least(pair, device, runs=15, calls=2)
        print(f"{name:38} {ours:8.1f} {c:8.1f} {ours / c:6.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all without")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.large:
        return large(options.device)
    on_cpu = options.device == "cpu"
    if on_cpu:
        capi_share.with_share(millrace_kernels.library_path())
    print(f"torch {torch.__version__} on {options.device}: us per call, ours"
          + (", the C API's part of it, the rest" if on_cpu else "") + ", torch's own")
    for name, pair in cases(options.device).items():
        if options.names and not any(part in name for part in options.names):
            continue
        pair = [f for f in pair if f is not None]
        for f in pair:
            f()
        ours, *theirs = least(pair, options.device)
        share = capi_share.share_of(pair[0]) if on_cpu else 0.0
        print(f"{name:36} {ours:6.1f}" + (f" {share:6.1f} {ours - share:6.1f}" if on_cpu else "")
              + "".join(f" {t:6.1f}" for t in theirs), flush=True)


if __name__ == "__main__":
    main()

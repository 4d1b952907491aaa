#!/usr/bin/env python3
"""What a call from torch costs beside torch's own: tensors so small that computing them takes next to nothing.

  bench/torch_call_bench.py [--device cuda] [NAME ...]      with millrace_kernels on the path
  bench/torch_call_bench.py --large                         large tensors of a GPU beside the C API on the same memory

Microseconds of this thread's processor time per call, the least of many short runs, ours and torch's in turn in one
process; on a GPU the calls are queued and not waited for. "grad": inputs require one, forward alone.
"""

import argparse
import ctypes
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

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


def device_times(functions, calls=20, runs=15):
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


def large():
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))
    import flash_attention_test as flash
    import fused_ops
    import gemm_test

    path = str(millrace_kernels.library_path())
    x, w = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q, k, v = (torch.randn(4, 4096, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    y, out = torch.empty_like(x), torch.empty_like(q)
    gemm, library = gemm_test.Gemm(path, torch), flash.Library(path)
    problem = flash.Problem(type=flash.BF16, batch=4, heads=16, kv_heads=16, head_dim=128, value_dim=128, max_q=4096,
                            max_k=4096, window_left=-1, window_right=0)
    views, workspace = [flash.tensor_of(t, (0, 1, 2)) for t in (q, k, v, out)], library.workspace(torch, problem)
    norm = fused_ops.NormArgs(kind=fused_ops.RMS, rows=8192, cols=8192, x=fused_ops.Rows(x.data_ptr(), 2, 0),
                              y=fused_ops.Rows(y.data_ptr(), 2, 0), eps=1e-6)

    def norm_by_c():
        library.check(library.c.mr_norm(library.device, ctypes.byref(norm),
                                        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))

    rows = {
        "attention 4 x 4096 x 16 x 128, causal": (lambda: mt.attention(q, k, v, causal=True),
                                                  lambda: library.forward(torch, problem, *views, 0, workspace)),
        "linear 8192 x 8192 x 8192": (lambda: mt.linear(x, w), lambda: gemm(x, w, y, False, True)),
        "rms_norm 8192 x 8192": (lambda: mt.rms_norm(x), norm_by_c),
    }
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}, bf16: us through torch, by the C API, ratio")
    for name, pair in rows.items():
        ours, c = device_times(pair)
        print(f"{name:38} {ours:8.1f} {c:8.1f} {ours / c:6.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all without")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    if options.large:
        return large()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__} on {options.device}: us per call, ours, torch's, ratio")
    for name, pair in cases(options.device).items():
        if options.names and not any(part in name for part in options.names):
            continue
        for f in pair:
            f()
        ours, theirs = least(pair, options.device)
        print(f"{name:36} {ours:6.1f} {theirs:6.1f} {ours / theirs:5.2f}", flush=True)


if __name__ == "__main__":
    main()

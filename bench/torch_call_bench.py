#!/usr/bin/env python3
"""What a call from torch costs beside torch's own: tensors so small that computing them takes next to nothing.

  bench/torch_call_bench.py [--device cuda] [NAME ...]      with millrace_kernels on the path

Microseconds of this thread's processor time per call, the least of many short runs, ours and torch's in turn in one
process; on a GPU the calls are queued and not waited for. "grad": inputs require one, forward alone.
"""

import argparse
import time

import torch
import torch.nn.functional as F

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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all without")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
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

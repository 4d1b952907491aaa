#!/usr/bin/env python3
"""TFLOP/s of attention over tensors (millrace/kernels/flash_attention.h) on this machine's GPU beside torch's
scaled_dot_product_attention with the cuDNN and flash backends, in the same run.

    bench/flash_attention.py LIBRARY [LIBRARY ...] [--what forward|backward|decode|error] [--dtype bf16|f16|e4m3]
                             [--match d128] [--blocks 128] [--no-torch]

16k tokens in all. Operations: 4 x pairs x dim x heads, pairs of query and key that the mask shows (half of them where
causal), backward 2.5 times that. Medians of events around each call, after warming up. decode: GB/s of keys and
values. error: of E4M3 with outliers, against float64. Quantizing is not in the time of e4m3, transposing its values is;
torch's figures are bf16's.
"""
import argparse
import ctypes
import math
import os
import re
import sys
import warnings

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "gpu"))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpu_events import milliseconds  # noqa: E402
from flash_attention_test import BF16, E4M3, F16, Blocks, Gradients, Library, P, Problem, tensor_of  # noqa: E402

# name, batch, heads, kv heads, length, dims, left, right, sinks
SHAPES = [("d64 causal 8k", 2, 64, 8, 8192, (64, 64), -1, 0, True),
          ("d64 full 16k", 1, 32, 32, 16384, (64, 64), -1, -1, False),
          ("d128 full 16k", 1, 16, 16, 16384, (128, 128), -1, -1, False),
          ("d128 causal 16k", 1, 16, 16, 16384, (128, 128), -1, 0, False),
          ("d128 causal 8k gqa", 2, 32, 8, 8192, (128, 128), -1, 0, False),
          ("d128 full 2k", 8, 16, 16, 2048, (128, 128), -1, -1, False),
          ("d96 causal 16k", 1, 16, 16, 16384, (96, 96), -1, 0, False),
          ("d192/128 causal 16k", 1, 16, 16, 16384, (192, 128), -1, 0, False),
          ("d256 full 16k", 1, 8, 8, 16384, (256, 256), -1, -1, False),
          ("d256 causal 16k", 1, 8, 8, 16384, (256, 256), -1, 0, False),
          ("d64 window 1024 8k", 2, 64, 8, 8192, (64, 64), 1023, 0, True),
          ("d64 window 128 8k", 2, 64, 8, 8192, (64, 64), 127, 0, True)]


def visible_pairs(n, left, right):
    total = 0
    low = left if left >= 0 else n
    high = right if right >= 0 else n
    if (left, right) == (-1, -1):
        return n * n
    if (left, right) == (-1, 0):
        return n * n // 2
    for i in range(n):
        total += min(n - 1, i + high) - max(0, i - low) + 1
    return total


class Bench:
    def __init__(self, torch, shape, dtype="bf16"):
        self.torch = torch
        self.name, self.batch, self.h, self.hk, self.n, (self.d, self.dv), self.left, self.right, sinks = shape
        self.type = torch.float16 if dtype == "f16" else torch.bfloat16
        new = lambda heads, dim: torch.randn(self.batch, self.n, heads, dim, device="cuda", dtype=self.type)
        self.q, self.k, self.v = new(self.h, self.d), new(self.hk, self.d), new(self.hk, self.dv)
        self.out, self.d_out = torch.empty_like(new(self.h, self.dv)), new(self.h, self.dv)
        self.lse = torch.empty(self.batch, self.h, self.n, device="cuda")
        p = self.problem = Problem()
        p.type = F16 if dtype == "f16" else BF16
        p.batch, p.heads, p.kv_heads, p.head_dim, p.value_dim = self.batch, self.h, self.hk, self.d, self.dv
        p.max_q = p.max_k = self.n
        p.scale = 1 / math.sqrt(self.d)
        p.window_left, p.window_right = self.left, self.right
        self.sinks = torch.randn(self.h, device="cuda") if sinks else None
        if sinks:
            p.sinks = self.sinks.data_ptr()
        self.operations = 2 * self.batch * self.h * visible_pairs(self.n, self.left, self.right) * (self.d + self.dv)

    def use_blocks(self, block, share):
        """Each block of queries has this share of its keys' blocks; operations are counted of those."""
        torch, m = self.torch, self.n // block
        listed = torch.rand(self.batch * self.h * m, m, device="cuda") < share
        starts = torch.nn.functional.pad(listed.sum(1).cumsum(0), (1, 0)).int()
        columns = listed.nonzero()[:, 1].int()
        self.lists = (starts, columns)
        self.blocks = Blocks(block, block, m, starts.data_ptr(), columns.data_ptr())
        self.problem.blocks = ctypes.cast(ctypes.pointer(self.blocks), P)
        self.operations = 2 * len(columns) * block * block * (self.d + self.dv)

    def view(self, x):
        return tensor_of(x, (0, 1, 2))

    def use_codes(self, library, rotate=1):
        """E4M3 from here on."""
        self.codes = [library.quantize(self.torch, x, rows, turn)
                      for x, rows, turn in ((self.q, 1, rotate), (self.k, 128, rotate), (self.v, 128, 0))]
        p = self.problem
        p.type = E4M3
        p.q_scales, p.k_scales, p.v_scales = (scales.data_ptr() for _, scales in self.codes)

    def forward(self, library):
        workspace = library.workspace(self.torch, self.problem)
        inputs = [codes for codes, _ in self.codes] if self.problem.type == E4M3 else [self.q, self.k, self.v]
        views = [self.view(x) for x in (*inputs, self.out)]
        return lambda: library.forward(self.torch, self.problem, *views, self.lse.data_ptr(), workspace)

    def backward(self, library, deterministic):
        self.forward(library)()
        self.grads = [self.torch.empty_like(x) for x in (self.q, self.k, self.v)]
        self.d_sinks = self.torch.empty(self.h, device="cuda")
        g = Gradients(self.view(self.d_out), *[self.view(x) for x in self.grads],
                      self.d_sinks.data_ptr() if self.sinks is not None else None, deterministic)
        workspace = library.workspace(self.torch, self.problem, deterministic)
        views = [self.view(x) for x in (self.q, self.k, self.v, self.out)]
        return lambda: library.backward(self.torch, self.problem, *views, self.lse.data_ptr(), g, workspace)

    def torch_runs(self, what):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        if (self.left, self.right) not in ((-1, -1), (-1, 0)):
            return
        q, k, v, d_out = (x.transpose(1, 2).detach().requires_grad_(what == "backward")
                          for x in (self.q, self.k, self.v, self.d_out))
        for name, backend in [("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)]:
            def run(backend=backend):
                with sdpa_kernel(backend):
                    return sdpa(q, k, v, is_causal=self.right == 0, enable_gqa=self.h != self.hk)
            if what == "forward":
                yield name, run
            else:
                try:
                    out = run()
                except RuntimeError as error:
                    yield name, error
                    continue
                yield name, lambda out=out: self.torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)


# name, batch, heads, kv heads, keys, dim: one query row each
DECODE = [("d64 b64 32k", 64, 64, 8, 32768, 64), ("d64 b256 4k", 256, 64, 8, 4096, 64),
          ("d128 b32 32k", 32, 64, 8, 32768, 128),
          ("d128 b8 128k", 8, 64, 8, 131072, 128), ("d128 b1 128k", 1, 64, 8, 131072, 128),
          ("d128 b256 1k", 256, 64, 8, 1024, 128), ("d64 b1 8k", 1, 64, 8, 8192, 64)]


def decode(torch, libraries, match):
    """GB/s of keys and values of one query row, as the peers' speed is counted."""
    for name, batch, heads, kv_heads, n, dim in DECODE:
        if match and not re.search(match, name):
            continue
        new = lambda rows, h: torch.randn(batch, rows, h, dim, device="cuda", dtype=torch.bfloat16)
        q, k, v, out = new(1, heads), new(n, kv_heads), new(n, kv_heads), new(1, heads)
        p = Problem()
        p.type, p.batch, p.heads, p.kv_heads, p.head_dim, p.value_dim = BF16, batch, heads, kv_heads, dim, dim
        p.max_q, p.max_k, p.scale, p.window_left, p.window_right = 1, n, 1 / math.sqrt(dim), -1, 0
        views = [tensor_of(x, (0, 1, 2)) for x in (q, k, v, out)]
        figures = []
        for label, library in libraries:
            try:
                workspace = library.workspace(torch, p)
                ms = milliseconds(lambda: library.forward(torch, p, *views, None, workspace))
                figures.append(f"{label} {2 * k.numel() * 2 / ms * 1e-6:.0f} GB/s {ms * 1e3:.0f} us")
            except RuntimeError as error:
                figures.append(f"{label} - ({str(error)[:60]})")
        print(f"decode {name:14s} {2 * k.numel() * 2 / 1e6:.0f} MB  {'  '.join(figures)}", flush=True)
        del q, k, v, out


def outlier_errors(torch, library, n=4096, heads=16, dim=128):
    """Error against float64 where 1 in 1,000 entries has ten times the spread, as FlashAttention-3's paper draws them."""
    def draw():
        x = torch.randn(1, n, heads, dim, device="cuda", dtype=torch.float64)
        return x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 1e-3)
    q, k, v = (draw() for _ in range(3))
    want = torch.empty(n, heads, dim, dtype=torch.float64, device="cuda")
    for h in range(heads):
        p = torch.softmax(q[0, :, h] @ k[0, :, h].T / math.sqrt(dim), -1)
        want[:, h] = p @ v[0, :, h]
    shape = ("", 1, heads, heads, n, (dim, dim), -1, -1, False)
    def error(prepare):
        bench = Bench(torch, shape)
        bench.q, bench.k, bench.v = (x.bfloat16() for x in (q, k, v))
        prepare(bench)
        bench.forward(library)()
        torch.cuda.synchronize()
        return float((bench.out[0].double() - want).square().mean().sqrt())
    def one_scale(bench):
        bench.use_codes(library, 0)
        bench.codes = []
        for x, like in ((bench.q, (1, n, heads)), (bench.k, (1, heads, n // 128)), (bench.v, (1, heads, n // 128))):
            scale = float(x.abs().max()) / 448
            bench.codes.append(((x.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8),
                                torch.full(like, scale, device="cuda")))
        p = bench.problem
        p.q_scales, p.k_scales, p.v_scales = (scales.data_ptr() for _, scales in bench.codes)
    def plain():
        """Products of E4M3 with one scale a tensor, and probabilities rounded as they are."""
        rounded = lambda x: x.float().to(torch.float8_e4m3fn).double()  # noqa: E731
        scale = [x.abs().max() / 448 for x in (q, k, v)]
        a, b, c = (rounded(x / by) * by for x, by in zip((q, k, v), scale))
        squares = 0.0
        for h in range(heads):
            p = rounded(torch.softmax(a[0, :, h] @ b[0, :, h].T / math.sqrt(dim), -1))
            squares += float((p @ c[0, :, h] - want[:, h]).square().mean())
        return math.sqrt(squares / heads)
    one = error(one_scale)
    for name, found in (("bf16", error(lambda bench: None)), ("one scale a tensor, plain", plain()),
                        ("one scale a tensor", one),
                        ("scales of rows and blocks", error(lambda bench: bench.use_codes(library, 0))),
                        ("and rotated", error(lambda bench: bench.use_codes(library, 1)))):
        print(f"error {name:26s} {found:.3e}  one scale / this: {one / found:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("libraries", nargs="+")
    parser.add_argument("--what", default="forward")
    parser.add_argument("--match", default="")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--blocks", type=int, help="block-sparse: a quarter of the blocks of so many keys and queries")
    options = parser.parse_args()
    import torch
    warnings.filterwarnings("ignore")
    libraries = [(os.path.basename(x).replace("lib", "").replace(".so", ""), Library(os.path.abspath(x)))
                 for x in options.libraries]
    if options.what == "decode":
        return decode(torch, libraries, options.match)
    if options.what == "error":
        return outlier_errors(torch, libraries[0][1])
    for shape in SHAPES:
        if options.match and not re.search(options.match, shape[0]):
            continue
        bench = Bench(torch, shape, options.dtype)
        if options.dtype == "e4m3":
            bench.use_codes(libraries[0][1])
        if options.blocks:
            bench.use_blocks(options.blocks, 0.25)
        runs = []
        for name, library in libraries:
            try:
                if options.what == "forward":
                    runs.append((name, bench.forward(library)))
                else:
                    runs.append((name, bench.backward(library, 1)))
                    runs.append((name + "(atomic)", bench.backward(library, 0)))
            except RuntimeError as error:
                runs.append((name, error))
        if not options.no_torch and not options.blocks:
            runs += bench.torch_runs(options.what)
        figures = []
        for name, run in runs:
            try:
                if isinstance(run, Exception):
                    raise run
                ms = milliseconds(run)
                rate = bench.operations * (2.5 if options.what == "backward" else 1) / ms * 1e-9
                figures.append(f"{name} {rate:.0f}")
            except RuntimeError as error:
                figures.append(f"{name} - ({str(error)[:60]})")
        del runs, bench
        print(f"{options.what} {options.dtype} {shape[0]:20s} {'  '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()

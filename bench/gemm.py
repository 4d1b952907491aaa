#!/usr/bin/env python3
"""Products of plain matrices (mr_gemm) beside cuBLAS (torch) in the same run, TFLOP/s of each.

    gemm.py LIBRARY [--json]      needs torch and a GPU

Shapes of 4096^3, 8192^3, Llama 8B, gpt-oss-20b and Qwen3-30B-A3B; NT is the forward product, NN the gradient of its
input, TN that of its weight. Below 1,024 rows weights are read from memory, as between the layers of a model: copies of
them take turns, so that none is in L2; with a long k there is a line with split_k as well. FP8 has scales of 1 x 128 and
128 x 128 here, one per tensor in cuBLAS. An epilogue is beside the same product without.
"""
import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "gpu"))
from gemm_test import SWIGLU, Gemm, random_matrix  # noqa: E402

SHAPES = [("4096^3", 4096, 4096, 4096), ("8192^3", 8192, 8192, 8192), ("Llama 8B qkv, 2,048 rows", 2048, 6144, 4096),
          ("Llama 8B gate and up, 2,048 rows", 2048, 28672, 4096), ("Llama 8B down, 2,048 rows", 2048, 4096, 14336),
          ("gpt-oss-20b qkv, 1,024 rows", 1024, 5120, 2880), ("Qwen3-30B-A3B q, 1,024 rows", 1024, 4096, 2048),
          ("gpt-oss-20b qkv, 512 rows", 512, 5120, 2880), ("Llama 8B qkv, 512 rows", 512, 6144, 4096),
          ("Llama 8B gate and up, 256 rows", 256, 28672, 4096), ("Llama 8B qkv, 256 rows", 256, 6144, 4096),
          ("Llama 8B qkv, 128 rows", 128, 6144, 4096), ("Llama 8B down, 128 rows", 128, 4096, 14336),
          ("gpt-oss-20b qkv, 128 rows", 128, 5120, 2880), ("Llama 8B qkv, 64 rows", 64, 6144, 4096)]
COLD_BYTES = 250 << 20  # of weights that take turns: an H200's L2 has 50 MB
LAYOUTS = (("NT", 0, 1), ("NN", 0, 0), ("TN", 1, 0))


def milliseconds(torch, calls, repeats=12, rounds=7):
    """Of each call, the median of rounds in which they take turns: a GPU at its power limit slows down with time, and
    who comes first would have the higher clock. Calls are replayed from CUDA graphs: a call from Python takes some 20 us,
    longer than products of few rows."""
    graphs = []
    for call in calls:
        call()  # what is set up once
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(repeats):
                call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = [[] for _ in calls]
    for turn in range(rounds + 1):  # the first is not counted
        for i in range(len(calls)):
            at = (i + turn) % len(calls)
            start.record()
            graphs[at].replay()
            end.record()
            end.synchronize()
            if turn > 0:
                times[at].append(start.elapsed_time(end) / repeats)
    return [sorted(of)[rounds // 2] for of in times]


def sixteen_bits(torch, gemm, add):
    for dtype in (torch.bfloat16, torch.float16):
        for name, m, n, k in SHAPES:
            for layout, ta, tb in LAYOUTS:
                a = random_matrix(torch, *((k, m) if ta else (m, k)), dtype)
                copies = 1 if m >= 1024 else max(2, -(-COLD_BYTES // (2 * n * k)))
                weights = [random_matrix(torch, *((n, k) if tb else (k, n)), dtype) for _ in range(copies)]
                c = torch.empty(m, n, device="cuda", dtype=dtype)
                left = a.t() if ta else a

                def theirs():
                    for b in weights:
                        torch.mm(left, b.t() if tb else b, out=c)
                for split_k in (0, 1) if m < 1024 and k >= 8192 else (0,):
                    def ours():
                        for b in weights:
                            gemm(a, b, c, ta, tb, split_k=split_k)
                    add(f"{str(dtype)[6:]} {layout} {name}{', split_k' if split_k else ''}", copies * m * n * k, ours, theirs,
                        repeats=max(2, 12 // copies))


def eight_bits(torch, gemm, add):
    for m, n, k in ((4096, 4096, 4096), (8192, 8192, 8192), (2048, 28672, 4096), (4096, 7168, 2048)):
        c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        one = torch.ones((), device="cuda")
        a, b = (random_matrix(torch, rows, k, torch.float8_e4m3fn) for rows in (m, n))
        scales = [torch.rand(rows, k // 128, device="cuda") for rows in (m, n // 128)]
        add(f"fp8 {m} x {n} x {k}", m * n * k, lambda: gemm(a, b, c, 0, 1, scales=scales),
            lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
        x, y = (random_matrix(torch, rows, k, torch.int8) for rows in (m, n))
        per = [torch.rand(rows, device="cuda") for rows in (m, n)]
        add(f"int8 {m} x {n} x {k}", m * n * k, lambda: gemm(x, y, c, 0, 1, scales=per), lambda: torch._int_mm(x, y.t()))


def epilogues(torch, gemm, add):
    m = n = k = 4096
    a, b, residual = (random_matrix(torch, m, k, torch.bfloat16) for _ in range(3))
    c, bias = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), torch.randn(n, device="cuda")

    def plain():
        gemm(a, b, c, 0, 1)

    for name, more in (("bias", {"bias": bias}), ("residual", {"residual": residual}),
                       ("bias, GELU", {"bias": bias, "activation": 1}), ("bias, SiLU", {"bias": bias, "activation": 3}),
                       ("all", {"bias": bias, "activation": 2, "residual": residual})):
        add(f"epilogue {name}", m * n * k, lambda: gemm(a, b, c, 0, 1, **more), plain, "without")
    half = torch.empty(m, n // 2, device="cuda", dtype=torch.bfloat16)
    add("epilogue SwiGLU", m * n * k, lambda: gemm(a, b, half, 0, 1, activation=SWIGLU), plain, "without")
    for name, columns, activation in (("FP8", n, 0), ("SwiGLU, FP8", n // 2, SWIGLU)):
        codes = torch.empty(m, columns, device="cuda", dtype=torch.float8_e4m3fn)
        scales = torch.empty(m, columns // 128, device="cuda")
        add(f"epilogue {name}", m * n * k,
            lambda: gemm(a, b, codes, 0, 1, activation=activation, c_scales=scales), plain, "without")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import torch
    torch.manual_seed(1)
    rows = []

    def add(name, products, ours, peer, beside="cuBLAS", repeats=12):
        tflops = [2 * products / of / 1e9 for of in milliseconds(torch, [ours, peer], repeats)]
        rows.append({"name": name, "tflops": tflops[0], f"{beside.lower()}_tflops": tflops[1]})
        if not arguments.json:
            print(f"{name:48} {tflops[0]:6.0f} TFLOP/s  {beside} {tflops[1]:6.0f}, {100 * tflops[0] / tflops[1]:4.0f}%",
                  flush=True)

    gemm = Gemm(arguments.library, torch)
    sixteen_bits(torch, gemm, add)
    eight_bits(torch, gemm, add)
    epilogues(torch, gemm, add)
    if arguments.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

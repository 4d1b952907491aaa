#!/usr/bin/env python3
"""Products on a CPU: mr_gemm, mr_lowbit_gemm and mr_fp4_gemm of one library or several, in turn with torch.

    bench/gemm_cpu.py LIBRARY... [--threads 1] [--isa amx] [--only WORD] [--rows 1 128 ...] [--dim 2048]

LIBRARY is libmillrace_kernels.so. A line is one product of square weights: GFLOP/s of each library and of torch in
bf16 (or float32, where that is what is multiplied); of one row the share of the read loop as well, whose bytes are
those of the weights. Weights take turns over as many copies as no cache holds where there are few rows. The best of the
rounds counts, for others may be at work on the machine; with one thread it is the thread's own time.
"""
import argparse
import ctypes
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests/gpu")]
import gemm_test as plain  # noqa: E402  (its folder is put on the path above)
import lowbit_test as lowbit  # noqa: E402
from fused_ops import Library  # noqa: E402

BF16 = torch.bfloat16
COLD_BYTES = 256 << 20  # weights of few rows, all copies
OPTIONS = None


def best_of(calls, rounds):
    """Of each call, in turns; calls are lists over copies."""
    clock = time.thread_time if OPTIONS.threads == 1 else time.perf_counter
    for call in calls:
        call[0]()
    best = [float("inf")] * len(calls)
    for turn in range(rounds):
        for i, copies in enumerate(calls):
            for call in copies if len(copies) > 1 else copies * OPTIONS.repeat:
                begin = clock()
                call()
                best[i] = min(best[i], clock() - begin)
    return best


def aligned(count):
    whole = torch.zeros(count + 256, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 256:][:count]


def with_workspace(library, name, args):
    space = aligned(max(1, library.workspace_bytes(name, args)))
    return lambda: library.call_with_workspace(name, args, space)


def plain_call(library, a, b, c, transpose_a, transpose_b):
    types = {torch.float32: plain.F32, torch.float16: plain.F16, BF16: plain.BF16, torch.int8: plain.I8}
    args = plain.Args(type=types[a.dtype], m=c.shape[0], n=c.shape[1], k=a.shape[0 if transpose_a else 1], a=a.data_ptr(),
                      lda=a.stride(0), transpose_a=transpose_a, b=b.data_ptr(), ldb=b.stride(0), transpose_b=transpose_b,
                      out_type=types[c.dtype], c=c.data_ptr(), ldc=c.stride(0))
    call = with_workspace(library, "mr_gemm", args)
    return lambda kept=(a, b, c): call()


def random(rows, cols, dtype):
    if dtype == torch.int8:
        return torch.randint(-127, 128, (rows, cols), dtype=dtype)
    return torch.randn(rows, cols).to(dtype)


def copies_of(weight_bytes, rows):
    return max(1, COLD_BYTES // weight_bytes) if rows <= 16 else 1


def plain_products(libraries, rows, dim, dtype, layout):
    transpose_a, transpose_b = layout == "TN", layout == "NT"
    a = random(dim, rows, dtype) if transpose_a else random(rows, dim, dtype)
    out = BF16 if dtype == torch.int8 else dtype
    c = torch.empty(rows, dim, dtype=out)
    weights = [random(dim, dim, dtype) for _ in range(copies_of(dim * dim * a.element_size(), rows))]
    calls = [[plain_call(lib, a, b, c, int(transpose_a), int(transpose_b)) for b in weights] for lib in libraries]
    if dtype == torch.int8:
        theirs = [lambda b=b: torch._int_mm(a, b.t()) for b in weights] if rows > 16 and transpose_b else None
    else:
        left = a.t() if transpose_a else a
        theirs = [lambda b=b: torch.mm(left, b.t() if transpose_b else b, out=c) for b in weights]
    return calls, theirs, dim * dim * a.element_size()


def lowbit_products(libraries, rows, dim, name, backward):
    """Torch multiplies the same shape in bf16."""
    which = lowbit.NAMES.index(name)
    x, y = random(rows, dim, BF16), torch.empty(rows, dim, dtype=BF16)
    group, packing = lowbit.GROUP[which], lowbit.ROWS if which < 2 else lowbit.GPTQ
    codes = torch.randint(-2**31, 2**31 - 1, (dim * dim // 8,), dtype=torch.int32)
    if which < 2:
        scales, zeros = torch.randint(110, 118, (dim * dim // group,), dtype=torch.uint8), None
    else:
        scales = (torch.rand(dim * dim // group) / 100 + 0.001).to(torch.float16)
        zeros = torch.randint(-2**31, 2**31 - 1, (dim * dim // group // 8,), dtype=torch.int32)
    calls = []
    for library in libraries:
        matrix = lowbit.Matrix(which, packing, 1, dim, dim, codes.data_ptr(), scales.data_ptr(), lowbit.pointer(zeros))
        size = ctypes.c_size_t()
        library.check(library.lib.mr_lowbit_bytes(ctypes.byref(matrix), ctypes.byref(size)))
        units = []
        for _ in range(copies_of(size.value, rows)):
            units.append(aligned(size.value))
            library.check(library.lib.mr_lowbit_repack(library.handle, ctypes.byref(matrix), ctypes.c_void_p(units[-1].data_ptr()),
                                                       size, None))
        calls.append([])
        for unit in units:
            args = lowbit.Lowbit(which, 1, dim, dim, unit.data_ptr(), None, int(backward), rows, None, x.data_ptr(), dim,
                                 plain.BF16, y.data_ptr(), dim, 1.0, None)
            call = with_workspace(library, "mr_lowbit_gemm", args)
            calls[-1].append(lambda call=call, kept=(unit, x, y): call())
    weight = random(dim, dim, BF16)
    theirs = [lambda: torch.mm(x, weight if backward else weight.t(), out=y)] if rows > 16 else None
    return calls, theirs, size.value


def fp4_products(libraries, rows, dim, which):
    """Torch multiplies the same shape in bf16."""
    group = lowbit.GROUP[which]
    a, b = (torch.randint(0, 256, (r, dim // 2), dtype=torch.uint8) for r in (rows, dim))
    scales = [torch.randint(110, 118, (r, dim // group), dtype=torch.uint8) for r in (rows, dim)]
    c = torch.empty(rows, dim, dtype=BF16)
    calls = []
    for library in libraries:
        args = lowbit.Fp4(which, rows, dim, dim, a.data_ptr(), scales[0].data_ptr(), b.data_ptr(), scales[1].data_ptr(), 1.0,
                          plain.BF16, c.data_ptr(), dim)
        call = with_workspace(library, "mr_fp4_gemm", args)
        calls.append([lambda call=call, kept=(a, b, c, scales): call()])
    x, weight = random(rows, dim, BF16), random(dim, dim, BF16)
    return calls, [lambda: torch.mm(x, weight.t(), out=c)], dim * dim // 2


def read_loop():
    arrays = [torch.ones(8 << 20, dtype=torch.int64) for _ in range(4)]
    return 8 * (8 << 20) / best_of([[lambda a=a: a.sum() for a in arrays]], 5)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="+")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", help="the kernel table of all libraries, instead of the best")
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 128, 512, 2048])
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3, help="calls of a round")
    global OPTIONS
    OPTIONS = options = parser.parse_args()
    torch.set_num_threads(options.threads)
    libraries = [Library(path, "cpu", options.threads, options.isa) for path in options.library]
    dim = options.dim
    products = {f"{name} {layout}": lambda rows, t=dtype, l=layout: plain_products(libraries, rows, dim, t, l)
                for dtype, name in ((BF16, "bf16"), (torch.float32, "f32"), (torch.int8, "int8"))
                for layout in ("NT", "NN", "TN")}
    for name in lowbit.NAMES:
        for backward in (False, True):
            products[name + (" backward" if backward else "")] = (
                lambda rows, n=name, b=backward: lowbit_products(libraries, rows, dim, n, b))
    products["MXFP4 x MXFP4"] = lambda rows: fp4_products(libraries, rows, dim, 0)
    products["NVFP4 x NVFP4"] = lambda rows: fp4_products(libraries, rows, dim, 1)
    read = read_loop()
    print(f"{libraries[0].description()}; torch {torch.__version__}; {dim} x {dim}, {options.threads} threads; "
          f"read loop {read / 1e9:.1f} GB/s", flush=True)
    for name, make in products.items():
        if options.only not in name:
            continue
        for rows in options.rows:
            calls, theirs, weight_bytes = make(rows)
            times = best_of(calls + ([theirs] if theirs else []), options.rounds)
            ours = times[:len(calls)]
            line = " ".join(f"{2e-9 * rows * dim * dim / t:7.1f}" for t in ours)
            line += f"  torch {2e-9 * rows * dim * dim / times[-1]:7.1f} {times[-1] / ours[-1]:5.2f}x" if theirs else " " * 22
            if rows <= 16:
                line += "  of the read loop " + " ".join(f"{weight_bytes / t / read:4.0%}" for t in ours)
            print(f"{name:32s} {rows:5d} rows {line}", flush=True)


if __name__ == "__main__":
    main()

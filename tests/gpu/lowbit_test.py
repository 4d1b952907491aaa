#!/usr/bin/env python3
"""Four-bit weights, experts and FP4 by FP4 (millrace/kernels/{lowbit,grouped_gemm,fp4_gemm}.h) against torch in float64:
formats, packings, odd shapes, experts without rows, gradients; what lies between rows has to be as it was; a row's bits
alone and among others.

    lowbit_test.py LIBRARY [--device cuda|cpu] [--bench]     needs torch; ends with 77, loudly, where a GPU is missing
"""
import argparse
import ctypes
import sys

SKIPPED = 77
F32, F16, BF16, F8 = 0, 1, 2, 3
P, I, L, F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
NAMES, GROUP = ("MXFP4", "NVFP4", "INT4 in groups of 32", "INT4 in groups of 128"), (32, 16, 32, 128)
ROWS, GPTQ, GPTQ_V2, AWQ = range(4)
FORWARD, DGRAD, WGRAD = range(3)


def structure(*fields):
    return type("Args", (ctypes.Structure,), {"_fields_": list(fields)})


Matrix = structure(("format", I), ("packing", I), ("experts", L), ("n", L), ("k", L), ("codes", P), ("scales", P), ("zeros", P))
Lowbit = structure(("format", I), ("experts", L), ("n", L), ("k", L), ("weights", P), ("expert_scales", P), ("backward", I),
                   ("m", L), ("offsets", P), ("x", P), ("ldx", L), ("out_type", I), ("y", P), ("ldy", L), ("alpha", F),
                   ("bias", P))
Grouped = structure(("op", I), ("type", I), ("experts", L), ("m", L), ("n", L), ("k", L), ("offsets", P), ("a", P), ("lda", L),
                    ("b", P), ("ldb", L), ("out_type", I), ("c", P), ("ldc", L), ("alpha", F), ("a_scales", P), ("b_scales", P))
Fp4 = structure(("format", I), ("m", L), ("n", L), ("k", L), ("a", P), ("a_scales", P), ("b", P), ("b_scales", P), ("alpha", F),
                ("out_type", I), ("c", P), ("ldc", L))


def pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


class Library:
    def __init__(self, path, torch, device):
        self.torch, self.name = torch, device
        self.c = ctypes.CDLL(path)
        self.c.mr_last_error.restype = ctypes.c_char_p
        self.device = P()
        self.check(self.c.mr_device_open(device.encode(), None, ctypes.byref(self.device)))
        self.types = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16, torch.float8_e4m3fn: F8}
        self.workspace = torch.empty(0, dtype=torch.uint8, device=device)

    def check(self, status):
        if status != 0:
            raise RuntimeError(f"status {status}: {self.c.mr_last_error().decode()}")

    def stream(self):
        return P(self.torch.cuda.current_stream().cuda_stream if self.name == "cuda" else None)

    def aligned(self, count):
        """Memory of the device, 256-byte aligned."""
        whole = self.torch.empty(count + 256, dtype=self.torch.uint8, device=self.name)
        return whole[-whole.data_ptr() % 256:][:count]

    def call(self, name, args):
        count = ctypes.c_size_t()
        self.check(getattr(self.c, name + "_workspace_bytes")(self.device, ctypes.byref(args), ctypes.byref(count)))
        if self.workspace.numel() < count.value:
            self.workspace = self.aligned(count.value)
        self.check(getattr(self.c, name)(self.device, ctypes.byref(args), P(pointer(self.workspace)), count, self.stream()))


class Weights:
    """Random codes [experts, n, k], published in a packing and repacked; values: what they mean, in float64."""

    def __init__(self, library, format_, n, k, experts=1, packing=ROWS, values=True):
        torch = library.torch
        self.library, self.format, self.n, self.k, self.experts = library, format_, n, k, experts
        group = GROUP[format_]

        def random(low, high, *shape, dtype=torch.int32):
            return torch.randint(low, high, shape, dtype=dtype, device=library.name)

        codes, zeros = random(0, 16, experts, n, k, dtype=torch.uint8), None
        if packing == ROWS:
            self.codes = codes[..., 0::2] | codes[..., 1::2] << 4
            if format_ == 0:
                self.scales = random(118, 127, experts, n, k // group, dtype=torch.uint8)
                scales = torch.exp2(self.scales.double() - 127)
            else:
                self.scales = random(0, 0x50, experts, n, k // group, dtype=torch.uint8)
                scales = self.scales.view(torch.float8_e4m3fn).double()
            table = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64,
                                 device=library.name)
            if values:
                self.values = table[codes.int()] * scales.repeat_interleave(group, -1)
        else:
            self.scales = (torch.rand(experts, k // group, n, device=library.name) * .01 + .001).half()
            zero = random(1 if packing == GPTQ else 0, 16, experts, k // group, n)
            bits = torch.arange(8, dtype=torch.int32, device=library.name) * 4
            order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], device=library.name)
            stored = (zero - 1 if packing == GPTQ else zero).reshape(experts, k // group, n // 8, 8)
            by_column = codes.transpose(1, 2).int()
            if packing == AWQ:
                self.codes = (by_column.reshape(experts, k, n // 8, 8)[..., order] << bits).sum(-1).int()
                zeros = (stored[..., order] << bits).sum(-1).int()
            else:
                self.codes = (by_column.reshape(experts, k // 8, 8, n) << bits[:, None]).sum(2).int()
                zeros = (stored << bits).sum(-1).int()
            if values:
                def spread(t):
                    return t.double().transpose(1, 2).repeat_interleave(group, -1)
                self.values = ((codes.double() - spread(zero)) * spread(self.scales)).bfloat16().double()
        self.codes, self.zeros = self.codes.contiguous(), zeros
        self.bytes = sum(t.nbytes for t in (self.codes, self.scales, zeros) if t is not None)
        matrix = Matrix(format=format_, packing=packing, experts=experts, n=n, k=k, codes=pointer(self.codes),
                        scales=pointer(self.scales), zeros=pointer(zeros))
        count = ctypes.c_size_t()
        library.check(library.c.mr_lowbit_bytes(ctypes.byref(matrix), ctypes.byref(count)))
        self.units = library.aligned(count.value)
        library.check(library.c.mr_lowbit_repack(library.device, ctypes.byref(matrix), P(pointer(self.units)), count,
                                                 library.stream()))

    def __call__(self, x, y, backward=0, offsets=None, bias=None, scales=None, alpha=1.0):
        self.library.call("mr_lowbit_gemm", Lowbit(
            format=self.format, experts=self.experts, n=self.n, k=self.k, weights=pointer(self.units),
            expert_scales=pointer(scales), backward=backward, m=x.shape[0], offsets=pointer(offsets), x=pointer(x),
            ldx=x.stride(0), out_type=self.library.types[y.dtype], y=pointer(y), ldy=y.stride(0), alpha=alpha,
            bias=pointer(bias)))


class Test:
    def __init__(self, library):
        self.library, self.torch, self.device = library, library.torch, library.name
        self.cases = self.failed = 0
        # float32: chains of up to 4,096 columns in the tensor cores' accumulators, which cut what they round.
        self.allowed = {self.torch.float32: 5e-6, self.torch.bfloat16: 4e-3, self.torch.float16: 5e-4}

    def expect(self, what, good, detail=""):
        self.cases += 1
        if not good:
            self.failed += 1
            print(f"FAILED {what}: {detail}", flush=True)

    def compare(self, what, got, exact, allowed):
        error = ((got.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()
        self.expect(what, error <= allowed, f"error {error:.2e}, allowed {allowed:.0e}")  # NaN fails

    def random(self, *shape, dtype=None):
        return self.torch.randn(*shape, device=self.device).to(dtype or self.torch.bfloat16)

    def formats(self):
        torch, nan = self.torch, float("nan")
        kinds = [(0, ROWS), (1, ROWS)] + [(f, p) for f in (2, 3) for p in (GPTQ, GPTQ_V2, AWQ)]
        for format_, packing in kinds:
            for n, k in ((72, 256), (520, 4608)):  # two segments
                weights = Weights(self.library, format_, n, k, packing=packing)
                for m in (1, 5, 40, 300):
                    name = f"{NAMES[format_]}, packing {packing}, {m} x {n} x {k}"
                    x, bias = self.random(m, k), torch.randn(1, n, device=self.device)
                    exact = .5 * x.double() @ weights.values[0].t() + bias.double()
                    for out in (torch.float32, torch.bfloat16, torch.float16) if m == 5 else (torch.float32,):
                        y = torch.full((m, n + 8), nan, device=self.device, dtype=out)
                        weights(x, y[:, :n], bias=bias, alpha=.5)
                        self.compare(f"{name} to {out}", y[:, :n], exact, self.allowed[out])
                        self.expect(name, bool(torch.isnan(y[:, n:]).all()), "wrote between rows")
                    dy, dx = self.random(m, n), torch.full((m, k), nan, device=self.device)
                    weights(dy, dx, backward=1)
                    self.compare(f"{name}, backward", dx, dy.double() @ weights.values[0], 3e-6)

    def experts(self):
        torch, counts, n, k = self.torch, [0, 130, 1, 300, 64], 192, 2304
        offsets = torch.tensor([0] + counts).cumsum(0).int().to(self.device)
        parts = [slice(a, b) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]
        m = sum(counts)
        for format_, packing in ((0, ROWS), (1, ROWS), (2, AWQ), (3, GPTQ)):
            weights = Weights(self.library, format_, n, k, len(counts), packing)
            x, dy = self.random(m, k), self.random(m, n)
            scales, bias = (torch.rand(*shape, device=self.device) + .5 for shape in ((len(counts),), (len(counts), n)))
            y, dx = (torch.full((m, size), float("nan"), device=self.device) for size in (n, k))
            weights(x, y, offsets=offsets, scales=scales, bias=bias)
            weights(dy, dx, backward=1, offsets=offsets, scales=scales)
            by_expert = list(zip(parts, weights.values, scales.double(), bias.double()))
            self.compare(f"{NAMES[format_]}, experts", y, torch.cat([s * (x[p].double() @ w.t()) + b for p, w, s, b in by_expert]),
                         3e-6)
            self.compare(f"{NAMES[format_]}, experts, backward", dx,
                         torch.cat([s * (dy[p].double() @ w) for p, w, s, _ in by_expert]), 3e-6)

    def bits(self):
        torch = self.torch
        for format_ in range(4):
            weights = Weights(self.library, format_, 192, 6144, packing=ROWS if format_ < 2 else AWQ, values=False)
            x = self.random(300, 6144)

            def rows(first, last):
                y = torch.empty(last - first, 192, device=self.device)
                weights(x[first:last], y)
                return y
            every = rows(0, 300)
            for first, last in ((0, 8), (3, 4), (0, 40), (100, 228)):
                self.expect(f"{NAMES[format_]}: rows {first} to {last}", torch.equal(every[first:last], rows(first, last)),
                            "other bits than among 300")

    def grouped(self):
        torch = self.torch
        for counts in ([130, 0, 1, 300, 64], [128, 128], [7, 513, 200]):
            experts, m = len(counts), sum(counts)
            offsets = torch.tensor([0] + counts).cumsum(0).int().to(self.device)
            parts = [slice(a, b) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]
            for n, k, dtype in ((256, 128, torch.bfloat16), (328, 200, torch.float16), (70, 133, torch.bfloat16)):
                x, dy, w = self.random(m, k, dtype=dtype), self.random(m, n, dtype=dtype), self.random(experts, n, k, dtype=dtype)
                exact = ([x[p].double() @ e.double().t() for p, e in zip(parts, w)],
                         [dy[p].double() @ e.double() for p, e in zip(parts, w)],
                         [(dy[p].double().t() @ x[p].double())[None] for p in parts])
                for op, a, b in ((FORWARD, x, w), (DGRAD, dy, w), (WGRAD, dy, x)):
                    for out in (torch.float32, dtype):
                        shape = ((m, n), (m, k), (experts, n, k))[op]
                        c = torch.full(shape, float("nan"), device=self.device, dtype=out)
                        self.run_grouped(op, offsets, a, b, c, n, k)
                        self.compare(f"experts {counts}, op {op}, {n} x {k}, {dtype} to {out}", c, torch.cat(exact[op]),
                                     self.allowed[out])
            for n, k in ((256, 512), (384, 272), (70, 133)):
                blocks, down = (k + 127) // 128, (n + 127) // 128
                x, w = self.random(m, k, dtype=torch.float8_e4m3fn), self.random(experts, n, k, dtype=torch.float8_e4m3fn)
                a, b = torch.rand(m, blocks, device=self.device) + .1, torch.rand(experts, down, blocks, device=self.device) + .1
                values = w.double() * b.double().repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[:, :, :k]
                rows = x.double() * a.double().repeat_interleave(128, 1)[:, :k]
                c = torch.full((m, n), float("nan"), device=self.device)
                self.run_grouped(FORWARD, offsets, x, w, c, n, k, (a, b))
                # Hopper's e4m3 products keep some 14 bits of a sum.
                self.compare(f"experts {counts}, {n} x {k}, e4m3", c,
                             torch.cat([rows[p] @ e.t() for p, e in zip(parts, values)]), 1e-3)
                # Its gradients, of what was quantized once.
                dy, d = self.random(m, n, dtype=torch.float8_e4m3fn), torch.rand(m, down, device=self.device) + .1
                dys = dy.double() * d.double().repeat_interleave(128, 1)[:, :n]
                c = torch.full((m, k), float("nan"), device=self.device)
                self.run_grouped(DGRAD, offsets, dy, w, c, n, k, (d, b))
                self.compare(f"experts {counts}, {n} x {k}, e4m3, rows' gradient", c,
                             torch.cat([dys[p] @ e for p, e in zip(parts, values)]), 1e-5)
                c = torch.full((experts, n, k), float("nan"), device=self.device)
                self.run_grouped(WGRAD, offsets, dy, x, c, n, k, (d, a))
                self.compare(f"experts {counts}, {n} x {k}, e4m3, weights' gradient", c,
                             torch.stack([dys[p].t() @ rows[p] for p in parts]), 1e-5)

    def run_grouped(self, op, offsets, a, b, c, n, k, scales=(None, None)):
        self.library.call("mr_grouped_gemm", Grouped(
            op=op, type=self.library.types[a.dtype], experts=offsets.numel() - 1, m=a.shape[0], n=n, k=k,
            offsets=pointer(offsets), a=pointer(a), b=pointer(b), out_type=self.library.types[c.dtype], c=pointer(c),
            a_scales=pointer(scales[0]), b_scales=pointer(scales[1])))

    def fp4(self):
        for format_ in (0, 1):
            for m, n, k in ((70, 90, 320), (5, 130, 96)):
                a, b = (Weights(self.library, format_, rows, k) for rows in (m, n))
                c = self.torch.full((m, n), float("nan"), device=self.device)
                self.library.call("mr_fp4_gemm", Fp4(
                    format=format_, m=m, n=n, k=k, a=pointer(a.codes), a_scales=pointer(a.scales), b=pointer(b.codes),
                    b_scales=pointer(b.scales), out_type=F32, c=pointer(c)))
                self.compare(f"{NAMES[format_]} by itself, {m} x {n} x {k}", c, a.values[0] @ b.values[0].t(), 3e-6)


def seconds(torch, call, count=10):
    for _ in range(2):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        begin.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / count * 1e-3)
    return best


def bench(library):
    torch = library.torch
    for m, n, k in ((8192, 8192, 8192), (4096, 5760, 2880), (1024, 4096, 4096), (128, 8192, 8192)):
        x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
        y, dy = torch.empty(m, n, device="cuda").bfloat16(), torch.randn(m, n, device="cuda").bfloat16()
        dx, work = torch.empty_like(x), 2e-12 * m * n * k
        line = f"{m} x {n} x {k}: cuBLAS {work / seconds(torch, lambda: torch.matmul(x, w.t(), out=y)):.0f}"
        for format_ in range(4):
            if k % GROUP[format_] == 0:
                weights = Weights(library, format_, n, k, packing=ROWS if format_ < 2 else GPTQ, values=False)
                line += (f", {NAMES[format_]} {work / seconds(torch, lambda: weights(x, y)):.0f} (gradient "
                         f"{work / seconds(torch, lambda: weights(dy, dx, backward=1)):.0f})")
        print(line, "TFLOP/s", flush=True)
    for format_ in range(4):
        weights = Weights(library, format_, 16384, 32768, packing=ROWS if format_ < 2 else GPTQ, values=False)
        line = f"{NAMES[format_]}, 16384 x 32768:"
        for m in (1, 4, 8):
            x, y = torch.randn(m, 32768, device="cuda").bfloat16(), torch.empty(m, 16384, device="cuda").bfloat16()
            line += f" {m} rows {weights.bytes / seconds(torch, lambda: weights(x, y)) * 1e-12:.2f}"
        print(line, "TB/s of the published bytes", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--bench", action="store_true", help="time it beside cuBLAS instead")
    arguments = parser.parse_args()
    why = None
    try:
        import torch
        if arguments.device == "cuda" and not torch.cuda.is_available():
            why = "no GPU"
    except ImportError:
        why = "no torch"
    if why:
        print(f"\n*** SKIPPED: four-bit weights were not compared with torch: {why} ***\n", file=sys.stderr)
        sys.exit(SKIPPED)
    torch.manual_seed(1)
    library = Library(arguments.library, torch, arguments.device)
    if arguments.bench:
        return bench(library)
    test = Test(library)
    for part in (test.formats, test.experts, test.bits, test.grouped, test.fp4):
        part()
    print(f"[  figure  ] four-bit weights and experts on {arguments.device}: {test.cases} comparisons, {test.failed} failed")
    sys.exit(1 if test.failed else 0)


if __name__ == "__main__":
    main()

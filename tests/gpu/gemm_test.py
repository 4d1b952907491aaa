#!/usr/bin/env python3
"""Products of plain matrices (millrace/kernels/gemm.h) of a GPU against torch in float64: types, layouts, epilogues, odd
shapes and strides with gaps; what lies between rows has to be as it was; the same bits in 100 runs, and for a row alone.

    gemm_test.py LIBRARY        needs torch and a GPU; ends with 77, loudly, where one is missing
"""
import ctypes
import sys

SKIPPED = 77
F32, F16, BF16, F8, I8, E5M2 = 0, 1, 2, 3, 100, 101
SWIGLU, CLAMPED_SWIGLU = 4, 5
GATE = 1.702, 2.0  # alpha and limit
P, I, L, F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Args(ctypes.Structure):
    _fields_ = [("type", I), ("m", L), ("n", L), ("k", L), ("a", P), ("lda", L), ("transpose_a", I), ("b", P), ("ldb", L),
                ("transpose_b", I), ("out_type", I), ("c", P), ("ldc", L), ("alpha", F), ("a_scales", P), ("b_scales", P),
                ("a_scale_stride", L), ("b_scale_stride", L), ("bias", P), ("activation", I), ("residual", P),
                ("residual_stride", L), ("gate_alpha", F), ("gate_limit", F), ("c_scales", P), ("c_scale_stride", L),
                ("b_type", I), ("a_scale_rows", I), ("a_scale_cols", I), ("b_scale_rows", I), ("b_scale_cols", I),
                ("split_k", I)]


def skip(why):
    print(f"\n*** SKIPPED: products were not compared with torch: {why} ***\n", file=sys.stderr)
    sys.exit(SKIPPED)


class Gemm:
    """mr_gemm over torch's tensors: a [m, k] or, transposed, [k, m]; b [k, n] or, transposed, [n, k]."""

    def __init__(self, path, torch):
        self.torch = torch
        self.c = ctypes.CDLL(path)
        self.c.mr_last_error.restype = ctypes.c_char_p
        self.device = P()
        self.check(self.c.mr_device_open(b"cuda", None, ctypes.byref(self.device)))
        self.types = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16, torch.float8_e4m3fn: F8,
                      torch.int8: I8, torch.float8_e5m2: E5M2}

    def check(self, status):
        if status != 0:
            raise RuntimeError(f"status {status}: {self.c.mr_last_error().decode()}")

    def __call__(self, a, b, c, transpose_a, transpose_b, bias=None, activation=0, residual=None, scales=None, alpha=1.0,
                 c_scales=None, grids=None, split_k=0):
        args = Args(type=self.types[a.dtype], m=c.shape[0], n=b.shape[0 if transpose_b else 1],
                    k=a.shape[0 if transpose_a else 1],
                    a=a.data_ptr(), lda=a.stride(0), transpose_a=transpose_a, b=b.data_ptr(), ldb=b.stride(0),
                    transpose_b=transpose_b, out_type=self.types[c.dtype], c=c.data_ptr(), ldc=c.stride(0), alpha=alpha,
                    activation=activation, split_k=split_k)
        if bias is not None:
            args.bias = bias.data_ptr()
        if residual is not None:
            args.residual, args.residual_stride = residual.data_ptr(), residual.stride(0)
        if scales is not None:
            args.a_scales, args.b_scales = scales[0].data_ptr(), scales[1].data_ptr()
        if b.dtype != a.dtype:
            args.b_type = self.types[b.dtype]
        if grids is not None:
            args.a_scale_rows, args.a_scale_cols, args.b_scale_rows, args.b_scale_cols = grids
        if activation == CLAMPED_SWIGLU:
            args.gate_alpha, args.gate_limit = GATE
        if c_scales is not None:
            args.c_scales, args.c_scale_stride = c_scales.data_ptr(), c_scales.stride(0)
        size = ctypes.c_size_t()
        self.check(self.c.mr_gemm_workspace_bytes(self.device, ctypes.byref(args), ctypes.byref(size)))
        workspace = self.torch.empty(size.value, device="cuda", dtype=self.torch.uint8) if size.value else None
        stream = P(self.torch.cuda.current_stream().cuda_stream)
        self.check(self.c.mr_gemm(self.device, ctypes.byref(args), P(workspace.data_ptr()) if size.value else None,
                                  size, stream))


def random_matrix(torch, rows, cols, dtype, gap=0):
    if dtype == torch.int8:
        return torch.randint(-127, 128, (rows, cols + gap), device="cuda", dtype=dtype)[:, :cols]
    return torch.randn(rows, cols + gap, device="cuda").to(dtype)[:, :cols]


class Test:
    def __init__(self, torch, gemm):
        self.torch, self.gemm, self.cases, self.failed = torch, gemm, 0, 0

    def expect(self, what, good, detail):
        self.cases += 1
        if not good:
            self.failed += 1
            print(f"FAILED {what}: {detail}", flush=True)

    def compare(self, what, a, b, transpose_a, transpose_b, out, allowed, expected=None, **more):
        torch = self.torch
        exact = (a.t() if transpose_a else a).double() @ (b.t() if transpose_b else b).double()
        exact = exact if expected is None else expected(exact)
        m, n = exact.shape
        whole = torch.full((m, n + 8), float("nan"), device="cuda", dtype=out)
        self.gemm(a, b, whole[:, :n], transpose_a, transpose_b, **more)
        error = (whole[:, :n].double() - exact).abs().max().item() / max(exact.abs().max().item(), 1e-30) if m * n else 0.0
        self.expect(what, error <= allowed, f"error {error:.2e}, allowed {allowed:.0e}")
        self.expect(what, bool(torch.isnan(whole[:, n:]).all()), "wrote between rows")

    def layouts(self):
        torch = self.torch
        allowed = {torch.float32: 1e-5, torch.float16: 8e-4, torch.bfloat16: 6e-3}
        shapes = [(128, 256, 64), (256, 512, 1024), (72, 136, 200), (8, 8, 8), (1000, 328, 72), (264, 264, 4096),
                  (1, 1048, 64), (1, 1, 1), (7, 13, 31), (65, 67, 129), (3, 5, 0), (513, 2048, 96)]
        for dtype in (torch.bfloat16, torch.float16, torch.int8):
            for transpose_a, transpose_b in ((0, 1), (0, 0), (1, 0), (1, 1)):
                for m, n, k in shapes:
                    gap = 16 if m % 8 == 0 and n % 8 == 0 else 3
                    a = random_matrix(torch, *((k, m) if transpose_a else (m, k)), dtype, gap)
                    b = random_matrix(torch, *((n, k) if transpose_b else (k, n)), dtype, gap)
                    for out in (torch.float32, torch.bfloat16 if dtype == torch.int8 else dtype):
                        name = f"{dtype} {'NT'[transpose_a]}{'NT'[transpose_b]} {m} x {n} x {k} to {out}"
                        self.compare(name, a, b, transpose_a, transpose_b, out, allowed[out])

    def epilogues(self):
        torch = self.torch
        gelu = torch.nn.functional.gelu
        functions = [lambda x: x, gelu, lambda x: gelu(x, approximate="tanh"), torch.nn.functional.silu]
        for m, n, k in ((200, 264, 320), (33, 51, 70)):
            a, b = (random_matrix(torch, rows, k, torch.bfloat16) for rows in (m, n))
            bias = torch.randn(n, device="cuda")
            for out, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 6e-3), (torch.float16, 8e-4)):
                residual = random_matrix(torch, m, n, out)
                for which in range(16):
                    with_bias, with_residual = which & 1, which & 2
                    more = {"activation": which // 4, "alpha": 0.125}
                    if with_bias:
                        more["bias"] = bias
                    if with_residual:
                        more["residual"] = residual

                    def expected(x):
                        y = functions[which // 4](0.125 * x + (bias.double() if with_bias else 0))
                        return y + residual.double() if with_residual else y
                    self.compare(f"epilogue {which} {m} x {n} to {out}", a, b, 0, 1, out, allowed, expected, **more)

    def few_rows(self):
        """Shapes that tiles of their own are for, each with a residual beside the outputs and in their place; the same
        bits as among more rows."""
        torch = self.torch
        for dtype, allowed in ((torch.bfloat16, 6e-3), (torch.float16, 8e-4)):
            for m, n, k in ((64, 6144, 192), (512, 6144, 192), (512, 5120, 320), (1000, 1288, 200), (65, 136, 128)):
                name = f"{dtype} {m} x {n} x {k}"
                a, b = random_matrix(torch, m + 1500, k, dtype), random_matrix(torch, n, k, dtype)
                residual = random_matrix(torch, m, n, dtype, 8)
                self.compare(name, a[:m], b, 0, 1, dtype, allowed)
                self.compare(f"{name}, residual", a[:m], b, 0, 1, dtype, allowed, lambda x: x + residual.double(),
                             residual=residual)
                beside, inside = torch.empty(m, n, device="cuda", dtype=dtype), residual.clone()
                self.gemm(a[:m], b, beside, 0, 1, residual=residual)
                self.gemm(a[:m], b, inside, 0, 1, residual=inside)
                self.expect(name, torch.equal(beside, inside), "a residual in the outputs' place gives others")
                every = torch.empty(m + 1500, n, device="cuda", dtype=dtype)
                self.gemm(a, b, every, 0, 1)
                self.gemm(a[:m], b, beside, 0, 1)
                self.expect(name, torch.equal(every[:m], beside), "other bits than among more rows")

    def split(self):
        """K in parts, with every epilogue that such kernels have; the same bits in 100 runs."""
        torch = self.torch
        gelu = torch.nn.functional.gelu
        shapes = (128, 4096, 14336), (64, 1048, 8200), (33, 4096, 4096), (100, 328, 16384), (1, 4096, 14336), (130, 72, 9992)
        for dtype, allowed in ((torch.bfloat16, 6e-3), (torch.float16, 8e-4)):
            for m, n, k in shapes:
                bias, residual = torch.randn(n, device="cuda"), random_matrix(torch, m, n, dtype, 8)
                for transpose_a, transpose_b in ((0, 1), (0, 0), (1, 0)):
                    a = random_matrix(torch, *((k, m) if transpose_a else (m, k)), dtype, 8 - m % 8 if transpose_a else 8)
                    b = random_matrix(torch, *((n, k) if transpose_b else (k, n)), dtype, 8)
                    name = f"split {dtype} {'NT'[transpose_a]}{'NT'[transpose_b]} {m} x {n} x {k}"
                    for out in (torch.float32, dtype):
                        self.compare(f"{name} to {out}", a, b, transpose_a, transpose_b, out,
                                     2e-5 if out == torch.float32 else allowed, split_k=1)
                    self.compare(f"{name}, all", a, b, transpose_a, transpose_b, dtype, allowed,
                                 lambda x: gelu(0.01 * x + bias.double()) + residual.double(), split_k=1, alpha=0.01,
                                 bias=bias, activation=1, residual=residual)
                    first, other = (torch.empty(m, n, device="cuda") for _ in range(2))
                    self.gemm(a, b, first, transpose_a, transpose_b, split_k=1)
                    same = True
                    for _ in range(100 if transpose_b else 3):
                        self.gemm(a, b, other.fill_(float("nan")), transpose_a, transpose_b, split_k=1)
                        same = same and torch.equal(first, other)
                    self.expect(name, same, "other bits in another run")

    def gates(self):
        """Gated activations and outputs in FP8, of every type, layout and kernel."""
        torch = self.torch

        def clamped(x):
            gate, up = x.chunk(2, 1)
            gate, up = gate.clamp(max=GATE[1]), up.clamp(-GATE[1], GATE[1])
            return gate * torch.sigmoid(GATE[0] * gate) * (up + 1)
        functions = {0: lambda x: x, 1: torch.nn.functional.gelu, 3: torch.nn.functional.silu, CLAMPED_SWIGLU: clamped,
                     SWIGLU: lambda x: torch.nn.functional.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1]}
        for m, n, k in ((200, 272, 320), (33, 54, 70), (300, 1040, 512)):
            for dtype in (torch.bfloat16, torch.float16, torch.int8):
                layouts = ((0, 1),) if dtype == torch.int8 else ((0, 1), (0, 0), (1, 0))
                for transpose_a, transpose_b in layouts:
                    a = random_matrix(torch, *((k, m) if transpose_a else (m, k)), dtype)
                    b = random_matrix(torch, *((n, k) if transpose_b else (k, n)), dtype)
                    alpha = 1e-5 if dtype == torch.int8 else 0.125
                    bias = torch.randn(n, device="cuda")
                    sums = alpha * (a.t() if transpose_a else a).double() @ (b.t() if transpose_b else b).double()
                    for activation, function in functions.items():
                        exact = function(sums + bias.double())
                        name = f"{dtype} {transpose_a}{transpose_b} {m} x {n} x {k}, activation {activation}"
                        more = {"activation": activation, "alpha": alpha, "bias": bias}
                        self.compare_codes(name, a, b, transpose_a, transpose_b, exact, **more)
                        if activation >= SWIGLU:
                            residual = random_matrix(torch, m, n // 2, torch.bfloat16)
                            self.compare(name, a, b, transpose_a, transpose_b, torch.bfloat16, 6e-3,
                                         lambda x: exact + residual.double(), residual=residual, **more)

    def compare_codes(self, what, a, b, transpose_a, transpose_b, exact, **more):
        torch = self.torch
        (m, n), blocks = exact.shape, (exact.shape[1] + 127) // 128
        codes = torch.zeros(m, n + 16, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
        scales = torch.full((m, blocks + 1), -1.0, device="cuda")
        self.gemm(a, b, codes[:, :n], transpose_a, transpose_b, c_scales=scales, **more)
        padded = torch.zeros(m, 128 * blocks, device="cuda", dtype=torch.float64)
        padded[:, :n] = exact
        most, found = padded.view(m, -1, 128).abs().amax(2), scales[:, :blocks].double() * 448
        largest = most.max()
        self.expect(what, bool(((found - most).abs() <= 1e-5 * largest).all()) and bool((scales[:, blocks] == -1).all()),
                    "scales are not the largest magnitudes")
        got = codes[:, :n].double() * scales[:, :blocks].double().repeat_interleave(128, 1)[:, :n]
        step = most.repeat_interleave(128, 1)[:, :n] / 28  # half of the distance of the largest codes is 16 of 448
        self.expect(what, bool(((got - exact).abs() <= step + 1e-5 * largest).all()),
                    f"codes are {(got - exact).abs().max().item():.2e} off, of {largest.item():.2e}")
        self.expect(what, bool((codes.view(torch.uint8)[:, n:] == 0).all()), "wrote between rows")

    def scales(self):
        torch = self.torch
        for m, n, k in ((128, 256, 128), (256, 128, 512), (130, 264, 1040), (16, 128, 128), (1000, 328, 144),
                        (1, 1040, 4096), (5, 7, 300)):
            a, b = (random_matrix(torch, rows, k, torch.int8) for rows in (m, n))
            rows, columns = torch.rand(m, device="cuda"), torch.rand(n, device="cuda")
            self.compare(f"int8 {m} x {n} x {k}", a, b, 0, 1, torch.float32, 1e-6,
                         lambda x: x * rows.double()[:, None] * columns.double(), scales=(rows, columns))
            a, b = (random_matrix(torch, rows, k, torch.float8_e4m3fn) for rows in (m, n))
            blocks = (k + 127) // 128
            rows, patches = (torch.rand(count, blocks, device="cuda") for count in (m, (n + 127) // 128))
            exact = (a.double() * rows.double().repeat_interleave(128, 1)[:, :k]) @ (
                b.double() * patches.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]).t()
            # Hopper's e4m3 products keep some 14 bits of a sum of 128.
            self.compare(f"fp8 {m} x {n} x {k}", a, b, 0, 1, torch.float32, 8e-4, lambda x: exact, scales=(rows, patches))

    def mixed(self):
        """Two types of floats in every layout, with an epilogue too."""
        torch = self.torch
        types = torch.float32, torch.bfloat16, torch.float16
        pairs = [(x, y) for x in types for y in types[1:] if x != y]
        for m, n, k in ((128, 256, 64), (200, 136, 520), (7, 13, 31), (130, 67, 1000), (1, 1048, 64), (3, 5, 0)):
            for x, y in pairs:
                for transpose_a, transpose_b in ((0, 1), (0, 0), (1, 0), (1, 1)):
                    gap = 16 if m % 8 == 0 and n % 8 == 0 else 3
                    a = random_matrix(torch, *((k, m) if transpose_a else (m, k)), x, gap)
                    b = random_matrix(torch, *((n, k) if transpose_b else (k, n)), y, gap)
                    name = f"{x} by {y} {'NT'[transpose_a]}{'NT'[transpose_b]} {m} x {n} x {k}"
                    self.compare(name, a, b, transpose_a, transpose_b, torch.float32, 1e-5)
                    self.compare(name, a, b, transpose_a, transpose_b, torch.bfloat16, 6e-3)
                    bias = torch.randn(n, device="cuda")
                    self.compare(name + ", GELU", a, b, transpose_a, transpose_b, torch.float32, 1e-5,
                                 lambda e: torch.nn.functional.gelu(0.125 * e + bias.double()), alpha=0.125, bias=bias,
                                 activation=1)

    def grids(self):
        """Eight-bit floats with a scale for 1 or 128 rows and columns as they lie: what a linear layer's gradients take."""
        torch = self.torch
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2

        def spread(codes, scales, rows, cols):
            wide = scales.double().repeat_interleave(rows, 0)[:codes.shape[0]].repeat_interleave(cols, 1)
            return codes.double() * wide[:, :codes.shape[1]]

        def quantized(rows, cols, dtype, grid):
            shape = [(size + part - 1) // part for size, part in zip((rows, cols), grid)]
            return random_matrix(torch, rows, cols, dtype), torch.rand(shape, device="cuda") + 0.1
        layers = ((0, 1, (1, 128), (128, 128)), (0, 0, (1, 128), (128, 128)), (1, 0, (1, 128), (1, 128)),
                  (0, 0, (128, 1), (1, 1)), (1, 1, (128, 128), (128, 1)))
        for m, n, k in ((256, 384, 512), (130, 264, 200), (5, 7, 300), (129, 33, 131)):
            for transpose_a, transpose_b, grid_a, grid_b in layers:
                for x, y in ((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2), (e5m2, e5m2)):
                    a, a_scales = quantized(*((k, m) if transpose_a else (m, k)), x, grid_a)
                    b, b_scales = quantized(*((n, k) if transpose_b else (k, n)), y, grid_b)
                    left, right = spread(a, a_scales, *grid_a), spread(b, b_scales, *grid_b)
                    exact = (left.t() if transpose_a else left) @ (right.t() if transpose_b else right)
                    dense = x == y == e4m3 and (transpose_a, transpose_b) == (0, 1)  # tensor cores' e4m3: 14 bits
                    name = f"{x} {grid_a} by {y} {grid_b} {'NT'[transpose_a]}{'NT'[transpose_b]} {m} x {n} x {k}"
                    self.compare(name, a, b, transpose_a, transpose_b, torch.float32, 8e-4 if dense else 1e-5,
                                 lambda e: exact, scales=(a_scales, b_scales), grids=(*grid_a, *grid_b))
        # The usual grid, along k whatever the layout.
        for transpose_a, transpose_b in ((0, 1), (1, 0)):
            m, n, k = 130, 200, 300
            a = random_matrix(torch, *((k, m) if transpose_a else (m, k)), e5m2)
            b = random_matrix(torch, *((n, k) if transpose_b else (k, n)), e4m3)
            a_scales, b_scales = torch.rand(m, 3, device="cuda") + 0.1, torch.rand(2, 3, device="cuda") + 0.1
            left = spread(a.t() if transpose_a else a, a_scales, 1, 128)
            right = spread(b if transpose_b else b.t(), b_scales, 128, 128)
            self.compare(f"e5m2 by e4m3 {transpose_a}{transpose_b}, usual grid", a, b, transpose_a, transpose_b,
                         torch.float32, 1e-5, lambda e: left @ right.t(), scales=(a_scales, b_scales))

    def bits(self):
        torch = self.torch
        a, b = (random_matrix(torch, rows, 1024, torch.bfloat16) for rows in (1000, 2048))
        outputs = [torch.empty(1000, 2048, device="cuda") for _ in range(2)]
        self.gemm(a, b, outputs[0], 0, 1)
        for run in range(100):
            self.gemm(a, b, outputs[1], 0, 1)
            if not torch.equal(*outputs):
                return self.expect("bits", False, f"run {run} differs")
        alone = torch.empty(10, 2048, device="cuda")
        self.gemm(a[:10], b, alone, 0, 1)
        self.expect("bits", torch.equal(alone, outputs[0][:10]), "ten rows alone differ from the same among 1,000")
        a = a.float()
        self.gemm(a, b, outputs[0], 0, 1)
        for run in range(100):
            self.gemm(a, b, outputs[1], 0, 1)
            if not torch.equal(*outputs):
                return self.expect("bits", False, f"run {run} of two types differs")
        self.gemm(a[:10], b, alone, 0, 1)
        self.expect("bits", torch.equal(alone, outputs[0][:10]), "two types: ten rows alone differ from among 1,000")


def main():
    try:
        import torch
    except ImportError:
        skip("no torch")
    if not torch.cuda.is_available():
        skip("no GPU")
    torch.manual_seed(1)
    test = Test(torch, Gemm(sys.argv[1], torch))
    for part in (test.layouts, test.epilogues, test.few_rows, test.split, test.gates, test.scales, test.mixed, test.grids, test.bits):
        part()
    print(f"[  figure  ] cuda products: {test.cases} comparisons, {test.failed} failed")
    sys.exit(1 if test.failed else 0)


if __name__ == "__main__":
    main()

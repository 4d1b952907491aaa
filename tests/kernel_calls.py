"""Valid calls of every function of the kernel library on a CPU, small, for kernel_arguments_test.py to make wrong."""

import ctypes
import struct
from ctypes import addressof
from pathlib import Path

import c_headers

HEADERS = c_headers.Headers(Path(__file__).resolve().parent.parent / "include" / "millrace" / "kernels")
POISON = 0xA5
TYPES, FORMATS, PACKINGS = (HEADERS.enums[f"mr_{name}"] for name in ("dtype", "lowbit_format", "lowbit_packing"))
F32, F16, BF16, F8_E4M3, Q8_0, MXFP4, I8 = (
    TYPES[f"MR_{name}"] for name in ("F32", "F16", "BF16", "F8_E4M3", "Q8_0", "MXFP4", "I8"))
# A GPU's alone, what returns no status, and what makes and ends handles.
OTHERS = {"mr_attention_destroy", "mr_device_close", "mr_device_description", "mr_dtype_name", "mr_last_error",
          "mr_status_name", "mr_version", "mr_weight_adopt", "mr_weight_destroy"}
# A workspace that is asked for by another function's name.
WORKSPACES = {"mr_chunk_gated_delta_rule": "mr_gated_delta_workspace_bytes", "mr_chunk_wkv7": "mr_wkv7_workspace_bytes",
              "mr_flash_partial_forward": "mr_flash_forward_workspace_bytes",
              "mr_flash_partial_backward": "mr_flash_forward_workspace_bytes",
              "mr_flash_delta": "mr_flash_forward_workspace_bytes",
              "mr_attention_create": "mr_attention_workspace_bytes"}
# Arguments that are refused by the name of what they belong to.
ALSO = {"a_scale_cols": ("a_scale_rows and _cols",), "b_scale_cols": ("b_scale_rows and _cols",), "row_starts": ("columns",)}
CASES = {}


class Buffer:
    """Memory aligned to 256 bytes among poison; an output's is poison too."""

    def __init__(self, size, out=False, data=None, handle=False):
        self.memory = ctypes.create_string_buffer(size + 768)
        self.size, self.handle = size, handle
        self.at = (addressof(self.memory) + 511) // 256 * 256
        ctypes.memset(self.memory, POISON, len(self.memory))
        if not out:
            ctypes.memmove(self.at, data or bytes(size), size)
        self.before = self.memory.raw

    def restore(self):
        ctypes.memmove(self.memory, self.before, len(self.before))

    def written(self):
        if self.handle and ctypes.c_void_p.from_address(self.at).value is None:  # no handle was made
            return False
        return self.memory.raw != self.before


class Call:
    """Arguments of a function by name. optional: pointers that may be NULL; unread: what this call does not look at."""

    def __init__(self, calls, name, function, optional, unread):
        self.name, self.function, self.optional, self.unread = name, function, optional.split(), unread.split()
        self.headers, self.library, self.device = calls.headers, calls.library, calls.device
        self.arguments, self.buffers, self.hosts, self.kept = {"device": calls.device, "stream": None}, {}, {}, []

    def keep(self, buffer):
        self.buffers[buffer.at] = buffer
        return buffer.at

    def input(self, size, byte=0):
        return self.keep(Buffer(size, data=bytes([byte]) * size))

    def output(self, size, handle=False):
        return self.keep(Buffer(size, out=True, handle=handle))

    def integers(self, *values):
        return self.keep(Buffer(4 * len(values), data=struct.pack(f"{len(values)}i", *values)))

    def host(self, value):
        """Where a struct of the host lies, whose fields are tried too."""
        self.hosts[addressof(value)] = value
        return addressof(value)

    def new(self, name, *values, **fields):
        return self.headers.structs[name](*values, **fields)

    def rows(self, at, stride=0):
        return self.new("mr_rows", at, 0, stride)

    def vector(self, at):
        return self.new("mr_vector", at, 0)

    def run(self, function, arguments):
        values = (arguments[name] for name, *_ in self.headers.functions[function][1])
        return getattr(self.library, function)(*values)

    def check(self, function, **arguments):
        if self.run(function, {**self.arguments, **arguments}) != 0:
            raise RuntimeError(self.library.mr_last_error().decode())

    def ask(self, function, **arguments):
        """A number of bytes."""
        bytes_ = ctypes.c_size_t()
        self.check(function, bytes=addressof(bytes_), **arguments)
        return bytes_.value

    def workspace_bytes(self, arguments):
        """What these arguments need; None where they are refused or there is no workspace."""
        function = WORKSPACES.get(self.function, self.function + "_workspace_bytes")
        if function not in self.headers.functions:
            return None
        bytes_, more = ctypes.c_size_t(), {}
        if function in ("mr_matmul_workspace_bytes", "mr_linear_cross_entropy_workspace_bytes"):
            if not arguments["args"]:
                return None
            args = self.headers.structs[self.function + "_args"].from_address(arguments["args"])
            more = {"weight": args.weight, "rows": args.rows, "chunk": args.rows}
        status = self.run(function, {**arguments, **more, "bytes": addressof(bytes_)})
        return bytes_.value if status == 0 else None


class Calls:
    def __init__(self, library, isa):
        self.headers = HEADERS
        self.library = self.headers.load(library)
        options = self.headers.structs["mr_device_options"](1, isa.encode() if isa else None)
        device = ctypes.c_void_p()
        if self.library.mr_device_open(b"cpu", addressof(options), addressof(device)) != 0:
            raise SystemExit(self.library.mr_last_error().decode())
        self.device = device.value

    def names(self):
        return list(CASES)

    def make(self, name):
        function, fill, optional, unread = CASES[name]
        call = Call(self, name, function, optional, unread)
        arguments = fill(call)
        if isinstance(arguments, ctypes.Structure):
            arguments = {"args": call.host(arguments)}
        call.arguments.update(arguments)
        return call

    def not_covered(self):
        tried = {function for function, *_ in CASES.values()}
        return sorted(f for f in set(self.headers.functions) - tried - OTHERS if not f.startswith("flash_attention_v2"))


def call_of(function, name=None, optional="", unread="", fill_with=()):
    def add(fill):
        CASES[name or function.removeprefix("mr_")] = (function, lambda c: fill(c, *fill_with), optional, unread)
        return fill
    return add


# ---- fused operations: 3 rows of 40 columns, float32

NORM = "weight.data bias.data mean rstd"


@call_of("mr_norm", optional=NORM, fill_with=(0,))
@call_of("mr_norm", "norm_quantize", optional=NORM + " y.data", fill_with=(2,))
def norm(c, quantize):
    return c.new("mr_norm_args", kind=1, rows=3, cols=40, x=c.rows(c.input(480), 40), residual=c.rows(c.input(480)),
                 sum=c.rows(c.output(480)), y=c.rows(c.output(480)), weight=c.vector(c.input(160)),
                 bias=c.vector(c.input(160)), eps=1e-5, mean=c.output(12), rstd=c.output(12), quantize=quantize,
                 codes=c.output(120) if quantize else None, codes_stride=40 if quantize else 0,
                 scales=c.output(12) if quantize else None, scales_stride=1 if quantize else 0)


NORM_GRADIENT = "dsum.data weight.data dweight.data dbias.data"


@call_of("mr_norm_backward", optional=NORM_GRADIENT)
@call_of("mr_norm_backward_workspace_bytes", optional=NORM_GRADIENT)
def norm_backward(c):
    return {"bytes": c.output(8, handle=True), "args": c.host(c.new(
        "mr_norm_backward_args", kind=1, rows=3, cols=40, x=c.rows(c.input(480)), dy=c.rows(c.input(480)),
        dsum=c.rows(c.input(480)), dx=c.rows(c.output(480)), weight=c.vector(c.input(160)), mean=c.input(12),
        rstd=c.input(12), dweight=c.vector(c.output(160)), dbias=c.vector(c.output(160))))}


call_of("mr_rmsnorm")(lambda c: dict(x=c.input(480), x_stride=40, weight=c.input(160), eps=1e-5, rows=3, cols=40,
                                     y=c.output(480), y_stride=40))


def rotary_of(c):
    return c.new("mr_rotary", c.input(16), 4, 1.0, 0)


call_of("mr_rotary_rows")(lambda c: c.new("mr_rotary_args", rotary_of(c), c.integers(0, 1, 2), 3, 2, 8,
                                          c.rows(c.input(192)), c.rows(c.output(192))))
call_of("mr_rotary_apply")(lambda c: dict(rotary=c.host(rotary_of(c)), positions=c.integers(0, 1, 2), rows=3, heads=2,
                                          head_dim=8, x=c.output(192), row_stride=16))
call_of("mr_activation_rows")(lambda c: c.new("mr_activation_args", 4, 3, 40, *(c.rows(c.input(480)) for _ in "xu"),
                                              c.rows(c.output(480)), 1.7, 7.0))
call_of("mr_activation_rows_backward")(lambda c: c.new(
    "mr_activation_backward_args", 4, 3, 40, *(c.rows(c.input(480)) for _ in "xud"),
    *(c.rows(c.output(480)) for _ in "xu"), 1.7, 7.0))
call_of("mr_softmax")(lambda c: c.new("mr_softmax_args", 3, 40, c.rows(c.input(480)), c.rows(c.output(480)), 1.0))
call_of("mr_softmax_backward")(lambda c: c.new("mr_softmax_backward_args", 3, 40, c.rows(c.input(480)),
                                               c.rows(c.input(480)), c.rows(c.output(480)), 1.0))
call_of("mr_cross_entropy")(lambda c: c.new("mr_cross_entropy_args", 3, 40, c.rows(c.input(480)),
                                            c.integers(1, 2, -100), -100, c.output(12), c.output(12)))
call_of("mr_cross_entropy_backward")(lambda c: c.new(
    "mr_cross_entropy_backward_args", 3, 40, c.rows(c.input(480)), c.integers(1, 2, -100), -100, c.input(12), c.input(12),
    c.rows(c.output(480))))
call_of("mr_embedding")(lambda c: c.new("mr_embedding_args", 3, 40, 5, c.integers(1, 4, 0), c.rows(c.input(800)),
                                        c.rows(c.output(480)), 1.0))


@call_of("mr_embedding_backward")
@call_of("mr_embedding_backward_workspace_bytes")
def embedding_backward(c):
    return {"bytes": c.output(8, handle=True), "args": c.host(c.new(
        "mr_embedding_backward_args", 3, 40, 5, c.integers(1, 4, 0), c.rows(c.input(480)), c.rows(c.output(800)), 1.0, 1))}


call_of("mr_dropout")(lambda c: c.new("mr_dropout_args", 3, 40, c.rows(c.input(480)), c.rows(c.output(480)), 0.5, 1, 2))

# ---- products


def matrix_of(c, type, shape, data, **more):
    return c.new("mr_matrix", type, *shape, c.input(data), **more)


def weight_of(c, experts, rows, cols):
    matrix, weight = matrix_of(c, F32, (experts, rows, cols), 4 * experts * rows * cols), ctypes.c_void_p()
    c.kept.append(matrix)
    bytes_ = c.ask("mr_weight_bytes", matrix=addressof(matrix))
    c.check("mr_weight_create", matrix=addressof(matrix), memory=c.input(bytes_) if bytes_ else None,
            memory_bytes=bytes_, weight=addressof(weight))
    return weight.value


SCALES_OF_FP8 = "scale_type rows_per_scale cols_per_scale scales_per_row"


@call_of("mr_weight_create")
@call_of("mr_weight_bytes")
@call_of("mr_weight_kept_bytes")
def weight_create(c):
    matrix = matrix_of(c, F8_E4M3, (2, 16, 32), 1024, row_stride_bytes=32, scales=c.input(128), scale_type=F32,
                       rows_per_scale=1, cols_per_scale=32, scales_per_row=1)
    return dict(matrix=c.host(matrix), memory=None, memory_bytes=0, weight=c.output(8, handle=True),
                bytes=c.output(8, handle=True))


@call_of("mr_weight_create", "weight_create_mxfp4", optional="memory", unread=SCALES_OF_FP8 + " memory")
def weight_create_mxfp4(c):
    matrix = matrix_of(c, MXFP4, (1, 64, 64), 64 * 34)
    bytes_ = c.ask("mr_weight_bytes", matrix=addressof(matrix))
    return dict(matrix=c.host(matrix), memory=c.output(bytes_) if bytes_ else None, memory_bytes=bytes_,
                weight=c.output(8, handle=True))


call_of("mr_matmul", optional="bias")(lambda c: c.new("mr_matmul_args", weight_of(c, 1, 16, 32), c.input(64),
                                                      c.input(384), 32, c.output(192), 16, 3, 0))
call_of("mr_matmul_workspace_bytes")(lambda c: dict(weight=weight_of(c, 1, 16, 32), rows=3, bytes=c.output(8, handle=True)))


def gemm_of(call, **fields):
    return {"bytes": call.output(8, handle=True), "args": call.host(call.new("mr_gemm_args", **{**dict(
        type=BF16, m=5, n=16, k=32, a=call.input(320), lda=32, b=call.input(1024), ldb=32, transpose_b=1, out_type=F32,
        c=call.output(320), ldc=16, alpha=1.0, bias=call.input(64), residual=call.input(320), residual_stride=16),
        **fields}))}


call_of("mr_gemm", optional="bias residual")(gemm_of)
call_of("mr_gemm_workspace_bytes", optional="bias residual")(gemm_of)
call_of("mr_gemm", "gemm_fp8", optional="bias residual")(lambda c: gemm_of(
    c, type=F8_E4M3, b_type=F8_E4M3, a_scales=c.input(20), b_scales=c.input(4), a_scale_stride=1, b_scale_stride=1,
    a_scale_rows=1, a_scale_cols=128, b_scale_rows=128, b_scale_cols=128))
call_of("mr_gemm", "gemm_i8", optional="bias residual a_scales b_scales")(
    lambda c: gemm_of(c, type=I8, a_scales=c.input(20), b_scales=c.input(64)))
call_of("mr_gemm", "gemm_gated_quantized", optional="bias", unread="c")(lambda c: gemm_of(
    c, out_type=F8_E4M3, residual=None, residual_stride=0, c=c.output(80), c_scales=c.output(20), c_scale_stride=1,
    activation=5, gate_alpha=1.7, gate_limit=7.0))


def grouped_of(c, *fields):
    return {"bytes": c.output(8, handle=True), "args": c.host(c.new("mr_grouped_gemm_args", *fields))}


def grouped_forward(c):
    return grouped_of(c, 0, BF16, 2, 5, 16, 32, c.integers(0, 2, 5), c.input(320), 32, c.input(2048), 0, F32,
                      c.output(320), 16, 1.0)


call_of("mr_grouped_gemm")(grouped_forward)
call_of("mr_grouped_gemm_workspace_bytes")(grouped_forward)
call_of("mr_grouped_gemm", "grouped_fp8")(lambda c: grouped_of(
    c, 0, F8_E4M3, 2, 5, 16, 32, c.integers(0, 2, 5), c.input(160), 32, c.input(1024), 0, F32, c.output(320), 16, 1.0,
    c.input(20), c.input(8)))
call_of("mr_grouped_gemm", "grouped_wgrad")(lambda c: grouped_of(
    c, 2, BF16, 2, 5, 16, 32, c.integers(0, 2, 5), c.input(160), 16, c.input(320), 32, F32, c.output(4096), 0, 1.0))


def published_int4(c):
    return c.new("mr_lowbit_matrix", FORMATS["MR_LOWBIT_INT4_32"], PACKINGS["MR_LOWBIT_GPTQ"], 1, 16, 32, c.input(256), c.input(32), c.input(8))


def published_mxfp4(c):
    return c.new("mr_lowbit_matrix", FORMATS["MR_LOWBIT_MXFP4"], PACKINGS["MR_LOWBIT_ROWS"], 2, 16, 32, c.input(512), c.input(32, 127), None)


@call_of("mr_lowbit_repack", "repack_int4", fill_with=(published_int4,))
@call_of("mr_lowbit_repack", "repack_mxfp4", fill_with=(published_mxfp4,))
@call_of("mr_lowbit_bytes", optional="codes scales zeros", unread="codes scales zeros", fill_with=(published_int4,))
def repack(c, published):
    matrix = published(c)
    if c.function == "mr_lowbit_bytes":
        return dict(matrix=c.host(matrix), bytes=c.output(8, handle=True))
    bytes_ = c.ask("mr_lowbit_bytes", matrix=addressof(matrix))
    return dict(matrix=c.host(matrix), to=c.output(bytes_), bytes=bytes_)


@call_of("mr_lowbit_gemm", optional="expert_scales bias")
@call_of("mr_lowbit_gemm_workspace_bytes", optional="expert_scales bias")
def lowbit_gemm(c):
    matrix = published_mxfp4(c)
    bytes_ = c.ask("mr_lowbit_bytes", matrix=addressof(matrix))
    return {"bytes": c.output(8, handle=True), "args": c.host(c.new(
        "mr_lowbit_gemm_args", FORMATS["MR_LOWBIT_MXFP4"], 2, 16, 32, c.input(bytes_), c.input(8), 0, 5, c.integers(0, 2, 5),
        c.input(320), 32, F32, c.output(320), 16, 1.0, c.input(128)))}


@call_of("mr_fp4_gemm")
@call_of("mr_fp4_gemm_workspace_bytes", unread="a a_scales b b_scales")
def fp4_gemm(c):
    return {"bytes": c.output(8, handle=True), "args": c.host(c.new(
        "mr_fp4_gemm_args", FORMATS["MR_LOWBIT_MXFP4"], 5, 16, 32, c.input(80), c.input(5), c.input(256), c.input(16), 1.0, F32,
        c.output(320), 16))}


call_of("mr_moe_route")(lambda c: dict(scores=c.input(60), rows=3, experts=5, k=2, softmax_over=0, chosen=c.output(24),
                                       weights=c.output(24)))


@call_of("mr_moe", optional="gate_bias up_bias down_bias")
@call_of("mr_moe_workspace_bytes", optional="gate_bias up_bias down_bias chosen weights x y",
         unread="gate_bias up_bias down_bias chosen weights x y activation alpha limit")
def moe(c):
    return {"bytes": c.output(8, handle=True), "args": c.host(c.new(
        "mr_moe_args", weight_of(c, 2, 32, 64), weight_of(c, 2, 32, 64), weight_of(c, 2, 64, 32), c.input(256),
        c.input(256), c.input(512), 1, 1.7, 7.0, 1, c.integers(0, 1, 0), c.input(12), c.input(768), c.output(768), 3))}


call_of("mr_sample")(lambda c: dict(logits=c.input(40), rows=1, vocab=10, tokens=c.output(4),
                                    params=c.host(c.new("mr_sample_params", 1.0, 3, 0.9, 0.1, 0.5))))
call_of("mr_sample_workspace_bytes")(lambda c: dict(rows=3, vocab=10, bytes=c.output(8, handle=True)))
call_of("mr_quantize", optional="importance")(lambda c: dict(type=Q8_0, x=c.input(768), rows=3, cols=64,
                                                             importance=c.input(256), out=c.output(204)))
call_of("mr_dequantize", unread=SCALES_OF_FP8)(lambda c: dict(
    matrix=c.host(matrix_of(c, Q8_0, (1, 4, 64), 272)), first=1, rows=2, out=c.output(512)))
call_of("mr_row_bytes")(lambda c: dict(type=Q8_0, cols=64, bytes=c.output(8, handle=True)))
call_of("mr_linear_cross_entropy")(lambda c: c.new(
    "mr_linear_cross_entropy_args", weight_of(c, 1, 40, 32), c.input(384), 32, 3, c.integers(1, 2, -100), -100,
    c.output(12), c.output(12)))
call_of("mr_linear_cross_entropy_workspace_bytes")(lambda c: dict(
    weight=weight_of(c, 1, 40, 32), chunk=3, bytes=c.output(8, handle=True)))


@call_of("mr_linear_cross_entropy_backward", optional="dhidden.data dweight.data")
@call_of("mr_linear_cross_entropy_backward_workspace_bytes", optional="dhidden.data dweight.data")
def linear_cross_entropy_backward(c):
    return {"bytes": c.output(8, handle=True), "args": c.host(c.new(
        "mr_linear_cross_entropy_backward_args", 3, 40, 32, c.rows(c.input(384)), c.rows(c.input(5120)),
        c.integers(1, 2, -100), -100, c.input(12), c.input(12), c.rows(c.output(384)), c.rows(c.output(5120)), 0, 256,
        256))}

"""The kernels for arrays of anybody: numpy's, and whatever else lies in host memory and speaks DLPack (torch, cupy's
host arrays, tensorflow, mxnet ...). Results are numpy arrays; `out` may be any array that can be written.

Types are float32 and float16, and bfloat16 where ml_dtypes is installed. No gradients: torch and JAX have them.
"""

import ctypes
import math
import os
import threading

import numpy as np

from . import library_path

__all__ = ["Device", "attention", "dequantize", "gemm", "layer_norm", "quantize", "rms_norm", "softmax"]

_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
_c = ctypes.CDLL(str(library_path("kernels")))
_c.mr_last_error.restype = ctypes.c_char_p
_c.mr_device_description.restype = ctypes.c_char_p
_i32, _i64, _f32, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


def _struct(name, *fields):
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


_Rows = _struct("Rows", ("data", _ptr), ("type", _i32), ("stride", _i64))
_Vector = _struct("Vector", ("data", _ptr), ("type", _i32))
_Options = _struct("Options", ("threads", _i32), ("isa", ctypes.c_char_p))
_Softmax = _struct("Softmax", ("rows", _i64), ("cols", _i64), ("x", _Rows), ("y", _Rows), ("scale", _f32))
_Norm = _struct("Norm", ("kind", _i32), ("rows", _i64), ("cols", _i64), ("x", _Rows), ("residual", _Rows),
                ("sum", _Rows), ("y", _Rows), ("weight", _Vector), ("bias", _Vector), ("weight_offset", _f32),
                ("eps", _f32), ("mean", _ptr), ("rstd", _ptr), ("quantize", _i32), ("codes", _ptr),
                ("codes_stride", _i64), ("scales", _ptr), ("scales_stride", _i64))
_Tensor = _struct("Tensor", ("data", _ptr), ("batch_stride", _i64), ("seq_stride", _i64), ("head_stride", _i64))
_Problem = _struct("Problem", ("type", _i32), ("batch", _i32), ("heads", _i32), ("kv_heads", _i32), ("head_dim", _i32),
                   ("value_dim", _i32), ("max_q", _i32), ("max_k", _i32), ("cu_q", _ptr), ("cu_k", _ptr),
                   ("pages", _ptr), ("pages_stride", _i64), ("page_tokens", _i32), ("k_lengths", _ptr),
                   ("scale", _f32), ("softcap", _f32), ("window_left", _i32), ("window_right", _i32), ("sinks", _ptr),
                   ("blocks", _ptr), ("q_scales", _ptr), ("k_scales", _ptr), ("v_scales", _ptr))
_Gemm = _struct("Gemm", ("type", _i32), ("m", _i64), ("n", _i64), ("k", _i64), ("a", _ptr), ("lda", _i64),
                ("transpose_a", _i32), ("b", _ptr), ("ldb", _i64), ("transpose_b", _i32), ("out_type", _i32),
                ("c", _ptr), ("ldc", _i64), ("alpha", _f32), ("a_scales", _ptr), ("b_scales", _ptr),
                ("a_scale_stride", _i64), ("b_scale_stride", _i64), ("bias", _ptr), ("activation", _i32),
                ("residual", _ptr), ("residual_stride", _i64), ("gate_alpha", _f32), ("gate_limit", _f32),
                ("c_scales", _ptr), ("c_scale_stride", _i64), ("b_type", _i32), ("a_scale_rows", _i32),
                ("a_scale_cols", _i32), ("b_scale_rows", _i32), ("b_scale_cols", _i32), ("split_k", _i32))
_Matrix = _struct("Matrix", ("type", _i32), ("experts", _i64), ("rows", _i64), ("cols", _i64), ("data", _ptr),
                  ("row_stride_bytes", _i64), ("scales", _ptr), ("scale_type", _i32), ("rows_per_scale", _i64),
                  ("cols_per_scale", _i64), ("scales_per_row", _i64))


def _check(status):
    if status != 0:
        raise ValueError("millrace: " + _c.mr_last_error().decode())


class Device:
    """A CPU of the kernel library: so many threads (0: one per core), the best instruction set or the one named."""

    def __init__(self, threads=0, isa=None):
        self._handle = _ptr()
        options = _Options(threads, isa.encode() if isa else None)
        _check(_c.mr_device_open(b"cpu", ctypes.byref(options), ctypes.byref(self._handle)))
        self._lock = threading.Lock()  # a device serves one thread at a time
        self._pid = os.getpid()

    def call(self, name, *args):
        with self._lock:
            _check(getattr(_c, name)(self._handle, *args))

    def run(self, name, args, *more):
        """A function with a workspace."""
        needed = ctypes.c_size_t()
        with self._lock:
            _check(getattr(_c, f"{name}_workspace_bytes")(self._handle, ctypes.byref(args), ctypes.byref(needed)))
            memory = np.empty(needed.value + 256, np.uint8)
            at = _ptr((memory.ctypes.data + 255) // 256 * 256)
            _check(getattr(_c, name)(self._handle, ctypes.byref(args), *more, at, needed, None))

    def __reduce__(self):  # copies as well: a device is closed by one
        raise TypeError("Device: has threads of its own, expected one that is made where it is used")

    def __str__(self):
        return _c.mr_device_description(self._handle).decode()

    def __del__(self):
        if self._handle and self._pid == os.getpid():
            _c.mr_device_close(self._handle)


_default = None


def _device(device):
    global _default
    if device is not None:
        if not isinstance(device, Device):
            raise TypeError(f"device is {device!r}, expected a Device")
        return device
    if _default is None or _default._pid != os.getpid():
        _default = Device()
    return _default


def _shared(x):
    """numpy's view of what speaks DLPack, without a copy. bfloat16, which numpy has no DLPack of, by other ways."""
    if "bfloat16" not in str(getattr(x, "dtype", "")):
        return np.from_dlpack(x)
    import ml_dtypes

    if type(x).__module__.partition(".")[0] == "torch":
        import torch
        return np.from_dlpack(x.view(torch.int16)).view(ml_dtypes.bfloat16)
    return np.asarray(x)  # jax's


def _array(x, name):
    """numpy's view of an array: itself, or by DLPack, without a copy; numbers in the machine's own order."""
    if not isinstance(x, np.ndarray):
        x = _shared(x) if hasattr(x, "__dlpack__") else np.asarray(x)
    if x.dtype.name not in _TYPES:
        raise TypeError(f"{name} is {x.dtype}, expected float32, float16 or bfloat16")
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _of_rows(x):
    x = _array(x, "x")
    if x.ndim == 0:
        raise ValueError("x is a scalar, expected a last dimension")
    return np.ascontiguousarray(x)


def _rows(x):
    return _Rows(x.ctypes.data, _TYPES[x.dtype.name], 0)


def _vector(x, cols, name):
    if x is None:
        return _Vector(None, 0), None
    x = np.ascontiguousarray(_array(x, name))
    if x.shape != (cols,):
        raise ValueError(f"{name} has shape {x.shape}, expected ({cols},)")
    return _Vector(x.ctypes.data, _TYPES[x.dtype.name]), x


def _output(out, shape, dtype):
    """What is computed into, and what is returned: `out` itself where it is contiguous."""
    if out is None:
        return np.empty(shape, dtype), None
    if not isinstance(out, np.ndarray) and not hasattr(out, "__dlpack__"):
        raise TypeError(f"out is a {type(out).__name__}, expected an array")
    view = out if isinstance(out, np.ndarray) else _shared(out)
    if view.shape != shape or view.dtype != dtype:
        raise ValueError(f"out is {view.dtype} {view.shape}, expected {dtype} {shape}")
    if not view.flags.writeable:
        raise ValueError("out cannot be written")
    return (view, None) if view.flags.c_contiguous else (np.empty(shape, dtype), view)


def _finish(y, into, out):
    if into is not None:
        into[...] = y
    return y if out is None else out


def softmax(x, scale=1.0, *, out=None, device=None):
    """softmax(scale * x) over the last dimension."""
    x = _of_rows(x)
    y, into = _output(out, x.shape, x.dtype)
    if x.size:
        cols = x.shape[-1]
        args = _Softmax(x.size // cols, cols, _rows(x), _rows(y), scale)
        _device(device).call("mr_softmax", ctypes.byref(args), None)
    return _finish(y, into, out)


def _norm(kind, x, weight, bias, eps, offset, out, device):
    x = _of_rows(x)
    y, into = _output(out, x.shape, x.dtype)
    if x.size:
        cols = x.shape[-1]
        args = _Norm(kind=kind, rows=x.size // cols, cols=cols, x=_rows(x), y=_rows(y), eps=eps, weight_offset=offset)
        args.weight, _keep_weight = _vector(weight, cols, "weight")
        args.bias, _keep_bias = _vector(bias, cols, "bias")
        _device(device).call("mr_norm", ctypes.byref(args), None)
    return _finish(y, into, out)


def rms_norm(x, weight=None, eps=1e-6, weight_offset=0.0, *, out=None, device=None):
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension."""
    return _norm(0, x, weight, None, eps, weight_offset, out, device)


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, out=None, device=None):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    return _norm(1, x, weight, bias, eps, 0.0, out, device)


def attention(q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, sinks=None, out=None, device=None):
    """softmax(scale * q k^T) v over [batch, seq, heads, dim]; heads may be a multiple of k's. head sizes are multiples
    of 8, at most 256."""
    q, k, v = (np.ascontiguousarray(_array(x, name)) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if x.ndim != 4 or x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} {x.shape}, expected {q.dtype} [batch, seq, heads, dim]")
    if k.shape != (q.shape[0], k.shape[1], v.shape[2], q.shape[3]) or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"q, k and v have shapes {q.shape}, {k.shape} and {v.shape}, which do not fit")
    shape = (*q.shape[:3], v.shape[3])
    y, into = _output(out, shape, q.dtype)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale) or 1e-38  # the C API's 0 is the default
    problem = _Problem(type=_TYPES[q.dtype.name], batch=q.shape[0], heads=q.shape[2], kv_heads=k.shape[2],
                       head_dim=q.shape[3], value_dim=v.shape[3], max_q=q.shape[1], max_k=k.shape[1], scale=scale,
                       softcap=softcap, window_left=max(window[0], -1),
                       window_right=0 if causal else max(window[1], -1))
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks, np.float32)
        if sinks.shape != (q.shape[2],):
            raise ValueError(f"sinks has shape {sinks.shape}, expected ({q.shape[2]},)")
        problem.sinks = sinks.ctypes.data
    tensors = [_Tensor(x.ctypes.data if x.size else None, math.prod(x.shape[1:]), math.prod(x.shape[2:]), x.shape[3])
               for x in (q, k, v, y)]
    _device(device).run("mr_flash_forward", problem, *tensors, None)
    return _finish(y, into, out)


def gemm(a, b, *, transpose_a=False, transpose_b=False, bias=None, out=None, device=None):
    """op(a) op(b) + bias of two matrices of one type, with sums in float32."""
    a, b = (np.ascontiguousarray(_array(x, name)) for x, name in ((a, "a"), (b, "b")))
    if a.ndim != 2 or b.ndim != 2 or a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} {a.shape} and b {b.dtype} {b.shape}, expected two matrices of one type")
    m, k = a.shape[::-1] if transpose_a else a.shape
    k_of_b, n = b.shape[::-1] if transpose_b else b.shape
    if k != k_of_b:
        raise ValueError(f"a and b have shapes {a.shape} and {b.shape}, which do not fit")
    c, into = _output(out, (m, n), a.dtype)
    if bias is not None:
        bias = np.ascontiguousarray(bias, np.float32)
        if bias.shape != (n,):
            raise ValueError(f"bias has shape {bias.shape}, expected ({n},)")
    if k == 0:
        c[...] = 0 if bias is None else bias
    elif c.size:
        kind = _TYPES[a.dtype.name]
        args = _Gemm(type=kind, m=m, n=n, k=k, a=a.ctypes.data, transpose_a=int(transpose_a), b=b.ctypes.data,
                     transpose_b=int(transpose_b), out_type=kind, c=c.ctypes.data,
                     bias=None if bias is None else bias.ctypes.data)
        _device(device).run("mr_gemm", args)
    return _finish(c, into, out)


def _parse(name):
    if not isinstance(name, str):
        raise TypeError(f"type is {name!r}, expected a name")
    kind = _i32()
    _check(_c.mr_dtype_parse(name.encode(), ctypes.byref(kind)))
    return kind


def quantize(w, type, *, device=None):
    """float32 [rows, cols] -> uint8 [rows, bytes of a row] of a block type: "q8_0", "mxfp4", "q4_k", ..."""
    w = np.ascontiguousarray(_array(w, "w"), np.float32)
    if w.ndim != 2:
        raise ValueError(f"w has shape {w.shape}, expected [rows, cols]")
    kind, size = _parse(type), ctypes.c_size_t()
    _check(_c.mr_row_bytes(kind, _i64(w.shape[1]), ctypes.byref(size)))
    y = np.empty((w.shape[0], size.value), np.uint8)
    if w.size:
        _device(device).call("mr_quantize", kind, _ptr(w.ctypes.data), _i64(w.shape[0]), _i64(w.shape[1]), None,
                             _ptr(y.ctypes.data))
    return y


def dequantize(values, type, *, device=None):
    """Back to float32 [rows, cols]."""
    values = np.ascontiguousarray(values)
    if values.ndim != 2 or values.dtype != np.uint8:
        raise ValueError(f"values is {values.dtype} {values.shape}, expected uint8 [rows, bytes]")
    kind, elements, size = _parse(type), _i32(), _i32()
    _check(_c.mr_dtype_block(kind, ctypes.byref(elements), ctypes.byref(size)))
    if values.shape[1] % size.value:
        raise ValueError(f"rows of {values.shape[1]} bytes, expected blocks of {size.value}")
    cols = values.shape[1] // size.value * elements.value
    y = np.empty((values.shape[0], cols), np.float32)
    if y.size:
        matrix = _Matrix(type=kind.value, experts=1, rows=y.shape[0], cols=cols, data=values.ctypes.data)
        _device(device).call("mr_dequantize", ctypes.byref(matrix), _i64(0), _i64(y.shape[0]), _ptr(y.ctypes.data))
    return y

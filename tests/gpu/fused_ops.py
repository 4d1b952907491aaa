"""The fused operations of the kernel library through ctypes, over torch tensors of any device.

Structs are those of include/millrace/kernels/{rows,norm,rotary,activation,softmax,cross_entropy,embedding,dropout}.h.
"""

import ctypes
from ctypes import Structure, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p

import torch

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
RMS, LAYER = 0, 1
NONE, FP8_1X128, FP8_ROW, INT8_ROW = range(4)
GELU, GELU_TANH, SILU, SWIGLU, CLAMPED_SWIGLU, GEGLU, GEGLU_TANH = range(7)


class Rows(Structure):
    _fields_ = [("data", c_void_p), ("type", c_int), ("stride", c_int64)]


class Vector(Structure):
    _fields_ = [("data", c_void_p), ("type", c_int)]


class NormArgs(Structure):
    _fields_ = [("kind", c_int), ("rows", c_int64), ("cols", c_int64), ("x", Rows), ("residual", Rows), ("sum", Rows),
                ("y", Rows), ("weight", Vector), ("bias", Vector), ("weight_offset", c_float), ("eps", c_float),
                ("mean", c_void_p), ("rstd", c_void_p), ("quantize", c_int), ("codes", c_void_p),
                ("codes_stride", c_int64), ("scales", c_void_p), ("scales_stride", c_int64)]


class NormBackwardArgs(Structure):
    _fields_ = [("kind", c_int), ("rows", c_int64), ("cols", c_int64), ("x", Rows), ("dy", Rows), ("dsum", Rows),
                ("dx", Rows), ("weight", Vector), ("weight_offset", c_float), ("mean", c_void_p), ("rstd", c_void_p),
                ("dweight", Vector), ("dbias", Vector)]


class Rotary(Structure):
    _fields_ = [("inv_freq", c_void_p), ("num_freqs", c_int32), ("magnitude", c_float), ("interleaved", c_int32)]


class RotaryArgs(Structure):
    _fields_ = [("rotary", Rotary), ("positions", c_void_p), ("rows", c_int64), ("heads", c_int32),
                ("head_dim", c_int32), ("x", Rows), ("y", Rows), ("inverse", c_int32)]


class ActivationArgs(Structure):
    _fields_ = [("kind", c_int), ("rows", c_int64), ("cols", c_int64), ("x", Rows), ("up", Rows), ("y", Rows),
                ("alpha", c_float), ("limit", c_float)]


class ActivationBackwardArgs(Structure):
    _fields_ = [("kind", c_int), ("rows", c_int64), ("cols", c_int64), ("x", Rows), ("up", Rows), ("dy", Rows),
                ("dx", Rows), ("dup", Rows), ("alpha", c_float), ("limit", c_float)]


class SoftmaxArgs(Structure):
    _fields_ = [("rows", c_int64), ("cols", c_int64), ("x", Rows), ("y", Rows), ("scale", c_float)]


class SoftmaxBackwardArgs(Structure):
    _fields_ = [("rows", c_int64), ("cols", c_int64), ("y", Rows), ("dy", Rows), ("dx", Rows), ("scale", c_float)]


class CrossEntropyArgs(Structure):
    _fields_ = [("rows", c_int64), ("vocab", c_int64), ("logits", Rows), ("targets", c_void_p),
                ("ignore_index", c_int32), ("loss", c_void_p), ("lse", c_void_p)]


class CrossEntropyBackwardArgs(Structure):
    _fields_ = [("rows", c_int64), ("vocab", c_int64), ("logits", Rows), ("targets", c_void_p),
                ("ignore_index", c_int32), ("lse", c_void_p), ("dloss", c_void_p), ("dlogits", Rows)]


class LinearCrossEntropyBackwardArgs(Structure):
    _fields_ = [("rows", c_int64), ("vocab", c_int64), ("inner", c_int64), ("hidden", Rows), ("weight", Rows),
                ("targets", c_void_p), ("ignore_index", c_int32), ("lse", c_void_p), ("dloss", c_void_p),
                ("dhidden", Rows), ("dweight", Rows), ("accumulate", c_int32), ("chunk_rows", c_int64),
                ("chunk_vocab", c_int64)]


class EmbeddingArgs(Structure):
    _fields_ = [("rows", c_int64), ("cols", c_int64), ("vocab", c_int64), ("tokens", c_void_p), ("table", Rows),
                ("y", Rows), ("scale", c_float)]


class EmbeddingBackwardArgs(Structure):
    _fields_ = [("rows", c_int64), ("cols", c_int64), ("vocab", c_int64), ("tokens", c_void_p), ("dy", Rows),
                ("dtable", Rows), ("scale", c_float), ("accumulate", c_int32)]


class DropoutArgs(Structure):
    _fields_ = [("rows", c_int64), ("cols", c_int64), ("x", Rows), ("y", Rows), ("p", c_float), ("seed", c_uint64),
                ("offset", c_uint64)]


class DeviceOptions(Structure):
    _fields_ = [("threads", c_int32), ("isa", c_char_p)]


def rows(tensor):
    """A tensor [rows, cols], its columns side by side, or None."""
    if tensor is None:
        return Rows(None, 0, 0)
    assert tensor.dim() == 2 and (tensor.stride(1) == 1 or tensor.shape[1] == 1), tensor.stride()
    stride = tensor.stride(0) if tensor.shape[0] > 1 else 0
    return Rows(tensor.data_ptr() or None, TYPES[tensor.dtype], stride)


def vector(tensor):
    return Vector(None, 0) if tensor is None else Vector(tensor.data_ptr(), TYPES[tensor.dtype])


def pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


def workspace(size, device):
    """`size` bytes, aligned as the library wants them; None: nothing."""
    if size == 0:
        return None
    memory = torch.empty(size + 256, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % 256
    return memory[begin : begin + size]


class Library:
    """A device of a shared library. Calls go to torch's current stream and raise RuntimeError with mr_last_error()."""

    def __init__(self, path, device="cpu", threads=0, isa=None):
        self.lib = ctypes.CDLL(path)
        self.lib.mr_last_error.restype = c_char_p
        self.lib.mr_device_description.restype = c_char_p
        self.lib.mr_device_description.argtypes = [c_void_p]
        self.lib.mr_device_close.argtypes = [c_void_p]
        self.on_gpu = device != "cpu"
        self.handle = c_void_p()
        options = DeviceOptions(threads, isa.encode() if isa else None)
        self.check(self.lib.mr_device_open(device.encode(), byref(options), byref(self.handle)))

    def close(self):
        self.lib.mr_device_close(self.handle)

    def description(self):
        return self.lib.mr_device_description(self.handle).decode()

    def check(self, status):
        if status != 0:
            raise RuntimeError(f"status {status}: {self.lib.mr_last_error().decode()}")

    def stream(self):
        return c_void_p(torch.cuda.current_stream().cuda_stream) if self.on_gpu else None

    def call(self, name, args):
        self.check(getattr(self.lib, name)(self.handle, byref(args), self.stream()))

    def call_with_workspace(self, name, args, workspace):
        memory = c_void_p(pointer(workspace))
        size = c_size_t(0 if workspace is None else workspace.numel() * workspace.element_size())
        self.check(getattr(self.lib, name)(self.handle, byref(args), memory, size, self.stream()))

    def workspace_bytes(self, name, args):
        size = c_size_t()
        self.check(getattr(self.lib, name + "_workspace_bytes")(self.handle, byref(args), byref(size)))
        return size.value

    # ---- operations: outputs are given, so that a caller can poison them

    def norm(self, kind, x, y, weight=None, bias=None, residual=None, sum=None, weight_offset=0.0, eps=1e-5, mean=None,
             rstd=None, quantize=NONE, codes=None, scales=None):
        args = NormArgs(kind, x.shape[0], x.shape[1], rows(x), rows(residual), rows(sum), rows(y), vector(weight),
                        vector(bias), weight_offset, eps, pointer(mean), pointer(rstd), quantize, pointer(codes),
                        0 if codes is None or codes.shape[0] < 2 else codes.stride(0), pointer(scales),
                        0 if scales is None or scales.shape[0] < 2 else scales.stride(0))
        self.call("mr_norm", args)

    def norm_backward_args(self, kind, x, dy, dx, weight=None, dsum=None, weight_offset=0.0, mean=None, rstd=None,
                           dweight=None, dbias=None):
        return NormBackwardArgs(kind, x.shape[0], x.shape[1], rows(x), rows(dy), rows(dsum), rows(dx), vector(weight),
                                weight_offset, pointer(mean), pointer(rstd), vector(dweight), vector(dbias))

    def rotary(self, x, y, positions, inv_freq, heads, head_dim, magnitude=1.0, interleaved=False, inverse=False):
        args = RotaryArgs(Rotary(pointer(inv_freq), inv_freq.numel(), magnitude, int(interleaved)), pointer(positions),
                          x.shape[0], heads, head_dim, rows(x), rows(y), int(inverse))
        self.call("mr_rotary_rows", args)

    def activation(self, kind, x, y, up=None, alpha=1.702, limit=7.0):
        args = ActivationArgs(kind, x.shape[0], x.shape[1], rows(x), rows(up), rows(y), alpha, limit)
        self.call("mr_activation_rows", args)

    def activation_backward(self, kind, x, dy, dx, up=None, dup=None, alpha=1.702, limit=7.0):
        args = ActivationBackwardArgs(kind, x.shape[0], x.shape[1], rows(x), rows(up), rows(dy), rows(dx), rows(dup),
                                      alpha, limit)
        self.call("mr_activation_rows_backward", args)

    def softmax(self, x, y, scale=1.0):
        self.call("mr_softmax", SoftmaxArgs(x.shape[0], x.shape[1], rows(x), rows(y), scale))

    def softmax_backward(self, y, dy, dx, scale=1.0):
        args = SoftmaxBackwardArgs(y.shape[0], y.shape[1], rows(y), rows(dy), rows(dx), scale)
        self.call("mr_softmax_backward", args)

    def cross_entropy(self, logits, targets, loss, lse, ignore_index=-100):
        args = CrossEntropyArgs(logits.shape[0], logits.shape[1], rows(logits), pointer(targets), ignore_index,
                                pointer(loss), pointer(lse))
        self.call("mr_cross_entropy", args)

    def cross_entropy_backward(self, logits, targets, lse, dloss, dlogits, ignore_index=-100):
        args = CrossEntropyBackwardArgs(logits.shape[0], logits.shape[1], rows(logits), pointer(targets), ignore_index,
                                        pointer(lse), pointer(dloss), rows(dlogits))
        self.call("mr_cross_entropy_backward", args)

    def linear_cross_entropy_backward_args(self, hidden, weight, targets, lse, dloss, dhidden, dweight, accumulate=False,
                                           chunks=(0, 0), ignore_index=-100):
        return LinearCrossEntropyBackwardArgs(
            hidden.shape[0], weight.shape[0], hidden.shape[1], rows(hidden), rows(weight), pointer(targets), ignore_index,
            pointer(lse), pointer(dloss), rows(dhidden), rows(dweight), accumulate, *chunks)

    def embedding(self, table, tokens, y, scale=1.0):
        args = EmbeddingArgs(tokens.numel(), table.shape[1], table.shape[0], pointer(tokens), rows(table), rows(y),
                             scale)
        self.call("mr_embedding", args)

    def embedding_backward_args(self, tokens, dy, dtable, scale=1.0, accumulate=False):
        return EmbeddingBackwardArgs(tokens.numel(), dtable.shape[1], dtable.shape[0], pointer(tokens), rows(dy),
                                     rows(dtable), scale, int(accumulate))

    def dropout(self, x, y, p, seed, offset):
        self.call("mr_dropout", DropoutArgs(x.shape[0], x.shape[1], rows(x), rows(y), p, seed, offset))

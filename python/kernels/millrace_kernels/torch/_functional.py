"""Functions over torch.ops.millrace with the names and the manners of torch.nn.functional."""

import functools
import math
from typing import NamedTuple

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _is_any_autocast_enabled as any_autocast
from torch.compiler import is_compiling, is_dynamo_compiling

from ._autograd import RECORDED, recording, under_transforms
from ._direct_call import direct
from ._fake import BLOCKS

ops = torch.ops.millrace
_F32, _I32, _I64 = torch.float32, torch.int32, torch.int64


def watched():
    """Does a compiler, a transform or a forward-mode derivative look on? Then the operation itself is called."""
    return is_compiling() or transforms_active() or forward_ad._current_level >= 0


def _refuse_tangents(name, args):
    """torch's dispatcher would drop the tangents of an operation that has no rule for them, without a word."""
    if is_compiling() or forward_ad._current_level < 0:
        return
    for x in args:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"millrace::{name} has no derivative in forward mode, expected reverse mode")


def quick(name, differentiable, results, otherwise, stepped=0, step=1):
    """millrace::name past torch's dispatcher where that may be; else `otherwise`, with the same arguments."""
    at_once = direct(name, differentiable, results, otherwise, stepped, step)

    def go(*args):  # other compilers than Dynamo, which cannot see into at_once, show themselves to it
        return otherwise(*args) if is_dynamo_compiling() else at_once(*args)

    return go


def entry(name, differentiable, results=None):
    """What calls millrace::name; its arguments at `differentiable` are tensors or None, have a gradient, and
    are told. results: so many of them are given, one by itself; all of them without.

    Where a gradient is wanted, by the recording of _autograd; else past it. Compilers, transforms and autocast see the
    operation itself, whose kernels of those kinds are torch's and take several times as long.
    """
    op = getattr(ops, name).default
    call, record, transformed = getattr(op, "_op", op), None, op
    if name in RECORDED:
        record, transformed = recording(name, results), under_transforms(name)
    below_autograd = torch._C._AutoDispatchBelowAutograd

    def given(made):
        return made if results is None else made[0] if results == 1 else made[:results]

    def go(*args):
        if watched() or any_autocast():
            _refuse_tangents(name, args)
            return given((transformed if transforms_active() and not is_compiling() else op)(*args))
        if record is not None and is_grad_enabled():
            for i in differentiable:
                x = args[i]
                if x is not None and x.requires_grad:
                    return record(*args)
        with below_autograd():
            return given(call(*args))

    return quick(name, differentiable, results, go)


def _int32(x, name):
    """Whole numbers as an operation takes them: int64 as well, on a CPU."""
    dtype = x.dtype
    if dtype is _I32 or dtype is _I64 and x.is_cpu:
        return x
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {x.dtype}, expected whole numbers")
    if x.itemsize >= 4:  # what int32 does not hold is refused by its range, and not another number
        whole = x if x.dtype == torch.int64 else x.to(torch.int64)
        x = whole.clamp(-(1 << 31), (1 << 31) - 1)
    return x.to(torch.int32)


def _float32(x):
    return x if x.dtype is _F32 else x.to(_F32)  # .to() of what it is already takes 0.7 us


def _kept(made):
    """May a tensor be used in later calls? Not one that a mode of torch has made, or that has no gradients for good."""
    return made.__class__ is torch.Tensor and not made.is_inference()


_rms_norm, _layer_norm = entry("rms_norm", (0, 1), 1), entry("layer_norm", (0, 1, 2), 1)
_add_rms_norm, _add_layer_norm = entry("add_rms_norm", (0, 1, 2), 2), entry("add_layer_norm", (0, 1, 2, 3), 2)
# Where no gradient is wanted nothing is made for one.
_norm_plain = quick("norm_plain", (0, 1, 2), None, lambda x, weight, bias, eps, offset, layer: _layer_norm(
    x, weight, bias, eps) if layer else _rms_norm(x, weight, eps, offset))
_add_norm_plain = quick("add_norm_plain", (0, 1, 2, 3), None, lambda x, r, weight, bias, layer, eps, offset: _add_layer_norm(
    x, r, weight, bias, eps) if layer else _add_rms_norm(x, r, weight, eps, offset))
_rotary, _activation, _gated_activation = entry("rotary", (0,)), entry("activation", (0,)), entry("gated_activation", (0, 1))
_softmax, _dropout = entry("softmax", (0,)), entry("dropout", (0,))
_cross_entropy, _linear_cross_entropy = entry("cross_entropy", (0,), 1), entry("linear_cross_entropy", (0, 1), 1)
_embedding, _linear = entry("embedding", (1,)), entry("linear", (0, 1, 2))
_linear_packed, _experts_packed = entry("linear_packed", (0, 5)), entry("experts_packed", ())
_route, _experts = entry("route", (0,)), entry("experts", (0, 2, 3, 4, 5, 6, 7, 8))
_sample, _sample_alike = entry("sample", ()), entry("sample_alike", ())


def rms_norm(x, weight=None, eps=1e-6, weight_offset=0.0):
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension. Gemma's weights have offset 1."""
    return _norm_plain(x, weight, None, eps, weight_offset, False)


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    return _norm_plain(x, weight, bias, eps, 0.0, True)


def add_rms_norm(x, residual, weight=None, eps=1e-6, weight_offset=0.0):
    """sum = x + residual; (rms_norm(sum), sum)."""
    return _add_norm_plain(x, residual, weight, None, False, eps, weight_offset)


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5):
    """sum = x + residual; (layer_norm(sum), sum)."""
    return _add_norm_plain(x, residual, weight, bias, True, eps, 0.0)


@functools.lru_cache(maxsize=64)
def _frequencies_of(dim, base, device):
    half = torch.arange(dim // 2, device=device, dtype=torch.float64)
    return (base**(-2.0 * half / dim)).to(torch.float32)


def _frequencies(dim, base, device):
    if watched():
        return _frequencies_of.__wrapped__(dim, base, device)
    made = _frequencies_of(dim, base, device)
    if not _kept(made):
        _frequencies_of.cache_clear()
    return made


def rotary(x, positions, inv_freq=None, *, base=10000.0, magnitude=1.0, interleaved=False):
    """Turns the heads of x [..., heads, head_dim] by their positions, whose shape broadcasts to x's before heads.

    inv_freq [rotary dimensions / 2]: the angle per position of each pair; None: base^(-2 i / head_dim).
    """
    shape = x.shape
    if inv_freq is None:
        inv_freq = _frequencies(shape[-1], base, x.device)
    positions = _int32(positions, "positions")
    if positions.shape != shape[:-2]:
        positions = positions.expand(shape[:-2])
    return _rotary(x, positions, _float32(inv_freq), magnitude, interleaved, False)


def gelu(x, approximate="none"):
    """torch's gelu: approximate is "none" (by erf) or "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate is "{approximate}", expected "none" or "tanh"')
    return _activation(x, "gelu" if approximate == "none" else "gelu_tanh")


def silu(x):
    return _activation(x, "silu")


def swiglu(gate, up):
    """silu(gate) * up."""
    return _gated_activation(gate, up, "swiglu", 1.702, 7.0)


def geglu(gate, up, approximate="none"):
    """gelu(gate) * up."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate is "{approximate}", expected "none" or "tanh"')
    return _gated_activation(gate, up, "geglu" if approximate == "none" else "geglu_tanh", 1.702, 7.0)


def clamped_swiglu(gate, up, alpha=1.702, limit=7.0):
    """gpt-oss's: g = min(gate, limit), u = clamp(up, +-limit): g * sigmoid(alpha g) * (u + 1)."""
    return _gated_activation(gate, up, "clamped_swiglu", alpha, limit)


def softmax(x, scale=1.0):
    """softmax(scale * x) over the last dimension, summed in float32."""
    return _softmax(x, scale)


def cross_entropy(logits, targets, *, ignore_index=-100, reduction="mean"):
    """Of logits [..., vocab] and classes [...]. "mean" is over the targets that are not ignore_index, as torch's is."""
    how = _number_of(reduction)
    if not logits.is_cuda:
        return _cross_entropy(logits, _int32(targets, "targets"), ignore_index, how)
    return _reduced(_cross_entropy(logits, _int32(targets, "targets"), ignore_index, 0), targets, ignore_index, how)


def linear_cross_entropy(hidden, weight, targets, *, ignore_index=-100, reduction="mean"):
    """cross_entropy(hidden W^T, targets) of hidden [..., in] and weight [vocab, in], without its logits: forward and
    backward compute so many of them at a time. Gradients of hidden and weight, on a CPU."""
    how, targets = _number_of(reduction), _int32(targets, "targets")
    if not hidden.is_cuda:
        return _linear_cross_entropy(hidden, weight, targets, ignore_index, how)
    return _reduced(_linear_cross_entropy(hidden, weight, targets, ignore_index, 0), targets, ignore_index, how)


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _number_of(reduction):
    if reduction not in _REDUCTIONS:
        raise ValueError(f'reduction is "{reduction}", expected "mean", "sum" or "none"')
    return _REDUCTIONS[reduction]


def _reduced(loss, targets, ignore_index, how):
    """On a GPU; on a CPU the operation does it."""
    if how == 0:
        return loss
    total = loss.sum()
    return total if how == 2 else total / (targets != ignore_index).sum()


def embedding(tokens, table, scale=1.0):
    """scale * table[tokens]."""
    return _embedding(_int32(tokens, "tokens"), table, scale)


def dropout(x, p=0.5, training=True, seed=None):
    """Zeroes elements with probability p, and divides the rest by 1 - p.

    seed: int64 [2] on the CPU, a seed and an offset; the same ones drop the same elements on every device. None: from
    torch's generator.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p is {p}, expected at least 0 and below 1")
    if not training or p == 0.0:
        return x
    if seed is None:
        seed = torch.randint(0, 2**62, (2,), device="cpu")
    return _dropout(x, p, seed)


def linear(x, weight, bias=None):
    """x W^T + bias, with sums in float32; gradients of all three."""
    return _linear(x, weight, None if bias is None else _float32(bias))


def route(scores, k, softmax_all=False):
    """The k experts of largest scores [rows, experts], and their softmax: (chosen int32, weights), [rows, k].

    softmax_all: over all scores, and not over those of the chosen.
    """
    weights, chosen = _route(_float32(scores), k, softmax_all)
    return chosen, weights


def experts(x, chosen, weights, gate, up, down, *, gate_bias=None, up_bias=None, down_bias=None, type="",
            activation="swiglu", alpha=1.702, limit=7.0):
    """sum over slots of weights * down[e] act(gate[e] x, up[e] x), e = chosen, for every row of x [rows, hidden].

    gate and up are [experts, ffn, hidden], down is [experts, hidden, ffn]: float32, float16, bfloat16, or bytes of
    the block type `type` (quantize). Gradients of x, weights, and of weights that are floats. On a GPU all three are
    what pack() makes, and there is no gradient.
    """
    if isinstance(gate, PackedWeight):
        if gate.shape != up.shape or gate.shape != (*down.shape[:1], *down.shape[:0:-1]) or not (
                gate.type == up.type == down.type) or len(gate.shape) != 3:
            raise ValueError(f"gate, up and down are {gate.type} {gate.shape}, {up.type} {up.shape} and {down.type} "
                             f"{down.shape}, expected one type, [experts, ffn, hidden] twice and [experts, hidden, ffn]")
        y = _experts_packed(_float32(x), _int32(chosen, "chosen"), _float32(weights), gate.packed,
                            up.packed, down.packed, gate.type, *gate.shape[:2], gate_bias, up_bias, down_bias,
                            activation, alpha, limit)
    else:
        y = _experts(_float32(x), _int32(chosen, "chosen"), _float32(weights), gate, up, down, gate_bias, up_bias,
                     down_bias, type, activation, alpha, limit)
    return y if y.dtype == x.dtype else y.to(x.dtype)


class PackedWeight(NamedTuple):
    """What pack() makes: a weight [rows, cols] or [experts, rows, cols] as its device multiplies it."""

    packed: torch.Tensor  # uint8
    type: str
    shape: tuple[int, ...]


def pack(weight, type="", scales=None, device=None):
    """A weight for experts() and packed_linear() on a GPU: float32, float16 or bfloat16 [.., rows, cols], or bytes of the
    block type `type` (quantize), or "f8_e4m3" with its scales. device: the weight's own unless told."""
    like = torch.empty(0, device=weight.device if device is None else device)
    weight = weight.detach().cpu()
    named = type or {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}.get(weight.dtype)
    if named is None:
        raise TypeError(f"weight has dtype {weight.dtype}, expected float32, float16 or bfloat16, or bytes and a type")
    elements, size = BLOCKS.get(named, (1, 1)) if weight.dtype == torch.uint8 else (1, 1)
    shape = (*weight.shape[:-1], weight.shape[-1] // size * elements)
    made = ops.weight_pack(weight, like, named, None if scales is None else scales.detach().cpu())
    return PackedWeight(made, named, shape)


def packed_linear(x, weight, bias=None):
    """x W^T + bias of a PackedWeight [out, in]; gradients of x and bias."""
    y = _linear_packed(_float32(x), weight.packed, weight.type, *weight.shape, None if bias is None else _float32(bias))
    return y if y.dtype == x.dtype else y.to(x.dtype)


_NUMBERS = (int, float)
_OPTION_TYPES = torch.float32, torch.int32, torch.float32, torch.float32  # temperature, top_k, top_p, min_p


def _per_row(value, dtype, rows, name):
    value = torch.as_tensor(value, dtype=dtype, device="cpu")
    if value.dim() > 1 or (value.dim() == 1 and value.shape[0] != rows):
        raise ValueError(f"{name} has shape {list(value.shape)}, expected one number or [{rows}]")
    return value


def sample(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=None, generator=None):
    """A token for every row of logits [rows, vocab], int32; -1 where a logit is NaN, -2 where all are -infinity.

    Each option is a number or one per row. uniform: the random numbers in [0, 1), float64 [rows]; the same logits and
    number give the same token on every device and in any batch.
    """
    rows = logits.shape[0]
    if uniform is None:
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    else:
        uniform = _per_row(uniform, torch.float64, rows, "uniform")
    logits = _float32(logits)
    if (temperature.__class__ in _NUMBERS and top_k.__class__ is int and top_p.__class__ in _NUMBERS
            and min_p.__class__ in _NUMBERS):
        return _sample_alike(logits, uniform, temperature, top_k, top_p, min_p)
    return _sample(logits, uniform, *(_per_row(value, dtype, rows, name) for value, dtype, name in zip(
        (temperature, top_k, top_p, min_p), _OPTION_TYPES, ("temperature", "top_k", "top_p", "min_p"))))


def default_scale(scale, head_dim):
    """The C API takes 0 for 1 / sqrt(head_dim): a scale of 0 itself becomes the least number, which weighs alike."""
    if scale is None:
        return head_dim**-0.5
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}, expected a finite number")
    return float(scale) if scale != 0 else 1e-38

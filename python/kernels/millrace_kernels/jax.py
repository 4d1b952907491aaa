"""Millrace's kernels in JAX by its FFI, on CPUs and GPUs: attention, norms, rotary, activations, softmax, cross-entropy.

Every function is differentiable in reverse (`custom_vjp`), batches under `vmap` (one call for the whole batch where
that gives the same), and runs inside `jit` and `shard_map`. Types are float32, float16 and bfloat16; sums are float32.
"""

import ctypes
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from . import library_path

__all__ = ["add_layer_norm", "add_rms_norm", "attention", "clamped_swiglu", "cross_entropy", "geglu", "gelu",
           "layer_norm", "rms_norm", "rotary", "silu", "softmax", "swiglu"]

_library = ctypes.CDLL(str(library_path("jax")))
_NAMES = ("attention", "attention_backward", "norm", "norm_backward", "rotary", "activation", "activation_backward",
          "softmax", "softmax_backward", "cross_entropy", "cross_entropy_backward")
for _platform, _name in ((p, n) for p in ("cpu", "CUDA") for n in _NAMES):
    _handler = getattr(_library, f"millrace_jax_{_platform.lower()}_{_name}", None)
    if _handler is not None:  # of CUDA there are none in a build without it
        jax.ffi.register_ffi_target(f"millrace_{_name}", jax.ffi.pycapsule(_handler), platform=_platform)

_KINDS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "swiglu": 3, "clamped_swiglu": 4, "geglu": 5, "geglu_tanh": 6}
_TYPES = (jnp.float32, jnp.float16, jnp.bfloat16)
_DIM_STEP = 8  # head sizes of the library
_NONE = (0,)  # the shape of an array that is not there


def _axes(x):
    """The axes of a mesh that x varies over, inside shard_map; JAX has moved this twice."""
    kind = jax.typeof(x)
    if hasattr(kind, "manual_axis_type"):
        return kind.manual_axis_type.varying
    return getattr(kind, "vma", frozenset())


def _call(name, results, *args, **attributes):
    axes = frozenset().union(*(_axes(a) for a in args))
    made = jax.ffi.ffi_call(f"millrace_{name}", results)(*args, **attributes)
    return jax.tree.map(lambda y: _varying(y, axes), made)


def _varying(x, axes):
    missing = tuple(axes - _axes(x))
    if not missing:
        return x
    return lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, missing)


def _aligned(*arrays):
    """All varying over the axes that any does, so that a gradient is summed over the axes its array does not vary
    over."""
    axes = frozenset().union(*(_axes(a) for a in arrays))
    return tuple(_varying(x, axes) for x in arrays)


def _shaped(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _none(dtype=jnp.float32):
    return jnp.zeros(_NONE, dtype)


def _require_float(x, name):
    if not hasattr(x, "dtype"):
        raise TypeError(f"{name} is a {type(x).__name__}, expected an array")
    if x.dtype not in _TYPES:
        raise TypeError(f"{name} is {x.dtype}, expected float32, float16 or bfloat16")


def _int32(x, name):
    """Whole numbers; what int32 does not hold becomes its largest or least, and not another number."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} is {x.dtype if hasattr(x, 'dtype') else type(x).__name__}, expected whole numbers")
    own, most = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    if own.max > most.max:
        x = jnp.minimum(x, most.max)
    if own.min < most.min:
        x = jnp.maximum(x, most.min)
    return x.astype(jnp.int32)


def _batching(call, num_rows, merges=True):
    """`call` under vmap. Its first num_rows arrays may have any dimensions in front, and a batch is one more in front;
    where another array is batched too, or a result sums over rows (merges False), each example is a call."""
    wrapped = custom_vmap(call)

    @wrapped.def_vmap
    def _(size, batched, *args):
        if not merges or any(batched[num_rows:]):
            mapped = [a for a, b in zip(args, batched) if b]

            def one(chosen):
                chosen = iter(chosen)
                return wrapped(*(next(chosen) if b else a for a, b in zip(args, batched)))

            out = lax.map(one, mapped)
            return out, jax.tree.map(lambda _: True, out)
        rows = [a if b else jnp.broadcast_to(a, (size, *a.shape)) for a, b in zip(args[:num_rows], batched)]
        out = wrapped(*rows, *args[num_rows:])
        return out, jax.tree.map(lambda y: y.shape != _NONE, out)

    def with_axes(*args):  # custom_vmap forgets what results vary over
        axes = frozenset().union(*(_axes(a) for a in args))
        return jax.tree.map(lambda y: _varying(y, axes), wrapped(*args))

    return with_axes


# ---------------------------------------------------------------- attention


def _joined(x):
    """[..., seq, heads, dim] as [batch, seq, heads, dim]."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


@functools.cache
def _attention_calls(scale, softcap, left, right, with_sinks):
    how = {"scale": np.float32(scale), "softcap": np.float32(softcap), "window_left": np.int32(left),
           "window_right": np.int32(right)}

    def forward(q, k, v, sinks):
        lead = q.shape[:-3]
        seq, heads, _ = q.shape[-3:]
        batch = math.prod(lead)
        out, lse = _call("attention", (_shaped((batch, seq, heads, v.shape[-1]), q.dtype),
                                       _shaped((batch, heads, seq))), _joined(q), _joined(k), _joined(v), sinks, **how)
        return out.reshape(*lead, *out.shape[1:]), lse.reshape(*lead, heads, seq)

    def backward(d_out, q, k, v, out, lse, sinks):
        joined = [_joined(x) for x in (d_out, q, k, v, out)]
        flat_lse = lse.reshape(math.prod(lse.shape[:-2]), *lse.shape[-2:])
        results = (*(_shaped(x.shape, x.dtype) for x in joined[1:4]), _shaped(sinks.shape))
        d_q, d_k, d_v, d_sinks = _call("attention_backward", results, *joined, flat_lse, sinks, **how)
        return d_q.reshape(q.shape), d_k.reshape(k.shape), d_v.reshape(v.shape), d_sinks

    return _batching(forward, 3), _batching(backward, 6, merges=not with_sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, sinks, how):
    return _attention_calls(*how)[0](q, k, v, sinks)[0]


def _attention_forward(q, k, v, sinks, how):
    out, lse = _attention_calls(*how)[0](q, k, v, sinks)
    return out, (q, k, v, out, lse, sinks)


def _attention_backward(how, kept, d_out):
    return _attention_calls(*how)[1](d_out, *kept)


_attention.defvjp(_attention_forward, _attention_backward)


def attention(q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, sinks=None):
    """softmax(scale * q k^T) v over [batch, seq, heads, dim] (or [seq, heads, dim]); heads may be a multiple of k's.

    causal: query i sees keys j <= i + k_len - q_len. window (left, right): keys from position - left to position +
    right; a negative side is open. sinks [heads]: a logit in every softmax that has no value.
    """
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        _require_float(x, name)
        if x.ndim < 3:
            raise ValueError(f"{name} has shape {x.shape}, expected [..., seq, heads, dim]")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, expected one type")
    if q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k and v have shapes {q.shape}, {k.shape} and {v.shape}, which do not fit")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"q has {q.shape[-2]} heads, expected a multiple of k's {k.shape[-2]}, at least one")
    if q.shape[-1] == 0:
        raise ValueError(f"q has shape {q.shape}, expected at least one dimension of a head")
    sinks = None if sinks is None else jnp.asarray(sinks)
    if sinks is not None and sinks.shape != (q.shape[-2],):
        raise ValueError(f"sinks has shape {sinks.shape}, expected ({q.shape[-2]},)")
    left, right = window
    if causal:
        right = 0
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale) or 1e-38  # the C API's 0 is the default
    value_dim = v.shape[-1]

    def padded(x):
        missing = -x.shape[-1] % _DIM_STEP
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x

    sinks = _none() if sinks is None else sinks.astype(jnp.float32)
    how = (scale, float(softcap), max(int(left), -1), max(int(right), -1), sinks.shape != _NONE)
    return _attention(*_aligned(padded(q), padded(k), padded(v), sinks), how)[..., :value_dim]


# ---------------------------------------------------------------- norms


@functools.cache
def _norm_calls(layer, eps, offset):

    def forward(x, residual, weight, bias):
        summed = residual.shape[-1:] != _NONE or x.shape[-1] == 0
        lead = x.shape[:-1]
        return _call("norm", (_shaped(x.shape, x.dtype), _shaped(x.shape if summed else _NONE, residual.dtype),
                              _shaped(lead if layer else _NONE), _shaped(lead)), x, residual, weight, bias,
                     layer=layer, eps=np.float32(eps), weight_offset=np.float32(offset))

    def backward(dy, dsum, x, mean, rstd, weight, bias):
        if x.size == 0:
            return jnp.zeros_like(x), jnp.zeros(weight.shape), jnp.zeros(bias.shape)
        return _call("norm_backward", (_shaped(x.shape, x.dtype), _shaped(weight.shape), _shaped(bias.shape)), dy,
                     dsum, x, weight, mean, rstd, layer=layer, weight_offset=np.float32(offset))

    # Without a residual the second array is no rows: every example is a call then only if it is batched.
    return _batching(forward, 2), _batching(forward, 1), _batching(backward, 0, merges=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _norm(x, weight, bias, how):
    return _norm_calls(*how)[1](x, _none(x.dtype), weight, bias)[0]


def _norm_forward(x, weight, bias, how):
    y, _, mean, rstd = _norm_calls(*how)[1](x, _none(x.dtype), weight, bias)
    return y, (x, mean, rstd, weight, bias)


def _norm_backward(how, kept, dy):
    x, mean, rstd, weight, bias = kept
    d_x, d_weight, d_bias = _norm_calls(*how)[2](dy, _none(dy.dtype), x, mean, rstd, weight, bias)
    return d_x, d_weight.astype(weight.dtype), d_bias.astype(bias.dtype)


_norm.defvjp(_norm_forward, _norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _add_norm(x, residual, weight, bias, how):
    return _norm_calls(*how)[0](x, residual, weight, bias)[:2]


def _add_norm_forward(x, residual, weight, bias, how):
    y, total, mean, rstd = _norm_calls(*how)[0](x, residual, weight, bias)
    return (y, total), (total, mean, rstd, weight, bias, x[:0], residual[:0])


def _add_norm_backward(how, kept, gradients):
    total, mean, rstd, weight, bias, x, residual = kept
    dy, dsum = gradients
    d, d_weight, d_bias = _norm_calls(*how)[2](dy, dsum, total, mean, rstd, weight, bias)
    return d.astype(x.dtype), d.astype(residual.dtype), d_weight.astype(weight.dtype), d_bias.astype(bias.dtype)


_add_norm.defvjp(_add_norm_forward, _add_norm_backward)


def _vector(x, cols, name):
    if x is None:
        return _none()
    _require_float(x, name)
    if x.shape != (cols,):
        raise ValueError(f"{name} has shape {x.shape}, expected ({cols},)")
    return x


def _check_rows(x, *others):
    _require_float(x, "x")
    if x.ndim == 0:
        raise ValueError("x is a scalar, expected a last dimension")
    for other, name in others:
        _require_float(other, name)
        if other.shape != x.shape:
            raise ValueError(f"{name} has shape {other.shape}, expected {x.shape}")


def rms_norm(x, weight=None, eps=1e-6, weight_offset=0.0):
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension."""
    _check_rows(x)
    return _norm(*_aligned(x, _vector(weight, x.shape[-1], "weight"), _none()),
                 (False, float(eps), float(weight_offset)))


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    _check_rows(x)
    cols = x.shape[-1]
    return _norm(*_aligned(x, _vector(weight, cols, "weight"), _vector(bias, cols, "bias")), (True, float(eps), 0.0))


def add_rms_norm(x, residual, weight=None, eps=1e-6, weight_offset=0.0):
    """sum = x + residual; (rms_norm(sum), sum)."""
    _check_rows(x, (residual, "residual"))
    return _add_norm(*_aligned(x, residual, _vector(weight, x.shape[-1], "weight"), _none()),
                     (False, float(eps), float(weight_offset)))


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5):
    """sum = x + residual; (layer_norm(sum), sum)."""
    _check_rows(x, (residual, "residual"))
    cols = x.shape[-1]
    return _add_norm(*_aligned(x, residual, _vector(weight, cols, "weight"), _vector(bias, cols, "bias")),
                     (True, float(eps), 0.0))


# ---------------------------------------------------------------- rotary, activations, softmax


@functools.cache
def _rotary_call(magnitude, interleaved, inverse):

    def call(x, positions, inv_freq):
        return _call("rotary", _shaped(x.shape, x.dtype), x, positions, inv_freq, magnitude=np.float32(magnitude),
                     interleaved=interleaved, inverse=inverse)

    return _batching(call, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rotary(x, positions, inv_freq, how):
    return _rotary_call(*how, False)(x, positions, inv_freq)


def _rotary_backward(how, kept, dy):
    return _rotary_call(*how, True)(dy, *kept), None, jnp.zeros_like(kept[1])


_rotary.defvjp(lambda x, positions, inv_freq, how: (_rotary(x, positions, inv_freq, how), (positions, inv_freq)),
               _rotary_backward)


def rotary(x, positions, inv_freq=None, *, base=10000.0, magnitude=1.0, interleaved=False):
    """Turns the heads of x [..., heads, head_dim] by their positions, whose shape broadcasts to x's before heads. The
    angles inv_freq are constants: they have no gradient."""
    _require_float(x, "x")
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}, expected [..., heads, head_dim]")
    positions = _int32(positions, "positions")
    if inv_freq is None:
        inv_freq = base**(-2.0 * np.arange(x.shape[-1] // 2) / x.shape[-1])
    positions = jnp.broadcast_to(positions, x.shape[:-2])
    return _rotary(*_aligned(x, positions, jnp.asarray(inv_freq, jnp.float32)), (float(magnitude), bool(interleaved)))


@functools.cache
def _activation_calls(kind, alpha, limit):
    how = {"kind": np.int32(kind), "alpha": np.float32(alpha), "limit": np.float32(limit)}

    def alone(x):
        return _call("activation", _shaped(x.shape, x.dtype), x, _none(x.dtype), **how)

    def alone_backward(dy, x):
        return _call("activation_backward", (_shaped(x.shape, x.dtype), _shaped(_NONE, x.dtype)), dy, x,
                     _none(x.dtype), **how)[0]

    def gated(x, up):
        return _call("activation", _shaped(x.shape, x.dtype), x, up, **how)

    def gated_backward(dy, x, up):
        return tuple(_call("activation_backward", (_shaped(x.shape, x.dtype), _shaped(up.shape, up.dtype)), dy, x, up,
                           **how))

    if kind < _KINDS["swiglu"]:
        return _batching(alone, 1), _batching(alone_backward, 2)
    return _batching(gated, 2), _batching(gated_backward, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _activation(arrays, how):
    return _activation_calls(*how)[0](*arrays)


def _activation_backward(how, arrays, dy):
    made = _activation_calls(*how)[1](dy, *arrays)
    return (made if isinstance(made, tuple) else (made,),)


_activation.defvjp(lambda arrays, how: (_activation(arrays, how), arrays), _activation_backward)


def _kind(name, approximate):
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate is "{approximate}", expected "none" or "tanh"')
    return _KINDS[name if approximate == "none" else f"{name}_tanh"]


def gelu(x, approximate="none"):
    """x Phi(x), by erf or ("tanh") by tanh."""
    _check_rows(x)
    return _activation((x,), (_kind("gelu", approximate), 0.0, 0.0))


def silu(x):
    """x sigmoid(x)."""
    _check_rows(x)
    return _activation((x,), (_KINDS["silu"], 0.0, 0.0))


def swiglu(gate, up):
    """silu(gate) * up."""
    _check_rows(gate, (up, "up"))
    return _activation(_aligned(gate, up), (_KINDS["swiglu"], 0.0, 0.0))


def geglu(gate, up, approximate="none"):
    """gelu(gate) * up."""
    _check_rows(gate, (up, "up"))
    return _activation(_aligned(gate, up), (_kind("geglu", approximate), 0.0, 0.0))


def clamped_swiglu(gate, up, alpha=1.702, limit=7.0):
    """gpt-oss's: g = min(gate, limit), u = clamp(up, +-limit): g * sigmoid(alpha g) * (u + 1)."""
    _check_rows(gate, (up, "up"))
    return _activation(_aligned(gate, up), (_KINDS["clamped_swiglu"], float(alpha), float(limit)))


@functools.cache
def _softmax_calls(scale):

    def forward(x):
        return _call("softmax", _shaped(x.shape, x.dtype), x, scale=np.float32(scale))

    def backward(dy, y):
        return _call("softmax_backward", _shaped(y.shape, y.dtype), dy, y, scale=np.float32(scale))

    return _batching(forward, 1), _batching(backward, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _softmax(x, scale):
    return _softmax_calls(scale)[0](x)


def _softmax_forward(x, scale):
    y = _softmax(x, scale)
    return y, y


_softmax.defvjp(_softmax_forward, lambda scale, y, dy: (_softmax_calls(scale)[1](dy, y),))


def softmax(x, scale=1.0):
    """softmax(scale * x) over the last dimension, summed in float32."""
    _check_rows(x)
    return _softmax(x, float(scale))


# ---------------------------------------------------------------- cross-entropy


@functools.cache
def _cross_entropy_calls(ignore):

    def forward(logits, targets):
        lead = logits.shape[:-1]
        return _call("cross_entropy", (_shaped(lead), _shaped(lead)), logits, targets, ignore_index=np.int32(ignore))

    def backward(d_loss, logits, targets, lse):
        return _call("cross_entropy_backward", _shaped(logits.shape, logits.dtype), d_loss, logits, targets, lse,
                     ignore_index=np.int32(ignore))

    return _batching(forward, 2), _batching(backward, 4)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits, targets, ignore):
    return _cross_entropy_calls(ignore)[0](logits, targets)[0]


def _cross_entropy_forward(logits, targets, ignore):
    loss, lse = _cross_entropy_calls(ignore)[0](logits, targets)
    return loss, (logits, targets, lse)


def _cross_entropy_backward(ignore, kept, d_loss):
    return _cross_entropy_calls(ignore)[1](d_loss, *kept), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def cross_entropy(logits, targets, *, ignore_index=-100):
    """The loss of every row of logits [..., vocab] against targets [...]: float32, 0 where it is ignore_index."""
    _check_rows(logits)
    targets = _int32(targets, "targets")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets has shape {targets.shape}, expected {logits.shape[:-1]}")
    return _cross_entropy(*_aligned(logits, targets), int(ignore_index))

"""Functions over torch.ops.millrace with the names and the manners of torch.nn.functional."""

import math

import torch

ops = torch.ops.millrace


def wants_gradient(*args):
    """Can a gradient be wanted of a result of these? Then the kernel that records one must run, which is Python and
    takes 10 us."""
    if not torch.is_grad_enabled():
        return False
    for a in args:
        if isinstance(a, torch.Tensor) and a.requires_grad:
            return True
    return False


def run(op, *args):
    """op(*args); where no gradient can be wanted, past the kernel that records one."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or wants_gradient(*args):
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _int32(x, name):
    if x.dtype == torch.int32:
        return x
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {x.dtype}, expected whole numbers")
    return x.to(torch.int32)


def rms_norm(x, weight=None, eps=1e-6, weight_offset=0.0):
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension. Gemma's weights have offset 1."""
    return run(ops.rms_norm.default, x, weight, eps, weight_offset)[0]


def layer_norm(x, weight=None, bias=None, eps=1e-5):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    return run(ops.layer_norm.default, x, weight, bias, eps)[0]


def add_rms_norm(x, residual, weight=None, eps=1e-6, weight_offset=0.0):
    """sum = x + residual; (rms_norm(sum), sum)."""
    return run(ops.add_rms_norm.default, x, residual, weight, eps, weight_offset)[:2]


def add_layer_norm(x, residual, weight=None, bias=None, eps=1e-5):
    """sum = x + residual; (layer_norm(sum), sum)."""
    return run(ops.add_layer_norm.default, x, residual, weight, bias, eps)[:2]


def rotary(x, positions, inv_freq=None, *, base=10000.0, magnitude=1.0, interleaved=False):
    """Turns the heads of x [..., heads, head_dim] by their positions, whose shape broadcasts to x's before heads.

    inv_freq [rotary dimensions / 2]: the angle per position of each pair; None: base^(-2 i / head_dim).
    """
    if inv_freq is None:
        half = torch.arange(x.shape[-1] // 2, device=x.device, dtype=torch.float64)
        inv_freq = base**(-2.0 * half / x.shape[-1])
    positions = _int32(positions, "positions").expand(x.shape[:-2])
    return run(ops.rotary.default, x, positions, inv_freq.to(torch.float32), magnitude, interleaved)


def gelu(x, approximate="none"):
    """torch's gelu: approximate is "none" (by erf) or "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate is "{approximate}", expected "none" or "tanh"')
    return run(ops.activation.default, x, "gelu" if approximate == "none" else "gelu_tanh")


def silu(x):
    return run(ops.activation.default, x, "silu")


def swiglu(gate, up):
    """silu(gate) * up."""
    return run(ops.gated_activation.default, gate, up, "swiglu")


def geglu(gate, up, approximate="none"):
    """gelu(gate) * up."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate is "{approximate}", expected "none" or "tanh"')
    return run(ops.gated_activation.default, gate, up, "geglu" if approximate == "none" else "geglu_tanh")


def clamped_swiglu(gate, up, alpha=1.702, limit=7.0):
    """gpt-oss's: g = min(gate, limit), u = clamp(up, +-limit): g * sigmoid(alpha g) * (u + 1)."""
    return run(ops.gated_activation.default, gate, up, "clamped_swiglu", alpha, limit)


def softmax(x, scale=1.0):
    """softmax(scale * x) over the last dimension, summed in float32."""
    return run(ops.softmax.default, x, scale)


def cross_entropy(logits, targets, *, ignore_index=-100, reduction="mean"):
    """Of logits [..., vocab] and classes [...]. "mean" is over the targets that are not ignore_index, as torch's is."""
    _check_reduction(reduction)
    loss = run(ops.cross_entropy.default, logits, _int32(targets, "targets"), ignore_index)[0]
    return _reduced(loss, targets, ignore_index, reduction)


def linear_cross_entropy(hidden, weight, targets, *, ignore_index=-100, reduction="mean"):
    """cross_entropy(hidden W^T, targets) of hidden [..., in] and weight [vocab, in], without its logits: forward and
    backward compute so many of them at a time. Gradients of hidden and weight, on a CPU."""
    _check_reduction(reduction)
    loss = run(ops.linear_cross_entropy.default, hidden, weight, _int32(targets, "targets"), ignore_index)[0]
    return _reduced(loss, targets, ignore_index, reduction)


def _check_reduction(reduction):
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is "{reduction}", expected "mean", "sum" or "none"')


def _reduced(loss, targets, ignore_index, reduction):
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def embedding(tokens, table, scale=1.0):
    """scale * table[tokens]."""
    return run(ops.embedding.default, _int32(tokens, "tokens"), table, scale)


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
    return run(ops.dropout.default, x, p, seed)


def linear(x, weight, bias=None):
    """x W^T + bias, with sums in float32; gradients of all three."""
    return run(ops.linear.default, x, weight, None if bias is None else bias.to(torch.float32))


def route(scores, k, softmax_all=False):
    """The k experts of largest scores [rows, experts], and their softmax: (chosen int32, weights), [rows, k].

    softmax_all: over all scores, and not over those of the chosen.
    """
    weights, chosen = run(ops.route.default, scores.to(torch.float32), k, softmax_all)
    return chosen, weights


def experts(x, chosen, weights, gate, up, down, *, gate_bias=None, up_bias=None, down_bias=None, type="",
            activation="swiglu", alpha=1.702, limit=7.0):
    """sum over slots of weights * down[e] act(gate[e] x, up[e] x), e = chosen, for every row of x [rows, hidden].

    gate and up are [experts, ffn, hidden], down is [experts, hidden, ffn]: float32, float16, bfloat16, or bytes of
    the block type `type` (quantize). Gradients of x, weights, and of weights that are floats.
    """
    y = run(ops.experts.default, x.to(torch.float32), _int32(chosen, "chosen"), weights.to(torch.float32), gate, up,
            down, gate_bias, up_bias, down_bias, type, activation, alpha, limit)
    return y.to(x.dtype)


def sample(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=None, generator=None):
    """A token for every row of logits [rows, vocab], int32; -1 where a logit is NaN, -2 where all are -infinity.

    Each option is a number or one per row. uniform: the random numbers in [0, 1), float64 [rows]; the same logits and
    number give the same token on every device and in any batch.
    """
    rows = logits.shape[0]

    def per_row(value, dtype, name):
        value = torch.as_tensor(value, dtype=dtype, device="cpu")
        if value.dim() > 1 or (value.dim() == 1 and value.shape[0] != rows):
            raise ValueError(f"{name} has shape {list(value.shape)}, expected one number or [{rows}]")
        return value.expand(rows).contiguous()

    if uniform is None:
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    return run(ops.sample.default, logits.to(torch.float32), per_row(uniform, torch.float64, "uniform"),
               per_row(temperature, torch.float32, "temperature"), per_row(top_k, torch.int32, "top_k"),
               per_row(top_p, torch.float32, "top_p"), per_row(min_p, torch.float32, "min_p"))


def default_scale(scale, head_dim):
    """The C API takes 0 for 1 / sqrt(head_dim): a scale of 0 itself becomes the least number, which weighs alike."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}, expected a finite number")
    return float(scale) if scale != 0 else 1e-38

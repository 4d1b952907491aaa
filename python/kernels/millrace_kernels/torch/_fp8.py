"""Linear layers trained in eight bits: every operand is quantized once, as it lies, and the forward product and both of
its gradients take the same codes."""

import torch

from ._autograd import as_rows, cast_under_autocast, differentiable
from ._fake import OUT_TYPES
from ._functional import entry

ops = torch.ops.millrace

FP8_TYPES = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}  # and their largest
GRID = 128  # elements of a side that share a scale
OUT_NAMES = {dtype: name for name, dtype in OUT_TYPES.items()}


def quantize_fp8(x, type="e4m3", grid=(1, GRID)):
    """x [rows, cols] -> codes of "e4m3" or "e5m2", and a float32 scale for every grid[0] x grid[1] of them: what
    ops.matmul_fp8 takes. A scale is the largest magnitude over the type's largest number."""
    if type not in FP8_TYPES:
        raise ValueError(f'type is "{type}", expected one of {", ".join(FP8_TYPES)}')
    if x.dim() != 2 or any(side not in (1, GRID) for side in grid):
        raise ValueError(f"x has shape {list(x.shape)} and grid is {grid}, expected a matrix, and each side 1 or {GRID}")
    dtype, most = FP8_TYPES[type]
    rows, cols = x.shape
    down, across = -(-rows // grid[0]), -(-cols // grid[1])
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, across * grid[1] - cols, 0, down * grid[0] - rows))
    patches = padded.reshape(down, grid[0], across, grid[1])
    largest = patches.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / most, torch.ones_like(largest))
    codes = (patches / scales[:, None, :, None]).to(dtype)
    return codes.reshape(down * grid[0], across * grid[1])[:rows, :cols].contiguous(), scales


def _out_name(x):
    if x.dtype not in OUT_NAMES:
        raise TypeError(f"x has dtype {x.dtype}, expected float32, float16 or bfloat16")
    return OUT_NAMES[x.dtype]


# Codes go out as bytes: torch compares tensors of float8 nowhere.
@torch.library.custom_op("millrace::linear_fp8", mutates_args=())
def _linear_fp8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gradient: str
                ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, codes and scales of x as rows, codes and scales of weight)"""
    x_codes, x_scales = quantize_fp8(as_rows(x))
    w_codes, w_scales = quantize_fp8(weight, grid=(GRID, GRID))
    out = _out_name(x) if bias is None else "f32"
    y = ops.matmul_fp8(x_codes, w_codes, x_scales, w_scales, False, True, out_type=out)
    if bias is not None:
        y = (y + bias).to(x.dtype)
    return (y.reshape(*x.shape[:-1], weight.shape[0]), x_codes.view(torch.uint8), x_scales, w_codes.view(torch.uint8),
            w_scales)


@_linear_fp8.register_fake
def _(x, weight, bias, gradient):
    rows, (out, cols) = as_rows(x), weight.shape
    across = -(-cols // GRID)
    return (x.new_empty((*x.shape[:-1], out)), x.new_empty(rows.shape, dtype=torch.uint8),
            x.new_empty((rows.shape[0], across), dtype=torch.float32), x.new_empty((out, cols), dtype=torch.uint8),
            x.new_empty((-(-out // GRID), across), dtype=torch.float32))


def save_linear_fp8(ctx, inputs, output):
    x, weight, bias, ctx.gradient = inputs
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.shape, ctx.types, ctx.has_bias = x.shape, (_out_name(x), _out_name(weight)), bias is not None


@differentiable("linear_fp8", save_linear_fp8)
def _(ctx, dy, *_):
    x_codes, x_scales, w_codes, w_scales = ctx.saved_tensors
    x_codes, w_codes = (codes.view(torch.float8_e4m3fn) for codes in (x_codes, w_codes))
    rows = as_rows(dy)
    d_codes, d_scales = quantize_fp8(rows, ctx.gradient)
    d_x = d_weight = d_bias = None
    if ctx.needs_input_grad[0]:
        d_x = ops.matmul_fp8(d_codes, w_codes, d_scales, w_scales, out_type=ctx.types[0]).reshape(ctx.shape)
    if ctx.needs_input_grad[1]:
        d_weight = ops.matmul_fp8(d_codes, x_codes, d_scales, x_scales, True, False, 1, GRID, 1, GRID, ctx.types[1])
    if ctx.has_bias and ctx.needs_input_grad[2]:
        d_bias = rows.sum(0, dtype=torch.float32)
    return d_x, d_weight, d_bias, None


cast_under_autocast("linear_fp8", 2)
_call = entry("linear_fp8", (0, 1, 2))


def linear_fp8(x, weight, bias=None, gradient="e5m2"):
    """x W^T + bias in eight bits on a CPU: x in E4M3 with a scale for 1 x 128, weight with one for 128 x 128, and in the
    backward pass dy in `gradient`, "e5m2" or "e4m3", with one for 1 x 128. Gradients of all three."""
    if gradient not in FP8_TYPES:
        raise ValueError(f'gradient is "{gradient}", expected one of {", ".join(FP8_TYPES)}')
    return _call(x, weight, None if bias is None else bias.to(torch.float32), gradient)[0]

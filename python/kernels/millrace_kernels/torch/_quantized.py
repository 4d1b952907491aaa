"""Linear layers whose weights are of a block type, FP8 or MXFP4, and a model turned into them in one call."""

import torch
from torch import nn

from ._fake import BLOCKS
from ._functional import run

ops = torch.ops.millrace

ALIASES = {"int8": "q8_0", "int4": "q4_0", "fp8": "f8_e4m3"}
FP8_GRID = 128  # elements of a side that share a scale
FP8_MAX = 448.0
ENCODED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "mxfp4", "q4_z")


def type_named(name):
    """The library's name of a type, or ValueError with the names there are."""
    known = ALIASES.get(name, name)
    if known not in (*ENCODED, "f8_e4m3"):
        names = ", ".join((*ENCODED, "f8_e4m3", *ALIASES))
        raise ValueError(f'type is "{name}", expected one of {names}')
    return known


def _fp8(w):
    rows, cols = w.shape
    padded = nn.functional.pad(w, (0, -cols % FP8_GRID, 0, -rows % FP8_GRID))
    patches = padded.reshape(padded.shape[0] // FP8_GRID, FP8_GRID, -1, FP8_GRID)
    largest = patches.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    codes = (patches / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[:rows, :cols].contiguous(), scales


def quantize(weight, type, importance=None):
    """weight [.., rows, cols] -> (values, scales): bytes uint8 [.., rows, bytes of a row] and None, or for "fp8" a
    matrix of float8_e4m3fn and a float32 scale for every 128 x 128. importance [cols] weighs the errors of columns."""
    type = type_named(type)
    weight = weight.detach().to(torch.float32)
    if type != "f8_e4m3":
        return ops.quantize(weight, type, importance), None
    if importance is not None or weight.dim() != 2:
        raise ValueError("fp8 takes a matrix and no importance")
    return _fp8(weight)


def dequantize(values, type, scales=None):
    """Back to float32 [.., rows, cols]."""
    return ops.dequantize(values, type_named(type), scales)


class QuantizedLinear(nn.Module):
    """nn.Linear with a weight of another type. The weight is fixed; gradients reach the input and the bias."""

    def __init__(self, linear: nn.Linear, type: str):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.type = type_named(type)
        values, scales = quantize(linear.weight, self.type)
        self.register_buffer("weight", values)
        self.register_buffer("scales", scales)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(),
                                                                  requires_grad=linear.bias.requires_grad)

    def _apply(self, fn, recurse=True):
        # .to(bfloat16) and .half() are about activations: codes and scales stay what they are.
        kept = {name: getattr(self, name) for name in ("weight", "scales")}
        super()._apply(fn, recurse)
        for name, x in kept.items():
            if x is not None and getattr(self, name).dtype != x.dtype:
                setattr(self, name, x.to(getattr(self, name).device))
        return self

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(torch.float32)
        y = run(ops.linear_quantized.default, x.to(torch.float32), self.weight, self.type, self.scales, bias)
        return y.to(x.dtype)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, type={self.type}"


def quantize_(model, type, *, skip=()):
    """Replaces every nn.Linear of a model, in place, by a QuantizedLinear; -> how many.

    type: "mxfp4", "q8_0" ("int8"), "q4_0" ("int4"), "q4_k", "fp8", ... skip: names of modules, or the ends of them
    ("lm_head"), that stay as they are. What does not fit the type is said before anything is changed.
    """
    type = type_named(type)
    block = 1 if type == "f8_e4m3" else BLOCKS[type][0]
    found = []
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if child.__class__ is nn.Linear and not any(full == s or full.endswith("." + s) for s in skip):
                found.append((full, module, child_name, child))
    if isinstance(model, nn.Linear):
        raise TypeError("model is one nn.Linear: expected a module that holds it, or QuantizedLinear(linear, type)")
    for full, _, _, child in found:
        if child.in_features % block != 0:
            raise ValueError(f"{full} has rows of {child.in_features}, {type} has blocks of {block}: name it in skip")
        if child.weight.device.type != "cpu":
            raise ValueError(f"{full} lies on {child.weight.device}: weights of {type} are multiplied on a CPU alone")
        if not bool(torch.isfinite(child.weight).all()):
            raise ValueError(f"{full} has a weight that is not finite")
    made = {}
    for _, module, child_name, child in found:
        if id(child) not in made:
            made[id(child)] = QuantizedLinear(child, type)
        setattr(module, child_name, made[id(child)])
    return len(found)

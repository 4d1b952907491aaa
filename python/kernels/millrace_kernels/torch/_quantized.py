"""Linear layers whose weights are of a block type, FP8 or four bits, and a model turned into them in one call."""

import torch
from torch import nn

from ._fake import BLOCKS, LOWBIT_GROUPS
from ._fp8 import GRID, quantize_fp8
from ._functional import _float32, _linear_packed, entry
from ._lowbit_layout import to_layout_of_device

ops = torch.ops.millrace
# The bias comes after what is no tensor: an input alone does not say whether a gradient is wanted.
_linear_quantized, _lowbit_linear = entry("linear_quantized", (0, 4)), entry("lowbit_linear", (0, 6))

ALIASES = {"int8": "q8_0", "int4": "q4_0", "fp8": "f8_e4m3"}
ENCODED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "mxfp4", "q4_z")


def type_named(name, more=()):
    """The library's name of a type, or ValueError with the names there are, and `more` of the caller's."""
    known = ALIASES.get(name, name)
    if known not in (*ENCODED, "f8_e4m3"):
        names = ", ".join((*ENCODED, "f8_e4m3", *ALIASES, *more))
        raise ValueError(f'type is "{name}", expected one of {names}')
    return known


def quantize(weight, type, importance=None):
    """weight [.., rows, cols] -> (values, scales): bytes uint8 [.., rows, bytes of a row] and None, or for "fp8" a
    matrix of float8_e4m3fn and a float32 scale for every 128 x 128. importance [cols] weighs the errors of columns."""
    type = type_named(type)
    weight = weight.detach().to(torch.float32)
    if type != "f8_e4m3":
        return ops.quantize(weight, type, importance), None
    if importance is not None or weight.dim() != 2:
        raise ValueError("fp8 takes a matrix and no importance")
    return quantize_fp8(weight, grid=(GRID, GRID))


def dequantize(values, type, scales=None):
    """Back to float32 [.., rows, cols]."""
    return ops.dequantize(values, type_named(type), scales)


def _held(module, held, name):
    """module.name, which lies in the dict `held` unless it is parametrized: nn.Module's own lookup takes three times as
    long."""
    return held[name] if name in held else getattr(module, name)


class QuantizedLinear(nn.Module):
    """nn.Linear with a weight of another type. The weight is fixed; gradients reach the input and the bias.

    On a GPU the weight is what the GPU multiplies (`packed`), made once; codes and scales stay in host memory, for
    state_dict() and for another device.
    """

    def __init__(self, linear: nn.Linear, type: str):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format = type_named(type)
        values, scales = quantize(linear.weight.detach().cpu(), self.format)
        self.register_buffer("weight", values)
        self.register_buffer("scales", scales)
        self.register_buffer("packed", None, persistent=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(),
                                                                  requires_grad=linear.bias.requires_grad)
        self._pack(linear.weight.device)

    def _pack(self, device):
        self.packed = None
        if device.type == "cuda":
            self.packed = ops.weight_pack(self.weight, torch.empty(0, device=device), self.format, self.scales)

    def _apply(self, fn, recurse=True):
        # .to(bfloat16) and .half() are about activations: codes and scales stay what they are.
        names = ("weight", "scales", "packed")
        kept = {name: self._buffers[name] for name in names}
        device = fn(torch.empty(0, device=kept["weight" if kept["packed"] is None else "packed"].device)).device
        self._buffers.update(dict.fromkeys(names))
        super()._apply(fn, recurse)
        for name in ("weight", "scales"):
            self._buffers[name] = kept[name]
            if kept[name] is not None and device.type != "cuda":
                moved = fn(kept[name])
                self._buffers[name] = moved if moved.dtype == kept[name].dtype else kept[name].to(moved.device)
        if kept["packed"] is not None and kept["packed"].device == device:
            self.packed = kept["packed"]
        else:
            self._pack(device)
        return self

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        if self.packed is not None:
            self._pack(self.packed.device)

    def forward(self, x):
        buffers, bias = self._buffers, _held(self, self._parameters, "bias")
        if bias is not None:
            bias = _float32(bias)
        packed = _held(self, buffers, "packed")
        if packed is not None:
            y = _linear_packed(_float32(x), packed, self.format, self.out_features, self.in_features, bias)
        else:
            y = _linear_quantized(_float32(x), _held(self, buffers, "weight"), self.format,
                                  _held(self, buffers, "scales"), bias, GRID, GRID)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _e2m1(x):
    """The nearest code of each element, the even one of two that are as near; beyond 6 it is 6."""
    steps = torch.tensor(E2M1, device=x.device)
    size = x.abs()
    middles = (steps[1:] + steps[:-1]) / 2
    code = torch.bucketize(size, middles)  # a middle belongs to the code below it
    tie = (code < 7) & (size == middles[code.clamp(max=6)]) & (code % 2 == 1)
    return (code + tie.long() + 8 * torch.signbit(x).long()).to(torch.uint8)


def _pack_pairs(codes):
    return (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous()


def lowbit_quantize(weight, format):
    """weight [n, k] -> (packed, scale): what ops.lowbit_linear multiplies, and a factor of the whole matrix.

    format: "mxfp4", "nvfp4" (a scale per 16 and one for the matrix), "int4_32", "int4_128" (a scale and a zero for so
    many columns)."""
    if format not in LOWBIT_GROUPS:
        raise ValueError(f'format is "{format}", expected one of {", ".join(LOWBIT_GROUPS)}')
    w = weight.detach().to(torch.float32)
    n, k = w.shape
    group, scale, zeros = LOWBIT_GROUPS[format], 1.0, None
    if k % group != 0 or (format.startswith("int4") and n % 8 != 0):
        raise ValueError(f"weight has shape {list(w.shape)}: {format} has groups of {group} columns"
                         + (", and rows come in eights" if format.startswith("int4") else ""))
    grouped = w.reshape(n, k // group, group)
    if format.startswith("int4"):
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        step = ((high - low) / 15).to(torch.float16)
        step = torch.where(step == 0, torch.ones_like(step), step)
        zero = (-low / step.float()).round().clamp(0, 15)
        codes = ((grouped / step.float()[..., None]).round() + zero[..., None]).clamp(0, 15)
        shifts = 4 * torch.arange(8, device=w.device)
        words = (codes.reshape(n, k // 8, 8).long() << shifts).sum(-1).t()  # [k / 8, n]
        scales = step.t().contiguous()
        zeros = (zero.t().reshape(-1, n // 8, 8).long() << shifts).sum(-1)

        def int32(x):
            return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32).contiguous()

        return ops.lowbit_repack(int32(words), scales, int32(zeros), format, "gptq_v2", n, k), scale
    largest = grouped.abs().amax(-1)
    if format == "nvfp4":
        scale = max(float(largest.max()) / (448.0 * 6.0), 1e-30) if largest.numel() else 1.0
        scales = (largest / 6.0 / scale).to(torch.float8_e4m3fn)
        by = scales.float() * scale
        scales = scales.view(torch.uint8)
    else:
        exponent = torch.where(largest > 0, torch.floor(torch.log2(largest.clamp(min=1e-38))) - 2, -127.0)
        scales = (exponent + 127).clamp(0, 254).to(torch.uint8)
        by = torch.exp2(scales.float() - 127)
    codes = _e2m1(torch.where(by[..., None] > 0, grouped / by[..., None], 0.0)).reshape(n, k)
    return ops.lowbit_repack(_pack_pairs(codes), scales.contiguous(), None, format, "rows", n, k), scale


class LowBitLinear(nn.Module):
    """nn.Linear with a weight of four bits, multiplied with bf16 activations on the device that it lies on. The weight is
    fixed; gradients reach the input and the bias."""

    def __init__(self, linear: nn.Linear, format: str):
        super().__init__()
        self.in_features, self.out_features, self.format = linear.in_features, linear.out_features, format
        packed, self.scale = lowbit_quantize(linear.weight, format)
        self.register_buffer("weight", packed)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(),
                                                                  requires_grad=linear.bias.requires_grad)

    def forward(self, x):
        bias, dtype = _held(self, self._parameters, "bias"), x.dtype
        if bias is not None:
            bias = _float32(bias)
        y = _lowbit_linear(x if dtype is torch.bfloat16 else x.to(torch.bfloat16), _held(self, self._buffers, "weight"),
                           self.format, self.out_features, self.in_features, self.scale, bias, False)
        return y if y.dtype is dtype else y.to(dtype)

    def _apply(self, fn, recurse=True):
        layout = self.weight.device.type
        super()._apply(fn, recurse)
        self.weight = to_layout_of_device(self.weight, layout, self.format, self.out_features, self.in_features)
        return self

    def get_extra_state(self):
        return {"scale": self.scale, "layout": self.weight.device.type}

    def set_extra_state(self, state):
        """Behind the buffers. A state that names no layout has a GPU's."""
        self.scale = state["scale"]
        self.weight = to_layout_of_device(self.weight, state.get("layout", "cuda"), self.format, self.out_features,
                                          self.in_features)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


def quantize_(model, type, *, skip=()):
    """Replaces every nn.Linear of a model, in place, by a QuantizedLinear or a LowBitLinear; -> how many.

    type: "mxfp4", "q8_0" ("int8"), "q4_0" ("int4"), "q4_k", "fp8", ...; "nvfp4", "int4_32", "int4_128" and, on a GPU,
    "mxfp4" are LowBitLinear, multiplied with bf16 activations. skip: a name of a module or several, or the ends of them
    ("lm_head"), that stay as they are. What does not fit the type is said before anything is changed.
    """
    on_gpu = any(p.device.type == "cuda" for p in model.parameters())
    low_bits = type in LOWBIT_GROUPS and (type != "mxfp4" or on_gpu)
    if not low_bits:
        type = type_named(type, [name for name in LOWBIT_GROUPS if name not in ENCODED])
    skip = (skip,) if isinstance(skip, str) else skip
    block = LOWBIT_GROUPS[type] if low_bits else 1 if type == "f8_e4m3" else BLOCKS[type][0]
    found = []
    for name, module in model.named_modules():
        for child_name, child in module._modules.items():  # a child of two names by both
            full = f"{name}.{child_name}" if name else child_name
            if child.__class__ is nn.Linear and not any(full == s or full.endswith("." + s) for s in skip):
                found.append((full, module, child_name, child))
    if isinstance(model, nn.Linear):
        raise TypeError("model is one nn.Linear: expected a module that holds it, or QuantizedLinear(linear, type)")
    for full, _, _, child in found:
        if child.in_features % block != 0:
            raise ValueError(f"{full} has rows of {child.in_features}, {type} has blocks of {block}: name it in skip")
        if type.startswith("int4_") and child.out_features % 8 != 0:
            raise ValueError(f"{full} has {child.out_features} rows, {type} has them in eights: name it in skip")
        if not bool(torch.isfinite(child.weight).all()):
            raise ValueError(f"{full} has a weight that is not finite")
    made = {}
    for _, module, child_name, child in found:
        if id(child) not in made:
            made[id(child)] = LowBitLinear(child, type) if low_bits else QuantizedLinear(child, type)
        setattr(module, child_name, made[id(child)])
    return len(found)

"""Millrace's kernels as PyTorch operations: `torch.ops.millrace.*`, and functions over them with torch's manners.

Every operation has a fake kernel and, where it is differentiable, a gradient; `torch.compile(fullgraph=True)` and
autocast work as with torch's own. Results do not depend on the number of threads, and gradients are deterministic.
"""

import torch as _torch

from .. import library_path as _library_path

_torch.ops.load_library(str(_library_path("torch")))

from . import _autograd, _fake  # noqa: E402,F401  the operations exist from here on
from ._attention import attention, attention_paged, scaled_dot_product_attention, set_fallback  # noqa: E402
from ._fp8 import linear_fp8, quantize_fp8  # noqa: E402
from ._functional import (add_layer_norm, add_rms_norm, clamped_swiglu, cross_entropy, dropout,  # noqa: E402
                          embedding, experts, geglu, gelu, layer_norm, linear, linear_cross_entropy, pack,
                          packed_linear, PackedWeight, rms_norm, rotary, route, sample, silu, softmax, swiglu)
from ._quantized import (LowBitLinear, QuantizedLinear, dequantize, lowbit_quantize, quantize,  # noqa: E402
                         quantize_)
from ._transformers import register_attention  # noqa: E402
from . import _batching  # noqa: E402,F401  of all operations, Python's too

__all__ = [
    "LowBitLinear", "PackedWeight", "QuantizedLinear", "add_layer_norm", "add_rms_norm", "attention", "attention_paged", "clamped_swiglu",
    "cross_entropy", "dequantize", "dropout", "embedding", "experts", "geglu", "gelu", "layer_norm", "linear",
    "linear_cross_entropy", "linear_fp8", "lowbit_quantize", "pack", "packed_linear", "quantize", "quantize_", "quantize_fp8",
    "register_attention", "rms_norm", "rotary", "route", "sample", "scaled_dot_product_attention", "set_fallback", "silu",
    "softmax", "swiglu"
]

"""Weights as Hugging Face directories store them quantized: random codes and scales, packed as the published
packages pack them, with the float32 values that their dequantizers define.

GPTQ and AWQ are packed here by the published layouts, and the values come from the numbers before packing.
compressed-tensors and bitsandbytes pack and unpack themselves. Scales are widened to float32 before the product
(transformers in float32 does the same); bitsandbytes rounds to the dtype in its state, and so do the values.
"""

import numpy as np
import torch

from quantize_formats import Weight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(values, tensors):
    """tensors: what follows the module's name -> torch tensor."""
    return Weight(values.float().numpy(), {"hf": {k: v.contiguous() for k, v in tensors.items()}})


def pack_words(codes, bits, order=None):
    """[..., n] -> int32 [..., n * bits / 32], the first code in the lowest bits."""
    per = 32 // bits
    c = codes.to(torch.int64).reshape(*codes.shape[:-1], -1, per)
    c = c[..., list(order)] if order else c
    words = (c << (bits * torch.arange(per))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def draw_integers(rng, shape, std, bits, group, sym, dtype):
    """Codes [rows, cols], zero points and scales [rows, groups] of about the standard deviation asked for."""
    rows, cols = shape
    groups = -(-cols // (cols if group == -1 else group))
    top = 2**bits
    codes = torch.from_numpy(np.clip(np.rint(rng.standard_normal(shape) * top / 5 + top / 2), 0, top - 1))
    zeros = torch.from_numpy(rng.integers(0, top, size=(rows, groups)) if not sym else np.full((rows, groups), top // 2))
    if not sym:  # around the middle, and the ends once each
        zeros = (zeros // 4 + top * 3 // 8)
        zeros[0, 0], zeros[-1, -1] = 0, top - 1
    scales = torch.from_numpy(std / (top / 5) * rng.uniform(0.7, 1.3, size=(rows, groups))).to(dtype)
    return codes.to(torch.int64), zeros.to(torch.int64), scales


def integer_values(codes, zeros, scales, group_of):
    return (codes - zeros[:, group_of]).float() * scales.float()[:, group_of]


def column_groups(rng, cols, group, act_order):
    group_of = torch.arange(cols) // (cols if group == -1 else group)
    return group_of[torch.from_numpy(rng.permutation(cols))] if act_order else group_of


def gptq(rng, shape, std, bits=4, group=32, sym=True, act_order=False, v2=False, dtype=torch.float16, g_idx=True):
    codes, zeros, scales = draw_integers(rng, shape, std, bits, group, sym, dtype)
    group_of = column_groups(rng, shape[1], group, act_order)
    stored = zeros if v2 else (zeros - 1) % 2**bits
    tensors = {"qweight": pack_words(codes.T.reshape(-1, 32 // bits, shape[0]).transpose(1, 2), bits)[..., 0],
               "qzeros": pack_words(stored.T, bits), "scales": scales.T}
    if g_idx:
        tensors["g_idx"] = group_of.to(torch.int32)
    return packed(integer_values(codes, zeros, scales, group_of), tensors)


def awq(rng, shape, std, group=32, dtype=torch.float16):
    codes, zeros, scales = draw_integers(rng, shape, std, 4, group, False, dtype)
    tensors = {"qweight": pack_words(codes.T, 4, AWQ_ORDER), "qzeros": pack_words(zeros.T, 4, AWQ_ORDER),
               "scales": scales.T}
    return packed(integer_values(codes, zeros, scales, column_groups(rng, shape[1], group, False)), tensors)


def compress(rng, shape, std, dtype, args, zero_point=False, global_scale=False):
    """A Gaussian weight through compressed-tensors' own compressor and back."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], **args)
    weights: QuantizationArgs = scheme.weights
    x = torch.from_numpy(rng.standard_normal(shape) * std).float()
    rows, cols = shape
    plain = lambda value: getattr(value, "value", value)  # an enumeration, or its text
    kind, number, size = plain(weights.strategy), plain(weights.type), weights.group_size
    grid = {"tensor": (1,), "channel": (rows, 1), "group": (rows, cols // (size or cols)),
            "tensor_group": (rows, cols // (size or cols)),
            "block": tuple(-(-n // b) for n, b in zip(shape, weights.block_structure or (1, 1)))}[kind]
    top = {("int", 4): 7, ("int", 8): 127, ("float", 8): 448, ("float", 4): 6}[(number, weights.num_bits)]
    scale = torch.from_numpy(3.2 * std / top * rng.uniform(0.7, 1.3, size=grid)).to(dtype)
    state = {"weight": x, "weight_scale": scale}
    if global_scale:
        state["weight_global_scale"] = torch.tensor([1234.567], dtype=torch.float32)
        state["weight_scale"] = (scale.float() * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    if kind == "group" and number == "float":
        state["weight_scale"] = torch.exp2(torch.round(torch.log2(scale.float())))
    if zero_point:
        state["weight_zero_point"] = torch.from_numpy(rng.integers(-top - 1, top + 1, size=grid)).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(plain(infer_module_format(torch.nn.Linear, scheme)))
    out = compressor.compress(state, scheme)
    wide = {k: v.float() if v.dtype in (torch.float16, torch.bfloat16) else v for k, v in out.items()}
    if weights.num_bits == 4 and number == "float":
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        scale = compressor._decompress_scale(out["weight_scale"], torch.float32)
        back = dequantize(unpack_fp4_from_uint8(out["weight_packed"], rows, cols, torch.float32), scale,
                          args=weights, dtype=torch.float32, global_scale=out.get("weight_global_scale"))
    else:
        back = compressor.decompress(wide, scheme)["weight"]
    assert back.dtype == torch.float32 and torch.corrcoef(torch.stack([back.flatten(), x.flatten()]))[0, 1] > 0.5
    return packed(back, out)


def compressed(rng, shape, std, kind, dtype=torch.bfloat16, group=None, zero_point=False):
    """kind: int4, int8 (pack-quantized), w8a8, fp8, fp8-channel, fp8-block, nvfp4, mxfp4."""
    activations = {"num_bits": 8, "strategy": "token", "dynamic": True}
    base = {"int4": {"num_bits": 4}, "int8": {"num_bits": 8}, "w8a8": {"num_bits": 8},
            "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
            "fp8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
            "fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "fp8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}[kind]
    if kind in ("int4", "int8", "w8a8"):
        base |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = {"weights": {"symmetric": not zero_point, **base}}
    if kind == "w8a8":
        args["input_activations"] = activations
    if kind.startswith("fp8"):
        args["input_activations"] = activations | {"type": "float"}
    return compress(rng, shape, std, dtype, args, zero_point, global_scale=kind == "nvfp4")


def bitsandbytes_4bit(rng, shape, std, quant_type="nf4", nested=True, dtype=torch.bfloat16):
    import bitsandbytes.functional as bnb

    x = torch.from_numpy(rng.standard_normal(shape) * std).to(dtype)
    codes, state = bnb.quantize_4bit(x, blocksize=64, compress_statistics=nested, quant_type=quant_type)
    values = bnb.dequantize_4bit(codes, state)
    assert values.dtype == dtype
    return packed(values, {"weight": codes} | {"weight." + k: v for k, v in state.as_dict(packed=True).items()})


def bitsandbytes_int8(rng, shape, std):
    import bitsandbytes.functional as bnb

    x = torch.from_numpy(rng.standard_normal(shape) * std).to(torch.float16)
    scb = x.abs().amax(dim=1).float()
    codes = torch.round(x.float() * (127.0 / scb[:, None])).to(torch.int8)
    return packed(bnb.int8_vectorwise_dequant(codes, scb), {"weight": codes, "SCB": scb})

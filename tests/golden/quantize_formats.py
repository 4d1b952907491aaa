"""Weights of the tiny models: random numbers that a file type can hold exactly, with their encoded bytes.

The trick that keeps the fixtures small: most matrices are drawn as q * 2^k with |q| <= 127, which BF16,
F16, F32 and Q8_0 (scale 2^k) all hold exactly, and experts as MXFP4 codes, which BF16 holds exactly. So one
set of expected logits serves the Hugging Face directory and the GGUF file of the same model.
"""

from dataclasses import dataclass, field

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


@dataclass
class Weight:
    values: np.ndarray  # float32, the shape Hugging Face gives it; what transformers computes with
    raw: dict = field(default_factory=dict)  # type -> encoded bytes, same leading dimensions
    codes: np.ndarray | None = None  # MXFP4: element codes 0..15, shape of values
    scales: np.ndarray | None = None  # MXFP4: e8m0 bytes [..., n/32]; FP8: float32 [ceil(out/128), ceil(in/128)]
    factor: float | None = None  # what a tensor beside it multiplies all of it with; in values, not in raw

    def rows(self, index):
        """The same weight with its rows (axis -2) picked or reordered."""
        take = lambda a: None if a is None else np.ascontiguousarray(np.take(a, index, axis=-2))
        return Weight(take(self.values), {k: take(v) for k, v in self.raw.items()}, take(self.codes), take(self.scales),
                      self.factor)

    def gguf(self, qtype):
        """Encoded array for GGUFWriter.add_tensor; asserts that the type holds the values exactly."""
        if qtype in self.raw:
            return self.raw[qtype]
        if qtype == T.F32:
            return self.values
        if qtype == T.F16:
            out = self.values.astype(np.float16)
            assert np.array_equal(out.astype(np.float32), self.values)
            return out
        assert qtype == T.BF16, qtype
        out = gguf.quants.quantize(self.values, qtype)
        assert np.array_equal(gguf.quants.dequantize(out, qtype), self.values)
        return out


def exact_q8(rng, shape, std):
    """q * 2^k, |q| <= 127, one k per 32 elements of a row: exact in Q8_0, BF16, F16 and F32."""
    *lead, n = shape
    q = np.clip(np.rint(rng.standard_normal((*lead, n // 32, 32)) * 40), -127, 127).astype(np.int8)
    k = int(np.rint(np.log2(std / 40 / 0.8))) - rng.integers(0, 2, size=(*lead, n // 32, 1))
    d = np.exp2(k.astype(np.float32))
    raw = np.concatenate([d.astype(np.float16).view(np.uint8), q.view(np.uint8)], axis=-1)
    raw = raw.reshape(*lead, n // 32 * 34)
    values = (d * q).reshape(shape).astype(np.float32)
    assert np.array_equal(gguf.quants.dequantize(raw, T.Q8_0), values)
    return Weight(values, {T.Q8_0: raw})


def exact_bf16(rng, shape, mean, std):
    """A vector (norm, bias, sink): rounded to 8 significant bits and away from tiny, so F16 holds it too."""
    v = (mean + std * rng.standard_normal(shape)).astype(np.float32)
    v = np.where(np.abs(v) < 2**-6, np.float32(2**-6), v)
    return Weight((v.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))


def exact_mxfp4(rng, shape, std):
    """MXFP4 codes with one e8m0 scale per 32 elements of a row. e2m1 codes of uniform bits have std 2.9."""
    *lead, n = shape
    codes = rng.integers(0, 16, size=(*lead, n // 32, 32), dtype=np.uint8)
    exponent = int(np.rint(np.log2(std / 2.9 / 0.75))) - rng.integers(0, 2, size=(*lead, n // 32))
    scales = (exponent + 127).astype(np.uint8)
    values = (E2M1[codes] * np.exp2(exponent.astype(np.float32))[..., None]).reshape(shape).astype(np.float32)
    raw = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=-1)
    raw = raw.reshape(*lead, n // 32 * 17)
    assert np.array_equal(gguf.quants.dequantize(raw, T.MXFP4), values)
    return Weight(values, {T.MXFP4: raw}, codes.reshape(shape), scales)


def mxfp4_hf_blocks(weight):
    """Hugging Face layout: [..., n/32, 16] bytes, low nibble = even element."""
    c = weight.codes.reshape(*weight.codes.shape[:-1], -1, 32)
    return c[..., 0::2] | c[..., 1::2] << 4


def fp8_blocks(rng, shape, std, scale_dtype):
    """E4M3 codes and 128x128 block scales (the last block of a row or column may be partial)."""
    import torch

    codes = torch.from_numpy((rng.standard_normal(shape) * 60).astype(np.float32)).to(torch.float8_e4m3fn)
    grid = [(n + 127) // 128 for n in shape]
    scale = torch.from_numpy((std / 60 * rng.uniform(0.6, 1.4, size=grid)).astype(np.float32)).to(scale_dtype)
    full = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    return Weight((codes.float() * full).numpy(), {"fp8": codes, "scale_inv": scale})


def pack_k_scales(sc, m):
    """Eight 6-bit scales and minima in 12 bytes, the Q4_K/Q5_K way."""
    sc, m = sc.astype(np.uint8), m.astype(np.uint8)
    low = np.concatenate([sc[:, :4] | (sc[:, 4:] >> 4) << 6, m[:, :4] | (m[:, 4:] >> 4) << 6], axis=1)
    return np.concatenate([low, (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4], axis=1)


def half_bytes(x):
    return np.ascontiguousarray(x.astype(np.float16)).view(np.uint8)


def quantize_q45_k(x, bits):
    """x [blocks, 256]: eight groups of 32, value = d*sc*q - dmin*m with sc and m of 6 bits."""
    g = x.reshape(-1, 8, 32)
    low = np.minimum(g.min(axis=2), 0)
    step = (g.max(axis=2) - low) / (2**bits - 1)
    d = np.maximum(step.max(axis=1, keepdims=True) / 63, 1e-7).astype(np.float16).astype(np.float32)
    dmin = np.maximum((-low).max(axis=1, keepdims=True) / 63, 1e-7).astype(np.float16).astype(np.float32)
    sc = np.clip(np.rint(step / d), 1, 63)
    m = np.clip(np.rint(-low / dmin), 0, 63)
    q = np.rint((g + (dmin * m)[..., None]) / (d * sc)[..., None])
    q = np.clip(q, 0, 2**bits - 1).astype(np.uint8).reshape(-1, 4, 2, 32)
    qs = ((q[:, :, 0] & 15) | (q[:, :, 1] & 15) << 4).reshape(-1, 128)
    parts = [half_bytes(d), half_bytes(dmin), pack_k_scales(sc, m)]
    if bits == 5:
        high = (q >> 4).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
        parts.append(np.bitwise_or.reduce(high, axis=1))
    return np.concatenate([*parts, qs], axis=1)


def quantize_q6_k(x):
    """x [blocks, 256]: sixteen groups of 16, value = d*scale*(q - 32) with int8 scales, both signs used."""
    g = x.reshape(-1, 16, 16)
    at = np.abs(g).argmax(axis=2)[..., None]
    step = np.take_along_axis(g, at, axis=2)[..., 0] / -32
    d = np.maximum(np.abs(step).max(axis=1, keepdims=True) / 127, 1e-7).astype(np.float16).astype(np.float32)
    scale = np.clip(np.rint(step / d), -127, 127)
    scale = np.where(scale == 0, 1, scale)
    q = np.clip(np.rint(g / (d * scale)[..., None]) + 32, 0, 63).astype(np.uint8).reshape(-1, 2, 4, 32)
    ql = np.concatenate([q[:, :, 0:2] & 15 | (q[:, :, 2:4] & 15) << 4], axis=2).reshape(-1, 128)
    qh = np.bitwise_or.reduce((q >> 4) << np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1), axis=2)
    return np.concatenate([ql, qh.reshape(-1, 64), scale.astype(np.int8).view(np.uint8), half_bytes(d)], axis=1)


HALVES_AT = {T.Q2_K: [80, 82], T.Q3_K: [108], T.IQ4_NL: [0], T.IQ4_XS: [0], T.IQ3_XXS: [0], T.IQ3_S: [0],
             T.IQ2_XXS: [0], T.IQ2_XS: [0], T.IQ2_S: [0], T.IQ1_S: [0], T.IQ1_M: [], T.TQ1_0: [52], T.TQ2_0: [64],
             T.NVFP4: []}


def put_iq1_m_scale(raw, halves):
    """The f16 scale of IQ1_M, in the upper four bits of its last four words."""
    words = raw[:, 48:].view(np.uint16)
    words[:] = (words & 0xFFF) | ((halves >> np.array([0, 4, 8, 12], np.uint16)) & 15) << 12


def random_codes(rng, shape, std, qtype, factor=None):
    """Random codes of the types gguf-py cannot write, their scales such that the values have this deviation."""
    elements, size = gguf.GGML_QUANT_SIZES[qtype]
    raw = rng.integers(0, 256, size=(int(np.prod(shape)) // elements, size), dtype=np.uint8)

    def put_scale(d):
        signs = np.where(np.arange(len(raw)) % 3 == 0, -d, d).astype(np.float16).reshape(-1, 1)
        for i, at in enumerate(HALVES_AT[qtype]):
            raw[:, at : at + 2] = (signs * np.float16(1.5 if i == 1 else 1)).astype(np.float16).view(np.uint8)
        if qtype == T.IQ1_M:
            put_iq1_m_scale(raw, signs.view(np.uint16))

    if qtype == T.NVFP4:
        middle = int(gguf.quants.NVFP4.fp32_to_ue4m3(np.float32([std / 2.9 / (factor or 1)]))[0])
        raw[:, :4] = np.clip(middle + rng.integers(-3, 3, (len(raw), 4)), 1, 126)
    else:
        put_scale(1.0)
        put_scale(std / np.std(gguf.quants.dequantize(raw, qtype)))
    raw = raw.reshape(*shape[:-1], -1)
    values = gguf.quants.dequantize(raw, qtype).astype(np.float32).reshape(shape)
    assert 0.5 < np.std(values) * (factor or 1) / std < 2, (qtype, np.std(values) / std)
    return Weight(values * np.float32(factor or 1), {qtype: raw}, factor=factor)


def quantized(rng, shape, std, qtype):
    """Gaussian weights in any GGUF type; the values are what the type decodes to."""
    if qtype in HALVES_AT:
        return random_codes(rng, shape, std, qtype)
    x = (rng.standard_normal(shape) * std).astype(np.float32)
    if qtype in (T.Q4_K, T.Q5_K, T.Q6_K):
        blocks = x.reshape(-1, 256)
        raw = quantize_q6_k(blocks) if qtype == T.Q6_K else quantize_q45_k(blocks, 4 if qtype == T.Q4_K else 5)
        raw = raw.reshape(*shape[:-1], -1)
    elif qtype == T.F16:
        raw = x.astype(np.float16)
        return Weight(raw.astype(np.float32), {qtype: raw})
    else:
        raw = gguf.quants.quantize(x, qtype)
    values = gguf.quants.dequantize(raw, qtype).astype(np.float32).reshape(shape)
    error = np.sqrt(np.mean((values - x) ** 2)) / std
    assert error < 0.12, (qtype, error)  # a packing mistake would give about 1
    return Weight(values, {qtype: raw})


def random_halves(rng, shape):
    """Finite float16 of any sign and exponent, subnormals included."""
    bits = rng.integers(0, 1 << 16, size=shape, dtype=np.uint16)
    exponent = (bits >> 10) & 31
    return np.where(exponent == 31, bits & ~np.uint16(0x4000), bits).astype(np.uint16)


def block_fixture(rng):
    """Random blocks of every type and what gguf-py / torch decode them to: [(name, raw, scales, values)]."""
    import torch

    halves_at = {T.Q8_0: [0], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q4_K: [0, 2],
                 T.Q5_K: [0, 2], T.Q6_K: [208]}
    out = []
    for qtype, offsets in halves_at.items():
        elements, size = gguf.GGML_QUANT_SIZES[qtype]
        raw = rng.integers(0, 256, size=(32 if elements == 32 else 8, size), dtype=np.uint8)
        for at in offsets:
            raw[:, at : at + 2] = random_halves(rng, (raw.shape[0], 1)).view(np.uint8)
        out.append((qtype.name.lower(), raw, None, gguf.quants.dequantize(raw, qtype)))

    codes = rng.integers(0, 16, size=(32, 32), dtype=np.uint8)
    scales = rng.integers(2, 250, size=(32, 1), dtype=np.uint8)  # 255 is NaN by the standard
    scales[:5, 0] = [0, 1, 2, 126, 251]
    values = (E2M1[codes].astype(np.float64) * np.exp2(scales.astype(np.float64) - 127)).astype(np.float32)
    packed = np.concatenate([scales, codes[:, :16] | codes[:, 16:] << 4], axis=1)
    assert np.array_equal(gguf.quants.dequantize(packed, T.MXFP4), values)
    out.append(("mxfp4", packed, None, values))
    out.append(("mxfp4_split", codes[:, 0::2] | codes[:, 1::2] << 4, scales, values))

    every = np.array([b for b in range(256) if b & 0x7F != 0x7F], dtype=np.uint8)
    out.append(("f8_e4m3", every, None, torch.from_numpy(every).view(torch.float8_e4m3fn).float().numpy()))
    halves = random_halves(rng, 256)
    out.append(("f16", halves.view(np.uint8), None, halves.view(np.float16).astype(np.float32)))
    brain = rng.integers(0, 1 << 16, size=256, dtype=np.uint16)
    brain = np.where((brain >> 7) & 255 == 255, brain & 0x3FFF, brain).astype(np.uint16)
    out.append(("bf16", brain.view(np.uint8), None, (brain.astype(np.uint32) << 16).view(np.float32)))
    return out + low_bit_fixture(rng)


def low_bit_fixture(rng):
    """The types below four bits, of uneven levels and NVFP4: codes are random, IQ1_M's scale of four pieces too."""
    out = []
    for qtype, offsets in HALVES_AT.items():
        elements, size = gguf.GGML_QUANT_SIZES[qtype]
        raw = rng.integers(0, 256, size=(1024 // elements, size), dtype=np.uint8)
        for at in offsets:
            raw[:, at : at + 2] = random_halves(rng, (raw.shape[0], 1)).view(np.uint8)
        if qtype == T.IQ1_M:
            put_iq1_m_scale(raw, random_halves(rng, (raw.shape[0], 1)))
        if qtype == T.NVFP4:
            raw[:, :4] = np.arange(64, dtype=np.uint8).reshape(-1, 4) * 4 + rng.integers(0, 4, (16, 4), dtype=np.uint8)
        out.append((qtype.name.lower(), raw, None, gguf.quants.dequantize(raw, qtype).astype(np.float32)))
    return out

"""Repacked four-bit weights from one device's layout to another's: a GPU multiplies units as kernels/quant/lowbit_units.h
has them, a CPU as kernels/cpu/matmul/lowbit_task.h. A module that moves, or a state that was saved elsewhere, is taken
apart here and repacked where it is."""

import torch

ROWS, COLUMNS = 64, 128
GROUPS = {"mxfp4": 32, "nvfp4": 16, "int4_32": 32, "int4_128": 128}
# kernels/quant/e2m1_word.h: where bit b of a pair's elements lies.
_PLACES = (0xF876, 0x2BA9, 0x5EDC, 0x1043)


def _e2m1_bit(i, b):
    crosses = b == 3 and i // 2 in (1, 2)
    return (_PLACES[i // 2] >> (4 * b) & 15) + 16 * ((i + crosses) % 2)


def _code_of(words, i, int4):
    if int4:
        return words >> (i // 2 * 4 + i % 2 * 16) & 15
    return sum((words >> _e2m1_bit(i, b) & 1) << b for b in range(4))


def _words(units):
    """[units][4096 bytes] -> int64 [units][1024]"""
    four = units.reshape(len(units), -1, 4).long()
    return four[..., 0] | four[..., 1] << 8 | four[..., 2] << 16 | four[..., 3] << 24


def _gpu_codes(units, int4):
    words = _words(units).reshape(-1, 8, 4, 8, 4)  # [unit][step][warp][g][t]
    codes = torch.empty(len(units), 4, 2, 8, 8, 2, 4, 2, dtype=torch.uint8, device=units.device)
    for i in range(8):  # [unit][warp][half][g][step][upper eight columns][t][odd]
        codes[:, :, i // 2 % 2, :, :, i // 4, :, i % 2] = _code_of(words, i, int4).permute(0, 2, 3, 1, 4).to(torch.uint8)
    return codes.reshape(-1, ROWS, COLUMNS)


def _cpu_codes(units):
    words = _words(units).reshape(-1, COLUMNS // 8, ROWS)
    codes = torch.stack([words >> (4 * j) & 15 for j in range(8)], -1)  # [unit][eight][row][column of it]
    return codes.permute(0, 2, 1, 3).reshape(-1, ROWS, COLUMNS).to(torch.uint8)


def _in_rows(values, gpu):
    """[..., 64] by the order of a GPU's lanes, or of rows -> by rows"""
    if not gpu:
        return values
    shape = values.shape[:-1]
    return values.reshape(*shape, 4, 8, 2).transpose(-1, -2).reshape(*shape, ROWS)


def _e4m3_of(stored):
    """kernels/quant/lowbit_units.h: five bits of exponent, three of mantissa -> e4m3"""
    exponent, mantissa = stored >> 3, stored & 7
    normal = (exponent - 2) << 3 | mantissa
    small = torch.where(exponent == 2, 4 | mantissa >> 1, torch.where(exponent == 1, 2 | mantissa >> 2, 1))
    return torch.where(exponent > 2, normal, small)


def published(packed, layout, format, n, k):
    """Bytes as a device repacked them (layout: its type) -> codes uint8 [n, k], scales and zeros (or None) [n, k / group]:
    scales uint8, of INT4 float16."""
    gpu, int4, group = layout != "cpu", format.startswith("int4"), GROUPS[format]
    tiles, across, groups = -(-n // ROWS), -(-k // COLUMNS), COLUMNS // group
    units = packed.reshape(tiles * across, -1)
    codes = _gpu_codes(units[:, :4096], int4) if gpu else _cpu_codes(units[:, :4096])
    rest = units[:, 4096:].reshape(len(units), groups, -1)

    def whole(x, columns):  # [unit][row][...] -> [n][columns]
        x = x.reshape(tiles, across, ROWS, -1).transpose(1, 2).reshape(tiles * ROWS, -1)
        return x[:n, :columns].contiguous()

    scales, zeros = rest[..., : 2 * ROWS if int4 else ROWS], None
    if int4:
        scales = _in_rows(scales.contiguous().view(torch.float16), gpu)
        zeros = whole(_in_rows(rest[..., 2 * ROWS:], gpu).transpose(1, 2), k // group)
    else:
        scales = _in_rows(scales, gpu).long()
        if gpu:
            scales = (scales - 94).clamp(min=0) if format == "mxfp4" else _e4m3_of(scales)
        scales = scales.to(torch.uint8)
    return whole(codes, k), whole(scales.transpose(1, 2), k // group), zeros


def to_layout_of_device(packed, layout, format, n, k):
    """What a device of type `layout` repacked, as the device does that the bytes lie on."""
    if packed.device.type in (layout, "meta") or packed.numel() == 0:
        return packed
    codes, scales, zeros = published(packed, layout, format, n, k)
    repack = torch.ops.millrace.lowbit_repack
    if zeros is None:
        return repack((codes[:, 0::2] | codes[:, 1::2] << 4).contiguous(), scales, None, format, "rows", n, k)

    def words(x):  # eights of the last dimension, the first in the lowest bits
        bits = (x.reshape(*x.shape[:-1], -1, 8).long() << 4 * torch.arange(8, device=x.device)).sum(-1)
        return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)

    return repack(words(codes).t().contiguous(), scales.t().contiguous(), words(zeros.t()).contiguous(), format,
                  "gptq_v2", n, k)

#!/usr/bin/env python3
"""Linear layers and experts with weights of four bits (torch.ops.millrace.lowbit_*), of block types and packed
(weight_pack, linear_packed, experts_packed) against torch in float64.

  tests/python/kernels_lowbit_test.py [--device cuda] [NAME ...]

Run by tests/python/kernels_test.py with the package on the path.
"""

import math
import sys

import torch
import torch.nn.functional as F

import millrace_kernels.torch as mt
from kernels_torch_test import (BF16, F32, close, compare, device, exact_experts, ops, raises, random, run_tests)


def lowbit_weight(packed, format, n, k, scale):
    """[n, k] in float64: what the packed weight multiplies unit vectors to. Exact: a weight is a bf16."""
    return ops.lowbit_linear(torch.eye(k, dtype=BF16), packed, format, n, k, 1.0).double().T * scale


def test_lowbit():
    torch.manual_seed(22)
    bounds = {"mxfp4": 0.16, "nvfp4": 0.12, "int4_32": 0.09, "int4_128": 0.11}
    for format, bound in bounds.items():
        for n, k in ((72, 256), (8, 128), (136, 384)):
            w, x = random(n, k, grad=False), random(2, 3, k, dtype=BF16)
            packed, scale = mt.lowbit_quantize(w, format)
            plain = lowbit_weight(packed, format, n, k, scale)
            error = float((plain - w.double()).norm() / w.double().norm())
            assert error < bound, f"{format}: relative error {error:.3g}"
            bias = random(n)
            compare(f"lowbit_linear {format} {n, k}",
                    lambda x, b: ops.lowbit_linear(x, packed, format, n, k, scale, b),
                    lambda x, b: F.linear(x, plain, b), (x, bias), BF16)
        model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.GELU(), torch.nn.Linear(64, 128, bias=False))
        skipped = ("2",) if format == "int4_128" else ()
        x = random(5, 256)
        if format != "mxfp4" or device() != "cpu":
            want = model(x)
            assert mt.quantize_(model, format, skip=skipped) == 2 - len(skipped) and format in repr(model)
            off = float((model(x) - want).detach().norm() / want.detach().norm())
            assert off < 2 * bound, f"{format}: the model is off by {off:.3g}"
            model(x).sum().backward()
            assert x.grad is not None and model[0].bias.grad is not None
            again = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.GELU(), torch.nn.Linear(64, 128, bias=False))
            mt.quantize_(again, format, skip=skipped)
            again.load_state_dict(model.state_dict())
            assert torch.equal(again(x), model(x))
    raises(ValueError, "groups", mt.lowbit_quantize, random(8, 100), "nvfp4")
    raises(ValueError, "format", mt.lowbit_quantize, random(8, 128), "q4_0")
    packed, _ = mt.lowbit_quantize(random(8, 128, grad=False), "nvfp4")
    raises(RuntimeError, "columns", ops.lowbit_linear, random(2, 64, dtype=BF16), packed, "nvfp4", 8, 128)
    raises(RuntimeError, "weight has", ops.lowbit_linear, random(2, 256, dtype=BF16), packed, "nvfp4", 8, 256)
    raises(RuntimeError, "bfloat16", ops.lowbit_linear, random(2, 128), packed, "nvfp4", 8, 128)


PACKED = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "mxfp4", "f8_e4m3")


def coded(w, type):
    """(what pack takes: values and scales; the same numbers in float64), on the CPU."""
    plain = {"f32": F32, "f16": torch.float16, "bf16": BF16}.get(type)
    if plain is not None:
        return (w.to(plain), None), w.to(plain).double()
    values, scales = mt.quantize(w, type)
    return (values, scales), mt.dequantize(values, type, scales).double()


def gpu_unit(codes, scales, zeros, format):
    """One unit, codes uint8 [64, 128], as kernels/quant/lowbit_units.h describes it, word by word."""
    places = (0xF876, 0x2BA9, 0x5EDC, 0x1043)
    int4 = format.startswith("int4")
    out = bytearray()
    for at in range(1024):
        word = 0
        for i in range(8):
            row = at // 32 % 4 * 16 + at % 32 // 4 + i // 2 % 2 * 8
            column = at // 128 * 16 + at % 4 * 2 + i % 2 + i // 4 * 8
            code = int(codes[row, column])
            if int4:
                word |= code << (i // 2 * 4 + i % 2 * 16)
                continue
            for b in range(4):
                half = (i + (b == 3 and i // 2 in (1, 2))) % 2
                word |= (code >> b & 1) << ((places[i // 2] >> 4 * b & 15) + 16 * half)
        out += word.to_bytes(4, "little")
    rows = [slot // 16 * 16 + slot % 16 // 2 + slot % 2 * 8 for slot in range(64)]
    for group in range(scales.shape[1]):
        of_rows = scales[rows, group].contiguous()
        if int4:
            out += of_rows.view(torch.uint8).numpy().tobytes() + zeros[rows, group].contiguous().numpy().tobytes()
        elif format == "mxfp4":
            out += bytes(int(e) + 94 for e in of_rows)
        else:  # what is stored is the power of two above 2^-9 and three bits: by value
            values = [float(x) for x in of_rows.view(torch.float8_e4m3fn)]
            logs = [math.frexp(x)[1] - 1 for x in values]
            out += bytes((e + 9) << 3 | int((x / 2.0**e - 1) * 8) for x, e in zip(values, logs))
    return torch.frombuffer(out, dtype=torch.uint8).clone()


def test_layouts_of_devices():
    """What a GPU repacked is repacked where it is loaded, and a module that moves takes its weight along."""
    from millrace_kernels.torch import _lowbit_layout

    torch.manual_seed(5)
    for format in ("mxfp4", "nvfp4", "int4_32", "int4_128"):
        linear = torch.nn.Linear(128, 64, device="cpu")
        with torch.device("cpu"):
            layer = mt.LowBitLinear(linear, format)
            x = torch.randn(3, 128)
            want = layer(x)
            parts = _lowbit_layout.published(layer.weight, "cpu", format, 64, 128)
            state = layer.state_dict()
            extra = next(name for name in state if name.endswith("_extra_state"))
            assert state[extra]["layout"] == "cpu"
            state["weight"] = gpu_unit(*parts, format)
            state[extra] = {"scale": layer.scale}  # names no layout: as states were before there was a CPU's
            again = mt.LowBitLinear(linear, format)
            again.load_state_dict(state)
            assert torch.equal(again(x), want), format
        if device() != "cpu":
            moved = mt.LowBitLinear(linear, format).to(device())
            close(f"{format} moved", moved(x.to(device())).cpu(), want.double(), BF16)
            assert torch.equal(moved.to("cpu")(x), want), format


def test_packed():
    """The product's own rounding: activations to 8 bits per block of 32 on a CPU, to bf16 on a GPU, weights there too."""
    torch.manual_seed(23)
    for type in PACKED:
        for rows, cols in ((72, 256), (33, 512)):
            (values, scales), plain = coded(random(rows, cols, grad=False).cpu(), type)
            packed = mt.pack(values, "" if scales is None and values.dtype != torch.uint8 else type, scales, device())
            assert packed.shape == (rows, cols) and packed.packed.device.type == device()
            plain = plain.to(device())
            for count in (1, 3, 40):
                x, bias = random(count, cols), random(rows)
                got, want = mt.packed_linear(x, packed, bias), F.linear(x.double(), plain, bias.double())
                off = float((got.double() - want).detach().norm() / want.detach().norm())
                assert off < 0.012, f"packed {type} {count} rows: relative error {off:.3g}"
                dy = torch.randn(count, rows)
                if device() != "cpu" and type not in mt._autograd.UNPACKED_ON_GPU:
                    raises(NotImplementedError, f"weights of {type}", torch.autograd.grad, got, (x, bias), dy)
                    continue
                d_x, d_bias = torch.autograd.grad(got, (x, bias), dy)
                off = float((d_x.double() - dy.double() @ plain).norm() / (dy.double() @ plain).norm())
                assert off < (1e-5 if device() == "cpu" else 4e-3), f"packed {type} dx: relative error {off:.3g}"
                close(f"packed {type} dbias", d_bias, dy.double().sum(0), F32)
            assert torch.equal(mt.packed_linear(x[:1], packed), mt.packed_linear(x, packed)[:1]), "a row's bits"
    assert mt.packed_linear(x[:0], packed).shape == (0, rows)
    raises(RuntimeError, "bytes", ops.linear_packed, x, packed.packed[:-1], packed.type, rows, cols)
    raises(RuntimeError, "columns", mt.packed_linear, x[:, 1:], packed)
    raises(TypeError, "dtype", mt.pack, torch.zeros(2, 32, dtype=torch.int32))


def test_packed_experts():
    torch.manual_seed(24)
    rows, hidden, ffn, count, k = 7, 64, 96, 5, 2
    chosen, weights = (t.detach() for t in mt.route(random(rows, count), k))
    biases = [random(count, n, grad=False) for n in (ffn, ffn, hidden)]
    for type in ("f32", "bf16", "q8_0", "mxfp4"):
        made = [coded(random(*shape, scale=0.3, grad=False).cpu(), type)
                for shape in ((count, ffn, hidden), (count, ffn, hidden), (count, hidden, ffn))]
        packed = [mt.pack(v, "" if v.dtype != torch.uint8 else type, s, device()) for (v, s), _ in made]
        plain = [w.to(device()) for _, w in made]
        for clamped in (False, True):
            x = random(rows, hidden, grad=False)
            got = mt.experts(x, chosen, weights, *packed, gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2],
                             activation="clamped_swiglu" if clamped else "swiglu")
            want = exact_experts(x.double(), weights.double(), *plain, [b.double() for b in biases], chosen, clamped)
            off = float((got.double() - want).norm() / want.norm())
            assert off < 0.02, f"packed experts {type}: relative error {off:.3g}"
    raises(ValueError, "expected one type", mt.experts, x, chosen, weights, packed[0], packed[1], packed[1])


def test_quantize_model():
    torch.manual_seed(17)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32, bias=False))
    x = torch.randn(5, 64, requires_grad=True)
    want = model(x)
    assert mt.quantize_(model, "q8_0") == 2 and "q8_0" in repr(model)
    off = float((model(x) - want).detach().norm() / want.detach().norm())
    assert off < 0.02, off
    model(x).sum().backward()
    assert x.grad is not None and model[0].bias.grad is not None
    again = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32, bias=False))
    mt.quantize_(again, "q8_0")
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))
    moved = again.cpu()(x.detach().cpu())  # and back
    off = float((moved - want.detach().cpu()).norm() / want.detach().cpu().norm())
    assert off < 0.02 and torch.equal(again.to(device())(x), model(x)), off
    assert model.to(BF16)(x.to(BF16)).dtype == BF16 and model[0].weight.dtype == torch.uint8
    odd = torch.nn.Sequential(torch.nn.Linear(64, 33), torch.nn.Linear(33, 4))
    raises(ValueError, "1 has rows of 33", mt.quantize_, odd, "mxfp4")
    assert type(odd[0]) is torch.nn.Linear, "changed before it was refused"
    assert mt.quantize_(odd, "q4_0", skip=("1",)) == 1
    compiled = torch.compile(odd, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x.detach()), odd(x.detach()))
    shared = torch.nn.Linear(64, 64)
    by_two_names = torch.nn.ModuleDict({"a": shared, "b": shared})
    assert mt.quantize_(by_two_names, "q8_0") == 2 and by_two_names["a"] is by_two_names["b"] is not shared


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def test_parametrized():
    """torch's parametrizations are seen by layers that look their tensors up themselves."""
    torch.manual_seed(46)
    x = torch.zeros(3, 128)
    for kind, type_of_weight in ((mt.LowBitLinear, "nvfp4"), (mt.QuantizedLinear, "q8_0")):
        layer = kind(torch.nn.Linear(128, 64), type_of_weight)
        before = layer(x).detach()
        torch.nn.utils.parametrize.register_parametrization(layer, "bias", Doubled())
        assert before.abs().max() > 0 and torch.equal(layer(x), 2 * before), kind.__name__


if __name__ == "__main__":
    sys.exit(run_tests({name: f for name, f in globals().items() if name.startswith("test_")}))

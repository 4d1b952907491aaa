#!/usr/bin/env python3
"""Linear layers with weights of four bits (torch.ops.millrace.lowbit_*) against torch in float64.

  tests/python/kernels_lowbit_test.py [--device cuda]

Run by tests/python/kernels_test.py with the package on the path.
"""

import sys

import torch
import torch.nn.functional as F

import millrace_kernels.torch as mt
from kernels_torch_test import BF16, compare, device, ops, raises, random, run_tests


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


if __name__ == "__main__":
    sys.exit(run_tests({"test_lowbit": test_lowbit}))

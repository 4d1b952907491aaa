#!/usr/bin/env python3
"""The fused operations of the kernel library against torch in float64, forward and backward (autograd).

    fused_test.py LIBRARY [--device cpu|cuda] [--isa NAME] [--repeat N] [--group NAME] [--seed N] [--few]

LIBRARY is the shared library, libmillrace_kernels.so. Every type, odd shapes (0 and 1 row, primes), rows with gaps,
outputs and workspaces that are poisoned first: the gaps must still be poison afterwards. N repetitions of every case
must give the same bits. Exits with 77 where torch is not there.
"""

import argparse
import sys

try:
    import torch
except ImportError as missing:
    print(f"*** fused_test.py is SKIPPED: {missing} ***")
    sys.exit(77)
import torch.nn.functional as F

import fused_ops as ops

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Of a result that is rounded once to a type, relative to the largest number of what is compared.
ROUNDING = {F32: 4e-6, F16: 6e-4, BF16: 5e-3}
POISON = 0xA5


class Case:
    """Tensors on a device with poisoned gaps, and the comparison."""

    def __init__(self, lib, device, seed, repeat):
        self.lib, self.device, self.repeat = lib, device, repeat
        self.random = torch.Generator().manual_seed(seed)
        self.failures, self.checks = [], 0
        self.outputs = []

    def floats(self, *shape, dtype=F32, scale=1.0, gap=0):
        """Random rows, `gap` columns between them, rounded to dtype."""
        x = (torch.randn(*shape, generator=self.random) * scale).to(dtype).to(self.device)
        if gap == 0:
            return x
        wide = torch.empty(shape[0], shape[1] + gap, dtype=dtype, device=self.device)
        wide[:, : shape[1]] = x
        return wide[:, : shape[1]]

    def integers(self, high, count):
        return torch.randint(0, high, (count,), generator=self.random).to(torch.int32).to(self.device)

    def out(self, *shape, dtype=F32, gap=0):
        """A poisoned output with poisoned gaps."""
        whole = shape if len(shape) == 1 else (shape[0], shape[1] + gap)
        size = torch.empty((), dtype=dtype).element_size()
        count = size
        for n in whole:
            count *= n
        raw = torch.full((count,), POISON, dtype=torch.uint8, device=self.device)
        wide = raw.view(dtype).view(whole)
        view = wide if len(shape) == 1 else wide[:, : shape[1]]
        self.outputs.append((raw, wide, view))
        return view

    def run(self, name, call):
        """The call, `repeat` times over freshly poisoned outputs: the bits are the same, the gaps stay poison."""
        first = None
        for turn in range(self.repeat):
            for raw, _, _ in self.outputs:
                raw.fill_(POISON)
            call()
            bits = [raw.clone() for raw, _, _ in self.outputs]
            if first is None:
                first = bits
            elif not all(torch.equal(a, b) for a, b in zip(first, bits)):
                self.fail(name, f"other bits in run {turn}")
                break
        for _, wide, view in self.outputs:
            if wide.dim() == 2 and wide.shape[1] > view.shape[1] and wide.shape[0] > 0:
                gap = wide[:, view.shape[1] :].contiguous().view(torch.uint8)
                if not bool((gap == POISON).all()):
                    self.fail(name, "a gap between rows was written")
        self.outputs = []

    def fail(self, name, why):
        self.failures.append(f"{name}: {why}")
        print(f"FAILED {name}: {why}", flush=True)

    def close(self, name, got, want, bound=None):
        """max |got - want| <= bound * max(1, max |want|); want in float64."""
        self.checks += 1
        if got.numel() == 0:
            return
        got64, want = got.detach().double().cpu(), want.detach().double().cpu()
        bound = bound or ROUNDING[got.dtype]
        scale = max(1.0, float(want.abs().max()))
        error = (got64 - want).abs()
        if not bool(torch.isfinite(error).all()) or float(error.max()) > bound * scale:
            error[~torch.isfinite(error)] = float("inf")
            at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
            self.fail(name, f"error {float(error.max()):.3g} at {at}, expected at most {bound * scale:.3g}: "
                            f"{float(got64[tuple(at)]):.6g} for {float(want[tuple(at)]):.6g}")

    def workspace(self, name, args):
        memory = ops.workspace(self.lib.workspace_bytes(name, args), self.device)
        return None if memory is None else memory.fill_(POISON)


# rows, cols, gap: what 16-byte loads like, and what they do not
SHAPES = [(0, 64, 0), (1, 1, 0), (1, 4096, 0), (5, 7, 3), (37, 257, 0), (3, 1000, 24), (130, 768, 0), (17, 2880, 8),
          (70, 4096, 0), (9, 5003, 1), (3, 8192, 0), (4, 16384, 0), (3, 20011, 5)]
QUANTIZED = [F32, F16, BF16]
PAIRS = [(F32, F32), (BF16, BF16), (F16, F16), (F32, BF16), (BF16, F32)]


def title(op, shape, *types):
    return f"{op} {shape[0]}x{shape[1]}+{shape[2]} " + " ".join(str(t).split(".")[-1] for t in types)


def grad(function, *inputs):
    """Outputs and, for the random dy given back, gradients, in float64."""
    leaves = [None if x is None else x.detach().double().cpu().requires_grad_() for x in inputs]
    return leaves, function(*leaves)


def norm_cases(case, few):
    lib = case.lib
    for kind in (ops.RMS, ops.LAYER):
        for number, shape in enumerate(SHAPES):
            n, cols, gap = shape
            for t_in, t_out in PAIRS if number % 3 == 0 and not few else PAIRS[number % 5 :][:1]:
                name = title(("rmsnorm", "layernorm")[kind], shape, t_in, t_out)
                with_residual, weighted = number % 2 == 1, number % 4 != 2
                offset = 1.0 if number % 3 == 1 else 0.0
                x = case.floats(n, cols, dtype=t_in, gap=gap)
                residual = case.floats(n, cols, dtype=t_in, gap=gap) if with_residual else None
                weight = case.floats(cols, dtype=t_out) if weighted else None
                t_bias = F32 if number % 2 == 0 else t_out
                bias = case.floats(cols, dtype=t_bias) if weighted and kind == ops.LAYER else None
                dy, dsum = case.floats(n, cols, dtype=t_out, gap=gap), None
                total = case.out(n, cols, dtype=t_in, gap=gap) if with_residual else None
                y, mean, rstd = case.out(n, cols, dtype=t_out, gap=gap), case.out(n), case.out(n)
                case.run(name, lambda: lib.norm(kind, x, y, weight, bias, residual, total, offset, 1e-5, mean, rstd))
                s = x if total is None else total
                if with_residual:
                    case.close(name + " sum", total, x.double() + residual.double())
                    dsum = case.floats(n, cols, dtype=t_in, gap=gap)

                def reference(s, w, b):
                    v = torch.ones(cols, dtype=torch.float64) if w is None else w + offset
                    if kind == ops.LAYER:
                        return F.layer_norm(s, (cols,), v, b, 1e-5)
                    return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-5) * v

                (s64, w64, b64), want = grad(reference, s, weight, bias)
                case.close(name, y, want)
                if n == 0:
                    continue
                if kind == ops.LAYER:
                    case.close(name + " mean", mean, s64.mean(-1))
                want.backward(dy.double().cpu())
                dx = case.out(n, cols, dtype=t_in, gap=gap)
                dweight = case.out(cols, dtype=t_out) if weighted else None
                dbias = case.out(cols, dtype=t_bias) if bias is not None else None
                args = lib.norm_backward_args(kind, s, dy, dx, weight, dsum, offset, mean, rstd, dweight, dbias)
                workspace = case.workspace("mr_norm_backward", args)
                case.run(name + " backward", lambda: lib.call_with_workspace("mr_norm_backward", args, workspace))
                case.close(name + " dx", dx, s64.grad + (0 if dsum is None else dsum.double().cpu()))
                if weighted:
                    case.close(name + " dweight", dweight, w64.grad)
                if bias is not None:
                    case.close(name + " dbias", dbias, b64.grad)
    weight = case.floats(48)  # gradients of weights over no rows are zeros, over many they are sums of blocks
    for n in (0, 5000):
        x, dy, rstd = case.floats(n, 48), case.floats(n, 48), case.floats(n).abs()
        dx, dweight = case.out(n, 48), case.out(48)
        args = lib.norm_backward_args(ops.RMS, x, dy, dx, weight, rstd=rstd, dweight=dweight)
        workspace = case.workspace("mr_norm_backward", args)
        case.run("rows", lambda: lib.call_with_workspace("mr_norm_backward", args, workspace))
        want = (dy.double() * x.double() * rstd.double()[:, None]).sum(0)
        case.close(f"dweight of {n} rows", dweight, want)


def quantize_cases(case, few):
    lib = case.lib
    for number, shape in enumerate(SHAPES):
        n, cols, gap = shape
        for how in (ops.FP8_1X128, ops.FP8_ROW, ops.INT8_ROW):
            dtype = QUANTIZED[(number + how) % 3]
            name = title(f"norm + quantize {how}", shape, dtype)
            x, weight = case.floats(n, cols, dtype=dtype, gap=gap), case.floats(cols, dtype=dtype)
            if n > 1:
                x[1] = 0
            groups = (cols + 127) // 128 if how == ops.FP8_1X128 else 1
            codes, scales = case.out(n, cols, dtype=torch.int8, gap=gap), case.out(n, groups, gap=1)
            case.run(name, lambda: lib.norm(ops.RMS, x, None, weight, quantize=how, codes=codes, scales=scales))
            if n == 0:
                continue
            x64 = x.double().cpu()
            y = x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double().cpu()
            width = 128 if how == ops.FP8_1X128 else cols
            padded = F.pad(y, (0, groups * width - cols)).view(n, groups, width)
            top = 127.0 if how == ops.INT8_ROW else 448.0
            want = padded.abs().amax(-1) / top
            case.close(name + " scales", scales, want, bound=2e-6)
            got = codes.cpu() if how == ops.INT8_ROW else codes.cpu().contiguous().view(torch.float8_e4m3fn)
            by = scales.double().cpu().repeat_interleave(width, 1)[:, :cols]
            back = got.double() * by
            # Half a step: of int8 the scale, of E4M3 a 16th of the number (or half of 2^-9 scales).
            step = by * 0.501 if how == ops.INT8_ROW else torch.maximum(y.abs() / 15.9, by * 2.0**-10 * 1.01)
            bad = (back - y).abs() > step + 1e-6 * y.abs().max()
            case.checks += 1
            if not bool(torch.isfinite(back).all()) or bool(bad.any()):
                case.fail(name, f"{int(bad.sum())} of {bad.numel()} codes are off by more than half a step")


def rotary_cases(case, few):
    lib = case.lib
    for heads, head_dim, half, interleaved, magnitude, gap in (
            (4, 64, 32, False, 1.0, 0), (4, 64, 32, True, 1.0, 0), (3, 128, 32, False, 1.3, 8),
            (2, 96, 20, True, 0.7, 0), (5, 80, 16, False, 1.0, 16), (1, 7, 3, False, 1.0, 0),
            (2, 10, 5, True, 1.1, 3), (2, 16, 0, False, 1.0, 0)):
        for n in (0, 1, 37):
            for t_in, t_out in PAIRS[:1] if few and n else PAIRS:
                name = title(f"rotary heads {heads} dim {head_dim} half {half} pairs {int(interleaved)}",
                             (n, heads * head_dim, gap), t_in, t_out)
                x = case.floats(n, heads * head_dim, dtype=t_in, gap=gap)
                positions = case.integers(1 << 20, n)
                inv_freq = (10000.0 ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))).float()
                angle = positions.double().cpu()[:, None] * inv_freq.double()[None, :]
                c, s = (torch.cos(angle) * magnitude)[:, None], (torch.sin(angle) * magnitude)[:, None]
                inv_freq = inv_freq.to(case.device)

                def reference(x):
                    h = x.reshape(n, heads, head_dim)
                    a = h[..., 0:2 * half:2] if interleaved else h[..., :half]
                    b = h[..., 1:2 * half:2] if interleaved else h[..., half:2 * half]
                    first, second = a * c - b * s, b * c + a * s
                    pairs = torch.stack((first, second), -1).flatten(2)
                    return torch.cat((pairs if interleaved else torch.cat((first, second), -1), h[..., 2 * half:]), -1).view(n, heads * head_dim)

                y = case.out(n, heads * head_dim, dtype=t_out, gap=gap)
                case.run(name, lambda: lib.rotary(x, y, positions, inv_freq, heads, head_dim, magnitude, interleaved))
                (x64,), want = grad(reference, x)
                case.close(name, y, want)
                if n == 0:
                    continue
                dy = case.floats(n, heads * head_dim, dtype=t_out, gap=gap)
                want.backward(dy.double().cpu())
                dx = case.out(n, heads * head_dim, dtype=t_in, gap=gap)
                case.run(name + " backward", lambda: lib.rotary(dy, dx, positions, inv_freq, heads, head_dim, magnitude,
                                                                interleaved, inverse=True))
                case.close(name + " dx", dx, x64.grad)
                in_place = x.clone()
                lib.rotary(in_place, in_place, positions, inv_freq, heads, head_dim, magnitude, interleaved)
                case.close(name + " in place", in_place, want)


def activation_reference(kind, x, up, alpha, limit):
    if kind in (ops.GELU, ops.GEGLU):
        y = F.gelu(x)
    elif kind in (ops.GELU_TANH, ops.GEGLU_TANH):
        y = F.gelu(x, approximate="tanh")
    elif kind == ops.CLAMPED_SWIGLU:
        g = x.clamp(max=limit)
        return g * torch.sigmoid(alpha * g) * (up.clamp(-limit, limit) + 1)
    else:
        y = F.silu(x)
    return y if up is None else y * up


def activation_cases(case, few):
    lib = case.lib
    for kind in range(7):
        for number, shape in enumerate(SHAPES[:9]):
            n, cols, gap = shape
            for t_in, t_out in PAIRS if number % 4 == 3 and not few else PAIRS[(number + kind) % 5 :][:1]:
                name = title(f"activation {kind}", shape, t_in, t_out)
                x = case.floats(n, cols, dtype=t_in, gap=gap, scale=4.0)
                up = case.floats(n, cols, dtype=t_in, gap=gap, scale=4.0) if kind >= ops.SWIGLU else None
                dy = case.floats(n, cols, dtype=t_out, gap=gap)
                alpha, limit = 1.702, 3.0
                y = case.out(n, cols, dtype=t_out, gap=gap)
                case.run(name, lambda: lib.activation(kind, x, y, up, alpha, limit))
                (x64, up64), want = grad(lambda a, b: activation_reference(kind, a, b, alpha, limit), x, up)
                case.close(name, y, want)
                if n == 0:
                    continue
                want.backward(dy.double().cpu())
                dx = case.out(n, cols, dtype=t_in, gap=gap)
                dup = case.out(n, cols, dtype=t_in, gap=gap) if up is not None else None
                case.run(name + " backward", lambda: lib.activation_backward(kind, x, dy, dx, up, dup, alpha, limit))
                case.close(name + " dx", dx, x64.grad)
                if up is not None:
                    case.close(name + " dup", dup, up64.grad)


def softmax_cases(case, few):
    lib = case.lib
    for number, shape in enumerate(SHAPES):
        n, cols, gap = shape
        for t_in, t_out in PAIRS if number % 3 == 1 and not few else PAIRS[number % 5 :][:1]:
            name, scale = title("softmax", shape, t_in, t_out), (1.0, -0.5, 3.0)[number % 3]
            x = case.floats(n, cols, dtype=t_in, gap=gap, scale=3.0)
            if cols > 5:
                x[:, 3] = -float("inf") if scale > 0 else float("inf")
            y = case.out(n, cols, dtype=t_out, gap=gap)
            case.run(name, lambda: lib.softmax(x, y, scale))
            case.close(name, y, torch.softmax(x.double().cpu() * scale, -1))
            if n == 0:
                continue
            dy = case.floats(n, cols, dtype=t_out, gap=gap)
            dx = case.out(n, cols, dtype=t_in, gap=gap)
            case.run(name + " backward", lambda: lib.softmax_backward(y, dy, dx, scale))
            y64, dy64 = y.double().cpu(), dy.double().cpu()
            case.close(name + " dx", dx, scale * y64 * (dy64 - (y64 * dy64).sum(-1, keepdim=True)))


def cross_entropy_cases(case, few):
    lib = case.lib
    for number, shape in enumerate(SHAPES + [(3, 201088 if not few else 20001, 0)]):
        n, vocab, gap = shape
        t_in, t_out = PAIRS[number % 5]
        name = title("cross-entropy", shape, t_in, t_out)
        logits = case.floats(n, vocab, dtype=t_in, gap=gap, scale=5.0)
        targets = case.integers(vocab, n)
        if n > 2:
            targets[1] = -100
        loss, lse = case.out(n), case.out(n)
        case.run(name, lambda: lib.cross_entropy(logits, targets, loss, lse))
        wanted = targets.long().cpu()
        (l64,), want = grad(lambda l: F.cross_entropy(l, wanted, reduction="none", ignore_index=-100), logits)
        case.close(name + " loss", loss, want)
        case.close(name + " lse", lse, torch.logsumexp(l64, -1))
        if n == 0:
            continue
        dloss = case.floats(n)
        want.backward(dloss.double().cpu())
        dlogits = case.out(n, vocab, dtype=t_out, gap=gap)
        case.run(name + " backward", lambda: lib.cross_entropy_backward(logits, targets, lse, dloss, dlogits))
        case.close(name + " dlogits", dlogits, l64.grad)
        if t_in == t_out:
            lib.cross_entropy_backward(logits, targets, lse, dloss, logits)
            case.close(name + " in place", logits, l64.grad)


def linear_cross_entropy_cases(case, few):
    """The gradients without logits: of any chunks the same bits, each alone, and added to what is there."""
    lib, operation = case.lib, "mr_linear_cross_entropy_backward"
    sizes = [(1, 1, 1, 0), (7, 13, 131, 3), (37, 64, 300, 0), (270, 40, 530, 8)]
    for number, (n, inner, vocab, gap) in enumerate(sizes if few else sizes + [(1100, 256, 4500, 0), (515, 200, 2047, 8)]):
        for turn, (t_in, t_weight, t_out) in enumerate([(BF16, BF16, F32), (F32, F32, F32), (F16, F16, F16),
                                                        (F32, BF16, BF16), (BF16, BF16, BF16)]):
            if few and turn != number:
                continue
            name = f"linear cross-entropy {n} x {inner} x {vocab} {t_in} {t_weight} {t_out}"
            hidden = case.floats(n, inner, dtype=t_in, gap=gap)
            weight = case.floats(vocab, inner, dtype=t_weight, gap=gap, scale=0.3)
            targets, dloss = case.integers(vocab, n), case.floats(n)
            if n > 2:
                targets[1] = -100
            wanted = targets.long().cpu()
            (h64, w64), loss = grad(lambda h, w: F.cross_entropy(h @ w.t(), wanted, reduction="none", ignore_index=-100),
                                    hidden, weight)
            loss.backward(dloss.double().cpu())
            lse = torch.logsumexp(h64.detach() @ w64.detach().t(), -1).float().to(case.device)
            dhidden, dweight = case.out(n, inner, dtype=t_out, gap=gap), case.out(vocab, inner, dtype=t_out, gap=gap)

            def call(to_hidden, to_weight, accumulate=False, chunks=(0, 0)):
                args = lib.linear_cross_entropy_backward_args(hidden, weight, targets, lse, dloss, to_hidden, to_weight,
                                                              accumulate, chunks)
                lib.call_with_workspace(operation, args, case.workspace(operation, args))
            case.run(name, lambda: call(dhidden, dweight))
            # Of float32 the GPU multiplies 22 bits: exp of logits makes 5e-5 of it.
            bound = (1e-4 if t_in == F32 else 3e-5) if t_out == F32 else None
            case.close(name + " dhidden", dhidden, h64.grad, bound)
            case.close(name + " dweight", dweight, w64.grad, bound)
            again = torch.full_like(dhidden, 7), torch.full_like(dweight, 7)
            for chunks in ((256, 256), (1, 1000), (2000, 512)):
                call(*again, chunks=chunks)
                if not (torch.equal(again[0], dhidden) and torch.equal(again[1], dweight)):
                    case.fail(name, f"other bits in chunks of {chunks}")
            call(None, again[1], accumulate=True)
            case.close(name + " twice", again[1], 2 * w64.grad, bound and 2 * bound)
            call(again[0], None)
            case.close(name + " dhidden alone", again[0], h64.grad, bound)


def embedding_cases(case, few):
    lib = case.lib
    for number, (n, cols, gap, vocab) in enumerate(
            ((0, 64, 0, 10), (1, 1, 0, 1), (5, 7, 3, 3), (100, 257, 0, 11), (1025, 64, 8, 2), (3000, 96, 0, 70001),
             (2500, 128, 0, 257), (700, 72, 0, 256))):
        t_in, t_out = PAIRS[number % 5]
        name = title(f"embedding vocab {vocab}", (n, cols, gap), t_in, t_out)
        table = case.floats(vocab, cols, dtype=t_in, gap=gap)
        tokens = case.integers(vocab, n)
        if n > 200:
            tokens[50:150] = tokens[0]  # one that comes often
        y = case.out(n, cols, dtype=t_out, gap=gap)
        case.run(name, lambda: lib.embedding(table, tokens, y, 1.5))
        case.close(name, y, table.double().cpu()[tokens.long().cpu()] * 1.5)
        dy = case.floats(n, cols, dtype=t_out, gap=gap)
        want = torch.zeros(vocab, cols, dtype=torch.float64).index_add_(0, tokens.long().cpu(), dy.double().cpu() * 1.5)
        dtable = case.out(vocab, cols, dtype=t_in, gap=gap)
        args = lib.embedding_backward_args(tokens, dy, dtable, 1.5)
        workspace = case.workspace("mr_embedding_backward", args)
        case.run(name + " backward", lambda: lib.call_with_workspace("mr_embedding_backward", args, workspace))
        case.close(name + " dtable", dtable, want)
        more = case.floats(vocab, cols, dtype=t_in, gap=gap)
        want = want + more.double().cpu()
        args = lib.embedding_backward_args(tokens, dy, more, 1.5, accumulate=True)
        lib.call_with_workspace("mr_embedding_backward", args, workspace)
        case.close(name + " accumulated", more, want)


def philox(counter, seed):
    """Philox 4x32-10 in Python's integers; the known answers are Random123's."""
    c, key, mask = list(counter), [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c


def dropout_cases(case, few):
    lib = case.lib
    assert philox([0] * 4, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    for number, shape in enumerate([(0, 8, 0), (1, 1, 0), (5, 7, 3), (13, 64, 0), (3, 130, 6)]):
        n, cols, gap = shape
        for t_in, t_out in PAIRS:
            for p in (0.0, 0.1, 0.75):
                name, seed, offset = title(f"dropout {p}", shape, t_in, t_out), 0x123456789ABCDEF, (7 << 32) + number
                x = case.floats(n, cols, dtype=t_in, gap=gap) + 10.0
                y = case.out(n, cols, dtype=t_out, gap=gap)
                case.run(name, lambda: lib.dropout(x, y, p, seed, offset))
                exact_p = float(torch.tensor(p, dtype=F32).double())
                below = int(exact_p * 2**32)
                words = [[philox([c // 4, r, offset & 0xFFFFFFFF, offset >> 32], seed)[c % 4] for c in range(cols)]
                         for r in range(n)]
                kept = torch.tensor(words, dtype=torch.int64).view(n, cols) >= below
                case.close(name, y, x.double().cpu() * kept / (1.0 - exact_p))
    x, y = torch.ones(512, 4096, device=case.device), case.out(512, 4096)
    case.run("dropout share", lambda: lib.dropout(x, y, 0.25, 1, 2))
    case.checks += 1
    share = float((y == 0).double().mean())
    if abs(share - 0.25) > 0.0015:  # five standard deviations of 2 M draws
        case.fail("dropout share", f"{share} are dropped, expected 0.25")


def plain_cases(case, few):
    """BF16 rows without gaps, which have kernels of their own on a GPU, in every length that one of them is for."""
    kept = [(of, list(of)) for of in (SHAPES, PAIRS, QUANTIZED)]
    SHAPES[:] = [(67, 256, 0), (67, 1024, 0), (33, 4096, 0), (300, 4096, 0), (37, 8192, 0), (9, 16384, 0), (11, 20008, 0),
                 (2500, 512, 0)][: 3 if few else None]
    PAIRS[:], QUANTIZED[:] = [(BF16, BF16)] * 5, [BF16] * 3
    for run in (norm_cases, quantize_cases, activation_cases, softmax_cases, cross_entropy_cases):
        run(case, few)
    for of, before in kept:
        of[:] = before
    # A long row's sum is the same, whether few rows have many CTAs each or many rows one.
    rows, vocab = (3, 600) if few else (520, 33_000)
    logits, targets = case.floats(rows, vocab, dtype=BF16, scale=5.0), case.integers(vocab, rows)
    many, few_rows = [case.out(n) for n in (rows, rows)], [case.out(n) for n in (2, 2)]
    case.lib.cross_entropy(logits, targets, *many)
    case.lib.cross_entropy(logits[:2], targets[:2], *few_rows)
    case.outputs = []
    case.close("long rows' lse", few_rows[1], torch.logsumexp(logits[:2].double(), -1))
    for all_rows, alone in zip(many, few_rows):
        if not torch.equal(all_rows[:2], alone):
            case.fail("long rows", "other bits alone than among many")


GROUPS = {"norm": norm_cases, "quantize": quantize_cases, "rotary": rotary_cases, "activation": activation_cases,
          "softmax": softmax_cases, "cross_entropy": cross_entropy_cases,
          "linear_cross_entropy": linear_cross_entropy_cases, "embedding": embedding_cases, "dropout": dropout_cases,
          "plain": plain_cases}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--isa")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--group", choices=GROUPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--few", action="store_true", help="fewer types and no long rows")
    options = parser.parse_args()
    if options.device != "cpu":
        torch.cuda.init()
    lib = ops.Library(options.library, options.device, threads=0 if options.device != "cpu" else 2, isa=options.isa)
    if options.few:
        del SHAPES[8:]
    failed = 0
    for name, run in GROUPS.items():
        if options.group not in (None, name):
            continue
        case = Case(lib, "cuda" if options.device != "cpu" else "cpu", options.seed, options.repeat)
        try:
            run(case, options.few)
        except Exception as error:  # the next group may still tell something
            case.fail(name, f"{type(error).__name__}: {error}")
        print(f"{name}: {case.checks} comparisons on {options.device}, {len(case.failures)} failures", flush=True)
        failed += len(case.failures) + (case.checks == 0)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

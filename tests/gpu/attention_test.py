#!/usr/bin/env python3
"""Attention of a device against torch in float64, over the product of its features: head dims, query heads per KV
head, windows, sinks, types of the KV cache, blocks in order and scattered, ragged batches of prompts and decodes.
attention_driver runs the steps through the same calls as a model's; outputs and cache are NaN before they are written.

    attention_test.py ATTENTION_DRIVER [--device cuda] [--match 'dim 64 .* kv fp8'] [--part 0/3]    needs torch

What torch is given is what the device was given, rounded where the device rounds by contract: rotated keys and values
to the cache's type and, on the tensor cores, queries to bf16: times scale and log2 e (the paged kernels) or times scale
alone (the tile kernel, which caps scores before the softmax). Everything from there on is float64. A device may leave
queries as they are: a case passes if all its rows are within one of the three bounds.

The bound of an output, with weights w, values v, W = sum w and L positions:
    tensor cores  (2^-8 + (L/8 + 32) 2^-22) sum w|v| / W    weights are rounded to bf16, off by 2^-8 of them at most;
                                                            a chain of L/16 products in float32 that cut what does not
                                                            fit, factors of exp2 once a tile of 128
    else          (L + 64) 2^-23 sum w|v| / W               one float32 chain over the positions
    and both      sum w d (|v| + |out|) / W                 what an error d of a score moves, to first order:
                                                            d = ln 2 (dim/16 + 8) 2^-22 sum |q||k|, log2 scores
Ends with 77, loudly, where torch or a GPU is missing.
"""
import argparse
import itertools
import math
import re
import struct
import subprocess
import sys
import time

SKIPPED = 77
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 2, "fp8": 3}  # DType
LOG2E = 1.4426950408889634
ROUNDINGS = ("times scale and log2 e", "times scale", "none")  # of queries, to bf16
BLOCK = 16


def skip(why):
    print(f"\n*** SKIPPED: attention was not compared with torch: {why} ***\n", file=sys.stderr)
    sys.exit(SKIPPED)


# ---------------------------------------------------------------- cases

# Steps of (sequence, new tokens): prompts in chunks beside single tokens, decodes alone (which fuse the rotation and,
# the second time, replay), few rows that are not decodes, contexts past a tile of 128 and a span of 512.
def decode(*sequences):
    return [(s, 1) for s in sequences]


RAGGED = [[(0, 130), (1, 1), (2, 17)], [(0, 300), (1, 1), (2, 33), (3, 5)], decode(0, 1, 2, 3),
          [(0, 90), (3, 1), (4, 600), (1, 1)], decode(0, 1, 2, 3, 4), decode(0, 1, 2, 3, 4), decode(0, 1, 2, 3, 4),
          [(0, 2), (1, 1)], decode(4), [(2, 9), (4, 7), (1, 16)]]
# One context past eight spans, alone and among so many that rows share multiprocessors.
LONG = [[(0, 900)], [(0, 900)] + [(s, 40) for s in range(1, 7)], decode(*range(7)),
        [(0, 900)] + [(s, 12) for s in range(7, 24)], decode(*range(24)), decode(*range(24)), [(0, 900)], [(0, 900)],
        decode(*range(24)), decode(*range(24)), decode(0), decode(0)]


class Case:
    def __init__(self, index, dim, heads, kv_heads, window, sinks, kv_type, in_order, steps):
        self.index, self.dim, self.heads, self.kv_heads = index, dim, heads, kv_heads
        self.window, self.sinks, self.kv_type, self.in_order, self.steps = window, sinks, kv_type, in_order, steps
        # How positions turn goes round: all dimensions in halves or in pairs, some of them, and with a magnitude.
        way = (index + index // 4) % 4  # not in step with what changes from case to case
        self.half = dim // 4 if way == 2 else dim // 2
        self.interleaved = way == 1
        self.magnitude = 1.25 if way == 3 else 1.0
        lengths = {}
        for step in steps:
            for sequence, tokens in step:
                lengths[sequence] = lengths.get(sequence, 0) + tokens
        self.max_context = max(lengths.values())
        self.max_tokens = max(sum(tokens for _, tokens in step) for step in steps)
        self.num_blocks = sum(-(-n // BLOCK) for n in lengths.values()) + 2

    def __str__(self):
        return (f"case {self.index}: dim {self.dim} heads {self.heads}/{self.kv_heads} window {self.window}"
                f"{' sinks' if self.sinks else ''} kv {self.kv_type} blocks {'in order' if self.in_order else 'scattered'}"
                f" rotating {2 * self.half}{' in pairs' if self.interleaved else ''}")


def all_cases():
    groups = [(4, 4), (8, 2), (8, 1), (6, 2), (16, 1)]  # 16: more than the paged kernels take
    shapes = []
    # The fastest to change last: executors are made anew when a shape or type does.
    for dim, (heads, kv_heads), kv_type, window in itertools.product((64, 128), groups, KV_TYPES, (0, 128, 37)):
        for sinks, in_order in itertools.product((False, True), (False, True)):
            shapes.append((dim, heads, kv_heads, window, sinks, kv_type, in_order, RAGGED))
    for dim, kv_type, window in itertools.product((20, 80, 96, 256), KV_TYPES, (0, 37)):
        shapes.append((dim, 6, 2, window, True, kv_type, False, RAGGED))
    for dim, kv_type, window in itertools.product((64, 128), ("bf16", "fp8"), (0, 1000)):
        shapes.append((dim, 16, 8, window, True, kv_type, False, LONG))
    return [Case(i, *shape) for i, shape in enumerate(shapes)]


# ---------------------------------------------------------------- the oracle

def float32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def rotated(case, x, positions, inv_freq):
    """float32 [rows, heads, dim], as the device computes it: float64 angles, then float32 with one fused product."""
    angle = positions.double()[:, None] * inv_freq.double()[None, :]
    c = (torch.cos(angle) * case.magnitude).float().double()[:, None, :]
    s = (torch.sin(angle) * case.magnitude).float().double()[:, None, :]
    n = 2 * case.half
    first, second = (slice(0, n, 2), slice(1, n, 2)) if case.interleaved else (slice(0, case.half), slice(case.half, n))
    a, b = x[..., first].double(), x[..., second].double()
    out = x.clone()
    out[..., first] = (a * c - (b * s).float().double()).float()
    out[..., second] = (b * c + (a * s).float().double()).float()
    return out


def stored(kv_type, x):
    """What the cache gives back for float32 [rows, heads, dim], in float64."""
    if kv_type == "f16":
        return x.half().double()
    if kv_type == "bf16":
        return x.bfloat16().double()
    if kv_type == "fp8":  # a power of two per token and head brings the largest to at most 448
        mantissa, exponent = torch.frexp(x.abs().amax(-1, keepdim=True))
        power = (exponent - 1 - 8 + (mantissa > 0.875).int()).clamp(-32, 7)
        scale = torch.exp2(power.double())
        codes = (x.double() / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.double() * scale
    return x.double()


def attention(case, query, keys, values, sinks, first, rounding, twist=""):
    """Output and bound, float64 [rows, heads, dim]: rotated queries at positions first.., all keys and values so far.
    `twist`: an error on purpose."""
    rows, length = query.shape[0], keys.shape[0]
    tensor_cores = rounding != "none"
    if rounding == "times scale and log2 e":
        q = (query * float32(case.scale * float32(LOG2E))).bfloat16().double()
    elif rounding == "times scale":
        q = (query * case.scale).bfloat16().double() * LOG2E
    else:
        q = query.double() * (case.scale * LOG2E)
    group = case.heads // case.kv_heads
    heads = [h // group for h in range(case.heads)]
    if twist == "another head":
        heads = [(h // group + 1) % case.kv_heads for h in range(case.heads)]
    q = q.transpose(0, 1)  # [heads, rows, dim]
    k, v = keys.transpose(0, 1)[heads], values.transpose(0, 1)[heads]  # [heads, length, dim]
    scores = q @ k.transpose(1, 2)
    error = math.log(2) * (case.dim / 16 + 8) * 2.0**-22 * (q.abs() @ k.abs().transpose(1, 2))
    row = first + torch.arange(rows, device=q.device)[:, None]
    position = torch.arange(length, device=q.device)[None, :]
    seen = position <= row
    if twist == "not the row itself":
        seen = (position < row) | (row == 0)
    if case.window:
        window = case.window + {"a wider window": 1, "a narrower window": -1}.get(twist, 0)
        seen &= position > row - window
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None and twist != "no sinks":
        sink = (sinks.double() * LOG2E)[:, None, None]
        top = torch.maximum(top, sink)
    w = torch.exp2(scores - top)
    total = w.sum(-1, keepdim=True)
    if sinks is not None and twist != "no sinks":
        total = total + torch.exp2(sink - top)
    out = (w @ v) / total
    size = (w @ v.abs()) / total
    moved = ((w * error) @ v.abs() + (w * error).sum(-1, keepdim=True) * out.abs()) / total
    share = 2.0**-8 + (length / 8 + 32) * 2.0**-22 if tensor_cores else (length + 64) * 2.0**-23
    return out.transpose(0, 1), (share * size + moved).transpose(0, 1) + 1e-30


TWISTS = ("a wider window", "a narrower window", "no sinks", "not the row itself", "another head")


# ---------------------------------------------------------------- running

class Driver:
    def __init__(self, path, device):
        self.process = subprocess.Popen([path, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def write(self, data):
        try:
            self.process.stdin.write(data)
        except BrokenPipeError:
            self.gone()

    def begin(self, case, inv_freq, sinks):
        header = struct.pack("<12i2f", case.heads, case.kv_heads, case.dim, case.window, case.half,
                             sinks is not None, case.interleaved, case.in_order, KV_TYPES[case.kv_type],
                             case.max_tokens, case.max_context, case.num_blocks, case.scale, case.magnitude)
        self.write(header + raw(inv_freq) + (raw(sinks) if sinks is not None else b""))

    def step(self, step, query, key, value):
        flat = [x for piece in step for x in piece]
        self.write(struct.pack(f"<{len(flat) + 1}i", len(step), *flat))
        for x in (query, key, value):
            self.write(raw(x))
        self.process.stdin.flush()
        answer = self.process.stdout.read(query.numel() * 4)
        if len(answer) != query.numel() * 4:
            self.gone()
        return torch.frombuffer(bytearray(answer), dtype=torch.float32).view(query.shape).to(query.device)

    def end_case(self):
        self.write(struct.pack("<i", 0))

    def close(self):
        self.process.stdin.close()
        return self.process.wait()

    def gone(self):
        sys.exit(f"attention_test: the driver ended with status {self.process.wait()}")


def raw(x):
    return x.cpu().contiguous().numpy().tobytes()


class Worst:
    """The largest error as a share of its bound, for each rounding of queries, and where."""

    def __init__(self):
        self.ratio, self.where = dict.fromkeys(ROUNDINGS, 0.0), dict.fromkeys(ROUNDINGS, "")

    def least(self):
        return min(self.ratio.values())

    def see(self, rounding, got, want, bound, where):
        ratio = ((got.double() - want).abs() / bound).nan_to_num(math.inf)
        most = ratio.max().item()
        if most <= self.ratio[rounding]:
            return
        at = int(ratio.argmax())
        row, head, dim = at // ratio[0].numel(), at // ratio.shape[2] % ratio.shape[1], at % ratio.shape[2]
        self.ratio[rounding] = most
        self.where[rounding] = (f"{where} row {row} head {head} dim {dim}: got {got[row, head, dim].item():.7g}, torch "
                                f"{want[row, head, dim].item():.7g}, {most:.3g} times the bound")


def run_case(driver, case, on, twists=("",)):
    """Every row of every step against the oracle and its twists: {twist: Worst}, and how many rows."""
    generator = torch.Generator(device=on).manual_seed(1000 + case.index)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=on)

    def sizes(n):
        return torch.exp2(torch.randint(-2, 1, (n, case.kv_heads, 1), generator=generator, device=on).float())

    case.scale = float32(1 / math.sqrt(case.dim))
    inv_freq = torch.tensor([1e4 ** (-i / case.half) for i in range(case.half)], dtype=torch.float32, device=on)
    sinks = 1 + 2 * normal(case.heads) if case.sinks else None
    # Heads that look at everything and heads that look at few positions; a size of its own for every key and value.
    spread = torch.linspace(0.5, 3.0, case.heads, device=on)[:, None]
    driver.begin(case, inv_freq, sinks)
    caches, worst, rows = {}, {twist: Worst() for twist in twists}, 0
    for number, step in enumerate(case.steps):
        n = sum(tokens for _, tokens in step)
        rows += n
        query = spread * normal(n, case.heads, case.dim)
        key = normal(n, case.kv_heads, case.dim) * sizes(n)
        value = normal(n, case.kv_heads, case.dim) * sizes(n)
        got = driver.step(step, query, key, value)
        at = 0
        for sequence, tokens in step:
            mine = slice(at, at + tokens)
            at += tokens
            before = caches[sequence][0].shape[0] if sequence in caches else 0
            positions = torch.arange(before, before + tokens, device=on)
            new = (stored(case.kv_type, rotated(case, key[mine], positions, inv_freq)),
                   stored(case.kv_type, value[mine]))
            caches[sequence] = tuple(torch.cat(p) for p in zip(caches[sequence], new)) if before else new
            q = rotated(case, query[mine], positions, inv_freq)
            for twist, rounding in itertools.product(twists, ROUNDINGS):
                want, bound = attention(case, q, *caches[sequence], sinks, before, rounding, twist)
                worst[twist].see(rounding, got[mine], want, bound, f"{case}, step {number} sequence {sequence}")
    driver.end_case()
    return worst, rows


def unnoticed_twists(driver, cases, on):
    """A test that cannot fail proves nothing: the oracle with an error in it must not agree."""
    case = next(c for c in cases if c.dim == 64 and c.kv_heads == 2 and c.window == 37 and c.sinks)
    worst, _ = run_case(driver, case, on, TWISTS)
    return [f"torch with {twist} agrees: {w.ratio}" for twist, w in worst.items() if w.least() <= 1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("driver")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--match", default="")
    parser.add_argument("--part", default="0/1", help="K/N: every Nth case from the Kth on")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    global torch
    try:
        import torch
    except ImportError as error:
        skip(f"this Python has no torch ({error})")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        skip("torch finds no GPU")
    on = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.time()
    driver = Driver(options.driver, options.device)
    cases = [case for case in all_cases() if re.search(options.match, str(case))][first::step]
    largest, tensor_cores, rows, failures = 0.0, 0, 0, unnoticed_twists(driver, all_cases(), on)
    for case in cases:
        worst, n = run_case(driver, case, on)
        worst = worst[""]
        rows += n
        best = min(ROUNDINGS, key=lambda which: worst.ratio[which])
        largest = max(largest, worst.ratio[best])
        tensor_cores += best != "none"
        if worst.ratio[best] > 1:
            failures.append(worst.where[best])
            if len(failures) >= 10:
                break
    print(f"[  figure  ] {options.device} attention against torch float64: {len(cases)} cases ({tensor_cores} on the "
          f"tensor cores), {rows} rows, largest error {largest:.3f} of its bound, {time.time() - began:.0f} s")
    print("".join(f"FAILED {failure}\n" for failure in failures), end="")
    status = driver.close()
    sys.exit(1 if failures or status != 0 else 0)


if __name__ == "__main__":
    main()

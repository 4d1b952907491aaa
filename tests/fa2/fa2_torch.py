#!/usr/bin/env python3
"""torch's scaled_dot_product_attention at the shapes of the frozen table (14 heads, 2 KV heads, d64, FP16), on tensors
that are on the GPU already. Prints one JSON object; status 77 without torch or a GPU.

  call    us a call by the host's clock: 200 calls, one wait at the end; kernel: us a call in a CUDA graph.
  gqa: enable_gqa. expanded: K and V kept once per query head. grouped: the 7 heads of a group as 7 query rows.
The least of the three counts: the table compares with the best that torch has.
"""

import json
import statistics
import sys
import time

LENGTHS = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HEADS, KV_HEADS, DIM = 14, 2, 64


def variants(torch, keys):
    sdpa = torch.nn.functional.scaled_dot_product_attention
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.float16)  # noqa: E731
    q, k, v = make(1, HEADS, 1, DIM), make(1, KV_HEADS, keys, DIM), make(1, KV_HEADS, keys, DIM)
    group = HEADS // KV_HEADS
    wide_k, wide_v = k.repeat_interleave(group, 1).contiguous(), v.repeat_interleave(group, 1).contiguous()
    grouped = q.view(1, KV_HEADS, group, DIM)
    return {"gqa": lambda: sdpa(q, k, v, enable_gqa=True), "expanded": lambda: sdpa(q, wide_k, wide_v),
            "grouped": lambda: sdpa(grouped, k, v)}


def call_time(torch, run):
    for _ in range(20):
        run()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 200 * 1e6)
    return statistics.median(times)


def kernel_time(torch, run):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            run()
    times = []
    for i in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 50 * 1e3)
    return statistics.median(times[3:])


def main():
    try:
        import torch
    except ImportError:
        print("*** SKIPPED: torch is not installed ***", file=sys.stderr)
        return 77
    if not torch.cuda.is_available():
        print("*** SKIPPED: torch finds no GPU ***", file=sys.stderr)
        return 77
    rows = []
    with torch.inference_mode():
        for keys in LENGTHS:
            found = {name: {"call": round(call_time(torch, run), 2), "kernel": round(kernel_time(torch, run), 2)}
                     for name, run in variants(torch, keys).items()}
            best = {what: min(of[what] for of in found.values()) for what in ("call", "kernel")}
            rows.append({"keys": keys, **best, "variants": found})
    print(json.dumps({"torch": torch.__version__, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

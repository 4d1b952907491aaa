#!/usr/bin/env python3
"""The fused operations: GB/s, their share of a copy (on a CPU: of reading) of the same size, and torch's GB/s.

    bench/fused.py LIBRARY... [--device cpu [--threads 1]] [--sizes 16 64 256] [--only WORD] [--compile]

LIBRARY is libmillrace_kernels.so, for a GPU of a CUDA build; several are compared with one another. A size is the MB of one BF16
tensor. Bytes are those that must move: every input read once, every output written once. Calls are captured into a CUDA
graph over enough sets of tensors that none is in L2 when its turn comes again; the median of nine replays counts. torch
is timed in the same way, eager, or compiled with --compile.

On a CPU every operation takes turns with reading, and the best of each counts: others may be at work on the
machine. With --threads 1 it is the thread's own time.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "tests/gpu")]
import fused_ops as ops  # noqa: E402  (its folder is put on the path above)

BF16 = torch.bfloat16
COLS, HEADS, HEAD_DIM, VOCAB, TABLE = 4096, 32, 128, 200_064, 65_536
COLD_BYTES = 400 << 20  # all sets together: an H200's L2 has 50 MB
DEVICE = "cuda"
THREADS = 0  # of a CPU; 0: all


def seconds(calls, replays=9):
    """Of one call, the calls being the same on different memory."""
    calls[0]()
    if DEVICE == "cpu":
        return cpu_seconds(calls, replays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:]) / len(calls)


def cpu_seconds(calls, replays):
    clock = time.thread_time if THREADS == 1 else time.perf_counter
    best = float("inf")
    for _ in range(replays):
        for call in calls:
            begin = clock()
            call()
            best = min(best, clock() - begin)
    return best


def tensor(rows, cols=COLS, dtype=BF16):
    if DEVICE == "cpu":  # where random numbers take longer than everything else
        return torch.randn(1, cols, dtype=dtype).expand(rows, cols).contiguous()
    return torch.randn(rows, cols, device=DEVICE, dtype=dtype)


def operations(lib, rows):
    """name -> (bytes, a function that makes a set: (our call, torch's call or None)). rows: of COLS columns."""
    n = rows * COLS
    weight, bias = torch.randn(COLS, device=DEVICE, dtype=BF16), torch.randn(COLS, device=DEVICE, dtype=BF16)
    inv_freq = 10000.0 ** (-torch.arange(HEAD_DIM // 2, device=DEVICE) / (HEAD_DIM / 2))
    positions = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    vocab_rows = max(1, n // VOCAB)
    targets = torch.randint(0, VOCAB, (vocab_rows,), device=DEVICE, dtype=torch.int32)
    tokens = torch.randint(0, TABLE // 8, (rows,), device=DEVICE, dtype=torch.int32)
    table = tensor(TABLE if DEVICE != "cpu" else TABLE // 8)
    statistics_of = torch.rand(rows, device=DEVICE) + 0.5

    def norm(kind, residual=False, quantize=ops.NONE):
        def make():
            x, y = tensor(rows), tensor(rows)
            r, s = (tensor(rows), tensor(rows)) if residual else (None, None)
            codes = scales = None
            if quantize != ops.NONE:
                codes = torch.empty(rows, COLS, device=DEVICE, dtype=torch.int8)
                scales = torch.empty(rows, COLS // 128 if quantize == ops.FP8_1X128 else 1, device=DEVICE)
            out = None if quantize != ops.NONE else y
            b = bias if kind == ops.LAYER else None
            peer = None
            if not residual and quantize == ops.NONE:
                peer = ((lambda: F.layer_norm(x, (COLS,), weight, bias)) if kind == ops.LAYER
                        else (lambda: F.rms_norm(x, (COLS,), weight, 1e-5)))
            return lambda: lib.norm(kind, x, out, weight, b, r, s, quantize=quantize, codes=codes, scales=scales), peer
        return make

    def norm_backward(kind):
        def make():
            x, dy, dx = tensor(rows), tensor(rows), tensor(rows)
            dweight, dbias = torch.empty_like(weight), torch.empty_like(bias) if kind == ops.LAYER else None
            args = lib.norm_backward_args(kind, x, dy, dx, weight, mean=statistics_of, rstd=statistics_of,
                                          dweight=dweight, dbias=dbias)
            space = ops.workspace(lib.workspace_bytes("mr_norm_backward", args), DEVICE)
            peer = None
            if kind == ops.LAYER and DEVICE != "cpu":
                row, backward = statistics_of[:, None], torch.ops.aten.native_layer_norm_backward
                peer = lambda: backward(dy, x, [COLS], row, row, weight, bias, [True] * 3)
            kept = (x, dy, dx, dweight, dbias)  # what args points to
            return lambda kept=kept: lib.call_with_workspace("mr_norm_backward", args, space), peer
        return make

    def rotary():
        x, y = tensor(rows, HEADS * HEAD_DIM), tensor(rows, HEADS * HEAD_DIM)
        return lambda: lib.rotary(x, y, positions, inv_freq, HEADS, HEAD_DIM), None

    def activation(kind, peer):
        def make():
            x, y, up = tensor(rows), tensor(rows), tensor(rows) if kind >= ops.SWIGLU else None
            return lambda: lib.activation(kind, x, y, up), lambda: peer(x, up)
        return make

    def activation_backward(kind, peer):
        def make():
            x, dy, dx = tensor(rows), tensor(rows), tensor(rows)
            up, dup = (tensor(rows), tensor(rows)) if kind >= ops.SWIGLU else (None, None)
            theirs = None if peer is None else lambda: peer(dy, x)
            return lambda: lib.activation_backward(kind, x, dy, dx, up, dup), theirs
        return make

    def softmax():
        x, y = tensor(rows), tensor(rows)
        return lambda: lib.softmax(x, y), lambda: F.softmax(x, -1)

    def softmax_backward():
        y, dy, dx = F.softmax(tensor(rows), -1), tensor(rows), tensor(rows)
        return lambda: lib.softmax_backward(y, dy, dx), lambda: torch.ops.aten._softmax_backward_data(dy, y, -1, BF16)

    def cross_entropy():
        logits, loss = tensor(vocab_rows, VOCAB), torch.empty(vocab_rows, device=DEVICE)
        lse = torch.empty_like(loss)
        wanted = targets.long()
        return (lambda: lib.cross_entropy(logits, targets, loss, lse),
                lambda: F.cross_entropy(logits, wanted, reduction="none"))

    def cross_entropy_backward():
        logits, out = tensor(vocab_rows, VOCAB), tensor(vocab_rows, VOCAB)
        lse, dloss = torch.rand(vocab_rows, device=DEVICE) + 12, torch.rand(vocab_rows, device=DEVICE)
        return lambda: lib.cross_entropy_backward(logits, targets, lse, dloss, out), None

    def embedding():
        y, wanted = tensor(rows), tokens.long()
        return lambda: lib.embedding(table, tokens, y), lambda: F.embedding(wanted, table)

    def embedding_backward():
        dy, dtable, wanted = tensor(rows), torch.empty_like(table), tokens.long()
        args = lib.embedding_backward_args(tokens, dy, dtable)
        space = ops.workspace(lib.workspace_bytes("mr_embedding_backward", args), DEVICE)
        return (lambda: lib.call_with_workspace("mr_embedding_backward", args, space),
                lambda: torch.zeros_like(dtable).index_add_(0, wanted, dy))

    def dropout():
        x, y = tensor(rows), tensor(rows)
        return lambda: lib.dropout(x, y, 0.1, 1, 2), lambda: F.dropout(x, 0.1)

    vocab_bytes = 2 * vocab_rows * VOCAB
    return {
        "rmsnorm": (4 * n, norm(ops.RMS)),
        "residual + rmsnorm": (8 * n, norm(ops.RMS, residual=True)),
        "rmsnorm + fp8 1x128": (3 * n, norm(ops.RMS, quantize=ops.FP8_1X128)),
        "rmsnorm + int8": (3 * n, norm(ops.RMS, quantize=ops.INT8_ROW)),
        "rmsnorm backward": (6 * n, norm_backward(ops.RMS)),
        "layernorm": (4 * n, norm(ops.LAYER)),
        "layernorm backward": (6 * n, norm_backward(ops.LAYER)),
        "rotary": (4 * n, rotary),
        "gelu": (4 * n, activation(ops.GELU, lambda x, up: F.gelu(x))),
        "gelu tanh": (4 * n, activation(ops.GELU_TANH, lambda x, up: F.gelu(x, approximate="tanh"))),
        "gelu backward": (6 * n, activation_backward(ops.GELU, lambda dy, x: torch.ops.aten.gelu_backward(dy, x))),
        "swiglu": (6 * n, activation(ops.SWIGLU, lambda x, up: F.silu(x) * up)),
        "swiglu backward": (10 * n, activation_backward(ops.SWIGLU, None)),
        "softmax": (4 * n, softmax),
        "softmax backward": (6 * n, softmax_backward),
        "cross-entropy 200k": (vocab_bytes, cross_entropy),
        "cross-entropy backward": (2 * vocab_bytes, cross_entropy_backward),
        "embedding": (4 * n, embedding),
        "embedding backward": (2 * n + 2 * table.numel(), embedding_backward),
        "dropout": (4 * n, dropout),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="+")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--only", default="")
    parser.add_argument("--from", dest="begin", type=int, default=0, help="leave out so many operations")
    parser.add_argument("--compile", action="store_true", help="torch.compile the peers (slow to start)")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU (0: all)")
    options = parser.parse_args()
    global DEVICE, THREADS
    DEVICE, THREADS = options.device, options.threads
    if DEVICE != "cpu":
        torch.cuda.init()
    elif THREADS > 0:
        torch.set_num_threads(THREADS)
    libraries = [ops.Library(path, DEVICE, THREADS) for path in options.library]
    rows_of = {size: size * 1_000_000 // (2 * COLS) for size in options.sizes}
    copies = {}
    for size, rows in rows_of.items():
        copies[size] = limit(rows)
    print("BF16; GB/s, share of the limit, torch's GB/s; " +
          ", ".join(f"{size} MB: {speed / 1e9:.0f}" for size, speed in copies.items()), flush=True)
    for name in list(operations(libraries[0], 1))[options.begin :]:
        if options.only in name:
            lines = [measure(libraries, name, rows, copies[size], options.compile) for size, rows in rows_of.items()]
            print(f"{name:23s}" + " | ".join(lines), flush=True)


def limit(rows):
    """Bytes a second: of a copy on a GPU, of adding up words on a CPU."""
    pairs = [(tensor(rows), tensor(rows)) for _ in range(max(2, COLD_BYTES // (4 * rows * COLS)))]
    if DEVICE == "cpu":
        return 2 * rows * COLS / seconds([lambda a=a: a.view(torch.int64).sum() for a, _ in pairs])
    return 4 * rows * COLS / seconds([lambda a=a, b=b: b.copy_(a) for a, b in pairs])


def measure(libraries, name, rows, copy, compiled):
    """Of each library GB/s and its share of the copy's, then torch's GB/s."""
    line, theirs = "", None
    for lib in libraries:
        moved, make = operations(lib, rows)[name]
        try:
            sets = [make() for _ in range(max(2, min(16 if DEVICE != "cpu" else 4, COLD_BYTES // moved)))]
            ours = moved / seconds([ours for ours, _ in sets])
            if DEVICE == "cpu":  # in the same minute, and the better of the two
                copy = max(copy, limit(rows))
            line += f"{ours / 1e9:5.0f} {100 * ours / copy:3.0f}% "
            if sets[0][1] is not None and theirs is None:
                peers = [torch.compile(peer) if compiled else peer for _, peer in sets]
                theirs = moved / seconds(peers)
        except Exception as error:  # the others may still tell something
            return f"{type(error).__name__}: {error}"[:60]
        del sets, make
    return line + (f"{theirs / 1e9:5.0f}" if theirs else "    -")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How close `millrace quantize` comes to what the disk allows.

    bench/quantize_speed.py PATH/TO/millrace MODEL.gguf [--types q8_0,q4_0,q4_k] [--repeat 3] [--cold]

Per type, in turns: quantizing, and the limit: one thread reads every byte of the model while another writes as many as
the result has and waits until they are on the disk, through the page cache and past it (O_DIRECT), whichever is faster.
--cold takes the model out of the page cache before each. Prints the best of each and their ratio, and the processor time
of quantizing: on a machine with other work on it, wall clock says
little, and source bytes per second of a core times the cores is what a quiet one would do.
"""

import argparse
import json
import mmap
import os
import pathlib
import resource
import subprocess
import tempfile
import threading
import time

PIECE = 8 << 20


def forget(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read_all(path):
    buffer = bytearray(PIECE)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def write_all(path, size, flags):
    piece = mmap.mmap(-1, PIECE)  # whole pages, as O_DIRECT wants them; so is the end of the file rounded up
    piece.write(os.urandom(PIECE))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o644)
    try:
        while size > 0:
            size -= os.write(descriptor, memoryview(piece)[:min(-size % mmap.PAGESIZE + size, PIECE)])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def limit_seconds(model, out, size, flags):
    start = time.monotonic()
    reader = threading.Thread(target=read_all, args=(model,))
    reader.start()
    write_all(out, size, flags)
    reader.join()
    return time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--types", default="q8_0,q4_0,q4_k")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    source = options.model.stat().st_size
    cores = len(os.sched_getaffinity(0))
    print(f"{options.model.name}: {source / 1e9:.2f} GB, {'cold' if options.cold else 'in the page cache'}, {cores} cores")
    print(f"{'type':<8} {'quantize':>10} {'limit':>10} {'of limit':>9} {'per core':>10} {'x cores':>10} {'of limit':>9}  limited by")
    with tempfile.TemporaryDirectory(dir=options.model.parent) as folder:
        out = pathlib.Path(folder) / "out.gguf"
        for name in options.types.split(","):
            best, limit, processor, by = float("inf"), float("inf"), float("inf"), ""
            for _ in range(options.repeat):
                if options.cold:
                    forget(options.model)
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                done = subprocess.run([options.binary, "quantize", options.model, out, "--type", name, "--json"],
                                      check=True, capture_output=True)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                report = json.loads(done.stdout)
                used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
                processor = min(processor, used)
                if report["seconds"] < best:
                    best, by = report["seconds"], report["limit"]
                out.unlink()
                for flags in (0, os.O_DIRECT):
                    if options.cold:
                        forget(options.model)
                    limit = min(limit, limit_seconds(options.model, out, report["file_bytes"], flags))
                    out.unlink()
            rate, most, core = (source / seconds / 1e6 for seconds in (best, limit, processor))
            print(f"{name:<8} {rate:>5.0f} MB/s {most:>5.0f} MB/s {100 * rate / most:>8.0f}% {core:>5.0f} MB/s "
                  f"{core * cores:>5.0f} MB/s {100 * core * cores / most:>8.0f}%  {by}", flush=True)


if __name__ == "__main__":
    main()

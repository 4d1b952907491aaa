"""Time by the GPU's own clock, for benchmarks that call from Python."""


def milliseconds(run, times=11):
    """The median of events around each call, after warming up."""
    import torch
    for _ in range(3):
        run()
    all_ms = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        all_ms.append(begin.elapsed_time(end))
    return sorted(all_ms)[times // 2]

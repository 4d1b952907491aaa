#!/usr/bin/env python3
"""The frozen benchmark of the resident decode: correctness, then ratios against what is recorded.

    fa2_gate.py BUILD_FOLDER            test, measure, compare with bench/results/frozen/resident_decode.json
    fa2_gate.py BUILD_FOLDER --record   test, measure, write that file
    fa2_gate.py --self-test             the comparison itself, without a GPU

A ratio (a peer's time over ours: more is better) that is more than 10% worse than the recorded one fails, and so does
a wrong result. Ratios are of one run on one machine; a GPU that nothing is recorded for is measured and not compared.
A ratio that fails is measured twice more, and the best counts: a neighbour on the machine is no regression. Recorded
is, of every time, the median of three runs.
Without a GPU: SKIPPED, status 0.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = ROOT / "bench" / "results" / "frozen" / "resident_decode.json"
SKIPPED = 77
SLACK = 0.10
RUNS = 3
# name of a ratio -> (whose time, over which of ours)
RATIOS = {
    "step_over_baseline": ("baseline_step", "step"),
    "kernel_over_plain": ("plain_kernel", "kernel"),
    "call_over_torch": ("torch_call", "pair"),
    "kernel_over_torch": ("torch_kernel", "kernel"),
}


def ratios_of(rows):
    """{"1024 step_over_baseline": 9.1, ..}; a peer that was not there has none."""
    return {f"{row['keys']} {name}": round(row[peer] / row[ours], 3)
            for row in rows for name, (peer, ours) in RATIOS.items() if row.get(peer)}


def worse(recorded, measured):
    """Lines about ratios that are more than SLACK worse, or gone although torch or the baseline ran."""
    kinds = {name.split()[1] for name in measured}
    faults = []
    for name, was in recorded.items():
        now = measured.get(name)
        if now is None and name.split()[1] in kinds:
            faults.append(f"{name}: not measured, recorded {was}")
        elif now is not None and now < was * (1 - SLACK):
            faults.append(f"{name}: {now}, recorded {was}: {100 * (1 - now / was):.0f}% worse, at most 10% are")
    return faults


def run_json(command):
    """What a program printed, or None where it was skipped."""
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    if result.returncode == SKIPPED:
        return None
    if result.returncode != 0:
        raise SystemExit(f"{command[0]} ended with status {result.returncode}")
    return json.loads(result.stdout)


def measure(build):
    ours = run_json([str(build / "fa2_opt_bench")])
    if ours is None:
        return None
    torch = run_json([sys.executable, str(Path(__file__).with_name("fa2_torch.py"))])
    for row in ours["rows"]:
        for peer in torch["rows"] if torch else []:
            if peer["keys"] == row["keys"]:
                row["torch_call"], row["torch_kernel"] = peer["call"], peer["kernel"]
    return {"gpu": ours["gpu"], "shape": ours["shape"], "torch": torch["torch"] if torch else None,
            "unit": "us", "rows": ours["rows"], "ratios": ratios_of(ours["rows"])}


def show(found):
    columns = ("keys", "splits", "step", "baseline_step", "pair", "torch_call", "kernel", "plain_kernel",
               "torch_kernel")
    print("  ".join(f"{c:>13}" for c in columns) + "   (us)")
    for row in found["rows"]:
        ratios = {name: found["ratios"].get(f"{row['keys']} {name}", "-") for name in RATIOS}
        print("  ".join(f"{row.get(c, '-'):>13}" for c in columns)
              + "   " + " ".join(f"{name.replace('_over_', '/')} {ratio}" for name, ratio in ratios.items()))


def compare(build, found):
    recorded = {entry["gpu"]: entry for entry in json.loads(RECORDED.read_text())} if RECORDED.exists() else {}
    if found["gpu"] not in recorded:
        print(f"*** NOT COMPARED: nothing is recorded for {found['gpu']} in {RECORDED.relative_to(ROOT)} ***")
        return 0
    frozen = recorded[found["gpu"]]["ratios"]
    best = found["ratios"]
    faults = worse(frozen, best)
    for _ in range(RUNS - 1):
        if not faults:
            break
        print("measured again: " + "; ".join(faults))
        again = measure(build)["ratios"]
        best = {name: max(x, again.get(name, x)) for name, x in best.items()}
        faults = worse(frozen, best)
    for fault in faults:
        print("FAILED: " + fault)
    print(f"frozen table: {len(frozen)} ratios, {len(faults)} failed")
    return 1 if faults else 0


def median_of(runs):
    """One entry of several: of every time the median."""
    found = dict(runs[0])
    found["rows"] = [{name: statistics.median(run["rows"][i][name] for run in runs) for name in row}
                     for i, row in enumerate(runs[0]["rows"])]
    found["ratios"] = ratios_of(found["rows"])
    found["runs"] = len(runs)
    return found


def record(found):
    entries = json.loads(RECORDED.read_text()) if RECORDED.exists() else []
    entries = [entry for entry in entries if entry["gpu"] != found["gpu"]] + [found]
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    RECORDED.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"recorded in {RECORDED.relative_to(ROOT)}")


def self_test():
    rows = [{"keys": 8, "step": 10, "baseline_step": 80, "kernel": 2, "plain_kernel": 5, "pair": 4}]
    was = ratios_of(rows)
    assert was == {"8 step_over_baseline": 8.0, "8 kernel_over_plain": 2.5}, was
    assert worse(was, was) == []
    assert worse(was, {**was, "8 kernel_over_plain": 2.26}) == []
    assert len(worse(was, {**was, "8 kernel_over_plain": 2.24})) == 1
    assert len(worse({**was, "16 kernel_over_plain": 2.0}, was)) == 1
    assert worse({**was, "8 call_over_torch": 2.0}, was) == []  # torch is not installed here
    runs = [{"rows": [{**rows[0], "kernel": kernel}]} for kernel in (1, 4, 2)]
    assert median_of(runs)["ratios"] == was, median_of(runs)
    if RECORDED.exists():
        for entry in json.loads(RECORDED.read_text()):
            assert entry["ratios"] == ratios_of(entry["rows"]), "recorded ratios are not those of the recorded times"
    print("fa2_gate: self-test passed")
    return 0


def main():
    if "--self-test" in sys.argv:
        return self_test()
    build = Path(sys.argv[1])
    tested = subprocess.run([str(build / "fa2_opt_test")], timeout=600).returncode
    if tested == SKIPPED:
        print("*** SKIPPED: neither results nor the frozen table were checked, there is no GPU here ***")
        return 0
    if tested != 0:
        return 1
    found = measure(build)
    show(found)
    if "--record" in sys.argv:
        record(median_of([found] + [measure(build) for _ in range(RUNS - 1)]))
        return 0
    return compare(build, found)


if __name__ == "__main__":
    sys.exit(main())

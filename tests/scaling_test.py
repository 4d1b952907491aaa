#!/usr/bin/env python3
"""Fails when docs/scaling.md or its pictures are not what bench/scaling.py computes, or the model breaks its own rules.

A ring and a mesh of one column are the same; no schedule is faster than its computing; more tokens a GPU never make a
schedule less efficient; the mesh that is chosen moves the fewest bytes of all.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import scaling  # noqa: E402


def page_faults():
    with tempfile.TemporaryDirectory() as folder:
        out = subprocess.run([sys.executable, ROOT / "bench/scaling.py", "--plots", folder], capture_output=True,
                             text=True, check=True).stdout
        faults = [f"docs/plots/{path.name} is not what bench/scaling.py draws" for path in Path(folder).iterdir()
                  if path.read_text() != (ROOT / "docs/plots" / path.name).read_text()]
    page = set((ROOT / "docs/scaling.md").read_text().split("\n"))
    return faults + [f"docs/scaling.md has no line: {line}" for line in out.split("\n")
                     if line.startswith("| ") and line not in page]


def model_faults(data):
    faults = []
    for name, shape in data["models"].items():
        model = scaling.Model(**shape)
        links, rate = scaling.cluster(data), data["gpu"]["forward"]
        for ranks in (1, 2, 3, 4, 6, 8, 16, 64, 100, 512):
            best = model.mesh_bytes(1, model.best_mesh(ranks), ranks // model.best_mesh(ranks))
            for a in range(1, ranks + 1):
                if ranks % a == 0 and model.mesh_bytes(1, a, ranks // a) < best:
                    faults.append(f"{name}: of {ranks} ranks a = {a} moves less than the mesh that is chosen")
            for schedule in scaling.SCHEDULES:
                before = 0.0
                for tokens in (2**17, 2**20, 2**24):
                    total, computing = scaling.predict(schedule, model, tokens, ranks, rate, links)
                    alone = model.pair * tokens**2 / 2 / rate / ranks
                    if abs(computing / alone - 1) > 1e-9:
                        faults.append(f"{name}: {schedule} of {ranks} computes {computing}, expected {alone}")
                    if total < computing or computing / total < before - 1e-9:
                        faults.append(f"{name}: {schedule} of {ranks}, {tokens} tokens: {computing} of {total} s")
                    before = computing / total
            ring, mesh = (scaling.predict(s, model, 2**20, ranks, rate, links, 1)[0] for s in ("ring", "mesh"))
            if ring != mesh:
                faults.append(f"{name}: a mesh of one column of {ranks} takes {mesh}, the ring {ring}")
    return faults


def main():
    data = json.loads((ROOT / "bench/scaling.json").read_text())
    faults = page_faults() + model_faults(data)
    for fault in faults:
        print(fault)
    print(f"scaling: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

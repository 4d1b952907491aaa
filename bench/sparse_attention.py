#!/usr/bin/env python3
"""What sparse attention costs and saves: the divergence of a model's predictions, and the time of a decoded token.

  bench/sparse_attention.py                            print the tables (docs/kernels/sparse_attention.md has them)
  bench/sparse_attention.py --plots DIR                also draw sparse-light.svg and sparse-dark.svg there
  bench/sparse_attention.py --divergence MILLRACE MODEL TEXT    measure the first again
  bench/sparse_attention.py --decode PROGRAM                   measure the second, by sparse_attention_bench
  bench/sparse_attention.py --prompts PROGRAM                  the same of the last 512 tokens of prompts

Divergence: KL(full || sparse) in nats per token of one window of the text, cache in f32, by millrace perplexity.
Time: one layer's attention of one token over random keys in bf16, 32 heads of 128 on 8 KV heads, the median.
Both are kept in bench/sparse_attention.json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from plots import FONT, THEMES  # noqa: E402

HERE = Path(__file__).resolve().parent
DATA = HERE / "sparse_attention.json"
BUDGETS = (256, 512, 1024, 2048, 4096)
CONTEXTS = (32768, 131072)
PROMPTS = (8192, 32768)
TIMED = (1024, 2048, 4096, 8192)


def call(words):
    return json.loads(subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True).stdout)


def origin():
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True, cwd=HERE)
    return {"date": str(date.today()), "commit": commit.stdout.strip(), "machine": platform.machine(),
            "processors": os.cpu_count()}


def measure_divergence(program, model, text, window, threads):
    data = {**origin(), "model": Path(model).name, "window": window, "budgets": []}
    for budget in (b for b in BUDGETS if b < window):
        out = call([program, "perplexity", model, "-f", text, "--ctx", window, "--kv-type", "f32", "--kl", "--json",
                    "--threads", threads, "--attention", "sparse", "--attention-budget", budget])
        kl = out["kl"]
        data["budgets"].append({"budget": budget, "mean": kl["mean"], "p99": kl["p99"], "top1": kl["top1_agreement"],
                                "perplexity_ratio": kl["perplexity_ratio"], "tokens": kl["tokens"]})
    return data


def measure_time(program, threads, contexts, rows):
    runs = [call([program, "--context", context, "--threads", threads, "--rows", rows, "--budgets",
                  ",".join(map(str, TIMED))]) for context in contexts]
    return {**origin(), "runs": runs}


def full_time(run):
    """Full attention was timed before and after the others."""
    return (run["full_us"] + run["full_again_us"]) / 2


def tables(data):
    lines = []
    if data["divergence"]["budgets"]:
        lines += ["| budget | KL mean, nats | 99% of tokens at most | same likeliest token | perplexity |", "|---|---|---|---|---|"]
        lines += [f"| {d['budget']:,} | {d['mean']:.4f} | {d['p99']:.3f} | {100 * d['top1']:.1f}% | "
                  f"{100 * (d['perplexity_ratio'] - 1):+.1f}% |" for d in data["divergence"]["budgets"]]
    for kind in ("decode", "prompts"):
        runs = data.get(kind, {}).get("runs")
        if not runs:
            continue
        budgets = list(runs[0]["sparse_us"])
        lines += ["", f"| context | full | {' | '.join(f'budget {int(b):,}' for b in budgets)} |", "|---|---|" + "---|" * len(budgets)]
        for run in runs:
            full = full_time(run)
            cells = [f"{run['sparse_us'][b] / 1000:.2f} ms, {100 * run['sparse_us'][b] / full:.0f}%" for b in budgets]
            lines.append(f"| {run['context']:,} | {full / 1000:.2f} ms | {' | '.join(cells)} |")
    return lines


def bars(title, rows, top, theme):
    """rows: (label, share of the widest, text)."""
    def text(x, y, content, color, size=13, anchor="start", weight="400"):
        return (f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" font-weight="{weight}" '
                f'text-anchor="{anchor}">{escape(content)}</text>')
    parts = [text(24, top, title, theme["text"], 15, weight="600")]
    for i, (label, share, value) in enumerate(rows):
        y = top + 16 + 28 * i
        parts += [text(220, y + 13, label, theme["text"], 13, "end"),
                  f'<rect x="236" y="{y}" width="456" height="16" rx="2.5" fill="{theme["track"]}"/>',
                  f'<rect x="236" y="{y}" width="{456 * share:.1f}" height="16" rx="2.5" fill="{theme["ours"]}"/>',
                  text(708, y + 13, value, theme["text"], 13, weight="600")]
    return parts, top + 16 + 28 * len(rows) + 34


def draw(data, theme):
    parts, y = [], 40
    divergence = data["divergence"]
    if divergence["budgets"]:
        widest = max(d["mean"] for d in divergence["budgets"])
        rows = [(f"budget {d['budget']:,}", d["mean"] / widest, f"{d['mean']:.4f} nats") for d in divergence["budgets"]]
        title = f"Divergence from full attention, {divergence['model']}, {divergence['window']:,} tokens"
        more, y = bars(title, rows, y, theme)
        parts += more
    for run in data["decode"]["runs"]:
        full = full_time(run)
        rows = [("full", 1.0, f"{full / 1000:.2f} ms")]
        rows += [(f"budget {int(b):,}", us / full, f"{us / 1000:.2f} ms") for b, us in run["sparse_us"].items()]
        more, y = bars(f"Attention of a decoded token at {run['context']:,} tokens, a layer", rows, y, theme)
        parts += more
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{y - 10}" viewBox="0 0 900 {y - 10}" '
                      f'font-family="{FONT}">', f'<rect width="900" height="{y - 10}" fill="{theme["ground"]}"/>', *parts,
                      "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--divergence", nargs=3, metavar=("MILLRACE", "MODEL", "TEXT"))
    parser.add_argument("--decode", metavar="PROGRAM")
    parser.add_argument("--prompts", metavar="PROGRAM")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    data = json.loads(DATA.read_text())
    if options.divergence:
        data["divergence"] = measure_divergence(*options.divergence, options.window, options.threads)
    if options.decode:
        data["decode"] = measure_time(options.decode, options.threads, CONTEXTS, 1)
    if options.prompts:
        data["prompts"] = measure_time(options.prompts, options.threads, PROMPTS, 512)
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    print("\n".join(tables(data)))
    if options.plots:
        for name, theme in THEMES.items():
            (options.plots / f"sparse-{name}.svg").write_text(draw(data, theme))


if __name__ == "__main__":
    main()

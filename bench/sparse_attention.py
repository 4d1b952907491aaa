#!/usr/bin/env python3
"""What sparse attention costs and saves: the divergence of a model's predictions, and the time of a decoded token.

  bench/sparse_attention.py                            print the tables (docs/kernels/sparse_attention.md has them)
  bench/sparse_attention.py --plots DIR                also draw sparse-light.svg and sparse-dark.svg there
  bench/sparse_attention.py --measure BUILD MODEL TEXT measure again and write bench/sparse_attention.json; BUILD is a
                                                       folder with both programs

Divergence: KL(full || sparse) in nats per token of one window of the text, cache in f32, by sparse_divergence_bench.
Time: one layer's attention of one token over random keys in bf16, 32 heads of 128 on 8 KV heads, the median,
by sparse_attention_bench.
"""

import argparse
import json
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
TIMED = (1024, 2048, 4096, 8192)


def call(words):
    return json.loads(subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True).stdout)


def measure(build, model, text, window, threads):
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True, cwd=HERE)
    data = {"date": str(date.today()), "commit": commit.stdout.strip(), "model": Path(model).name, "window": window,
            "decode": []}
    data["divergence"] = call([build / "sparse_divergence_bench", model, text, "--window", window, "--threads", threads,
                               "--budgets", ",".join(str(b) for b in BUDGETS if b < window)])["divergence"]
    for context in CONTEXTS:
        data["decode"].append(call([build / "sparse_attention_bench", "--context", context, "--threads", threads,
                                    "--budgets", ",".join(map(str, TIMED))]))
    DATA.write_text(json.dumps(data, indent=1) + "\n")


def full_time(run):
    """Full attention was timed before and after the others."""
    return (run["full_us"] + run["full_again_us"]) / 2


def tables(data):
    lines = []
    if data["divergence"]:
        lines += ["| budget | KL mean, nats | 99% of tokens at most | same likeliest token | perplexity |", "|---|---|---|---|---|"]
        lines += [f"| {d['budget']:,} | {d['mean']:.4f} | {d['p99']:.3f} | {100 * d['top1']:.1f}% | "
                  f"{100 * (d['perplexity_ratio'] - 1):+.1f}% |" for d in data["divergence"]]
    if data["decode"]:
        budgets = list(data["decode"][0]["sparse_us"])
        lines += ["", f"| context | full | {' | '.join(f'budget {int(b):,}' for b in budgets)} |", "|---|---|" + "---|" * len(budgets)]
        for run in data["decode"]:
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
    if data["divergence"]:
        widest = max(d["mean"] for d in data["divergence"])
        rows = [(f"{d['budget']:,} tokens", d["mean"] / widest, f"{d['mean']:.4f} nats") for d in data["divergence"]]
        more, y = bars(f"Divergence from full attention, {data['model']}, {data['window']:,} tokens", rows, y, theme)
        parts += more
    for run in data["decode"]:
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
    parser.add_argument("--measure", nargs=3, metavar=("BUILD", "MODEL", "TEXT"))
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.measure:
        measure(Path(options.measure[0]), *options.measure[1:], options.window, options.threads)
    data = json.loads(DATA.read_text())
    print("\n".join(tables(data)))
    if options.plots:
        for name, theme in THEMES.items():
            (options.plots / f"sparse-{name}.svg").write_text(draw(data, theme))


if __name__ == "__main__":
    main()

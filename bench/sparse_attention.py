#!/usr/bin/env python3
"""What sparse attention costs and saves: the divergence of a model's predictions, single facts found in a long text,
and the time of a decoded token.

  bench/sparse_attention.py                            print the tables (docs/kernels/sparse_attention.md has them)
  bench/sparse_attention.py --plots DIR                also draw sparse-*.svg there, light and dark
  bench/sparse_attention.py --divergence MILLRACE MODEL TEXT    measure the first again, budget by budget
  bench/sparse_attention.py --needles MILLRACE MODEL TEXT..     the second, by needles.py
  bench/sparse_attention.py --decode PROGRAM                    the third, by sparse_attention_bench
  bench/sparse_attention.py --prompts PROGRAM                   the same of the last 512 tokens of prompts

Divergence: KL(full || sparse) in nats per token of one window of the text, cache in f32, by millrace perplexity.
Budgets that are not measured now stay.
Time: one layer's attention of one token over random keys in bf16, 32 heads of 128 on 8 KV heads, the median.
All are kept in bench/sparse_attention.json: of a model and a length the newest.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import needles  # noqa: E402
from plots import FONT, THEMES, box, text  # noqa: E402

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


def first_tokens(program, model, file, count):
    """One window of a text, as --tokens takes it."""
    done = subprocess.run([program, "tokenize", model, "-f", file], check=True, capture_output=True, text=True)
    ids = done.stdout.split()
    if len(ids) < count:
        sys.exit(f"{file}: {len(ids)} tokens, expected at least {count}, --window")
    return ",".join(ids[:count])


def measure_divergence(program, model, text, window, threads, budgets):
    tokens = first_tokens(program, model, text, window)
    entry = {**origin(), "model": Path(model).name, "window": window, "text": Path(text).name, "budgets": []}
    for budget in (b for b in budgets if b < window):
        out = call([program, "perplexity", model, "--tokens", tokens, "--ctx", window, "--kv-type", "f32", "--kl",
                    "--json", "--threads", threads, "--attention", "sparse", "--attention-budget", budget])
        kl = out["kl"]
        entry["budgets"].append({"budget": budget, "mean": kl["mean"], "p99": kl["p99"], "top1": kl["top1_agreement"],
                                 "perplexity_ratio": kl["perplexity_ratio"], "tokens": kl["tokens"]})
    return entry


def put(entries, entry, length):
    """Among those of other models, lengths and texts; budgets that were not measured now stay as they were."""
    def place(e):
        return e["model"], e[length], e.get("text", "")

    same = [e for e in entries if place(e) == place(entry)]
    rest = [e for e in entries if e not in same]
    if length == "window":
        now = {b["budget"] for b in entry["budgets"]}
        entry["budgets"] += [b for e in same for b in e["budgets"] if b["budget"] not in now]
        entry["budgets"].sort(key=lambda b: b["budget"])
    return sorted(rest + [entry], key=place)


def measure_time(program, threads, contexts, rows):
    runs = [call([program, "--context", context, "--threads", threads, "--rows", rows, "--budgets",
                  ",".join(map(str, TIMED))]) for context in contexts]
    return {**origin(), "runs": runs}


def full_time(run):
    """Full attention was timed before and after the others."""
    return (run["full_us"] + run["full_again_us"]) / 2


def tables(data):
    lines = []
    for entry in data["divergence"]:
        lines += ["", f"{entry['model']}, {entry['window']:,} tokens{of_text(entry)}", "",
                  "| budget | KL mean, nats | 99% of tokens at most | same likeliest token | perplexity |", "|---|---|---|---|---|"]
        lines += [f"| {d['budget']:,} | {d['mean']:.4f} | {d['p99']:.3f} | {100 * d['top1']:.1f}% | "
                  f"{100 * (d['perplexity_ratio'] - 1):+.1f}% |" for d in entry["budgets"]]
    for entry in data["needles"]:
        lines += ["", f"{entry['model']}, {entry['tokens']:,} tokens", "", "| budget | found | by depth |", "|---|---|---|"]
        lines += [f"| {label(budget)} | {sum(found)} of {len(found)} | {''.join('●' if f else '○' for f in found)} |"
                  for budget, found in entry["found"].items()]
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


def of_text(entry):
    return f" of {entry['text']}" if "text" in entry else ""


def label(budget):
    return budget if budget == "full" else f"{int(budget):,}"


def bars(title, rows, top, theme):
    """rows: (label, share of the widest, text)."""
    parts = [text(24, top, title, theme["text"], 15, weight="600")]
    for i, (name, share, value) in enumerate(rows):
        y = top + 16 + 28 * i
        parts += [text(220, y + 13, name, theme["text"], 13, "end"), box(236, y, 456, 16, theme["track"]),
                  box(236, y, 456 * share, 16, theme["ours"]), text(708, y + 13, value, theme["text"], 13, weight="600")]
    return parts, top + 16 + 28 * len(rows) + 34


def dots(entry, top, theme):
    """A row a budget, a field for each needle by its depth: filled where it was found."""
    depths = entry["depths"]
    title = f"Facts found in {entry['tokens']:,} tokens, {entry['model']}"
    parts = [text(24, top, title, theme["text"], 15, weight="600")]
    step = 456 / depths
    for i, (budget, found) in enumerate(entry["found"].items()):
        y = top + 16 + 28 * i
        parts.append(text(220, y + 13, budget if budget == "full" else f"budget {int(budget):,}", theme["text"], 13, "end"))
        parts += [box(236 + step * j, y, step - 4, 16, theme["ours" if f else "track"]) for j, f in enumerate(found)]
        parts.append(text(708, y + 13, f"{sum(found)} of {depths}", theme["text"], 13, weight="600"))
    y = top + 16 + 28 * len(entry["found"]) + 12
    parts += [text(236, y, "first in the text", theme["soft"], 12), text(688, y, "last", theme["soft"], 12, "end")]
    return parts, y + 34


def page(parts, bottom, theme):
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{bottom - 10}" '
                      f'viewBox="0 0 900 {bottom - 10}" font-family="{FONT}">', box(0, 0, 900, bottom - 10, theme["ground"], 0),
                      *parts, "</svg>", ""])


def draw_times(data, theme):
    parts, y = [], 40
    for run in data["decode"]["runs"]:
        full = full_time(run)
        rows = [("full", 1.0, f"{full / 1000:.2f} ms")]
        rows += [(f"budget {int(b):,}", us / full, f"{us / 1000:.2f} ms") for b, us in run["sparse_us"].items()]
        more, y = bars(f"Attention of a decoded token at {run['context']:,} tokens, a layer", rows, y, theme)
        parts += more
    return page(parts, y, theme)


def draw_answers(data, theme):
    """What a budget changes: a person chooses by this."""
    parts, y = [], 40
    for entry in data["divergence"]:
        widest = max(d["mean"] for d in entry["budgets"])
        rows = [(f"budget {d['budget']:,}", d["mean"] / widest, f"{d['mean']:.4f} nats") for d in entry["budgets"]]
        title = f"Divergence from full attention, {entry['model']}, {entry['window']:,} tokens{of_text(entry)}"
        more, y = bars(title, rows, y, theme)
        parts += more
    for entry in data["needles"]:
        more, y = dots(entry, y, theme)
        parts += more
    return page(parts, y, theme)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--divergence", nargs=3, metavar=("MILLRACE", "MODEL", "TEXT"))
    parser.add_argument("--needles", nargs="+", metavar="MILLRACE MODEL TEXT")
    parser.add_argument("--decode", metavar="PROGRAM")
    parser.add_argument("--prompts", metavar="PROGRAM")
    parser.add_argument("--window", type=int, default=8192, help="tokens, of divergence")
    parser.add_argument("--tokens", type=int, default=7900, help="of the text with needles")
    parser.add_argument("--depths", type=int, default=10)
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    data = json.loads(DATA.read_text())
    budgets = [int(b) for b in options.budgets.split(",")]
    if options.divergence:
        entry = measure_divergence(*options.divergence, options.window, options.threads, budgets)
        data["divergence"] = put(data["divergence"], entry, "window")
    if options.needles:
        program, model, *texts = options.needles
        found = needles.measure(program, model, texts, options.tokens, budgets, options.depths, options.threads)
        data["needles"] = put(data["needles"], {**origin(), **found}, "tokens")
    if options.decode:
        data["decode"] = measure_time(options.decode, options.threads, CONTEXTS, 1)
    if options.prompts:
        data["prompts"] = measure_time(options.prompts, options.threads, PROMPTS, 512)
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    print("\n".join(tables(data)))
    if options.plots:
        for name, theme in THEMES.items():
            (options.plots / f"sparse-{name}.svg").write_text(draw_times(data, theme))
            (options.plots / f"sparse-answers-{name}.svg").write_text(draw_answers(data, theme))


if __name__ == "__main__":
    main()

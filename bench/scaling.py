#!/usr/bin/env python3
"""What attention over a context spread over GPUs costs: a model of time per step, checked against runs.

  bench/scaling.py                 print the tables (docs/scaling.md has them)
  bench/scaling.py --plots DIR     also draw scaling-light.svg and scaling-dark.svg there
  bench/scaling.py --input FILE    other numbers than bench/scaling.json

Plain data in, tables out. A schedule is a list of steps; in a step a rank computes tiles while messages move, so that
it takes the longer of both; partial outputs go home after the last. A message takes alpha + bytes / beta. Bytes are
those of src/dist/context_plan.cpp, which the tests compare with what communicators count.
"""

import argparse
import json
import sys
from functools import cache
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from plots import FONT, THEMES  # noqa: E402

HERE = Path(__file__).resolve().parent
SCHEDULES = ("ring", "mesh", "wallfacer")
ELEMENT, FLOAT = 2, 4  # bytes


class Model:
    """Bytes and operations of one layer's attention."""

    def __init__(self, heads, kv_heads, head_dim, **_):
        self.query = heads * head_dim * ELEMENT
        self.key = 2 * kv_heads * head_dim * ELEMENT
        self.partial = heads * (head_dim + 1) * FLOAT
        self.pair = 4 * heads * head_dim  # operations a query and key, forward

    def tile(self, tokens, ranks):
        """Operations of one owner's queries against one's keys: with zigzag half of the pairs are seen."""
        return self.pair * (tokens / ranks) ** 2 / 2

    def mesh_bytes(self, tokens, a, b):
        return ((a - 1) * (self.query + self.partial) + (b - 1) * self.key) * tokens / (a * b)

    def best_mesh(self, ranks):
        return min((a for a in range(1, ranks + 1) if ranks % a == 0),
                   key=lambda a: (self.mesh_bytes(ranks, a, ranks // a), a))


def best_team(ranks):
    return max(c for c in range(1, ranks + 1) if ranks % (c * c) == 0)


def nodes_of(first, last, held):
    """How many nodes of the tree over pieces [first, last) the ones in `held` can be merged to."""
    def visit(low, high):
        span = [p for p in range(max(low, first), min(high, last))]
        count = sum(p in held for p in span)
        if count == 0:
            return 0
        if count == len(span):
            return 1
        middle = (low + high) // 2
        return visit(low, middle) + visit(middle, high)
    return visit(0, 1 << (last - 1).bit_length() if last > 1 else 1)


@cache
def nodes_sent(schedule, ranks, a):
    """Partial outputs a row that go home, on average: to have one device's bits, each is a node of the tree of chunks.
    Causal, 2n pieces that are powers of two long; of ranks that are alike one is taken."""
    n, b = ranks, ranks // a
    if a == 1:
        return 0.0
    total = count = 0
    if schedule == "mesh":
        sample = sorted({j * b + i for j in range(a) for i in (0, b // 2, b - 1)})
    else:
        sample = [team * a + m for team in sorted({0, n // a // 2, n // a - 1}) for m in range(a)]
    for rank in sample:
        for mate in range(a):
            if schedule == "mesh":
                owner, keys = mate * b + rank % b, [rank // b * b + i for i in range(b)]
            else:
                first = rank // a + rank % a * (n // a // a)
                owner = rank // a * a + mate
                keys = [(first + s) % (n // a) * a + m for s in range(n // a // a) for m in range(a)]
            if owner == rank:
                continue
            held = set(keys) | {2 * n - 1 - k for k in keys}
            total += (nodes_of(0, owner + 1, held) + nodes_of(0, 2 * n - owner, held)) / 2
            count += 1
    return total / count


def steps_of(schedule, model, ranks, a=None):
    """[(tiles, messages, bytes a token of a rank in each, ranks between which they go)], and what goes home."""
    n = ranks
    if schedule == "wallfacer":
        c = best_team(n)
        rounds = n // (c * c)
        start = [(0, [(c - 1, model.query, c), (c, model.key, n)])] if c > 1 else []  # a ring's first keys are far
        rest = [(c * c, [(c if s + 1 < rounds else 0, model.key, n)]) for s in range(rounds)]
        return start + rest, (c - 1, model.partial * nodes_sent(schedule, n, c), c)
    a = 1 if schedule == "ring" else a or model.best_mesh(n)
    b = n // a
    steps = [(1, [(1, model.query, n)]) for _ in range(a - 1)]
    steps += [(1, [(1 if b > 1 else 0, model.key, b)])]
    steps += [(a, [(1 if hop < b - 1 else 0, model.key, b)]) for hop in range(1, b)]
    return steps, (a - 1, model.partial * nodes_sent(schedule, n, a), n)


def message_time(count, size, span, tokens, ranks, links):
    """Messages one after the other. links(span): the link between neighbours of a group that spans so many ranks."""
    link = links(span)
    return count * (link["alpha"] + size * tokens / ranks / link["beta"])


def predict(schedule, model, tokens, ranks, rate, links, a=None, cores=None):
    """Seconds: all, computing alone. cores: ranks share so many, which is our machine's case and no GPU's."""
    crowd = max(1.0, ranks / cores) if cores else 1.0
    steps, (count, size, span) = steps_of(schedule, model, ranks, a)
    tile = model.tile(tokens, ranks) / rate * crowd
    total = computing = 0.0
    for tiles, messages in steps:
        moving = sum(message_time(k, s, w, tokens, ranks, links) for k, s, w in messages)
        total += max(tiles * tile, moving)
        computing += tiles * tile
    return total + message_time(count, size, span, tokens, ranks, links), computing


def cluster(data):
    """NVLink inside a node, InfiniBand between nodes."""
    def link(span):
        return data["links"]["nvlink" if span <= data["gpu"]["per_node"] else "infiniband"]
    return link


def human_tokens(tokens):
    return f"{tokens / 2**20:g}M" if tokens >= 2**20 else f"{tokens / 2**10:g}K"


def context_that_fits(data, shape, ranks):
    """Tokens whose keys and values, of all layers, the GPUs hold beside the weights."""
    per_token = 2 * shape["kv_heads"] * shape["head_dim"] * ELEMENT * shape["layers"]
    return ranks * (0.9 * data["gpu"]["memory"] - shape["weights"]) / per_token


def scaling_rows(data, shape):
    model, rows = Model(**shape), []
    for ranks in data["gpus"]:
        tokens = data["tokens_per_gpu"] * ranks
        for schedule in SCHEDULES:
            total, computing = predict(schedule, model, tokens, ranks, data["gpu"]["forward"], cluster(data))
            shape_of = {"ring": f"1 x {ranks}", "mesh": f"{model.best_mesh(ranks)} x {ranks // model.best_mesh(ranks)}",
                        "wallfacer": f"teams of {best_team(ranks)}"}[schedule]
            rows.append({"gpus": ranks, "tokens": tokens, "schedule": schedule, "shape": shape_of, "seconds": total,
                         "share": 1 - computing / total, "efficiency": computing / total,
                         "fits": context_that_fits(data, shape, ranks)})
    return rows


def fixed_rows(data, shape, tokens):
    model, rows = Model(**shape), []
    for ranks in data["gpus"]:
        row = {"gpus": ranks}
        for schedule in SCHEDULES:
            total, computing = predict(schedule, model, tokens, ranks, data["gpu"]["forward"], cluster(data))
            row[schedule] = (total, computing / total)
        rows.append(row)
    return rows


def print_tables(data):
    for name, shape in data["models"].items():
        print(f"\n{name}, one layer forward, {human_tokens(data['tokens_per_gpu'])} tokens a GPU\n")
        print("| GPUs | context | schedule | shape | ms a layer | communication | efficiency |")
        print("|---|---|---|---|---|---|---|")
        for r in scaling_rows(data, shape):
            print(f"| {r['gpus']} | {human_tokens(r['tokens'])} | {r['schedule']} | {r['shape']} | "
                  f"{1e3 * r['seconds']:,.1f} | {100 * r['share']:.1f}% | {100 * r['efficiency']:.1f}% |")
        print(f"\n{name}, one layer forward, 1M tokens in all\n")
        print("| GPUs | ring, ms | efficiency | mesh, ms | efficiency | wallfacer, ms | efficiency |")
        print("|---|---|---|---|---|---|---|")
        for r in fixed_rows(data, shape, 2**20):
            cells = " | ".join(f"{1e3 * r[s][0]:,.2f} | {100 * r[s][1]:.0f}%" for s in SCHEDULES)
            print(f"| {r['gpus']} | {cells} |")
        fits = ", ".join(f"{n}: {context_that_fits(data, shape, n) / 1e6:,.1f}M" for n in data["gpus"])
        print(f"\nKeys and values of all layers fit up to (GPUs: tokens) {fits}.")
        model = Model(**shape)
        a = model.best_mesh(256)
        less = 1 - model.mesh_bytes(1, a, 256 // a) / model.mesh_bytes(1, 1, 256)
        ring, mesh = (predict(s, model, 2**20, 256, data["gpu"]["forward"], cluster(data))[0] for s in ("ring", "mesh"))
        sent = ", ".join(f"{n}: {nodes_sent('mesh', n, model.best_mesh(n)):.2f}" for n in data["gpus"])
        print(f"Nodes a row that a rank of the mesh sends home (GPUs: nodes) {sent}.")
        print(f"256 GPUs, mesh {a} x {256 // a}: {100 * less:.1f}% fewer bytes than the ring; "
              f"{ring / mesh:.2f} times as fast at 1M tokens.")
    print("\nPublished\n\n| what | figure | where |\n|---|---|---|")
    for p in data["published"]:
        print(f"| {p['what']} | {p['figure']} | {p['where']} |")


def check_runs(data):
    """Runs of examples/context_parallel beside what the model says for them."""
    if not data["runs"]:
        return
    print("\nRuns\n\n| link | ranks | schedule | tokens | measured, ms | predicted, ms | off |\n|---|---|---|---|---|---|---|")
    for run in data["runs"]:
        model = Model(run["heads"], run["kv_heads"], run["head_dim"])
        name, a = run["schedule"].split(" ")[0], None
        if name == "mesh":
            a = int(run["schedule"].split(" ")[1])
        link = {"alpha": run["alpha"], "beta": run["beta"]}
        total, _ = predict(name, model, run["tokens"], run["ranks"], run["rate"], lambda _: link, a, run["cores"])
        off = total / run["seconds"] - 1
        print(f"| {run['link']} | {run['ranks']} | {run['schedule']} | {run['tokens']} | {1e3 * run['seconds']:,.1f} | "
              f"{1e3 * total:,.1f} | {100 * off:+.0f}% |")


def draw(data, theme):
    """Efficiency over GPUs at 1M tokens, a panel a model, a line a schedule."""
    colors = {"ring": theme["soft"], "mesh": theme["ours"], "wallfacer": theme["limit"]}
    width, height, left, top, gap = 900, 340, 60, 70, 60
    panel = (width - 2 * left - gap) / len(data["models"])
    bottom = height - 60
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{escape(FONT)}">',
             f'<rect width="{width}" height="{height}" fill="{theme["ground"]}"/>',
             f'<text x="{left}" y="28" fill="{theme["text"]}" font-size="16" font-weight="600">Attention of 1M tokens '
             'over H200s: the share of the time that is computing (model)</text>']
    counts = data["gpus"]
    for i, (name, shape) in enumerate(data["models"].items()):
        x0 = left + i * (panel + gap)
        parts.append(f'<text x="{x0:g}" y="54" fill="{theme["soft"]}" font-size="13">{escape(name)}</text>')
        for percent in (0, 25, 50, 75, 100):
            y = bottom - (bottom - top) * percent / 100
            parts.append(f'<line x1="{x0:g}" y1="{y:g}" x2="{x0 + panel:g}" y2="{y:g}" stroke="{theme["grid"]}"/>')
            parts.append(f'<text x="{x0 - 8:g}" y="{y + 4:g}" fill="{theme["soft"]}" font-size="11" '
                         f'text-anchor="end">{percent}%</text>')
        at = [x0 + panel * k / (len(counts) - 1) for k in range(len(counts))]
        for x, count in zip(at, counts):
            parts.append(f'<text x="{x:g}" y="{bottom + 20:g}" fill="{theme["soft"]}" font-size="12" '
                         f'text-anchor="middle">{count}</text>')
        rows = fixed_rows(data, shape, 2**20)
        for schedule in SCHEDULES:
            points = [(x, bottom - (bottom - top) * row[schedule][1]) for x, row in zip(at, rows)]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            dash = ' stroke-dasharray="5 4"' if schedule == "wallfacer" else ""
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colors[schedule]}" stroke-width="2.2"{dash}/>')
    for k, schedule in enumerate(SCHEDULES):
        x = left + 130 * k
        dash = ' stroke-dasharray="5 4"' if schedule == "wallfacer" else ""
        parts.append(f'<line x1="{x}" y1="{height - 18}" x2="{x + 26}" y2="{height - 18}" stroke="{colors[schedule]}" '
                     f'stroke-width="2.2"{dash}/>')
        parts.append(f'<text x="{x + 34}" y="{height - 14}" fill="{theme["text"]}" font-size="12">{schedule}</text>')
    return "\n".join(parts + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input", default=str(HERE / "scaling.json"))
    parser.add_argument("--plots", help="a folder for the pictures")
    options = parser.parse_args()
    data = json.loads(Path(options.input).read_text())
    print_tables(data)
    check_runs(data)
    if options.plots:
        for name, theme in THEMES.items():
            (Path(options.plots) / f"scaling-{name}.svg").write_text(draw(data, theme))
    return 0


if __name__ == "__main__":
    sys.exit(main())

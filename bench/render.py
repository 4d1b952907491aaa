#!/usr/bin/env python3
"""Writes docs/benchmarks.md, its plots and the README's headline from the newest records in bench/results.

  bench/render.py            write docs/benchmarks.md, docs/plots/*.svg and the marked part of README.md
  bench/render.py --check    write nothing; status 1 where a file is not what the records say

A page is a table a machine and topic: ours, the peers of the same call, the share of the limit, and the command.
Nothing in it is typed by hand: to change a figure, measure it (bench/record.py) or correct the record.
"""

import argparse
import re
import sys
import textwrap

import plots
import records
from records import ROOT, RecordError

PAGE = "docs/benchmarks.md"
PLOTS = "docs/plots"
README = "README.md"
HEADLINE_MARKS = ("<!-- headline: written by bench/render.py -->", "<!-- end of headline -->")
MACHINES_FIRST = ("One H200", "16 x86 cores (AMX)")  # then the others by name

HEADINGS = {"speed": "Decode and prefill", "attention": "Attention", "products": "Matrix products",
            "fused": "Fused operations", "quantizing": "Quantizing", "quality": "What rounding costs",
            "engine": "Engine and sampling", "server": "Server", "tokenizers": "Tokenizers", "cache": "KV cache"}

INTRODUCTION = """\
<!-- Written by bench/render.py from bench/results: change the records, not this page. -->

# Benchmarks

Every figure is a record in [bench/results](../bench/results): commit, date, machine, command, median, range, runs,
limit and the peers of the same call. This page shows the newest of each. Ratios within a call count; absolute figures
move from machine to machine. What nobody wrote down is shown as "not recorded".

    bench/record.py --list                 # the sets of measurements, and what each needs
    bench/record.py cpu-smollm2            # measure one, append it to bench/results
    bench/render.py                        # write this page and its plots anew

"Shape" means random weights of the published model's exact shape: speed depends on the shape, not on the values. A
limit is the time the machine needs to read a token's bytes, or to do a prompt's arithmetic, at the bandwidth or peak
it was measured to have; where that was measured in another call, the share carries a mark (†). How the figures came
about, and what was tried and not kept: [docs/log](log/README.md). What the kernels do:
[docs/kernels](kernels/README.md).
"""


def number(value):
    """Three digits that matter, thousands separated."""
    magnitude = abs(value)
    if magnitude >= 1000:
        return f"{value:,.0f}"
    if magnitude >= 100:
        return f"{value:.0f}"
    if magnitude >= 10:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.3g}"


def spread(entry):
    """"(low to high, 3 runs)", as far as it is known."""
    parts = []
    if entry["range"] is not None and entry["range"][0] != entry["range"][1]:
        parts.append(f"{number(entry['range'][0])} to {number(entry['range'][1])}")
    if entry["runs"] is not None and entry["runs"] > 1:
        parts.append(f"{entry['runs']} runs")
    return f" ({', '.join(parts)})" if parts else ""


def ratio(record, peer):
    ours, theirs = record["median"], peer["median"]
    return theirs / ours if record["unit"] in records.LOWER_IS_BETTER else ours / theirs


def peer_name(peer):
    version = peer["version"]
    return peer["name"] + (f" {version}" if version and version not in peer["name"] else "")


def peer_cell(record):
    return "; ".join(f"{peer_name(peer)}: {number(peer['median'])}{spread(peer)}" for peer in record["peers"]) or "–"


def ratio_cell(record):
    return "; ".join(f"{ratio(record, peer):.2f}x" for peer in record["peers"]) or "–"


def limit_cell(record):
    share = records.share_of_limit(record)
    if share is None:
        return "–"
    return f"{100 * share:.0f}%{'' if record['limit']['same_run'] else '†'} of {number(record['limit']['value'])}"


def by_model(rows):
    """A model's rows together, else in the order they have."""
    models = list(dict.fromkeys(record["model"] for record in rows))
    return sorted(rows, key=lambda record: models.index(record["model"]))


def table_of(rows, references):
    """Markdown lines; `references` collects the texts below the table."""
    has_model = any(record["model"] for record in rows)
    has_peer = any(record["peers"] for record in rows)
    has_limit = any(record["limit"] for record in rows)
    head = (["model"] if has_model else []) + ["what", "Millrace"]
    head += (["peer, same call", "ratio"] if has_peer else []) + (["of the limit"] if has_limit else [])
    head += ["commit, date", "how"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for record in by_model(rows):
        cells = [record["model"] or "–"] if has_model else []
        cells += [record["metric"], f"{number(record['median'])} {record['unit']}{spread(record)}"]
        cells += [peer_cell(record), ratio_cell(record)] if has_peer else []
        cells += [limit_cell(record)] if has_limit else []
        cells += [f"{record['commit'] or 'not recorded'}, {record['date']}", references.mark(record)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def wrapped(text, indent=""):
    """Lines of prose as documents have them; words, and so options of commands, stay whole."""
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


class References:
    """Commands, limits and notes below a machine's tables, each once."""

    def __init__(self):
        self.texts = []

    def mark(self, record):
        command = f"`{record['command']}`" if record["command"] else "command not recorded"
        parts = [command] + [f"{peer['name']}: `{peer['command']}`" for peer in record["peers"] if peer["command"]]
        if record["machine"]["isa"]:
            parts.append(f"kernels `{record['machine']['isa']}`")
        if record["limit"]:
            parts.append(f"limit: {record['limit']['by']}")
        if record["note"]:
            parts.append(record["note"])
        text = "; ".join(parts)
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"

    def lines(self):
        return [line for idx, text in enumerate(self.texts, 1)
                for line in wrapped(f"{idx}. {text}", " " * len(f"{idx}. "))]


def machines_of(rows):
    names = sorted({record["machine"]["name"] for record in rows})
    return [name for name in MACHINES_FIRST if name in names] + [name for name in names if name not in MACHINES_FIRST]


def machine_section(name, rows):
    about = next((r["machine"]["about"] for r in reversed(rows) if r["machine"]["about"]), None)
    lines, references = [f"## {name}", ""], References()
    if about:
        lines += [*wrapped(about[0].upper() + about[1:] + "."), ""]
    for topic in records.TOPICS:
        of_topic = [record for record in rows if record["topic"] == topic]
        if of_topic:
            lines += [f"### {HEADINGS[topic]}", "", *table_of(of_topic, references), ""]
    return lines + ["How each was measured:", "", *references.lines(), ""]


def picture(name, title):
    return ["<picture>",
            f'  <source media="(prefers-color-scheme: dark)" srcset="plots/{name}-dark.svg">',
            f'  <img src="plots/{name}-light.svg" alt="{title}">', "</picture>", ""]


def chart_of(rows, phase, title):
    """Rows with a limit alone: a bar is a share of it."""
    groups = []
    for machine in machines_of(rows):
        found = []
        shown = [r for r in rows if r["machine"]["name"] == machine and r["phase"] == phase and r["limit"]]
        for record in by_model(shown):
            limit, llama = record["limit"]["value"], [p for p in record["peers"] if p["name"] == "llama.cpp"]
            metric = re.sub(r"^decode|^prefill of|\(--roofline\)", "", record["metric"]).strip(" ,")
            model, _, types = record["model"].replace(" shape", "").partition(", ")
            detail = ", ".join(part for part in (types, metric) if part)
            peer = llama[0]["median"] / limit if llama else None
            found.append(plots.Row(model, detail, records.share_of_limit(record), number(record["median"]), peer,
                                   number(llama[0]["median"]) if llama else ""))
        if found:
            groups.append((machine, tuple(found)))
    return plots.Chart(title, "share of the limit", tuple(groups))


HEADLINE = (  # machine, model, metrics of the README's table
    ("One H200", "gpt-oss-20b shape, MXFP4 and Q8_0",
     ("decode", "decode at 32,000 tokens", "prefill of 2,048 tokens", "decode of 128 sequences")),
    ("One H200", "Llama 8B shape, Q4_K", ("decode", "prefill of 2,048 tokens")),
    ("One H200", "Qwen3-30B-A3B shape, Q4_K", ("decode", "prefill of 2,048 tokens")),
    ("16 x86 cores (AMX)", "gpt-oss-20b shape, MXFP4 and Q8_0", ("decode", "prefill of 512 tokens")),
    ("16 x86 cores (AMX)", "Llama 8B shape, Q4_K", ("decode", "prefill of 256 tokens")),
    ("2 ARM cores (Neoverse-N1)", "gpt-oss-20b shape, MXFP4 and Q8_0", ("decode", "prefill of 512 tokens")),
    ("2 x86 cores (AVX-512 without VNNI)", "gpt-oss-20b shape, MXFP4 and Q8_0", ("decode", "prefill of 64 tokens")),
)


def headline(rows):
    """The README's table: tok/s of ours and of llama.cpp."""
    lines = ["| machine | model | what | Millrace | llama.cpp | ratio | of the limit |", "|" + "---|" * 7]
    for machine, model, metrics in HEADLINE:
        for metric in metrics:
            found = [r for r in rows if (r["machine"]["name"], r["model"], r["metric"]) == (machine, model, metric)]
            if not found or not found[0]["peers"]:
                raise RecordError(f"headline: no record with a peer of '{metric}', {model}, on {machine}")
            record, share = found[0], records.share_of_limit(found[0])
            lines.append(f"| {machine} | {model.replace(' shape', '')} | {metric} | **{number(record['median'])}** | "
                         f"{number(record['peers'][0]['median'])} | {ratio(record, record['peers'][0]):.2f}x | "
                         f"{f'{100 * share:.0f}%' if share is not None else '–'} |")
    return lines


def worst_first(rows):
    """Every speed beside llama.cpp's, the worst ratio first: where to work."""
    pairs = [(ratio(record, peer), record, peer) for record in rows if record["topic"] == "speed"
             for peer in record["peers"] if peer["name"].startswith("llama")]
    lines = ["## The worst first", "", "Everything that was measured beside llama.cpp in the same call.", "",
             "| ratio | machine | model | what | Millrace | peer |", "|" + "---|" * 6]
    for times, record, peer in sorted(pairs, key=lambda pair: pair[0]):
        lines.append(f"| {times:.2f}x | {record['machine']['name']} | {record['model'] or '–'} | {record['metric']} | "
                     f"{number(record['median'])} {record['unit']} | {number(peer['median'])} |")
    return [*lines, ""]


def readme_with(table):
    """The README with that table between its marks."""
    text = (ROOT / README).read_text(encoding="utf-8")
    begin, end = HEADLINE_MARKS
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise RecordError(f"{README}: found no lines '{begin}' and '{end}', expected the headline between them")
    return "\n".join([before + begin, "", *table, "", end + after])


CHARTS = {"decode": "Decode: tokens per second, as a part of what memory bandwidth allows",
          "prefill": "Prefill: tokens per second, as a part of what arithmetic allows"}


def files():
    """Everything this writes: path from the root -> text."""
    rows = records.newest(records.load_all())
    lines = [INTRODUCTION]
    out = {}
    for phase, title in CHARTS.items():
        chart = chart_of(rows, phase, title)
        lines += picture(phase, title)
        for theme in plots.THEMES:
            out[f"{PLOTS}/{phase}-{theme}.svg"] = plots.draw(chart, theme)
    lines += worst_first(rows)
    for machine in machines_of(rows):
        lines += machine_section(machine, [record for record in rows if record["machine"]["name"] == machine])
    out[README] = readme_with(headline(rows))
    out[PAGE] = "\n".join(lines).rstrip() + "\n"
    return out


def stale():
    """The files whose text is not what the records say."""
    return [name for name, text in files().items()
            if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="status 1 where a file differs; nothing is written")
    options = parser.parse_args()
    try:
        wrong = stale()
        if options.check:
            for name in wrong:
                print(f"render: {name} is not what bench/results says; bench/render.py writes it", file=sys.stderr)
            return 1 if wrong else 0
        for name in wrong:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(files()[name], encoding="utf-8")
            print(f"wrote {name}")
    except RecordError as error:
        print(f"render: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Writes src/tokenizer/bert_tables.cpp: what Hugging Face's BertNormalizer and BertPreTokenizer do with each code point.

Usage: tools/make_bert_tables.py
The tables are found by asking the PyPI package tokenizers (0.23.3) about every code point, because its classes are of
an older Unicode than any other package has.
"""
from pathlib import Path

from tokenizers import normalizers, pre_tokenizers

OUT = Path(__file__).resolve().parent.parent / "src/tokenizer/bert_tables.cpp"
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
REMOVED, SPACE, ACCENT, PUNCTUATION, CHINESE = 1, 2, 4, 8, 16  # BertFlags of bert_tables.h


def normalizer(**what):
    off = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    return normalizers.BertNormalizer(**{**off, **what}).normalize_str


def flags():
    clean, accents = normalizer(clean_text=True), normalizer(strip_accents=True)
    chinese, cut = normalizer(handle_chinese_chars=True), pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    out = []
    for c in CODE_POINTS:
        text = "a" + chr(c)
        cleaned, pieces = clean(text), len(cut(text + "a"))
        value = REMOVED * (cleaned == "a") | SPACE * (pieces == 2) | ACCENT * (accents(text) == "a")
        value |= PUNCTUATION * (pieces == 3) | CHINESE * (chinese(chr(c)) != chr(c))
        if not out or out[-1][1] != value or c == 0xE000:
            out.append((c, value))
    return [f"{c << 8 | value:#x}" for c, value in out]


def lower():
    """Runs of equal difference with a stride of 1 or 2; the one that becomes two is told by the code."""
    convert, runs = normalizer(lowercase=True), []
    for c in CODE_POINTS:
        to = convert(chr(c))
        if to == chr(c) or len(to) != 1:
            assert to == chr(c) or (c, to) == (0x130, "i\u0307"), (c, to)
            continue
        delta = ord(to) - c
        if runs:
            first, last, stride, d = runs[-1]
            if d == delta and c - last in (1, 2) and (first == last or c - last == stride):
                runs[-1] = (first, c, c - last, d)
                continue
        runs.append((c, c, 1, delta))
    return [f"{{{a:#x}, {b:#x}, {s}, {d}}}" for a, b, s, d in runs]


def rows(items, per_line):
    return ",\n    ".join(", ".join(items[i:i + per_line]) for i in range(0, len(items), per_line))


def main():
    flag_ranges, lower_runs = flags(), lower()
    OUT.write_text(f"""// What BertNormalizer and BertPreTokenizer of Hugging Face tokenizers do with each code point.
// Written by tools/make_bert_tables.py: change that, not this.
#include "tokenizer/bert_tables.h"

namespace millrace {{

// clang-format off
const uint32_t kBertFlagRanges[] = {{
    {rows(flag_ranges, 12)}}};
const size_t kNumBertFlagRanges = {len(flag_ranges)};

const LowerRun kBertLowerRuns[] = {{
    {rows(lower_runs, 4)}}};
const size_t kNumBertLowerRuns = {len(lower_runs)};
// clang-format on

}}  // namespace millrace
""", encoding="ascii")
    print(f"{OUT.name}: {len(flag_ranges)} ranges, {len(lower_runs)} runs")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes src/tokenizer/unicode_tables.cpp: character classes and canonical (de)composition data.

Categories are Unicode 16.0, which is what the regular expressions of Hugging Face tokenizers 0.2x and tiktoken
use; Python's own unicodedata is often older, so this needs the PyPI package unicodedata2==16.0.0. The NFC of
Hugging Face tokenizers 0.23.3 has older data, by the look of it of Unicode 9.0. AFTER_9_0 was found by asking it about
every code point: these have a combining class or decomposition in 16.0 and none there, so they have none here.
`--check` compares every code point with an installed Hugging Face tokenizers instead of writing.
"""
import pathlib
import sys

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata
if unicodedata.unidata_version != "16.0.0":
    sys.exit(f"Unicode {unicodedata.unidata_version} found, 16.0.0 expected: pip install unicodedata2==16.0.0")

OUT = pathlib.Path(__file__).resolve().parent.parent / "src/tokenizer/unicode_tables.cpp"

# Flags of unicode.h, in the same order.
LETTER, NUMBER, SPACE, UPPERISH, LOWERISH, NEWLINE, PUNCTUATION, WORD = (1 << i for i in range(8))
WHITE_SPACE = {9, 10, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F,
               0x3000}
# Alphabetic symbols (Other_Alphabetic of category So) and the joiners: \w of the Rust regex crate.
WORD_EXTRA = {0x200C, 0x200D, *range(0x24B6, 0x24EA), *range(0x1F130, 0x1F14A), *range(0x1F150, 0x1F16A),
              *range(0x1F170, 0x1F18A)}
AFTER_9_0 = [
    (0x7FD, 0x7FD), (0x897, 0x89F), (0x8CA, 0x8D3), (0x9FE, 0x9FE), (0xC3C, 0xC3C), (0xD3B, 0xD3C), (0xEBA, 0xEBA),
    (0x1715, 0x1715), (0x1ABF, 0x1ACE), (0x1DF6, 0x1DFA), (0xA82C, 0xA82C), (0x105C9, 0x105C9), (0x105E4, 0x105E4),
    (0x10D24, 0x10D27), (0x10D69, 0x10D6D), (0x10EAB, 0x10EAC), (0x10EFD, 0x10EFF), (0x10F46, 0x10F50),
    (0x10F82, 0x10F85), (0x11070, 0x11070), (0x1133B, 0x1133B), (0x11383, 0x11383), (0x11385, 0x11385),
    (0x1138E, 0x1138E), (0x11391, 0x11391), (0x113C5, 0x113C5), (0x113C7, 0x113C8), (0x113CE, 0x113D0),
    (0x1145E, 0x1145E), (0x11839, 0x1183A), (0x11938, 0x11938), (0x1193D, 0x1193E), (0x11943, 0x11943),
    (0x119E0, 0x119E0), (0x11A34, 0x11A34), (0x11A47, 0x11A47), (0x11A99, 0x11A99), (0x11D42, 0x11D42),
    (0x11D44, 0x11D45), (0x11D97, 0x11D97), (0x11F41, 0x11F42), (0x16121, 0x16128), (0x1612F, 0x1612F),
    (0x16D68, 0x16D6A), (0x16FF0, 0x16FF1), (0x1E08F, 0x1E08F), (0x1E130, 0x1E136), (0x1E2AE, 0x1E2AE),
    (0x1E2EC, 0x1E2EF), (0x1E4EC, 0x1E4EF), (0x1E5EE, 0x1E5EF)]
LATER = {c for first, last in AFTER_9_0 for c in range(first, last + 1)}
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def flags(c):
    category = unicodedata.category(chr(c))
    f = 0
    if category[0] == "L":
        f |= LETTER | WORD
    if category[0] == "N":
        f |= NUMBER
    if c in WHITE_SPACE:
        f |= SPACE
    if category in ("Lu", "Lt", "Lm", "Lo") or category[0] == "M":
        f |= UPPERISH
    if category in ("Ll", "Lm", "Lo") or category[0] == "M":
        f |= LOWERISH
    if c in (10, 13):
        f |= NEWLINE
    if category[0] == "P":
        f |= PUNCTUATION
    if category[0] == "M" or category in ("Nd", "Nl", "Pc") or c in WORD_EXTRA:
        f |= WORD
    return f


def ranges(value):
    """[(start << 8 | value)] where the value changes, from code point 0."""
    out, last = [], None
    for c in range(0x110000):
        v = 0 if 0xD800 <= c < 0xE000 else value(c)
        if v != last:
            out.append(c << 8 | v)
            last = v
    return out


def combining(c):
    return 0 if c in LATER else unicodedata.combining(chr(c))


def decompositions():
    """[(code point, first, second or 0, 1 when the pair composes back)], Hangul syllables excepted."""
    out = []
    for c in CODE_POINTS:
        text = unicodedata.decomposition(chr(c))
        if not text or text.startswith("<") or c in LATER:
            continue
        parts = [int(x, 16) for x in text.split()]
        composes = len(parts) == 2 and unicodedata.normalize("NFC", chr(parts[0]) + chr(parts[1])) == chr(c)
        out.append((c, parts[0], parts[1] if len(parts) == 2 else 0, int(composes)))
    return out


def rows(items, per_line):
    lines = [", ".join(items[i:i + per_line]) for i in range(0, len(items), per_line)]
    return ",\n    ".join(lines)


def write():
    flag_ranges = ranges(flags)
    combining_ranges = ranges(combining)
    symbol_ranges = ranges(lambda c: int(unicodedata.category(chr(c))[0] == "S"))
    pairs = decompositions()
    OUT.write_text(f"""// Unicode {unicodedata.unidata_version} character classes; canonical data as Unicode 9.0 had it.
// Written by tools/make_unicode_tables.py: change that, not this.
#include "tokenizer/unicode_tables.h"

namespace millrace {{

// clang-format off
const uint32_t kFlagRanges[] = {{
    {rows([hex(x) for x in flag_ranges], 12)}}};
const size_t kNumFlagRanges = {len(flag_ranges)};

const uint32_t kCombiningRanges[] = {{
    {rows([hex(x) for x in combining_ranges], 12)}}};
const size_t kNumCombiningRanges = {len(combining_ranges)};

const uint32_t kSymbolRanges[] = {{
    {rows([hex(x) for x in symbol_ranges], 12)}}};
const size_t kNumSymbolRanges = {len(symbol_ranges)};

const Decomposition kDecompositions[] = {{
    {rows([f"{{{a:#x},{b:#x},{s:#x},{k}}}" for a, b, s, k in pairs], 5)}}};
const size_t kNumDecompositions = {len(pairs)};
// clang-format on

}}  // namespace millrace
""", encoding="ascii")
    print(f"{OUT.name}: {len(flag_ranges)} + {len(combining_ranges)} ranges, {len(pairs)} decompositions, "
          f"{OUT.stat().st_size} bytes")


def check():
    """Every class, code point by code point, against the regular expressions of Hugging Face tokenizers."""
    import tokenizers
    from tokenizers import Regex, pre_tokenizers
    ours = {c: flags(c) for c in CODE_POINTS}
    bad = 0
    for pattern, flag in ((r"\p{L}", LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE), (r"\p{P}", PUNCTUATION),
                          (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", UPPERISH), (r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", LOWERISH)):
        theirs = set()
        for i in range(0, len(CODE_POINTS), 4096):
            text = "".join(map(chr, CODE_POINTS[i:i + 4096]))
            removed = pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(text)
            theirs |= set(text) - set("".join(piece for piece, _ in removed))
        different = sum(bool(ours[c] & flag) != (chr(c) in theirs) for c in CODE_POINTS)
        print(f"{pattern}: {different} of {len(CODE_POINTS)} differ from tokenizers {tokenizers.__version__}")
        bad += different
    sys.exit(bad != 0)


if __name__ == "__main__":
    check() if "--check" in sys.argv[1:] else write()

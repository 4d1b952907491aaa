#!/usr/bin/env python3
"""Writes kernels/quant/codebooks.cpp: which groups of magnitudes the IQ types of GGUF have codes for.

The codebooks are facts of the file format; gguf-py (pip install gguf==0.19.0) has them. Each is in ascending order
when its entries are read as numbers to the base of its levels, first element lowest, so the set says everything.
"""
import pathlib

import numpy as np
from gguf import quants

OUT = pathlib.Path(__file__).resolve().parent.parent / "kernels/quant/codebooks.cpp"
BOOKS = [("iq2_xxs", quants.IQ2_XXS), ("iq2_xs", quants.IQ2_XS), ("iq2_s", quants.IQ2_S), ("iq1", quants.IQ1_S),
         ("iq3_xxs", quants.IQ3_XXS), ("iq3_s", quants.IQ3_S)]

HEAD = """// Written by tools/make_codebooks.py: bit n of a set is group n (codebooks.h).
#include "kernels/quant/codebooks.h"

#include <cstddef>
#include <span>

namespace millrace::quant {
namespace {

// The groups of a set in their order.
template <class Book, size_t kLevels>
Book expand(std::span<const uint64_t> set, const int8_t (&levels)[kLevels]) {
  Book book{};
  size_t count = 0;
  for (size_t group = 0; group < 64 * set.size() && count < book.entries.size(); ++group) {
    if ((set[group / 64] >> (group % 64) & 1) == 0) continue;
    size_t digits = group;
    for (int8_t& element : book.entries[count]) {
      element = levels[digits % kLevels];
      digits /= kLevels;
    }
    ++count;
  }
  return book;
}

constexpr int8_t kLevelsIq2[] = {8, 25, 43};
constexpr int8_t kLevelsIq1[] = {-1, 0, 1};
constexpr int8_t kLevelsIq3Xxs[] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr int8_t kLevelsIq3S[] = {1, 3, 5, 7, 9, 11, 13, 15};
"""


def camel(name):
    return "".join(part.capitalize() for part in name.split("_"))


def set_of(book):
    """The words of a codebook's set."""
    book.init_grid()
    levels = {value: digit for digit, value in enumerate(book.grid_map)}
    digits = np.vectorize(levels.get)(book.grid.reshape(book.grid_shape))
    base, length = len(book.grid_map), book.grid_shape[1]
    groups = (digits * base ** np.arange(length)).sum(axis=1)
    assert np.all(np.diff(groups) > 0), "not in ascending order"
    words = [0] * ((base**length + 63) // 64)
    for group in map(int, groups):
        words[group // 64] |= 1 << group % 64
    return words


def main():
    out = [HEAD]
    for name, book in BOOKS:
        words = [f"0x{w:016x}," for w in set_of(book)]
        lines = "\n".join("    " + " ".join(words[i : i + 5]) for i in range(0, len(words), 5))
        out.append(f"// clang-format off\nconstexpr uint64_t kSet{camel(name)}[] = {{\n{lines}\n}};\n// clang-format on\n")
    out.append("}  // namespace\n")
    for name, book in BOOKS:
        kind = f"Codebook{book.grid_shape[1]}"
        levels = "kLevelsIq2" if name.startswith("iq2") else f"kLevels{camel(name)}"
        out.append(f"const {kind}& codebook_{name}() {{\n"
                   f"  static const {kind} book = expand<{kind}>(kSet{camel(name)}, {levels});\n  return book;\n}}\n")
    out.append("}  // namespace millrace::quant\n")
    OUT.write_text("\n".join(out))


main()

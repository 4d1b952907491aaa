// Which variant of a kernel a device uses for a shape, as a table that a person can read: what was timed, how
// long each took, what was chosen. All variants give the same bits, so a table can only make things slow.
//
// A table is made by `millrace tune`, once for a GPU and a build, and kept in a file of the user's cache
// directory; opening a device reads it (load_tuning) and never times anything.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tensor/dtype.h"

namespace millrace {

class Backend;

// For what a table holds. Of another driver or build its times say nothing.
struct TuningTarget {
  std::string device;  // "NVIDIA H200"
  std::string driver;  // "13.0"
  std::string build;   // "CUDA 13.0, kernels 1"
  bool operator==(const TuningTarget&) const = default;
};

// Matrices that a model multiplies the same rows with, together.
struct TuningShape {
  struct Part {
    DType type;
    int64_t outputs;
  };
  std::string what;  // "q, k, v"
  std::vector<Part> parts;
  int64_t cols = 0;
  bool add = false;       // to what is there
  int64_t most_rows = 0;  // at once
};

struct TuningKey {
  std::string kernel, format;     // "gemm", "bf16"
  int64_t outputs = 0, cols = 0;  // of all parts
  int64_t rows = 0;               // and fewer, down to the entry before
  bool operator==(const TuningKey&) const = default;
};
struct TuningTime {
  std::string candidate;
  double us = 0.0;
};
struct TuningEntry {
  std::string what;
  TuningKey key;
  std::string choice;
  std::vector<TuningTime> times;
};
struct TuningTable {
  TuningTarget target;
  std::vector<TuningEntry> entries;
};

// Called with each entry as it is made.
using AutotuneProgress = std::function<void(const TuningEntry&)>;

// $XDG_CACHE_HOME/millrace/tune-nvidia_h200-13.0.json, or under ~/.cache. Throws Error{kBadInput} where
// neither directory is known.
std::string tuning_file(const TuningTarget& target);

std::string tuning_text(const TuningTable& table);  // JSON
// Throws Error{kBadInput} naming the path and what is wrong.
TuningTable parse_tuning(const std::string& text, const std::string& path);

// `made` in place of the entries of `old` with the same keys; of another target `old` counts for nothing.
TuningTable merge_tuning(const TuningTable& old, const TuningTable& made);
// Makes the directories too. Throws Error{kIo}.
void write_tuning(const TuningTable& table, const std::string& path);

// Gives the device the table of its file, if there is one. Returns what there is to say: nothing, or one
// line why the file is not used; built-in choices hold then.
std::string load_tuning(Backend& backend);

}  // namespace millrace

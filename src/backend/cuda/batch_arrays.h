// What the kernels must know about a batch, as one array of int32 that goes to the device in one copy:
//   tokens [rows] | positions [rows] | sequence_of [rows] | logit_rows | per group: table_starts [sequences]
//   | tables, one sequence after another, group after group
// No CUDA in here: tested without a device.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "backend/backend.h"

namespace millrace::cuda {

class BatchArrays {
 public:
  // Lays the batch out. What contradicts the specification (rows that no sequence covers, a table entry that
  // is no block of the pool) fails a check here rather than a read on the device.
  BatchArrays(const Batch& batch, const ExecutorSpec& spec);

  size_t size() const { return size_; }
  void fill(int32_t* out) const;  // [size()]

  // Where the parts begin.
  size_t tokens() const { return 0; }
  size_t positions() const { return rows_; }
  size_t sequence_of() const { return 2 * rows_; }
  size_t logit_rows() const { return 3 * rows_; }
  size_t table_starts(int group) const { return groups_[group].starts; }
  size_t tables(int group) const { return groups_[group].tables; }

  // Whether group `group` holds every position that a row with this window (0: everything) can see.
  bool holds_window(int group, int32_t window) const;

 private:
  struct Group {
    size_t starts = 0, tables = 0;
    std::vector<int32_t> first_held;  // [sequences]: from this logical block on the table has no gap
  };
  Batch batch_;
  size_t rows_ = 0, size_ = 0;
  int num_groups_ = 0;
  std::array<Group, kMaxKvGroups> groups_;
};

}  // namespace millrace::cuda

// Which tile of which expert is whose, where rows are sorted by expert and only the device knows how many
// each has. Tiles are numbered through; who walks over them asks with rising numbers.
#pragma once

#include <cstdint>

namespace millrace::cuda {

struct GroupItem {
  int32_t expert;
  int32_t first_row, rows;  // of this tile; rows ends with the expert's last
  int32_t column_tile;
};

struct GroupCursor {
  const int32_t* offsets;  // [experts + 1], or null: one expert that has all rows
  int32_t experts, m, tile_rows, column_tiles;
  int32_t rows_of_tiles;  // tiles of so many rows in turn before the next column: what L2 keeps
  int32_t expert = 0, first = 0, begin = 0, end = 0;

  __device__ GroupCursor(const int32_t* at, int32_t num_experts, int32_t rows, int32_t rows_per_tile,
                         int32_t columns, int32_t together)
      : offsets(at),
        experts(num_experts),
        m(rows),
        tile_rows(rows_per_tile),
        column_tiles(columns),
        rows_of_tiles(together) {
    load();
  }
  __device__ void load() {
    begin = offsets != nullptr ? __ldg(offsets + expert) : 0;
    end = offsets != nullptr ? __ldg(offsets + expert + 1) : m;
  }
  __device__ int32_t row_tiles() const { return (end - begin + tile_rows - 1) / tile_rows; }
  // Tile `index`, which never falls from call to call; false: there is none.
  __device__ bool find(int32_t index, GroupItem& item) {
    while (index - first >= row_tiles() * column_tiles) {
      first += row_tiles() * column_tiles;
      if (++expert == experts) {
        --expert;
        end = begin = m;
        return false;
      }
      load();
    }
    const int32_t inside = index - first, per_group = rows_of_tiles * column_tiles;
    const int32_t first_tile = inside / per_group * rows_of_tiles;
    const int32_t height = min(rows_of_tiles, row_tiles() - first_tile);
    const int32_t row_tile = first_tile + inside % per_group % height;
    item.expert = expert;
    item.column_tile = inside % per_group / height;
    item.first_row = begin + row_tile * tile_rows;
    item.rows = min(tile_rows, end - item.first_row);
    return true;
  }
};

}  // namespace millrace::cuda

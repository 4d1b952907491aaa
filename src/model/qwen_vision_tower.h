// QwenVisionTower: Qwen 3 VL's vision tower (Bai et al. 2025). Pictures keep their shape: each is resized to
// whole squares of merge x merge patches, and its patches, with learned positions interpolated to their grid
// and rotated by row and column, see one another. A square of them becomes one row of the language model; so
// do the outputs of some layers within the tower, which are added behind the language model's first layers
// (DeepStack, Meng et al. 2024).
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"
#include "model/vision_layer.h"
#include "model/vision_tower.h"

namespace millrace {

struct QwenVisionConfig : VisionLayerShape {
  int32_t patch_size = 0, merge = 2;  // pixels; patches a side of what becomes one row
  int32_t frames = 2;                 // of the patches' convolution: a picture is all of them
  int32_t side = 0;                   // of the square of learned positions
  int32_t text_hidden = 0;
  std::vector<int32_t> deep;               // layers whose outputs go to the language model too, ascending
  int64_t min_pixels = 0, max_pixels = 0;  // of a resized picture
  std::array<float, 3> mean{0.5f, 0.5f, 0.5f}, deviation{0.5f, 0.5f, 0.5f};  // of the colours, in [0, 1]

  int32_t merged() const { return hidden * merge * merge; }
};

class QwenVisionTower final : public VisionTower {
 public:
  static bool is_in(const io::Checkpoint& checkpoint);  // of a Hugging Face directory
  QwenVisionTower(const io::Checkpoint& checkpoint, int32_t text_hidden, Backend& backend);
  ~QwenVisionTower() override;

  ImageGrid grid_of(int32_t width, int32_t height) const override;
  bool one_size() const override { return false; }
  int32_t further() const override { return static_cast<int32_t>(config_.deep.size()); }
  size_t workspace_bytes() const override { return workspace_bytes_; }
  std::string identity() const override;
  std::vector<float> rows_of(const uint8_t* rgb, const ImageGrid& grid) override;

 private:
  struct Merger;
  struct Names;
  struct Loader;
  void load(const io::Checkpoint& checkpoint);
  void load_patches(const Names& names, bool is_gguf);
  void load_layer(const Loader& from, int32_t l);
  void load_mergers(const Loader& from);
  void make_room(int32_t patches);  // an executor for so many
  // Patches in their order, all of a square before the next one: [patches][3] of 0, row and column.
  std::vector<int32_t> places_of(const ImageGrid& grid) const;
  std::vector<float> embedded(const uint8_t* rgb, const ImageGrid& grid,
                              const std::vector<int32_t>& places) const;  // [patches, hidden]
  void add_position(int32_t row, int32_t column, int32_t rows, int32_t columns, float* to) const;
  // hidden [patches, hidden] -> [tokens, text_hidden], each written `stride` behind the one before it.
  void merge(const Merger& merger, const std::vector<float>& hidden, int64_t tokens, float* to,
             int64_t stride);

  QwenVisionConfig config_;
  Backend& backend_;
  std::vector<float> patch_weight_;            // [3 * patch * patch, hidden]: of all frames together
  std::vector<float> patch_bias_, positions_;  // [hidden]; [side * side, hidden]
  std::vector<float> angles_;                  // [head_dim / 2]: of rows, then of columns
  std::vector<uint8_t> axes_;                  // Rope::axes
  std::vector<VisionLayer> layers_;
  std::unique_ptr<Merger> merger_;
  std::vector<std::unique_ptr<Merger>> deep_mergers_;
  std::vector<float> identity_;
  int32_t room_ = 0;
  std::unique_ptr<Executor> executor_, first_product_, second_product_;  // of patches; of squares
  std::atomic<size_t> workspace_bytes_ = 0;
  size_t fixed_bytes_ = 0;
  std::vector<int32_t> tokens_, table_;
};

}  // namespace millrace

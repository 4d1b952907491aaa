// SiglipTower: Gemma 3's vision tower, a SigLIP encoder (Zhai et al. 2023) over patches of a square picture,
// whose outputs are averaged in squares, normed and projected.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"
#include "model/vision_layer.h"
#include "model/vision_tower.h"

namespace millrace {

struct SiglipConfig : VisionLayerShape {
  int32_t image_size = 0, patch_size = 0;  // pixels
  int32_t tokens = 0;                      // rows of an image
  int32_t text_hidden = 0;
  std::array<float, 3> mean{0.5f, 0.5f, 0.5f}, deviation{0.5f, 0.5f, 0.5f};  // of the colours, in [0, 1]

  int32_t patches_per_side() const { return image_size / patch_size; }
  int32_t patches() const { return patches_per_side() * patches_per_side(); }
};

class SiglipTower final : public VisionTower {
 public:
  static bool is_in(const io::Checkpoint& checkpoint);  // of a Hugging Face directory
  SiglipTower(const io::Checkpoint& checkpoint, int32_t text_hidden, Backend& backend);
  ~SiglipTower() override;

  ImageGrid grid_of(int32_t width, int32_t height) const override;
  bool one_size() const override { return true; }
  size_t workspace_bytes() const override { return workspace_bytes_; }
  std::string identity() const override;
  std::vector<float> rows_of(const uint8_t* rgb, const ImageGrid& grid) override;

 private:
  struct Names;
  void load(const io::Checkpoint& checkpoint);
  std::vector<float> patches_of(const uint8_t* rgb) const;  // [patches, 3 * patch * patch]
  std::vector<float> embedded(const std::vector<float>& patches) const;
  std::vector<float> averaged(const std::vector<float>& hidden) const;  // [tokens, hidden]

  SiglipConfig config_;
  Backend& backend_;
  std::vector<float> patch_weight_;            // [3 * patch * patch, hidden]: columns of the convolution
  std::vector<float> patch_bias_, positions_;  // [hidden]; [patches, hidden]
  std::vector<float> soft_norm_, projection_;  // [hidden]; [hidden, text_hidden]
  std::vector<VisionLayer> layers_;
  WeightPtr post_norm_, post_norm_bias_;
  std::unique_ptr<Executor> executor_;
  size_t workspace_bytes_ = 0;
  std::vector<int32_t> tokens_, table_;  // of its one batch
};

}  // namespace millrace

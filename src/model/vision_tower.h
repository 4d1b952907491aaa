// VisionTower: what makes of a picture the rows that a language model reads in place of tokens. Each kind of
// tower is a file of its own (siglip_tower.h, qwen_vision_tower.h); its layers are operations of a backend,
// in an executor of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"

namespace millrace {

// What becomes of a picture of some size.
struct ImageGrid {
  int32_t width = 0, height = 0;  // pixels that it is resized to
  bool cubic = false;             // by cubic curves, or by triangles
  int32_t tokens = 0;             // rows of it
  int32_t rows = 0, columns = 0;  // tokens' places, for a model whose positions tell them; 0: it has none
};

class VisionTower {
 public:
  // Whether a Hugging Face directory, or a GGUF file of llama.cpp's mmproj kind, has one.
  static bool is_in(const io::Checkpoint& checkpoint);
  // `projector`: Architecture::ImageText's; `text_hidden`: the language model's. The checkpoint and the
  // backend must outlive the tower. Throws Error for another tower than that and for tensors that are not
  // there.
  static std::unique_ptr<VisionTower> open(const io::Checkpoint& checkpoint, std::string_view projector,
                                           int32_t text_hidden, Backend& backend);
  virtual ~VisionTower() = default;

  // Throws Error{kBadInput} for a picture that has no place in it.
  virtual ImageGrid grid_of(int32_t width, int32_t height) const = 0;
  virtual bool one_size() const = 0;             // all pictures have the same grid
  virtual int32_t further() const { return 0; }  // GivenRow::further of its rows
  // Of its executor, its keys and values, and the weights that it has copied for the host. Any thread.
  virtual size_t workspace_bytes() const = 0;
  // What makes rows of two towers differ, beside the picture: a digest's worth of its last weights.
  virtual std::string identity() const = 0;

  // rgb: [height][width][3] of the grid, 8 bits -> [tokens, (1 + further) * text_hidden]. One thread at a
  // time.
  virtual std::vector<float> rows_of(const uint8_t* rgb, const ImageGrid& grid) = 0;
};

}  // namespace millrace

// ImageReader: files of pictures on their way into a prompt. Each becomes some tokens whose ids are below
// 0 and made of the file's digest: the prefix cache names an image's blocks by what is in it. What the model
// reads in their place is the vision tower's, computed on the thread of whoever sends the image, and kept for
// the next turn of the conversation.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "io/checkpoint.h"
#include "model/vision_tower.h"

namespace millrace {

class ImageReader {
 public:
  using Rows = std::shared_ptr<const std::vector<float>>;

  // The tower of `checkpoint`, on a backend of its own.
  ImageReader(io::Checkpoint checkpoint, std::string_view projector, int32_t text_hidden,
              std::unique_ptr<Backend> backend);

  const VisionTower& tower() const { return *tower_; }
  // Of an image. Throws Error{kBadInput} for a file that is no picture, where sizes of pictures count. Any
  // thread.
  ImageGrid grid_of(std::string_view file) const;
  // [tokens]. No two images have the same; images of another tower have others. Any thread.
  std::vector<int32_t> ids_of(std::string_view file, const ImageGrid& grid) const;
  // [tokens, (1 + further) * hidden]. Throws Error{kBadInput} for a file that is no picture. Any thread; one
  // at a time.
  Rows rows_of(std::string_view file);

 private:
  using Digest = std::array<uint8_t, 32>;
  Digest digest_of(std::string_view file) const;

  const io::Checkpoint checkpoint_;  // first: the tower's weights are in its mapping
  const std::unique_ptr<Backend> backend_;
  const std::unique_ptr<VisionTower> tower_;
  Digest identity_;  // the tower's

  std::mutex mutex_;
  struct Kept {
    Digest digest;
    Rows rows;
  };
  std::list<Kept> kept_;  // latest first
  size_t kept_bytes_ = 0;
};

// The ids of a prompt without those of images.
std::vector<int32_t> text_tokens(const std::vector<int32_t>& tokens);

}  // namespace millrace

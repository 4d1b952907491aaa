#include "engine/image_reader.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "image/picture.h"
#include "kv/hash.h"

namespace millrace {
namespace {

// Images whose rows are kept: of 256 rows of 2560 numbers each 2.5 MiB, of larger ones more; beside the
// latest no more than so many bytes.
constexpr size_t kKept = 32, kKeptBytes = size_t{256} << 20;

}  // namespace

ImageReader::ImageReader(io::Checkpoint checkpoint, std::string_view projector, int32_t text_hidden,
                         std::unique_ptr<Backend> backend)
    : checkpoint_(std::move(checkpoint)),
      backend_(std::move(backend)),
      tower_(VisionTower::open(checkpoint_, projector, text_hidden, *backend_)),
      identity_() {
  kv::Blake2b hash(identity_.size());
  hash.update(tower_->identity());
  hash.finish(identity_);
}

ImageReader::Digest ImageReader::digest_of(std::string_view file) const {
  Digest digest;
  kv::Blake2b hash(digest.size());
  hash.update(identity_.data(), identity_.size());
  hash.update(file);
  hash.finish(digest);
  return digest;
}

ImageGrid ImageReader::grid_of(std::string_view file) const {
  if (tower_->one_size()) return tower_->grid_of(1, 1);
  const image::Picture picture = image::decode(file);
  return tower_->grid_of(picture.width, picture.height);
}

std::vector<int32_t> ImageReader::ids_of(std::string_view file, const ImageGrid& grid) const {
  const Digest digest = digest_of(file);
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < grid.tokens; ++i) {
    std::array<uint8_t, 4> bytes;
    kv::Blake2b hash(bytes.size());
    hash.update(digest.data(), digest.size());
    hash.update(&i, sizeof(i));
    hash.finish(bytes);
    int32_t id = 0;
    std::memcpy(&id, bytes.data(), sizeof(id));
    ids.push_back(id | INT32_MIN);
  }
  return ids;
}

ImageReader::Rows ImageReader::rows_of(std::string_view file) {
  const Digest digest = digest_of(file);
  const std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(kept_.begin(), kept_.end(), [&](const Kept& k) { return k.digest == digest; });
  if (found != kept_.end()) {
    kept_.splice(kept_.begin(), kept_, found);
    return kept_.front().rows;
  }
  const image::Picture whole = image::decode(file);
  const ImageGrid grid = tower_->grid_of(whole.width, whole.height);
  const image::Picture picture = image::resize(whole, grid.width, grid.height,
                                               grid.cubic ? image::Filter::kCubic : image::Filter::kLinear);
  kept_.push_front(
      {digest, std::make_shared<const std::vector<float>>(tower_->rows_of(picture.rgb.data(), grid))});
  const auto bytes = [](const Kept& kept) { return kept.rows->size() * sizeof(float); };
  kept_bytes_ += bytes(kept_.front());
  while (kept_.size() > 1 && (kept_.size() > kKept || kept_bytes_ > kKeptBytes)) {
    kept_bytes_ -= bytes(kept_.back());
    kept_.pop_back();
  }
  return kept_.front().rows;
}

std::vector<int32_t> text_tokens(const std::vector<int32_t>& tokens) {
  std::vector<int32_t> out;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(out), [](int32_t t) { return t >= 0; });
  return out;
}

}  // namespace millrace

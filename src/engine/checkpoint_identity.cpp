#include "engine/checkpoint_identity.h"

#include <algorithm>

#include "base/page_warmer.h"
#include "kv/hash.h"

namespace millrace {

std::string checkpoint_identity(const io::Checkpoint& checkpoint, const ModelConfig& config) {
  // Reading every weight would cost as much as the first answer. Of each tensor its name, type, shape and
  // three pieces of 256 bytes: fine-tuning, another quantization or another seed change nearly all of them.
  constexpr size_t kPiece = 256;
  const auto for_each_piece = [&](const TensorView& tensor, const auto& body) {
    const size_t bytes = tensor.bytes();
    for (const size_t at : {size_t{0}, bytes / 2, bytes - std::min(bytes, kPiece)}) {
      body(tensor.data + at, std::min(kPiece, bytes - at));
    }
  };
  // A rank may have little of the file: what lies around the pieces is not to be read for their sake.
  for (const TensorView& tensor : checkpoint.tensors()) for_each_piece(tensor, start_reading);
  kv::Blake2b hash(16);
  for (const TensorView& tensor : checkpoint.tensors()) {
    hash.update(tensor.name);
    const int32_t type = static_cast<int32_t>(tensor.type);
    hash.update(&type, sizeof(type));
    hash.update(tensor.shape.data(), sizeof(tensor.shape[0]) * static_cast<size_t>(tensor.rank));
    for_each_piece(tensor, [&](const std::byte* data, size_t bytes) { hash.update(data, bytes); });
  }
  // And what is computed from other keys of the file: positions, windows, norms.
  hash.update(config.rope_inv_freq.data(), config.rope_inv_freq.size() * sizeof(float));
  hash.update(config.layer_windows.data(), config.layer_windows.size() * sizeof(int32_t));
  hash.update(config.rope_window_inv_freq.data(), config.rope_window_inv_freq.size() * sizeof(float));
  hash.update(config.rope_axes.data(), config.rope_axes.size());
  for (const bool unrotated : config.unrotated_layers) hash.update(&unrotated, sizeof(bool));
  for (const float value : {config.rope_magnitude, config.norm_eps, config.embedding_scale,
                            config.residual_scale, config.attention_scale, config.attention_softcap}) {
    hash.update(&value, sizeof(float));
  }
  for (const auto& [name, value] : config.own) {
    hash.update(name);
    hash.update(&value, sizeof(float));
  }
  kv::BlockKey digest;
  hash.finish(digest.bytes);
  return digest.hex();
}

std::string adapter_identity(const Adapter& adapter) {
  kv::BlockKey digest;
  kv::Blake2b hash(sizeof(digest.bytes));
  for (const AdapterUpdate& update : adapter.updates) {
    hash.update(update.role);
    const int64_t shape[] = {update.layer, update.rank, update.in, update.out};
    hash.update(shape, sizeof(shape));
    hash.update(update.a.data(), update.a.size() * sizeof(float));
    hash.update(update.b.data(), update.b.size() * sizeof(float));
  }
  hash.finish(digest.bytes);
  return digest.hex();
}

}  // namespace millrace

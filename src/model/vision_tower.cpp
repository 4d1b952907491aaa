#include "model/vision_tower.h"

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/qwen_vision_tower.h"
#include "model/siglip_tower.h"

namespace millrace {
namespace {

constexpr std::string_view kQwen = "qwen3vl_merger";  // clip.projector_type

std::string_view projector_of(const io::Gguf& file) {
  return file.get_string("clip.projector_type", file.get_string("clip.vision.projector_type", "none"));
}

}  // namespace

bool VisionTower::is_in(const io::Checkpoint& checkpoint) {
  if (checkpoint.gguf)
    return checkpoint.gguf->get_bool("clip.has_vision_encoder", false) ||
           checkpoint.gguf->has("clip.vision.image_size");
  if (!checkpoint.hf->config.contains("vision_config")) return false;
  return SiglipTower::is_in(checkpoint) || QwenVisionTower::is_in(checkpoint);
}

std::unique_ptr<VisionTower> VisionTower::open(const io::Checkpoint& checkpoint, std::string_view projector,
                                               int32_t text_hidden, Backend& backend) {
  if (checkpoint.gguf && projector_of(*checkpoint.gguf) != projector) {
    throw_error(ErrorCode::kUnsupported, "{}: clip.projector_type: found {}, expected {}", checkpoint.path(),
                projector_of(*checkpoint.gguf), projector);
  }
  if (projector == kQwen) return std::make_unique<QwenVisionTower>(checkpoint, text_hidden, backend);
  return std::make_unique<SiglipTower>(checkpoint, text_hidden, backend);
}

}  // namespace millrace

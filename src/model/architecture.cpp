// Which architecture a checkpoint is of.
#include "model/architecture.h"

#include "base/check.h"
#include "base/error.h"
#include "io/hf_directory.h"
#include "model/decoder_layer.h"

namespace millrace {

std::vector<WeightSpec> Architecture::outer_weights(const ModelConfig&) const { return {}; }

Embed Architecture::embedding(const ModelWeights& w, const ModelConfig& config) const {
  return {.table = w.token_embedding.get(),
          .scale = config.embedding_scale,
          .positions = w.positions.get(),
          .types = w.token_types.get(),
          .norm = norm_of(config, w.embedding_norm, w.embedding_norm_bias)};
}

Logits Architecture::logits(const ModelWeights& w, const ModelConfig& config) const {
  const Weight* output = w.output ? w.output.get() : w.token_embedding.get();
  return {.norm = norm_of(config, w.output_norm, w.output_norm_bias),
          .output = {output, w.output_bias.get()},
          .scale = config.logit_scale,
          .softcap = config.logit_softcap};
}
namespace {

std::vector<std::string_view> names_in(const Architecture& a, bool gguf) {
  return gguf ? std::vector<std::string_view>{a.name()} : a.model_types();
}

}  // namespace

const Architecture& find_architecture(const io::Checkpoint& checkpoint) {
  const bool gguf = checkpoint.gguf.has_value();
  std::string found;
  if (gguf) {
    found = checkpoint.gguf->get_string("general.architecture");
  } else {
    const auto it = checkpoint.hf->config.find("model_type");
    if (it != checkpoint.hf->config.end() && it->is_string()) found = it->get<std::string>();
  }
  std::string known;
  for (const Architecture* a : architectures()) {
    for (const std::string_view name : names_in(*a, gguf)) {
      if (name == found && (gguf || a->claims(checkpoint.hf->config))) return *a;
      known += (known.empty() ? "" : ", ") + std::string(name);
    }
  }
  throw_error(ErrorCode::kUnsupported, "{}: {}: found \"{}\", expected one of {}", checkpoint.path(),
              gguf ? "general.architecture" : "config.json: model_type", found, known);
}

const Architecture& architecture_of(const ModelConfig& config) {
  const Architecture* found = nullptr;
  for (const Architecture* a : architectures()) {
    if (a->name() == config.architecture) found = a;
  }
  MILLRACE_CHECK(found != nullptr);  // read_config took the name from one of them
  return *found;
}

}  // namespace millrace

#include "model/gguf_keys.h"

#include "model/architecture.h"

namespace millrace {

void write_config_keys(const io::Checkpoint& checkpoint, const ModelConfig& config, io::GgufWriter& writer) {
  const ConfigReader reader(checkpoint, config.architecture);
  GgufKeys keys(reader, config, writer);
  architecture_of(config).write_keys(keys);
}

}  // namespace millrace

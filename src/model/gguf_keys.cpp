#include "model/gguf_keys.h"

#include "model/architecture.h"

namespace millrace {

void write_config_keys(const io::Checkpoint& checkpoint, const ModelConfig& config, io::GgufWriter& writer) {
  const Architecture& architecture = architecture_of(config);
  const ConfigReader reader(checkpoint, architecture);
  GgufKeys keys(reader, config, writer);
  architecture.write_keys(keys);
}

}  // namespace millrace

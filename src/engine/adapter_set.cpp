#include "engine/adapter_set.h"

#include <algorithm>

#include "base/error.h"
#include "engine/checkpoint_identity.h"

namespace millrace {

std::string AdapterSet::identity() const {
  std::string all;
  for (const std::string& identity : identities) all += (all.empty() ? "" : " ") + identity;
  return all;
}

AdapterSet read_adapters(const EngineOptions& options, const io::Checkpoint& checkpoint,
                         const ModelConfig& config) {
  AdapterSet set;
  for (const AdapterOption& option : parse_adapter_options("adapters", options.adapters)) {
    const Adapter& adapter = set.adapters.emplace_back(read_adapter(option, checkpoint, config));
    if (options.expert_parallel && adapter.adapts_experts()) {
      throw_error(ErrorCode::kUnsupported,
                  "{}: adapter of experts, expected none with expert_parallel: ranks have whole ones",
                  adapter.path);
    }
    set.identities.push_back(adapter_identity(adapter));
    set.features.add(OpFeature::kAdapters);
    set.features.add(OpFeature::kExpertAdapters, adapter.adapts_experts());
    set.max_rank = std::max(set.max_rank, static_cast<int32_t>(adapter.max_rank()));
    set.bytes += adapter.bytes();
  }
  return set;
}

}  // namespace millrace

#include "engine/weight_types.h"

#include "engine/auto_types.h"
#include "quant/type_request.h"

namespace millrace {

WeightTypes weight_types(const EngineOptions& options) {
  if (options.quantize == "auto") return auto_weight_types(options);
  WeightTypes types;
  if (options.quantize.empty()) return types;
  types.choice = type_choice(quant::parse_request("quantize", options.quantize));
  types.identity = options.quantize;
  return types;
}

}  // namespace millrace

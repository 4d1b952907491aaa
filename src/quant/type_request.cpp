#include "quant/type_request.h"

#include "base/error.h"
#include "kernels/cpu/quant/encoder.h"

namespace millrace::quant {

double bits_per_weight(DType type) {
  return 8.0 * info(type).block_bytes / info(type).block_elements +
         (type == DType::kMXFP4Split ? 8.0 / 32 : 0.0);  // the scales beside it
}

// RWKV's token shift and products of low rank (time_mix_w1.weight): small, and they decide what is forgotten.
static bool is_rwkv_low_rank(std::string_view name) {
  constexpr std::string_view kMix = "time_mix_";
  const size_t at = name.find(kMix);
  if (at == std::string_view::npos) return false;
  const std::string_view rest = name.substr(at + kMix.size());
  return rest.starts_with("lerp") || rest.size() == std::string_view("w1.weight").size();
}

Part part_of(std::string_view name, const TensorView& view, bool tied) {
  if (name == "output.weight") return Part::kOutput;
  if (name == "token_embd.weight") return tied ? Part::kOutput : Part::kEmbedding;
  if (name == "per_layer_token_embd.weight") return Part::kEmbedding;  // Gemma 4: looked up alone
  const bool router = name.ends_with("ffn_gate_inp.weight") || name.ends_with("ffn_gate_inp_shexp.weight");
  const bool added = name == "position_embd.weight" || name == "token_types.weight";  // to the embedding
  const bool low = is_rwkv_low_rank(name);
  const bool conv = name.ends_with("ssm_conv1d.weight") || name.ends_with("shortconv.conv.weight");
  const bool weight = name.ends_with(".weight") && !name.ends_with("norm.weight");
  if (view.rank < 2 || router || added || conv || low || !weight || view.cols() == 1) return Part::kSmall;
  return Part::kMatrix;
}

std::string request_names() {
  std::string out;
  for (const DType type : encodable_types()) out += std::string(info(type).name) + " ";
  return out + "int8 int4";
}

TypeRequest parse_request(std::string_view option, std::string_view name, bool knows_auto) {
  TypeRequest request;
  if (name == "int8") {
    request = {DType::kQ8_0, DType::kQ8_0, true};
  } else if (name == "int4") {
    request = {DType::kQ4_K, DType::kQ6_K, true};
  } else {
    const std::optional<DType> type = parse_dtype(name);
    if (!type || !can_encode(*type)) {
      throw_error(ErrorCode::kBadInput, "{}: found \"{}\", expected one of {}{}", option, name,
                  request_names(), knows_auto ? " auto" : "");
    }
    const bool small = bits_per_weight(*type) < 6.5;
    request = {*type, small ? DType::kQ6_K : *type, false};
  }
  return request;
}

DType fitting_type(DType wanted, int64_t cols) {
  if (cols % info(wanted).block_elements == 0) return wanted;
  if (cols % 32 != 0) return DType::kF16;
  switch (wanted) {
    case DType::kQ4_K:
      return DType::kQ4_1;
    case DType::kQ5_K:
      return DType::kQ5_1;
    case DType::kQ2_K:
    case DType::kQ3_K:
    case DType::kIQ4_XS:
    case DType::kNVFP4:
      return DType::kIQ4_NL;
    default:
      return DType::kQ8_0;
  }
}

DType target_type(const TypeRequest& request, std::string_view name, const TensorView& view, bool tied) {
  const Part part = part_of(name, view, tied);
  if (part == Part::kSmall) return DType::kF32;
  const DType wanted = fitting_type(part == Part::kOutput ? request.output_type : request.type, view.cols());
  if (!request.keep_smaller || bits_per_weight(view.type) > bits_per_weight(wanted)) return wanted;
  return view.type == DType::kMXFP4Split ? DType::kMXFP4 : view.type;
}

}  // namespace millrace::quant

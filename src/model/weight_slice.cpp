#include "model/weight_slice.h"

#include <optional>

#include "base/error.h"

namespace millrace {
namespace {

enum class Cut {
  kWhole,          // every rank has all of it
  kRows,           // output rows, of every expert where there are experts
  kColumns,        // the same of a vector: biases
  kExpertRows,     // output rows of every expert, or whole experts
  kExpertColumns,  // the same of a row per expert: biases
  kQueryHeads,     // output rows of query heads
  kKvHeads,
  kQueryHeadValues,  // values of query heads: biases
  kKvHeadValues,
  kHeadValues,  // one value per query head: sinks
};

struct Rule {
  std::string_view role;
  Cut cut;
};

// Every role that operations of tensor parallelism know.
constexpr Rule kRules[] = {
    {"token_embd.weight", Cut::kWhole},
    {"output_norm.weight", Cut::kWhole},
    {"output_norm.bias", Cut::kWhole},
    {"output.weight", Cut::kRows},
    {"output.bias", Cut::kColumns},
    {"position_embd.weight", Cut::kWhole},
    {"token_types.weight", Cut::kWhole},
    {"token_embd_norm.weight", Cut::kWhole},
    {"token_embd_norm.bias", Cut::kWhole},

    {"attn_norm.weight", Cut::kWhole},
    {"attn_norm.bias", Cut::kWhole},
    {"attn_q.weight", Cut::kQueryHeads},
    {"attn_q.bias", Cut::kQueryHeadValues},
    {"attn_k.weight", Cut::kKvHeads},
    {"attn_k.bias", Cut::kKvHeadValues},
    {"attn_v.weight", Cut::kKvHeads},
    {"attn_v.bias", Cut::kKvHeadValues},
    {"attn_q_norm.weight", Cut::kWhole},  // over head_dim: the same for every head
    {"attn_k_norm.weight", Cut::kWhole},
    {"attn_sinks.weight", Cut::kHeadValues},
    {"attn_output.weight", Cut::kRows},
    {"attn_output.bias", Cut::kColumns},
    // The same of layers with a state, whose other weights ranks have whole or not at all.
    {"ssm_out.weight", Cut::kRows},
    {"ssm_out.bias", Cut::kColumns},
    {"shortconv.out_proj.weight", Cut::kRows},
    {"shortconv.out_proj.bias", Cut::kColumns},
    {"attn_output_norm.weight", Cut::kWhole},
    {"attn_output_norm.bias", Cut::kWhole},
    {"post_attention_norm.weight", Cut::kWhole},
    {"post_ffw_norm.weight", Cut::kWhole},
    {"layer_output_norm.weight", Cut::kWhole},
    {"layer_output_norm.bias", Cut::kWhole},

    {"ffn_norm.weight", Cut::kWhole},
    {"ffn_norm.bias", Cut::kWhole},
    {"ffn_gate.weight", Cut::kRows},
    {"ffn_gate.bias", Cut::kColumns},
    {"ffn_up.weight", Cut::kRows},
    {"ffn_up.bias", Cut::kColumns},
    {"ffn_down.weight", Cut::kRows},
    {"ffn_down.bias", Cut::kColumns},

    {"ffn_gate_inp.weight", Cut::kWhole},  // every rank chooses the same experts
    {"ffn_gate_inp.bias", Cut::kWhole},
    {"exp_probs_b.bias", Cut::kWhole},
    {"ffn_gate_exps.weight", Cut::kExpertRows},
    {"ffn_gate_exps.bias", Cut::kExpertColumns},
    {"ffn_up_exps.weight", Cut::kExpertRows},
    {"ffn_up_exps.bias", Cut::kExpertColumns},
    {"ffn_down_exps.weight", Cut::kExpertRows},
    {"ffn_down_exps.bias", Cut::kExpertColumns},
    {"ffn_gate_shexp.weight", Cut::kRows},
    {"ffn_up_shexp.weight", Cut::kRows},
    {"ffn_down_shexp.weight", Cut::kRows},
    {"ffn_gate_inp_shexp.weight", Cut::kWhole},

    {"cls.weight", Cut::kWhole},  // the host's
    {"cls.bias", Cut::kWhole},
    {"cls.norm.weight", Cut::kWhole},
    {"cls.norm.bias", Cut::kWhole},
    {"cls.output.weight", Cut::kWhole},
    {"cls.output.bias", Cut::kWhole},
};

bool is_by_heads(Cut cut) {
  return cut == Cut::kQueryHeads || cut == Cut::kKvHeads || cut == Cut::kQueryHeadValues ||
         cut == Cut::kKvHeadValues || cut == Cut::kHeadValues;
}

std::optional<Cut> cut_of(std::string_view role) {
  for (const Rule& rule : kRules) {
    if (rule.role == role) return rule.cut;
  }
  return std::nullopt;
}

// Rows [part.begin, part.end) of a matrix, or of each of several.
TensorView rows_of(const TensorView& view, dist::Range part) {
  TensorView out = view;
  const int at = view.rank - 2;
  if (view.rank == 3) out.matrix_rows = view.matrix_rows == 0 ? view.shape[1] : view.matrix_rows;
  out.shape[static_cast<size_t>(at)] = part.size();
  if (view.data != nullptr) out.data = view.data + part.begin * view.row_stride_bytes;
  if (view.scales.data == nullptr) return out;
  if (view.scales.rows_per_scale == 1) {
    const auto scale_bytes = static_cast<int64_t>(info(view.scales.type).block_bytes);
    out.scales.data = view.scales.data + part.begin * view.scales.scales_per_row * scale_bytes;
  } else {
    out.scales.first_row = view.scales.first_row + part.begin;
  }
  return out;
}

// Matrices [part.begin, part.end) of several, or rows of biases: whole experts.
TensorView matrices_of(const TensorView& view, dist::Range part) {
  if (view.rank == 2) return rows_of(view, part);
  const int64_t each = view.matrix_rows == 0 ? view.shape[1] : view.matrix_rows;
  TensorView out = view;
  out.shape[0] = part.size();
  if (view.data != nullptr) out.data = view.data + part.begin * each * view.row_stride_bytes;
  if (view.scales.data == nullptr) return out;
  if (view.scales.rows_per_scale == 1) {
    const auto scale_bytes = static_cast<int64_t>(info(view.scales.type).block_bytes);
    out.scales.data = view.scales.data + part.begin * each * view.scales.scales_per_row * scale_bytes;
  } else {
    out.scales.first_row = view.scales.first_row + part.begin * each;
  }
  return out;
}

// Values [part.begin, part.end) of every row.
TensorView columns_of(const TensorView& view, dist::Range part) {
  TensorView out = view;
  out.shape[static_cast<size_t>(view.rank - 1)] = part.size();
  if (info(view.type).block_elements != 1 || view.scales.data != nullptr) {
    throw_error(ErrorCode::kUnsupported, "{}: a vector of type {} cannot be cut over ranks, expected floats",
                view.name, info(view.type).name);
  }
  if (view.data != nullptr)
    out.data = view.data + part.begin * static_cast<int64_t>(info(view.type).block_bytes);
  return out;
}

dist::Range times(dist::Range range, int64_t by) { return {range.begin * by, range.end * by}; }

}  // namespace

bool is_of_experts(std::string_view role) {
  const std::optional<Cut> cut = cut_of(role);
  return cut == Cut::kExpertRows || cut == Cut::kExpertColumns;
}

TensorView slice_weight(const TensorView& view, std::string_view role, const ModelConfig& config,
                        const dist::Shares& shares) {
  std::optional<Cut> cut = cut_of(role);
  if (shares.whole_attention() && (!cut || is_by_heads(*cut))) cut = Cut::kWhole;
  if (!cut) {
    throw_error(ErrorCode::kUnsupported,
                "{}: {}: no rule how ranks share rows of {}: expected one process, or --pipeline-parallel "
                "where layers do not read one another",
                view.name, config.architecture, role);
  }
  const auto heads = shares.heads(config.heads, config.kv_heads);
  switch (*cut) {
    case Cut::kWhole:
      break;
    case Cut::kRows:
      return rows_of(view, shares.rows(view.shape[static_cast<size_t>(view.rank - 2)]));
    case Cut::kExpertRows:
      if (shares.whole_experts()) return matrices_of(view, shares.experts(view.shape[0]));
      return rows_of(view, shares.rows(view.shape[static_cast<size_t>(view.rank - 2)]));
    case Cut::kExpertColumns:
      if (shares.whole_experts()) return matrices_of(view, shares.experts(view.shape[0]));
      // Biases of experts that lie in turn with others are seen as rows of one value.
      if (view.rank == 3) return rows_of(view, shares.rows(view.shape[1]));
      return columns_of(view, shares.rows(view.cols()));
    case Cut::kColumns:
      return columns_of(view, shares.rows(view.cols()));
    case Cut::kQueryHeads:
      return rows_of(view, times(heads.query, config.head_dim));
    case Cut::kKvHeads:
      return rows_of(view, times(heads.kv, config.head_dim));
    case Cut::kQueryHeadValues:
      return columns_of(view, times(heads.query, config.head_dim));
    case Cut::kKvHeadValues:
      return columns_of(view, times(heads.kv, config.head_dim));
    case Cut::kHeadValues:
      return columns_of(view, heads.query);
  }
  return view;
}

}  // namespace millrace

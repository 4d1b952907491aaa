// The C functions of the fused operations: what is checked on every device.
#include "kernels/api/mr_fused.h"

#include <initializer_list>

#include "kernels/api/mr_device.h"
#include "kernels/api/mr_rows_checks.h"

namespace millrace::api {
namespace {

constexpr int32_t kMaxHeads = 1 << 16, kMaxHeadSize = 1 << 12;

void check_vector(const mr_vector& of, const char* name) {
  if (of.data != nullptr) require_aligned(of.data, float_bytes(of.type, name), name);
}
void check_shape(int64_t rows, int64_t cols) {
  require_range(rows, 0, kMaxCount, "args.rows");
  require_range(cols, 1, kMaxCount, "args.cols");
}

// An output in the place of an input: element by element it is the same place.
void check_in_place(const mr_rows& out, const char* name, std::initializer_list<const mr_rows*> inputs) {
  for (const mr_rows* in : inputs) {
    if (out.data == nullptr || in->data != out.data) continue;
    if (in->type == out.type && in->stride == out.stride) continue;
    throw_error(ErrorCode::kBadInput,
                "{} is an input's memory with type {} and stride {}, expected that input's {} and {}", name,
                mr_dtype_name(out.type), out.stride, mr_dtype_name(in->type), in->stride);
  }
}
void check_begin(const mr_device* device, const void* args) {
  require_pointer(device, "device");
  require_pointer(args, "args");
}

// ---------------------------------------------------------------- norms

void check_codes(mr_norm_args& args) {
  require_range(args.quantize, MR_QUANTIZE_NONE, MR_QUANTIZE_INT8_ROW, "args.quantize");
  if (args.quantize == MR_QUANTIZE_NONE) {
    if (args.codes != nullptr || args.scales != nullptr) {
      throw_error(ErrorCode::kBadInput,
                  "args.codes or args.scales is given, expected NULL without a quantize");
    }
    return;
  }
  const int64_t groups = args.quantize == MR_QUANTIZE_FP8_1X128 ? (args.cols + 127) / 128 : 1;
  args.codes_stride = stride_or(args.codes_stride, args.cols, "args.codes_stride");
  args.scales_stride = stride_or(args.scales_stride, groups, "args.scales_stride");
  product(args.rows, args.codes_stride, "rows of args.codes");
  product(args.rows, args.scales_stride, "rows of args.scales");
  if (args.rows == 0) return;
  require_pointer(args.codes, "args.codes");
  require_aligned(args.scales, alignof(float), "args.scales");
}

mr_norm_args checked(const mr_norm_args& given) {
  mr_norm_args args = given;
  require_enum(args.kind, MR_NORM_RMS, MR_NORM_LAYER, "args.kind");
  check_shape(args.rows, args.cols);
  check_codes(args);
  check_rows(args.x, args.rows, args.cols, "args.x");
  check_optional(args.residual, args.rows, args.cols, "args.residual");
  if (args.residual.data != nullptr) {
    check_rows(args.sum, args.rows, args.cols, "args.sum");
  } else if (args.sum.data != nullptr) {
    throw_error(ErrorCode::kBadInput, "args.sum is given, expected none without args.residual");
  }
  if (args.y.data != nullptr || args.quantize == MR_QUANTIZE_NONE) {
    check_rows(args.y, args.rows, args.cols, "args.y");
  }
  check_vector(args.weight, "args.weight");
  check_vector(args.bias, "args.bias");
  check_in_place(args.sum, "args.sum", {&args.x, &args.residual});
  if (args.residual.data != nullptr) {
    require_apart(args.y.data, args.x.data, "args.y");
    require_apart(args.y.data, args.residual.data, "args.y");
    require_apart(args.y.data, args.sum.data, "args.y");
  }
  check_in_place(args.y, "args.y", {&args.x});
  require_finite(args.weight_offset, "args.weight_offset");
  require_finite(args.eps, "args.eps");
  if (args.eps < 0.0f) throw_error(ErrorCode::kBadInput, "args.eps is {}, expected at least 0", args.eps);
  if (args.mean != nullptr) require_aligned(args.mean, alignof(float), "args.mean");
  if (args.rstd != nullptr) require_aligned(args.rstd, alignof(float), "args.rstd");
  return args;
}

mr_norm_backward_args checked(const mr_norm_backward_args& given) {
  mr_norm_backward_args args = given;
  require_enum(args.kind, MR_NORM_RMS, MR_NORM_LAYER, "args.kind");
  check_shape(args.rows, args.cols);
  check_rows(args.x, args.rows, args.cols, "args.x");
  check_rows(args.dy, args.rows, args.cols, "args.dy");
  check_optional(args.dsum, args.rows, args.cols, "args.dsum");
  check_rows(args.dx, args.rows, args.cols, "args.dx");
  check_in_place(args.dx, "args.dx", {&args.dy, &args.dsum});
  require_apart(args.dx.data, args.x.data, "args.dx");
  check_vector(args.weight, "args.weight");
  check_vector(args.dweight, "args.dweight");
  check_vector(args.dbias, "args.dbias");
  require_apart(args.dweight.data, args.dbias.data, "args.dbias");
  require_finite(args.weight_offset, "args.weight_offset");
  if (args.rows > 0) {
    require_aligned(args.rstd, alignof(float), "args.rstd");
    if (args.kind == MR_NORM_LAYER) require_aligned(args.mean, alignof(float), "args.mean");
  }
  return args;
}

// ---------------------------------------------------------------- rotary, activations, softmax, dropout

mr_rotary_args checked(const mr_rotary_args& given) {
  mr_rotary_args args = given;
  require_range(args.rows, 0, kMaxCount, "args.rows");
  require_range(args.heads, 1, kMaxHeads, "args.heads");
  require_range(args.head_dim, 1, kMaxHeadSize, "args.head_dim");
  require_range(args.rotary.num_freqs, 0, args.head_dim / 2, "args.rotary.num_freqs");
  require_range(args.rotary.interleaved, 0, 1, "args.rotary.interleaved");
  require_range(args.inverse, 0, 1, "args.inverse");
  require_finite(args.rotary.magnitude, "args.rotary.magnitude");
  const int64_t cols = static_cast<int64_t>(args.heads) * args.head_dim;
  check_rows(args.x, args.rows, cols, "args.x");
  check_rows(args.y, args.rows, cols, "args.y");
  check_in_place(args.y, "args.y", {&args.x});
  if (args.rows == 0) return args;
  require_aligned(args.positions, alignof(int32_t), "args.positions");
  if (args.rotary.num_freqs > 0) {
    require_aligned(args.rotary.inv_freq, alignof(float), "args.rotary.inv_freq");
  }
  return args;
}

// Kinds with `up`, and the parameters of the clamped one.
void check_kind(const mr_activation_kind& kind, const mr_rows& up, float alpha, float limit) {
  require_enum(kind, MR_ACTIVATION_GELU, MR_ACTIVATION_GEGLU_TANH, "args.kind");
  if (kind < MR_ACTIVATION_SWIGLU && up.data != nullptr) {
    throw_error(ErrorCode::kBadInput, "args.up is given, expected none with args.kind {}",
                static_cast<int>(kind));
  }
  if (kind != MR_ACTIVATION_CLAMPED_SWIGLU) return;
  require_finite(alpha, "args.alpha");
  if (!(limit > 0.0f)) throw_error(ErrorCode::kBadInput, "args.limit is {}, expected above 0", limit);
}

mr_activation_args checked(const mr_activation_args& given) {
  mr_activation_args args = given;
  check_kind(args.kind, args.up, args.alpha, args.limit);
  check_shape(args.rows, args.cols);
  check_rows(args.x, args.rows, args.cols, "args.x");
  if (args.kind >= MR_ACTIVATION_SWIGLU) check_rows(args.up, args.rows, args.cols, "args.up");
  check_rows(args.y, args.rows, args.cols, "args.y");
  check_in_place(args.y, "args.y", {&args.x, &args.up});
  return args;
}

mr_activation_backward_args checked(const mr_activation_backward_args& given) {
  mr_activation_backward_args args = given;
  check_kind(args.kind, args.up, args.alpha, args.limit);
  check_shape(args.rows, args.cols);
  check_rows(args.x, args.rows, args.cols, "args.x");
  check_rows(args.dy, args.rows, args.cols, "args.dy");
  check_rows(args.dx, args.rows, args.cols, "args.dx");
  check_in_place(args.dx, "args.dx", {&args.x, &args.up, &args.dy});
  if (args.kind >= MR_ACTIVATION_SWIGLU) {
    check_rows(args.up, args.rows, args.cols, "args.up");
    check_rows(args.dup, args.rows, args.cols, "args.dup");
    check_in_place(args.dup, "args.dup", {&args.x, &args.up, &args.dy});
    require_apart(args.dup.data, args.dx.data, "args.dup");
  } else if (args.dup.data != nullptr) {
    throw_error(ErrorCode::kBadInput, "args.dup is given, expected none with args.kind {}",
                static_cast<int>(args.kind));
  }
  return args;
}

mr_softmax_args checked(const mr_softmax_args& given) {
  mr_softmax_args args = given;
  check_shape(args.rows, args.cols);
  check_rows(args.x, args.rows, args.cols, "args.x");
  check_rows(args.y, args.rows, args.cols, "args.y");
  check_in_place(args.y, "args.y", {&args.x});
  require_finite(args.scale, "args.scale");
  return args;
}

mr_softmax_backward_args checked(const mr_softmax_backward_args& given) {
  mr_softmax_backward_args args = given;
  check_shape(args.rows, args.cols);
  check_rows(args.y, args.rows, args.cols, "args.y");
  check_rows(args.dy, args.rows, args.cols, "args.dy");
  check_rows(args.dx, args.rows, args.cols, "args.dx");
  check_in_place(args.dx, "args.dx", {&args.y, &args.dy});
  require_finite(args.scale, "args.scale");
  return args;
}

mr_dropout_args checked(const mr_dropout_args& given) {
  mr_dropout_args args = given;
  check_shape(args.rows, args.cols);
  check_rows(args.x, args.rows, args.cols, "args.x");
  check_rows(args.y, args.rows, args.cols, "args.y");
  check_in_place(args.y, "args.y", {&args.x});
  if (!(args.p >= 0.0f && args.p < 1.0f)) {
    throw_error(ErrorCode::kBadInput, "args.p is {}, expected at least 0 and below 1", args.p);
  }
  return args;
}

// ---------------------------------------------------------------- cross-entropy, embedding

mr_cross_entropy_args checked(const mr_cross_entropy_args& given) {
  mr_cross_entropy_args args = given;
  require_range(args.rows, 0, kMaxCount, "args.rows");
  require_range(args.vocab, 1, kMaxCount, "args.vocab");
  check_rows(args.logits, args.rows, args.vocab, "args.logits");
  if (args.rows == 0) return args;
  require_aligned(args.targets, alignof(int32_t), "args.targets");
  require_aligned(args.loss, alignof(float), "args.loss");
  require_aligned(args.lse, alignof(float), "args.lse");
  require_apart(args.loss, args.lse, "args.lse");
  return args;
}

mr_cross_entropy_backward_args checked(const mr_cross_entropy_backward_args& given) {
  mr_cross_entropy_backward_args args = given;
  require_range(args.rows, 0, kMaxCount, "args.rows");
  require_range(args.vocab, 1, kMaxCount, "args.vocab");
  check_rows(args.logits, args.rows, args.vocab, "args.logits");
  check_rows(args.dlogits, args.rows, args.vocab, "args.dlogits");
  check_in_place(args.dlogits, "args.dlogits", {&args.logits});
  if (args.rows == 0) return args;
  require_aligned(args.targets, alignof(int32_t), "args.targets");
  require_aligned(args.lse, alignof(float), "args.lse");
  require_aligned(args.dloss, alignof(float), "args.dloss");
  return args;
}

mr_embedding_args checked(const mr_embedding_args& given) {
  mr_embedding_args args = given;
  check_shape(args.rows, args.cols);
  require_range(args.vocab, 1, kMaxCount, "args.vocab");
  check_rows(args.table, args.vocab, args.cols, "args.table");
  check_rows(args.y, args.rows, args.cols, "args.y");
  require_apart(args.y.data, args.table.data, "args.y");
  require_finite(args.scale, "args.scale");
  if (args.rows > 0) require_aligned(args.tokens, alignof(int32_t), "args.tokens");
  return args;
}

mr_embedding_backward_args checked(const mr_embedding_backward_args& given) {
  mr_embedding_backward_args args = given;
  check_shape(args.rows, args.cols);
  require_range(args.vocab, 1, kMaxCount, "args.vocab");
  require_range(args.accumulate, 0, 1, "args.accumulate");
  check_rows(args.dy, args.rows, args.cols, "args.dy");
  check_rows(args.dtable, args.vocab, args.cols, "args.dtable");
  require_apart(args.dtable.data, args.dy.data, "args.dtable");
  require_finite(args.scale, "args.scale");
  if (args.rows > 0) require_aligned(args.tokens, alignof(int32_t), "args.tokens");
  return args;
}

}  // namespace
}  // namespace millrace::api

namespace api = millrace::api;

extern "C" {

mr_status mr_norm(mr_device* device, const mr_norm_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_norm_args checked = api::checked(*args);
    if (checked.rows > 0) device->fused().norm(checked, stream);
  });
}

mr_status mr_norm_backward_workspace_bytes(const mr_device* device, const mr_norm_backward_args* args,
                                           size_t* bytes) {
  return api::guarded([&] {
    api::check_begin(device, args);
    api::require_pointer(bytes, "bytes");
    *bytes = device->fused().norm_backward_workspace_bytes(api::checked(*args));
  });
}

mr_status mr_norm_backward(mr_device* device, const mr_norm_backward_args* args, void* workspace,
                           size_t workspace_bytes, mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_norm_backward_args checked = api::checked(*args);
    api::FusedOps& ops = device->fused();
    api::require_workspace(workspace, workspace_bytes, ops.norm_backward_workspace_bytes(checked));
    ops.norm_backward(checked, workspace, stream);  // of no rows too: dweight and dbias are zeros then
  });
}

mr_status mr_rotary_rows(mr_device* device, const mr_rotary_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_rotary_args checked = api::checked(*args);
    if (checked.rows > 0) device->fused().rotary(checked, stream);
  });
}

mr_status mr_activation_rows(mr_device* device, const mr_activation_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_activation_args checked = api::checked(*args);
    if (checked.rows > 0) device->fused().activation(checked, stream);
  });
}

mr_status mr_activation_rows_backward(mr_device* device, const mr_activation_backward_args* args,
                                      mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_activation_backward_args checked = api::checked(*args);
    if (checked.rows > 0) device->fused().activation_backward(checked, stream);
  });
}

mr_status mr_softmax(mr_device* device, const mr_softmax_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_softmax_args checked = api::checked(*args);
    if (checked.rows > 0) device->fused().softmax(checked, stream);
  });
}

mr_status mr_softmax_backward(mr_device* device, const mr_softmax_backward_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_softmax_backward_args checked = api::checked(*args);
    if (checked.rows > 0) device->fused().softmax_backward(checked, stream);
  });
}

mr_status mr_cross_entropy(mr_device* device, const mr_cross_entropy_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_cross_entropy_args checked = api::checked(*args);
    if (checked.rows > 0) device->fused().cross_entropy(checked, stream);
  });
}

mr_status mr_cross_entropy_backward(mr_device* device, const mr_cross_entropy_backward_args* args,
                                    mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_cross_entropy_backward_args checked = api::checked(*args);
    if (checked.rows > 0) device->fused().cross_entropy_backward(checked, stream);
  });
}

mr_status mr_embedding(mr_device* device, const mr_embedding_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_embedding_args checked = api::checked(*args);
    if (checked.rows > 0) device->fused().embedding(checked, stream);
  });
}

mr_status mr_embedding_backward_workspace_bytes(const mr_device* device,
                                                const mr_embedding_backward_args* args, size_t* bytes) {
  return api::guarded([&] {
    api::check_begin(device, args);
    api::require_pointer(bytes, "bytes");
    *bytes = device->fused().embedding_backward_workspace_bytes(api::checked(*args));
  });
}

mr_status mr_embedding_backward(mr_device* device, const mr_embedding_backward_args* args, void* workspace,
                                size_t workspace_bytes, mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_embedding_backward_args checked = api::checked(*args);
    api::FusedOps& ops = device->fused();
    api::require_workspace(workspace, workspace_bytes, ops.embedding_backward_workspace_bytes(checked));
    ops.embedding_backward(checked, workspace, stream);  // of no rows too: the table's gradient is zero then
  });
}

mr_status mr_dropout(mr_device* device, const mr_dropout_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::check_begin(device, args);
    const mr_dropout_args checked = api::checked(*args);
    if (checked.rows > 0) device->fused().dropout(checked, stream);
  });
}

}  // extern "C"

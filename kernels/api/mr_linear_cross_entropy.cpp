// The C functions of cross-entropy over hidden states times a weight, whose logits are never there at once:
// what is checked on every device, and the forward, which is a product and a loss of so many rows at a time.
#include <algorithm>

#include "kernels/api/mr_device.h"
#include "kernels/api/mr_rows_checks.h"

namespace millrace::api {
namespace {

// Logits of `chunk` rows, then what their product needs.
size_t logits_bytes(int64_t chunk, int64_t vocab) {
  const auto bytes = static_cast<size_t>(product(chunk, vocab, "logits of a chunk")) * sizeof(float);
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}
size_t linear_bytes(const mr_device& device, const mr_weight& weight, int64_t chunk) {
  return logits_bytes(chunk, weight.rows) + device.matmul_workspace_bytes(weight, chunk);
}
void check_weight(const mr_device* device, const mr_weight* weight) {
  require_pointer(weight, "weight");
  if (&weight->device != device) throw_error(ErrorCode::kBadInput, "weight belongs to another device");
  if (weight->experts != 1) {
    throw_error(ErrorCode::kBadInput, "weight has {} experts, expected a plain matrix", weight->experts);
  }
}

// The largest chunk that a workspace has room for; 0: none.
int64_t chunk_that_fits(const mr_device& device, const mr_weight& weight, int64_t rows, size_t bytes) {
  int64_t low = 0, high = rows;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (linear_bytes(device, weight, middle) <= bytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

void linear_cross_entropy(mr_device& device, const mr_linear_cross_entropy_args& args, void* workspace,
                          size_t workspace_bytes, mr_stream stream) {
  const mr_weight& w = *args.weight;
  require_workspace(workspace, workspace_bytes, linear_bytes(device, w, 1));
  const int64_t chunk = chunk_that_fits(device, w, args.rows, workspace_bytes);
  auto* logits = static_cast<float*>(workspace);
  std::byte* scratch = static_cast<std::byte*>(workspace) + logits_bytes(chunk, w.rows);
  for (int64_t r = 0; r < args.rows; r += chunk) {
    const int64_t rows = std::min(chunk, args.rows - r);
    device.matmul(
        {&w, nullptr, args.hidden + r * args.hidden_stride, args.hidden_stride, logits, w.rows, rows, 0},
        scratch, stream);
    device.fused().cross_entropy({rows,
                                  w.rows,
                                  {logits, MR_F32, w.rows},
                                  args.targets + r,
                                  args.ignore_index,
                                  args.loss + r,
                                  args.lse + r},
                                 stream);
  }
}

mr_linear_cross_entropy_args checked(const mr_device* device, const mr_linear_cross_entropy_args& given) {
  mr_linear_cross_entropy_args args = given;
  check_weight(device, args.weight);
  require_range(args.rows, 0, kMaxCount, "args.rows");
  args.hidden_stride = stride_or(args.hidden_stride, args.weight->cols, "args.hidden_stride");
  product(args.rows, args.hidden_stride, "rows of args.hidden");
  if (args.rows == 0) return args;
  require_aligned(args.hidden, alignof(float), "args.hidden");
  require_aligned(args.targets, alignof(int32_t), "args.targets");
  require_aligned(args.loss, alignof(float), "args.loss");
  require_aligned(args.lse, alignof(float), "args.lse");
  require_apart(args.loss, args.lse, "args.lse");
  return args;
}

// ---------------------------------------------------------------- backward

// Logits that are there at once unless the caller says: 16 MiB, and each product of them large.
constexpr int64_t kChunkRows = 1024, kChunkVocab = 4096;

int64_t chunk_or(int64_t given, int64_t usual, int64_t all, const char* name) {
  require_range(given, 0, kMaxCount, name);
  const int64_t blocks = ((given == 0 ? usual : given) + MR_CROSS_ENTROPY_BLOCK - 1) / MR_CROSS_ENTROPY_BLOCK;
  return std::max<int64_t>(1, std::min(blocks * MR_CROSS_ENTROPY_BLOCK, all));
}

mr_linear_cross_entropy_backward_args checked(const mr_linear_cross_entropy_backward_args& given) {
  mr_linear_cross_entropy_backward_args args = given;
  require_range(args.rows, 0, kMaxCount, "args.rows");
  require_range(args.vocab, 1, kMaxCount, "args.vocab");
  require_range(args.in, 1, kMaxCount, "args.in");
  require_range(args.accumulate, 0, 1, "args.accumulate");
  check_rows(args.hidden, args.rows, args.in, "args.hidden");
  check_rows(args.weight, args.vocab, args.in, "args.weight");
  check_optional(args.dhidden, args.rows, args.in, "args.dhidden");
  check_optional(args.dweight, args.vocab, args.in, "args.dweight");
  if (args.dhidden.data == nullptr && args.dweight.data == nullptr && args.rows > 0)
    throw_error(ErrorCode::kBadInput, "args.dhidden and args.dweight are NULL, expected one of them");
  if (args.dweight.data == nullptr && args.accumulate != 0)
    throw_error(ErrorCode::kBadInput, "args.accumulate is 1, expected 0 without args.dweight");
  for (const mr_rows* in : {&args.hidden, &args.weight}) {
    require_apart(args.dhidden.data, in->data, "args.dhidden");
    require_apart(args.dweight.data, in->data, "args.dweight");
  }
  require_apart(args.dweight.data, args.dhidden.data, "args.dweight");
  args.chunk_rows = chunk_or(args.chunk_rows, kChunkRows, args.rows, "args.chunk_rows");
  args.chunk_vocab = chunk_or(args.chunk_vocab, kChunkVocab, args.vocab, "args.chunk_vocab");
  if (args.rows == 0) return args;
  require_aligned(args.targets, alignof(int32_t), "args.targets");
  require_aligned(args.lse, alignof(float), "args.lse");
  require_aligned(args.dloss, alignof(float), "args.dloss");
  return args;
}

}  // namespace

}  // namespace millrace::api

namespace api = millrace::api;

extern "C" {

mr_status mr_linear_cross_entropy_workspace_bytes(const mr_device* device, const mr_weight* weight,
                                                  int64_t chunk, size_t* bytes) {
  return api::tell_bytes(device, bytes, [&](const mr_device& on) {
    api::check_weight(device, weight);
    api::require_range(chunk, 1, api::kMaxCount, "chunk");
    return api::linear_bytes(on, *weight, chunk);
  });
}

mr_status mr_linear_cross_entropy(mr_device* device, const mr_linear_cross_entropy_args* args,
                                  void* workspace, size_t workspace_bytes, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(args, "args");
    const mr_linear_cross_entropy_args checked = api::checked(device, *args);
    if (checked.rows > 0) api::linear_cross_entropy(*device, checked, workspace, workspace_bytes, stream);
  });
}

mr_status mr_linear_cross_entropy_backward_workspace_bytes(const mr_device* device,
                                                           const mr_linear_cross_entropy_backward_args* args,
                                                           size_t* bytes) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(args, "args");
    api::require_pointer(bytes, "bytes");
    *bytes = device->fused().linear_cross_entropy_backward_workspace_bytes(api::checked(*args));
  });
}

mr_status mr_linear_cross_entropy_backward(mr_device* device,
                                           const mr_linear_cross_entropy_backward_args* args, void* workspace,
                                           size_t workspace_bytes, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(args, "args");
    const mr_linear_cross_entropy_backward_args good = api::checked(*args);
    api::FusedOps& ops = device->fused();
    api::require_workspace(workspace, workspace_bytes,
                           ops.linear_cross_entropy_backward_workspace_bytes(good));
    ops.linear_cross_entropy_backward(good, workspace, stream);  // of no rows too: dweight is zero then
  });
}

}  // extern "C"

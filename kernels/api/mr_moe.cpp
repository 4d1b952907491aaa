// The C functions of millrace/kernels/{moe,norm,sample}.h: what is checked on every device.
#include "millrace/kernels/moe.h"

#include <cmath>

#include "kernels/api/mr_device.h"
#include "millrace/kernels/norm.h"
#include "millrace/kernels/sample.h"

namespace millrace::api {
namespace {

constexpr int64_t kMaxMoeRows = INT32_MAX;

// Shapes alone: what a workspace is sized by.
void check_moe_shapes(const mr_device* device, const mr_moe_args* args) {
  require_pointer(device, "device");
  require_pointer(args, "args");
  require_pointer(args->gate, "args.gate");
  require_pointer(args->up, "args.up");
  require_pointer(args->down, "args.down");
  const mr_weight &gate = *args->gate, &up = *args->up, &down = *args->down;
  if (&gate.device != device || &up.device != device || &down.device != device) {
    throw_error(ErrorCode::kBadInput, "args.gate, args.up or args.down belongs to another device");
  }
  if (up.experts != gate.experts || up.rows != gate.rows || up.cols != gate.cols) {
    throw_error(ErrorCode::kBadInput, "args.up is [{}, {}, {}], expected gate's [{}, {}, {}]", up.experts,
                up.rows, up.cols, gate.experts, gate.rows, gate.cols);
  }
  if (down.experts != gate.experts || down.rows != gate.cols || down.cols != gate.rows) {
    throw_error(ErrorCode::kBadInput, "args.down is [{}, {}, {}], expected [{}, {}, {}] for this gate",
                down.experts, down.rows, down.cols, gate.experts, gate.cols, gate.rows);
  }
  require_range(args->k, 1, gate.experts, "args.k");
  require_range(args->rows, 0, kMaxMoeRows / args->k, "args.rows");
  product(args->rows * args->k, gate.rows, "inner activations");
  product(args->rows * args->k, gate.cols, "outputs of experts");
}

void check_moe(const mr_device* device, const mr_moe_args* args) {
  check_moe_shapes(device, args);
  require_range(static_cast<int64_t>(args->activation), MR_SWIGLU, MR_CLAMPED_SWIGLU, "args.activation");
  if (args->activation == MR_CLAMPED_SWIGLU) {
    require_finite(args->alpha, "args.alpha");
    if (!(args->limit > 0.0f)) {
      throw_error(ErrorCode::kBadInput, "args.limit is {}, expected above 0", args->limit);
    }
  }
  allow_aligned(args->gate_bias, alignof(float), "args.gate_bias");
  allow_aligned(args->up_bias, alignof(float), "args.up_bias");
  allow_aligned(args->down_bias, alignof(float), "args.down_bias");
  if (args->rows == 0) return;
  require_aligned(args->chosen, alignof(int32_t), "args.chosen");
  require_aligned(args->weights, alignof(float), "args.weights");
  require_aligned(args->x, alignof(float), "args.x");
  require_aligned(args->y, alignof(float), "args.y");
}

void check_route(const mr_device* device, const float* scores, int64_t rows, int32_t experts, int32_t k,
                 mr_softmax_over over, const int32_t* chosen, const float* weights) {
  require_pointer(device, "device");
  require_range(experts, 1, INT32_MAX, "experts");
  require_range(k, 1, experts, "k");
  require_range(rows, 0, kMaxMoeRows, "rows");
  product(rows, experts, "rows of scores");
  require_range(static_cast<int64_t>(over), MR_SOFTMAX_CHOSEN, MR_SOFTMAX_ALL, "softmax_over");
  if (rows == 0) return;
  require_aligned(scores, alignof(float), "scores");
  require_aligned(chosen, alignof(int32_t), "chosen");
  require_aligned(weights, alignof(float), "weights");
}

void require_number(double value, double low, bool low_included, double high, const char* name) {
  if ((low_included ? value >= low : value > low) && value <= high) return;  // NaN fails
  throw_error(ErrorCode::kBadInput, "{} is {}, expected {} {} and at most {}", name, value,
              low_included ? "at least" : "more than", low, high);
}

void check_sample_shape(int64_t rows, int64_t vocab) {
  require_range(rows, 0, kMaxMoeRows, "rows");
  require_range(vocab, 1, INT32_MAX, "vocab");
  product(rows, vocab, "rows of logits");
}

void check_params(const mr_sample_params* params, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const mr_sample_params& p = params[r];
    require_number(p.temperature, 0.0, true, 100.0, "temperature");
    require_range(p.top_k, 0, INT32_MAX, "top_k");
    require_number(p.top_p, 0.0, false, 1.0, "top_p");
    require_number(p.min_p, 0.0, true, 1.0, "min_p");
    require_number(p.uniform, 0.0, true, std::nextafter(1.0, 0.0), "uniform");
  }
}

}  // namespace
}  // namespace millrace::api

namespace api = millrace::api;

extern "C" {

mr_status mr_moe_route(mr_device* device, const float* scores, int64_t rows, int32_t experts, int32_t k,
                       mr_softmax_over softmax_over, int32_t* chosen, float* weights, mr_stream stream) {
  return api::guarded([&] {
    api::check_route(device, scores, rows, experts, k, softmax_over, chosen, weights);
    if (rows > 0) device->moe_route(scores, rows, experts, k, softmax_over, chosen, weights, stream);
  });
}

mr_status mr_moe_workspace_bytes(const mr_device* device, const mr_moe_args* args, size_t* bytes) {
  return api::guarded([&] {
    api::require_pointer(bytes, "bytes");
    api::check_moe_shapes(device, args);
    *bytes = device->moe_workspace_bytes(*args);
  });
}

mr_status mr_moe(mr_device* device, const mr_moe_args* args, void* workspace, size_t workspace_bytes,
                 mr_stream stream) {
  return api::guarded([&] {
    api::check_moe(device, args);
    if (args->rows == 0) return;
    api::require_workspace(workspace, workspace_bytes, device->moe_workspace_bytes(*args));
    device->moe(*args, workspace, stream);
  });
}

mr_status mr_rmsnorm(mr_device* device, const float* x, int64_t x_stride, const float* weight, float eps,
                     int64_t rows, int64_t cols, float* y, int64_t y_stride, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_range(rows, 0, api::kMaxElements, "rows");
    api::require_range(cols, 1, INT32_MAX, "cols");
    const int64_t from = api::stride_or(x_stride, cols, "x_stride");
    const int64_t to = api::stride_or(y_stride, cols, "y_stride");
    api::product(rows, from, "rows of x");
    api::product(rows, to, "rows of y");
    api::require_finite(eps, "eps");
    if (eps < 0.0f) {
      millrace::throw_error(millrace::ErrorCode::kBadInput, "eps is {}, expected at least 0", eps);
    }
    if (x == y && from != to) {
      millrace::throw_error(millrace::ErrorCode::kBadInput, "y is x with y_stride {}, expected x_stride's {}",
                            to, from);
    }
    if (rows == 0) return;
    api::require_aligned(x, alignof(float), "x");
    api::require_aligned(weight, alignof(float), "weight");
    api::require_aligned(y, alignof(float), "y");
    device->rmsnorm(x, from, weight, eps, rows, cols, y, to, stream);
  });
}

mr_status mr_sample_workspace_bytes(const mr_device* device, int64_t rows, int64_t vocab, size_t* bytes) {
  return api::tell_bytes(device, bytes, [&](const mr_device& on) {
    api::check_sample_shape(rows, vocab);
    return on.sample_workspace_bytes(rows, vocab);
  });
}

mr_status mr_sample(mr_device* device, const float* logits, int64_t rows, int64_t vocab,
                    const mr_sample_params* params, int32_t* tokens, void* workspace, size_t workspace_bytes,
                    mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::check_sample_shape(rows, vocab);
    if (rows == 0) return;
    api::require_aligned(logits, alignof(float), "logits");
    api::require_aligned(params, alignof(mr_sample_params), "params");
    api::require_aligned(tokens, alignof(int32_t), "tokens");
    api::check_params(params, rows);
    api::require_workspace(workspace, workspace_bytes, device->sample_workspace_bytes(rows, vocab));
    device->sample(logits, rows, vocab, params, tokens, workspace, stream);
  });
}

}  // extern "C"

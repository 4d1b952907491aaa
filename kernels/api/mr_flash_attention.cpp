// The C functions of millrace/kernels/flash_attention.h: what is checked on every device, before anything is
// launched or written.
#include "millrace/kernels/flash_attention.h"

#include "kernels/api/mr_device.h"
#include "kernels/api/mr_flash_checks.h"

namespace millrace::api {
namespace {

void check_gradients(const mr_flash_problem& p, const mr_flash_gradients& g) {
  require_range(g.deterministic, 0, 1, "gradients.deterministic");
  check_flash_tensor(g.d_out, query_shape(p, p.value_dim, p.type, false), "gradients.d_out");
  check_flash_tensor(g.d_q, query_shape(p, p.head_dim, p.type, true), "gradients.d_q");
  check_flash_tensor(g.d_k, key_shape(p, p.head_dim, p.type, true), "gradients.d_k");
  check_flash_tensor(g.d_v, key_shape(p, p.value_dim, p.type, true), "gradients.d_v");
  check_words(g.d_sinks, "gradients.d_sinks");
  if (g.d_sinks != nullptr && p.sinks == nullptr) {
    flash_bad("gradients.d_sinks is set, expected NULL where problem.sinks is NULL");
  }
}

mr_flash_quantize_args checked_quantize(const mr_flash_quantize_args* args) {
  require_pointer(args, "args");
  if (args->type != MR_BF16 && args->type != MR_F16) {
    throw_error(ErrorCode::kUnsupported, "args.type is {}, expected bf16 or f16", mr_dtype_name(args->type));
  }
  require_range(args->batch, 0, kMaxFlashBatch, "args.batch");
  require_range(args->seq, 0, kMaxFlashLength, "args.seq");
  require_range(args->heads, 1, kMaxFlashHeads, "args.heads");
  check_dim(args->dim, "args.dim");
  if (args->rows_per_scale != 1 && args->rows_per_scale != kFlashKeysPerScale) {
    flash_bad(fmt::format("args.rows_per_scale is {}, expected 1 (q) or {} (k, v)", args->rows_per_scale,
                          kFlashKeysPerScale));
  }
  require_range(args->rotate, 0, 1, "args.rotate");
  check_flash_tensor(args->x, {args->batch, args->seq, args->heads, args->dim, args->type, false}, "args.x");
  check_flash_tensor(args->codes, {args->batch, args->seq, args->heads, args->dim, MR_F8_E4M3, true},
                     "args.codes");
  if (args->batch > 0 && args->seq > 0) require_aligned(args->scales, 4, "args.scales");
  return *args;
}

}  // namespace
}  // namespace millrace::api

namespace api = millrace::api;

extern "C" {

mr_status mr_flash_forward_workspace_bytes(const mr_device* device, const mr_flash_problem* problem,
                                           size_t* bytes) {
  return api::tell_bytes(device, bytes, [&](const mr_device& on) {
    return on.flash_forward_workspace_bytes(api::checked_problem(problem));
  });
}

mr_status mr_flash_forward(mr_device* device, const mr_flash_problem* problem, mr_flash_tensor q,
                           mr_flash_tensor k, mr_flash_tensor v, mr_flash_tensor out, float* lse,
                           void* workspace, size_t workspace_bytes, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_flash_problem p = api::checked_problem(problem);
    api::check_inputs(p, q, k, v, out, true);
    api::check_words(lse, "lse");
    api::require_workspace(workspace, workspace_bytes, device->flash_forward_workspace_bytes(p));
    device->flash_forward({p, q, k, v, out, lse, workspace, workspace_bytes, stream});
  });
}

mr_status mr_flash_backward_workspace_bytes(const mr_device* device, const mr_flash_problem* problem,
                                            int32_t deterministic, size_t* bytes) {
  return api::tell_bytes(device, bytes, [&](const mr_device& on) {
    api::require_range(deterministic, 0, 1, "deterministic");
    return on.flash_backward_workspace_bytes(api::checked_for_backward(problem), deterministic != 0);
  });
}

mr_status mr_flash_backward(mr_device* device, const mr_flash_problem* problem, mr_flash_tensor q,
                            mr_flash_tensor k, mr_flash_tensor v, mr_flash_tensor out, const float* lse,
                            const mr_flash_gradients* gradients, void* workspace, size_t workspace_bytes,
                            mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_flash_problem p = api::checked_for_backward(problem);
    api::require_pointer(gradients, "gradients");
    api::check_inputs(p, q, k, v, out, false);
    api::check_gradients(p, *gradients);
    if (p.batch > 0 && p.max_q > 0) api::require_aligned(lse, 4, "lse");
    api::require_workspace(workspace, workspace_bytes,
                           device->flash_backward_workspace_bytes(p, gradients->deterministic != 0));
    device->flash_backward({p, q, k, v, out, lse, *gradients, workspace, workspace_bytes, stream});
  });
}

mr_status mr_flash_quantize(mr_device* device, const mr_flash_quantize_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    device->flash_quantize(api::checked_quantize(args), stream);
  });
}

}  // extern "C"

// The C functions of millrace/kernels/flash_partial.h: what is checked on every device, before anything is
// launched or written; and what a device says that has no attention in parts.
#include "millrace/kernels/flash_partial.h"

#include "kernels/api/mr_device.h"
#include "kernels/api/mr_flash_checks.h"
#include "kernels/cpu/attention/flash_attention.h"
#include "kernels/cpu/attention/flash_task.h"

static_assert(MR_FLASH_CHUNK == millrace::cpu::kFlashChunk);

namespace millrace::api {
namespace {

[[noreturn]] void no_parts(const mr_device& device, const char* function) {
  throw_error(ErrorCode::kUnsupported, "{}: {} has no attention in parts, expected a CPU", function,
              device.description());
}

void check_no_extras(const mr_flash_problem& p) {
  if (p.sinks != nullptr) {
    flash_bad("problem.sinks is set, expected NULL: a sink is no part's, mr_flash_finish merges it");
  }
  if (p.blocks != nullptr) {
    throw_error(ErrorCode::kUnsupported, "problem.blocks is set, which has no parts: expected NULL");
  }
}

void check_firsts(const int32_t* firsts, int32_t batch, int32_t longest, int32_t step,
                  const std::string& name) {
  require_aligned(firsts, 4, name.c_str());
  for (int32_t b = 0; b < batch; ++b) {
    const std::string entry = fmt::format("{}[{}]", name, b);
    require_range(firsts[b], 0, kMaxFlashLength - longest, entry.c_str());
    if (firsts[b] % step != 0) {
      flash_bad(fmt::format("{} is {}, expected a multiple of {}", entry, firsts[b], step));
    }
  }
}

mr_flash_span checked_span(const mr_flash_span* span, const mr_flash_problem& p, bool backward) {
  require_pointer(span, "span");
  if (p.batch == 0) return *span;
  check_firsts(span->q_first, p.batch, p.max_q, backward ? MR_FLASH_CHUNK : 1, "span.q_first");
  check_firsts(span->k_first, p.batch, p.max_k, MR_FLASH_CHUNK, "span.k_first");
  return *span;
}

void check_partial_rows(int64_t rows, int32_t heads, int32_t dim) {
  require_range(rows, 0, kMaxFlashLength, "args.rows");
  require_range(heads, 1, kMaxFlashHeads, "args.heads");
  check_dim(dim, "args.dim");
  product(rows, int64_t{heads} * dim, "elements of the partial");
}

mr_flash_merge_args checked_merge(const mr_flash_merge_args* args) {
  require_pointer(args, "args");
  check_partial_rows(args->rows, args->heads, args->dim);
  if ((args->lse == nullptr) != (args->other_lse == nullptr)) {
    flash_bad(fmt::format("args.{} is NULL and the other is not, expected lse and other_lse or neither",
                          args->lse == nullptr ? "lse" : "other_lse"));
  }
  check_words(args->lse, "args.lse");
  check_words(args->other_lse, "args.other_lse");
  if (args->rows == 0) return *args;
  require_aligned(args->out, 4, "args.out");
  require_aligned(args->other_out, 4, "args.other_out");
  if (args->out == args->other_out) flash_bad("args.other_out is args.out, expected another partial");
  return *args;
}

mr_flash_finish_args checked_finish(const mr_flash_finish_args* args) {
  require_pointer(args, "args");
  if (args->type != MR_F32 && args->type != MR_F16 && args->type != MR_BF16) {
    throw_error(ErrorCode::kUnsupported, "args.type is {}, expected bf16, f16 or f32",
                mr_dtype_name(args->type));
  }
  check_partial_rows(args->rows, args->heads, args->dim);
  check_words(args->partial_lse, "args.partial_lse");
  check_words(args->sinks, "args.sinks");
  check_words(args->lse, "args.lse");
  if (args->partial_lse == nullptr && (args->sinks != nullptr || args->lse != nullptr)) {
    flash_bad(fmt::format("args.{} is set, expected NULL where partial_lse is NULL",
                          args->sinks != nullptr ? "sinks" : "lse"));
  }
  if (args->rows == 0) return *args;
  require_aligned(args->partial, 4, "args.partial");
  check_flash_tensor(args->out, {1, args->rows, args->heads, args->dim, args->type, true}, "args.out");
  return *args;
}

void check_partial_gradients(const mr_flash_problem& p, const mr_flash_partial_gradients& g) {
  check_flash_tensor(g.d_out, query_shape(p, p.value_dim, p.type, false), "gradients.d_out");
  check_flash_tensor(g.d_q, query_shape(p, p.head_dim, MR_F32, true), "gradients.d_q");
  check_flash_tensor(g.d_k, key_shape(p, p.head_dim, MR_F32, true), "gradients.d_k");
  check_flash_tensor(g.d_v, key_shape(p, p.value_dim, MR_F32, true), "gradients.d_v");
  if (p.batch == 0 || p.max_q == 0) return;
  require_aligned(g.lse, 4, "gradients.lse");
  require_aligned(g.delta, 4, "gradients.delta");
}

}  // namespace
}  // namespace millrace::api

namespace api = millrace::api;

void mr_device::flash_partial_forward(const api::FlashPartialForward&) {
  api::no_parts(*this, "mr_flash_partial_forward");
}
void mr_device::flash_delta(const api::FlashDelta&) { api::no_parts(*this, "mr_flash_delta"); }
void mr_device::flash_partial_backward(const api::FlashPartialBackward&) {
  api::no_parts(*this, "mr_flash_partial_backward");
}
void mr_device::flash_merge(const mr_flash_merge_args&) { api::no_parts(*this, "mr_flash_merge"); }
void mr_device::flash_finish(const mr_flash_finish_args&) { api::no_parts(*this, "mr_flash_finish"); }

extern "C" {

mr_status mr_flash_partial_forward(mr_device* device, const mr_flash_problem* problem,
                                   const mr_flash_span* span, mr_flash_tensor q, mr_flash_tensor k,
                                   mr_flash_tensor v, mr_flash_tensor out, float* lse, void* workspace,
                                   size_t workspace_bytes, mr_stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_flash_problem p = api::checked_problem(problem);
    api::check_no_extras(p);
    const mr_flash_span checked = api::checked_span(span, p, false);
    api::check_flash_tensor(q, api::query_shape(p, p.head_dim, p.type, false), "q");
    api::check_flash_tensor(k, api::key_shape(p, p.head_dim, p.type, false), "k");
    api::check_flash_tensor(v, api::key_shape(p, p.value_dim, p.type, false), "v");
    api::check_flash_tensor(out, api::query_shape(p, p.value_dim, MR_F32, true), "out");
    if (p.batch > 0 && p.max_q > 0) api::require_aligned(lse, 4, "lse");
    api::require_workspace(workspace, workspace_bytes, device->flash_forward_workspace_bytes(p));
    device->flash_partial_forward({p, checked, q, k, v, out, lse, workspace});
  });
}

mr_status mr_flash_delta(mr_device* device, const mr_flash_problem* problem, mr_flash_tensor out,
                         mr_flash_tensor d_out, float* delta, void* workspace, size_t workspace_bytes,
                         mr_stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_flash_problem p = api::checked_for_backward(problem);
    api::check_flash_tensor(out, api::query_shape(p, p.value_dim, p.type, false), "out");
    api::check_flash_tensor(d_out, api::query_shape(p, p.value_dim, p.type, false), "d_out");
    if (p.batch > 0 && p.max_q > 0) api::require_aligned(delta, 4, "delta");
    api::require_workspace(workspace, workspace_bytes, device->flash_forward_workspace_bytes(p));
    device->flash_delta({p, out, d_out, delta, workspace});
  });
}

mr_status mr_flash_partial_backward(mr_device* device, const mr_flash_problem* problem,
                                    const mr_flash_span* span, mr_flash_tensor q, mr_flash_tensor k,
                                    mr_flash_tensor v, const mr_flash_partial_gradients* gradients,
                                    void* workspace, size_t workspace_bytes, mr_stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_flash_problem p = api::checked_for_backward(problem);
    api::check_no_extras(p);
    const mr_flash_span checked = api::checked_span(span, p, true);
    api::require_pointer(gradients, "gradients");
    api::check_flash_tensor(q, api::query_shape(p, p.head_dim, p.type, false), "q");
    api::check_flash_tensor(k, api::key_shape(p, p.head_dim, p.type, false), "k");
    api::check_flash_tensor(v, api::key_shape(p, p.value_dim, p.type, false), "v");
    api::check_partial_gradients(p, *gradients);
    api::require_workspace(workspace, workspace_bytes, device->flash_forward_workspace_bytes(p));
    device->flash_partial_backward({p, checked, q, k, v, *gradients, workspace});
  });
}

mr_status mr_flash_merge(mr_device* device, const mr_flash_merge_args* args, mr_stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    device->flash_merge(api::checked_merge(args));
  });
}

mr_status mr_flash_finish(mr_device* device, const mr_flash_finish_args* args, mr_stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    device->flash_finish(api::checked_finish(args));
  });
}

mr_status mr_flash_sink_gradient(float sink, const float* lse, const float* delta, int64_t rows,
                                 double* sum) {
  return api::guarded([&] {
    api::require_range(rows, 0, MR_FLASH_CHUNK, "rows");
    if (rows > 0) {
      api::require_aligned(lse, 4, "lse");
      api::require_aligned(delta, 4, "delta");
    }
    api::require_aligned(sum, alignof(double), "sum");
    *sum = millrace::cpu::flash_sink_gradient(sink, lse, delta, rows);
  });
}

}  // extern "C"

// Attention over tensors on a CPU behind the C API.
#include "kernels/api/cpu_device.h"
#include "kernels/cpu/attention/flash_attention.h"
#include "kernels/cpu/attention/flash_quantize.h"

namespace millrace::api {

size_t CpuDevice::flash_forward_workspace_bytes(const mr_flash_problem& problem) const {
  cpu::Arena count(nullptr);
  cpu::take_flash_workspace(count, problem, pool_.size(), false);
  return count.used();
}

void CpuDevice::flash_forward(const FlashForward& call) {
  cpu::check_flash(call.problem);
  cpu::Arena arena(static_cast<uint8_t*>(call.workspace));
  const cpu::FlashWorkspace workspace = cpu::take_flash_workspace(arena, call.problem, pool_.size(), false);
  cpu::flash_forward(context(), call.problem, {call.q, call.k, call.v, call.out, call.lse}, workspace);
}

size_t CpuDevice::flash_backward_workspace_bytes(const mr_flash_problem& problem, bool) const {
  cpu::Arena count(nullptr);
  cpu::take_flash_workspace(count, problem, pool_.size(), true);
  return count.used();
}

// Both modes are the same here: every sum has a fixed order.
void CpuDevice::flash_backward(const FlashBackward& call) {
  cpu::check_flash(call.problem);
  cpu::Arena arena(static_cast<uint8_t*>(call.workspace));
  const cpu::FlashWorkspace workspace = cpu::take_flash_workspace(arena, call.problem, pool_.size(), true);
  auto* lse = const_cast<float*>(call.lse);  // only read
  cpu::flash_backward(context(), call.problem, {call.q, call.k, call.v, call.out, lse, &call.gradients},
                      workspace);
}

void CpuDevice::flash_quantize(const mr_flash_quantize_args& args, mr_stream) {
  cpu::flash_quantize(context(), args);
}

void CpuDevice::flash_partial_forward(const FlashPartialForward& call) {
  cpu::check_flash(call.problem);
  cpu::Arena arena(static_cast<uint8_t*>(call.workspace));
  const cpu::FlashWorkspace workspace = cpu::take_flash_workspace(arena, call.problem, pool_.size(), false);
  cpu::flash_forward(
      context(), call.problem,
      {call.q, call.k, call.v, call.out, call.lse, nullptr, call.span.q_first, call.span.k_first}, workspace);
}

void CpuDevice::flash_delta(const FlashDelta& call) {
  cpu::check_flash(call.problem);
  cpu::Arena arena(static_cast<uint8_t*>(call.workspace));
  cpu::FlashWorkspace workspace = cpu::take_flash_workspace(arena, call.problem, pool_.size(), false);
  workspace.delta = call.delta;
  mr_flash_gradients gradients{};
  gradients.d_out = call.d_out;
  cpu::flash_delta(context(), call.problem, {{}, {}, {}, call.out, nullptr, &gradients}, workspace);
}

void CpuDevice::flash_partial_backward(const FlashPartialBackward& call) {
  cpu::check_flash(call.problem);
  cpu::Arena arena(static_cast<uint8_t*>(call.workspace));
  cpu::FlashWorkspace workspace = cpu::take_flash_workspace(arena, call.problem, pool_.size(), false);
  workspace.delta = const_cast<float*>(call.gradients.delta);  // only read
  auto* lse = const_cast<float*>(call.gradients.lse);          // only read
  const mr_flash_gradients gradients{
      call.gradients.d_out, call.gradients.d_q, call.gradients.d_k, call.gradients.d_v, nullptr, 1};
  cpu::flash_partial_backward(
      context(), call.problem,
      {call.q, call.k, call.v, {}, lse, &gradients, call.span.q_first, call.span.k_first}, workspace);
}

void CpuDevice::flash_merge(const mr_flash_merge_args& args) { cpu::flash_merge(context(), args); }

void CpuDevice::flash_finish(const mr_flash_finish_args& args) { cpu::flash_finish(context(), args); }

}  // namespace millrace::api

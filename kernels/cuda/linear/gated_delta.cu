// The gated delta rule (Qwen 3 Next, Qwen 3.5): state_scan.cuh with keys that read before they write.
#include "kernels/cuda/linear/state_scan.cuh"

namespace millrace::cuda {

void launch_gated_delta(const StateScan& op, const Launch& at) { launch_state_scan<true>(op, at); }

}  // namespace millrace::cuda

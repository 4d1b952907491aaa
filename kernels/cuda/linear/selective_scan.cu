// Mamba-2's selective scan (Granite 4): state_scan.cuh whose rows write their values as they are.
#include "kernels/cuda/linear/state_scan.cuh"

namespace millrace::cuda {

void launch_selective_scan(const StateScan& op, const Launch& at) { launch_state_scan<false>(op, at); }

}  // namespace millrace::cuda

// What code this binary holds for the GPU that is current on the calling thread, found by asking the driver
// about one kernel of each kind. Device::open asks once and keeps the answers.
#pragma once

namespace millrace::cuda {

// Does this binary hold code that the GPU can run?
bool has_code_for_device();
// The architecture of the code that runs on it, 90 for sm_90: of the PTX where the driver translates that.
int code_architecture();
// Is that code with the warpgroup instructions of sm_90a?
bool code_has_wgmma();

}  // namespace millrace::cuda

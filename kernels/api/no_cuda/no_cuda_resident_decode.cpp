// The resident decode in a build that has no CUDA: every call says so.
#include "kernels/api/mr_status.h"
#include "millrace/kernels/flash_attention_v2.h"
#include "millrace/kernels/flash_attention_v2_optimized.h"

namespace millrace::api {
namespace {

mr_status no_resident_decode(const char* call) {
  return guarded([&] { throw_error(ErrorCode::kDevice, "{}: this build of the C API has no CUDA", call); });
}

}  // namespace
}  // namespace millrace::api

extern "C" {

mr_status flash_attention_v2_decode(const float*, const float*, const float*, float*, int32_t, int32_t,
                                    int32_t, int32_t) {
  return millrace::api::no_resident_decode("flash_attention_v2_decode");
}
mr_status flash_attention_v2_opt_init(flash_attention_v2_opt**, int32_t, int32_t, int32_t, int32_t) {
  return millrace::api::no_resident_decode("flash_attention_v2_opt_init");
}
mr_status flash_attention_v2_opt_load_qkv(flash_attention_v2_opt*, const float*, const float*, const float*) {
  return millrace::api::no_resident_decode("flash_attention_v2_opt_load_qkv");
}
mr_status flash_attention_v2_opt_load_prompt(flash_attention_v2_opt*, const float*, const float*, int32_t) {
  return millrace::api::no_resident_decode("flash_attention_v2_opt_load_prompt");
}
mr_status flash_attention_v2_opt_decode_gpu(flash_attention_v2_opt*) {
  return millrace::api::no_resident_decode("flash_attention_v2_opt_decode_gpu");
}
mr_status flash_attention_v2_opt_get_output(flash_attention_v2_opt*, float*) {
  return millrace::api::no_resident_decode("flash_attention_v2_opt_get_output");
}
mr_status flash_attention_v2_opt_reset(flash_attention_v2_opt*) {
  return millrace::api::no_resident_decode("flash_attention_v2_opt_reset");
}
// Nothing was made: there is nothing to free.
mr_status flash_attention_v2_opt_cleanup(flash_attention_v2_opt**) { return MR_OK; }
mr_status flash_attention_v2_opt_decode(const float*, const float*, const float*, float*, int32_t, int32_t,
                                        int32_t, int32_t) {
  return millrace::api::no_resident_decode("flash_attention_v2_opt_decode");
}

}  // extern "C"

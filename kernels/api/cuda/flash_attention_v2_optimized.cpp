// The seven C functions of flash_attention_v2_optimized.h and its extension, over ResidentSession.
#include "millrace/kernels/flash_attention_v2_optimized.h"

#include <memory>

#include "kernels/cuda/resident/resident_error.h"
#include "kernels/cuda/resident/resident_session.h"

struct flash_attention_v2_opt {
  explicit flash_attention_v2_opt(const millrace::cuda::resident::ResidentShape& shape) : session(shape) {}
  millrace::cuda::resident::ResidentSession session;
};

namespace millrace::cuda::resident {
namespace {

// flash_attention_v2_opt_decode's, made by its first call on a thread.
thread_local std::unique_ptr<flash_attention_v2_opt> thread_default;

ResidentShape checked_shape(const char* call, int32_t batch_heads, int32_t kv_heads, int32_t head_dim,
                            int32_t max_seq) {
  check_shape(call, batch_heads, kv_heads, head_dim);
  require_range(max_seq, 1, 1 << 24, call, "max_seq");
  return {batch_heads, kv_heads, head_dim, max_seq};
}

ResidentSession& session_of(flash_attention_v2_opt* handle, const char* call) {
  if (handle == nullptr) {
    throw ResidentError(
        MR_ERROR_INVALID,
        std::string(call) + ": handle is NULL, expected one that flash_attention_v2_opt_init made");
  }
  return handle->session;
}

bool same_shape(const ResidentShape& a, const ResidentShape& b) {
  return a.batch_heads == b.batch_heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim &&
         a.max_seq == b.max_seq;
}

void load_token(ResidentSession& session, const char* call, const float* q, const float* k, const float* v) {
  require_pointer(q, call, "q");
  require_pointer(k, call, "k");
  require_pointer(v, call, "v");
  session.load_token(q, k, v);
}

}  // namespace
}  // namespace millrace::cuda::resident

namespace resident = millrace::cuda::resident;

extern "C" {

mr_status flash_attention_v2_opt_init(flash_attention_v2_opt** handle, int32_t batch_heads, int32_t kv_heads,
                                      int32_t head_dim, int32_t max_seq) {
  return resident::guarded([&] {
    resident::require_pointer(handle, "init", "handle");
    if (*handle != nullptr) {
      throw resident::ResidentError(
          MR_ERROR_INVALID,
          "init: *handle is not NULL, expected flash_attention_v2_opt_cleanup before another init");
    }
    *handle =
        new flash_attention_v2_opt(resident::checked_shape("init", batch_heads, kv_heads, head_dim, max_seq));
  });
}

mr_status flash_attention_v2_opt_load_qkv(flash_attention_v2_opt* handle, const float* q, const float* k,
                                          const float* v) {
  return resident::guarded(
      [&] { resident::load_token(resident::session_of(handle, "load_qkv"), "load_qkv", q, k, v); });
}

mr_status flash_attention_v2_opt_load_prompt(flash_attention_v2_opt* handle, const float* k, const float* v,
                                             int32_t tokens) {
  return resident::guarded([&] {
    resident::ResidentSession& session = resident::session_of(handle, "load_prompt");
    resident::require_pointer(k, "load_prompt", "k");
    resident::require_pointer(v, "load_prompt", "v");
    resident::require_range(tokens, 1, 1 << 24, "load_prompt", "tokens");
    session.load_prompt(k, v, tokens);
  });
}

mr_status flash_attention_v2_opt_decode_gpu(flash_attention_v2_opt* handle) {
  return resident::guarded([&] { resident::session_of(handle, "decode_gpu").decode(); });
}

mr_status flash_attention_v2_opt_get_output(flash_attention_v2_opt* handle, float* out) {
  return resident::guarded([&] {
    resident::ResidentSession& session = resident::session_of(handle, "get_output");
    resident::require_pointer(out, "get_output", "out");
    session.get_output(out);
  });
}

mr_status flash_attention_v2_opt_reset(flash_attention_v2_opt* handle) {
  return resident::guarded([&] {
    if (handle == nullptr && resident::thread_default == nullptr) {
      throw resident::ResidentError(
          MR_ERROR_INVALID,
          "reset: handle is NULL and flash_attention_v2_opt_decode keeps none for this thread");
    }
    (handle != nullptr ? handle : resident::thread_default.get())->session.reset();
  });
}

mr_status flash_attention_v2_opt_cleanup(flash_attention_v2_opt** handle) {
  return resident::guarded([&] {
    if (handle == nullptr) {
      resident::thread_default.reset();
      return;
    }
    delete *handle;
    *handle = nullptr;
  });
}

mr_status flash_attention_v2_opt_decode(const float* q, const float* k, const float* v, float* out,
                                        int32_t batch_heads, int32_t kv_heads, int32_t head_dim,
                                        int32_t max_seq) {
  return resident::guarded([&] {
    const resident::ResidentShape shape =
        resident::checked_shape("decode", batch_heads, kv_heads, head_dim, max_seq);
    resident::require_pointer(q, "decode", "q");
    resident::require_pointer(k, "decode", "k");
    resident::require_pointer(v, "decode", "v");
    resident::require_pointer(out, "decode", "out");
    if (resident::thread_default == nullptr ||
        !resident::same_shape(resident::thread_default->session.shape(), shape)) {
      resident::thread_default.reset();  // its memory first
      resident::thread_default = std::make_unique<flash_attention_v2_opt>(shape);
    }
    resident::ResidentSession& session = resident::thread_default->session;
    resident::load_token(session, "decode", q, k, v);
    session.decode();
    session.get_output(out);
  });
}

}  // extern "C"

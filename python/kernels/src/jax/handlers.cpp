// XLA FFI handlers for jax.ffi (millrace_kernels/jax.py): attention, norms, rotary, activations, softmax,
// cross-entropy on a CPU and, where the kernel library was built with CUDA, on a GPU by the same functions.
// Buffers are contiguous; an array that is not there is one of no elements.
#include <xla/ffi/api/ffi.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "python/kernels/src/device_pool.h"

namespace millrace::jax_calls {

// Where a call computes: its device, and memory for the time of the call.
struct Cpu {
  bindings::DeviceLease lease() const { return bindings::DeviceLease::cpu(0); }
  void* scratch(size_t bytes, bindings::DeviceLease& device) { return device.scratch(bytes); }
};

#ifdef MILLRACE_KERNELS_CUDA
// XLA's stream of this call, and XLA's memory: it goes back in order on that stream.
struct Cuda {
  bindings::DeviceLease lease() const { return bindings::DeviceLease::cuda(ordinal, stream); }
  void* scratch(size_t bytes, bindings::DeviceLease&) {
    if (bytes == 0) return nullptr;
    constexpr uintptr_t kAlignment = 256;  // of the C API; XLA takes no request beyond 16
    const std::optional<void*> memory = allocator.Allocate(bytes + kAlignment);
    if (!memory.has_value())
      throw std::runtime_error("millrace: XLA has no memory for a workspace of " + std::to_string(bytes));
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(*memory) + kAlignment - 1) / kAlignment *
                                   kAlignment);
  }
  int32_t ordinal;
  mr_stream stream;
  xla::ffi::ScratchAllocator allocator;
};
#endif

}  // namespace millrace::jax_calls

namespace xla::ffi {

template <>
struct CtxDecoding<millrace::jax_calls::Cpu> {
  using Type = millrace::jax_calls::Cpu;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return Type{};
  }
};

#ifdef MILLRACE_KERNELS_CUDA
template <>
struct CtxDecoding<millrace::jax_calls::Cuda> {
  using Type = millrace::jax_calls::Cuda;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    const auto ordinal = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    const auto stream = CtxDecoding<PlatformStream<mr_stream>>::Decode(api, context, diagnostic);
    auto allocator = CtxDecoding<ScratchAllocator>::Decode(api, context, diagnostic);
    if (!ordinal.has_value() || !stream.has_value() || !allocator.has_value()) return std::nullopt;
    return Type{*ordinal, *stream, std::move(*allocator)};
  }
};
#endif

}  // namespace xla::ffi

namespace millrace::jax_calls {
namespace {

namespace ffi = xla::ffi;
using bindings::check;
using bindings::DeviceLease;
using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

mr_dtype type_of(const Buffer& x, const char* name) {
  switch (x.element_type()) {
    case ffi::DataType::F32:
      return MR_F32;
    case ffi::DataType::F16:
      return MR_F16;
    case ffi::DataType::BF16:
      return MR_BF16;
    default:
      throw std::runtime_error(std::string("millrace: ") + name + ": expected float32, float16 or bfloat16");
  }
}

int64_t cols_of(const Buffer& x) {
  const auto dims = x.dimensions();
  if (dims.size() == 0) throw std::runtime_error("millrace: x is a scalar, expected a last dimension");
  return dims.back();
}
int64_t rows_of(const Buffer& x) {
  const int64_t cols = cols_of(x);
  return cols == 0 ? 0 : static_cast<int64_t>(x.element_count()) / cols;
}

mr_rows rows(const Buffer& x, const char* name) {
  return {x.element_count() == 0 ? nullptr : x.untyped_data(), type_of(x, name), 0};
}
mr_vector vector(const Buffer& x, const char* name) {
  return {x.element_count() == 0 ? nullptr : x.untyped_data(), type_of(x, name)};
}
float* floats(const Buffer& x) {
  return x.element_count() == 0 ? nullptr : static_cast<float*>(x.untyped_data());
}
const int32_t* words(const Buffer& x) { return static_cast<const int32_t*>(x.untyped_data()); }

// No exception crosses XLA.
template <class Body>
ffi::Error guarded(Body&& body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, error.what());
  }
}

// ---------------------------------------------------------------- attention

struct Mask {
  float scale, softcap;
  int32_t window_left, window_right;
};

// [batch, seq, heads, dim], contiguous.
mr_flash_tensor flash(const Buffer& x) {
  const auto d = x.dimensions();
  return {x.element_count() == 0 ? nullptr : x.untyped_data(), d[1] * d[2] * d[3], d[2] * d[3], d[3]};
}

mr_flash_problem problem_of(const Buffer& q, const Buffer& k, const Buffer& v, const Buffer& sinks,
                            const Mask& mask) {
  const auto dq = q.dimensions(), dk = k.dimensions(), dv = v.dimensions();
  mr_flash_problem p{};
  p.type = type_of(q, "q");
  p.batch = static_cast<int32_t>(dq[0]);
  p.max_q = static_cast<int32_t>(dq[1]);
  p.heads = static_cast<int32_t>(dq[2]);
  p.head_dim = static_cast<int32_t>(dq[3]);
  p.max_k = static_cast<int32_t>(dk[1]);
  p.kv_heads = static_cast<int32_t>(dk[2]);
  p.value_dim = static_cast<int32_t>(dv[3]);
  p.scale = mask.scale;
  p.softcap = mask.softcap;
  p.window_left = mask.window_left;
  p.window_right = mask.window_right;
  p.sinks = floats(sinks);
  return p;
}

template <class Place>
ffi::Error attention(Place place, Buffer q, Buffer k, Buffer v, Buffer sinks, Result out, Result lse,
                     float scale, float softcap, int32_t window_left, int32_t window_right) {
  return guarded([&] {
    const mr_flash_problem p = problem_of(q, k, v, sinks, {scale, softcap, window_left, window_right});
    DeviceLease device = place.lease();
    size_t bytes = 0;
    check(mr_flash_forward_workspace_bytes(device.get(), &p, &bytes));
    void* memory = place.scratch(bytes, device);
    check(mr_flash_forward(device.get(), &p, flash(q), flash(k), flash(v), flash(*out), floats(*lse), memory,
                           bytes, device.stream()));
  });
}

template <class Place>
ffi::Error attention_backward(Place place, Buffer d_out, Buffer q, Buffer k, Buffer v, Buffer out, Buffer lse,
                              Buffer sinks, Result d_q, Result d_k, Result d_v, Result d_sinks, float scale,
                              float softcap, int32_t window_left, int32_t window_right) {
  return guarded([&] {
    const mr_flash_problem p = problem_of(q, k, v, sinks, {scale, softcap, window_left, window_right});
    const mr_flash_gradients gradients{flash(d_out), flash(*d_q),      flash(*d_k),
                                       flash(*d_v),  floats(*d_sinks), 1};
    DeviceLease device = place.lease();
    size_t bytes = 0;
    check(mr_flash_backward_workspace_bytes(device.get(), &p, 1, &bytes));
    void* memory = place.scratch(bytes, device);
    check(mr_flash_backward(device.get(), &p, flash(q), flash(k), flash(v), flash(out), floats(lse),
                            &gradients, memory, bytes, device.stream()));
  });
}

// ---------------------------------------------------------------- norms

template <class Place>
ffi::Error norm(Place place, Buffer x, Buffer residual, Buffer weight, Buffer bias, Result y, Result sum,
                Result mean, Result rstd, bool layer, float eps, float weight_offset) {
  return guarded([&] {
    mr_norm_args args{};
    args.kind = layer ? MR_NORM_LAYER : MR_NORM_RMS;
    args.rows = rows_of(x);
    args.cols = cols_of(x);
    if (args.rows == 0) return;
    args.x = rows(x, "x");
    args.residual = rows(residual, "residual");
    args.sum = rows(*sum, "sum");
    args.y = rows(*y, "y");
    args.weight = vector(weight, "weight");
    args.bias = vector(bias, "bias");
    args.weight_offset = weight_offset;
    args.eps = eps;
    args.mean = floats(*mean);
    args.rstd = floats(*rstd);
    DeviceLease device = place.lease();
    check(mr_norm(device.get(), &args, device.stream()));
  });
}

template <class Place>
ffi::Error norm_backward(Place place, Buffer dy, Buffer dsum, Buffer x, Buffer weight, Buffer mean,
                         Buffer rstd, Result dx, Result dweight, Result dbias, bool layer,
                         float weight_offset) {
  return guarded([&] {
    mr_norm_backward_args args{};
    args.kind = layer ? MR_NORM_LAYER : MR_NORM_RMS;
    args.rows = rows_of(x);
    args.cols = cols_of(x);
    args.x = rows(x, "x");
    args.dy = rows(dy, "dy");
    args.dsum = rows(dsum, "dsum");
    args.dx = rows(*dx, "dx");
    args.weight = vector(weight, "weight");
    args.weight_offset = weight_offset;
    args.mean = floats(mean);
    args.rstd = floats(rstd);
    args.dweight = vector(*dweight, "dweight");
    args.dbias = vector(*dbias, "dbias");
    DeviceLease device = place.lease();
    size_t bytes = 0;
    check(mr_norm_backward_workspace_bytes(device.get(), &args, &bytes));
    void* memory = place.scratch(bytes, device);
    check(mr_norm_backward(device.get(), &args, memory, bytes, device.stream()));
  });
}

// ---------------------------------------------------------------- rotary, activations, softmax

// x [..., heads, head_dim], positions int32 of the shape before.
template <class Place>
ffi::Error rotary(Place place, Buffer x, Buffer positions, Buffer inv_freq, Result y, float magnitude,
                  bool interleaved, bool inverse) {
  return guarded([&] {
    const auto dims = x.dimensions();
    if (x.element_count() == 0) return;
    mr_rotary_args args{};
    args.rotary = {floats(inv_freq), static_cast<int32_t>(inv_freq.element_count()), magnitude,
                   interleaved ? 1 : 0};
    args.positions = words(positions);
    args.heads = static_cast<int32_t>(dims[dims.size() - 2]);
    args.head_dim = static_cast<int32_t>(dims.back());
    args.rows = static_cast<int64_t>(x.element_count()) / (int64_t{args.heads} * args.head_dim);
    args.x = rows(x, "x");
    args.y = rows(*y, "y");
    args.inverse = inverse ? 1 : 0;
    DeviceLease device = place.lease();
    check(mr_rotary_rows(device.get(), &args, device.stream()));
  });
}

template <class Place>
ffi::Error activation(Place place, Buffer x, Buffer up, Result y, int32_t kind, float alpha, float limit) {
  return guarded([&] {
    if (x.element_count() == 0) return;
    const mr_activation_args args{static_cast<mr_activation_kind>(kind),
                                  rows_of(x),
                                  cols_of(x),
                                  rows(x, "x"),
                                  rows(up, "up"),
                                  rows(*y, "y"),
                                  alpha,
                                  limit};
    DeviceLease device = place.lease();
    check(mr_activation_rows(device.get(), &args, device.stream()));
  });
}

template <class Place>
ffi::Error activation_backward(Place place, Buffer dy, Buffer x, Buffer up, Result dx, Result dup,
                               int32_t kind, float alpha, float limit) {
  return guarded([&] {
    if (x.element_count() == 0) return;
    mr_activation_backward_args args{};
    args.kind = static_cast<mr_activation_kind>(kind);
    args.rows = rows_of(x);
    args.cols = cols_of(x);
    args.x = rows(x, "x");
    args.up = rows(up, "up");
    args.dy = rows(dy, "dy");
    args.dx = rows(*dx, "dx");
    args.dup = rows(*dup, "dup");
    args.alpha = alpha;
    args.limit = limit;
    DeviceLease device = place.lease();
    check(mr_activation_rows_backward(device.get(), &args, device.stream()));
  });
}

template <class Place>
ffi::Error softmax(Place place, Buffer x, Result y, float scale) {
  return guarded([&] {
    if (x.element_count() == 0) return;
    const mr_softmax_args args{rows_of(x), cols_of(x), rows(x, "x"), rows(*y, "y"), scale};
    DeviceLease device = place.lease();
    check(mr_softmax(device.get(), &args, device.stream()));
  });
}

template <class Place>
ffi::Error softmax_backward(Place place, Buffer dy, Buffer y, Result dx, float scale) {
  return guarded([&] {
    if (y.element_count() == 0) return;
    const mr_softmax_backward_args args{rows_of(y),     cols_of(y),      rows(y, "y"),
                                        rows(dy, "dy"), rows(*dx, "dx"), scale};
    DeviceLease device = place.lease();
    check(mr_softmax_backward(device.get(), &args, device.stream()));
  });
}

// ---------------------------------------------------------------- cross-entropy

template <class Place>
ffi::Error cross_entropy(Place place, Buffer logits, Buffer targets, Result loss, Result lse,
                         int32_t ignore_index) {
  return guarded([&] {
    if (logits.element_count() == 0) return;
    const mr_cross_entropy_args args{rows_of(logits), cols_of(logits), rows(logits, "logits"),
                                     words(targets),  ignore_index,    floats(*loss),
                                     floats(*lse)};
    DeviceLease device = place.lease();
    check(mr_cross_entropy(device.get(), &args, device.stream()));
  });
}

template <class Place>
ffi::Error cross_entropy_backward(Place place, Buffer dloss, Buffer logits, Buffer targets, Buffer lse,
                                  Result dlogits, int32_t ignore_index) {
  return guarded([&] {
    if (logits.element_count() == 0) return;
    mr_cross_entropy_backward_args args{};
    args.rows = rows_of(logits);
    args.vocab = cols_of(logits);
    args.logits = rows(logits, "logits");
    args.targets = words(targets);
    args.ignore_index = ignore_index;
    args.lse = floats(lse);
    args.dloss = floats(dloss);
    args.dlogits = rows(*dlogits, "dlogits");
    DeviceLease device = place.lease();
    check(mr_cross_entropy_backward(device.get(), &args, device.stream()));
  });
}

// ---------------------------------------------------------------- handlers

// Place, then buffers: so many arguments, so many results.
template <class Place, int kArguments, int kResults>
auto bind_buffers() {
  if constexpr (kResults > 0) {
    return bind_buffers<Place, kArguments, kResults - 1>().template Ret<Buffer>();
  } else if constexpr (kArguments > 0) {
    return bind_buffers<Place, kArguments - 1, 0>().template Arg<Buffer>();
  } else {
    return ffi::Ffi::Bind().Ctx<Place>();
  }
}

}  // namespace

// What millrace_kernels/jax.py registers, by name: millrace_jax_cpu_NAME, and millrace_jax_cuda_NAME. NAME's
// arguments and results are buffers, so many of each; its attributes follow.
#define MILLRACE_HANDLER(place, Place, name, arguments, results, ...)       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(millrace_jax_##place##_##name, name<Place>, \
                                (bind_buffers<Place, arguments, results>())__VA_ARGS__);
#ifdef MILLRACE_KERNELS_CUDA
#define MILLRACE_HANDLERS(name, ...)            \
  MILLRACE_HANDLER(cpu, Cpu, name, __VA_ARGS__) \
  MILLRACE_HANDLER(cuda, Cuda, name, __VA_ARGS__)
#else
#define MILLRACE_HANDLERS(name, ...) MILLRACE_HANDLER(cpu, Cpu, name, __VA_ARGS__)
#endif
#pragma GCC visibility push(default)
MILLRACE_HANDLERS(
    attention, 4, 2,
    .Attr<float>("scale").Attr<float>("softcap").Attr<int32_t>("window_left").Attr<int32_t>("window_right"))
MILLRACE_HANDLERS(
    attention_backward, 7, 4,
    .Attr<float>("scale").Attr<float>("softcap").Attr<int32_t>("window_left").Attr<int32_t>("window_right"))
MILLRACE_HANDLERS(norm, 4, 4, .Attr<bool>("layer").Attr<float>("eps").Attr<float>("weight_offset"))
MILLRACE_HANDLERS(norm_backward, 6, 3, .Attr<bool>("layer").Attr<float>("weight_offset"))
MILLRACE_HANDLERS(rotary, 3, 1, .Attr<float>("magnitude").Attr<bool>("interleaved").Attr<bool>("inverse"))
MILLRACE_HANDLERS(activation, 2, 1, .Attr<int32_t>("kind").Attr<float>("alpha").Attr<float>("limit"))
MILLRACE_HANDLERS(activation_backward, 3, 2, .Attr<int32_t>("kind").Attr<float>("alpha").Attr<float>("limit"))
MILLRACE_HANDLERS(softmax, 1, 1, .Attr<float>("scale"))
MILLRACE_HANDLERS(softmax_backward, 2, 1, .Attr<float>("scale"))
MILLRACE_HANDLERS(cross_entropy, 2, 2, .Attr<int32_t>("ignore_index"))
MILLRACE_HANDLERS(cross_entropy_backward, 4, 1, .Attr<int32_t>("ignore_index"))
#pragma GCC visibility pop

}  // namespace millrace::jax_calls

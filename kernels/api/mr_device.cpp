#include "kernels/api/mr_device.h"

#include <charconv>
#include <optional>
#include <string_view>

namespace millrace::api {
namespace {

constexpr std::string_view kCuda = "cuda";
constexpr int kMaxThreads = 1024;  // more is a typing error, not a machine

int cuda_ordinal(std::string_view name) {
  if (name == kCuda) return 0;
  const std::string_view number = name.substr(kCuda.size() + 1);
  int ordinal = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), ordinal);
  if (error != std::errc{} || end != number.data() + number.size() || ordinal < 0) {
    throw_error(ErrorCode::kBadInput, "device: found \"{}\", expected cuda:N with a number N", name);
  }
  return ordinal;
}

mr_dtype parse_type(std::string_view name) {
  const std::optional<DType> found = parse_dtype(name);
  if (!found || *found > DType::kQ4_Z) {
    throw_error(ErrorCode::kBadInput, "type: found \"{}\", expected f32, f16, bf16, q8_0, ...", name);
  }
  return static_cast<mr_dtype>(*found);
}

std::unique_ptr<mr_device> open_device(std::string_view name, const mr_device_options& options) {
  require_range(options.threads, 0, kMaxThreads, "threads");
  if (name == "cpu") return open_cpu_device(options);
  if (name == kCuda || name.substr(0, kCuda.size() + 1) == "cuda:") {
    return open_cuda_device(cuda_ordinal(name));
  }
  throw_error(ErrorCode::kBadInput, "device: found \"{}\", expected cpu, cuda or cuda:N", name);
}

}  // namespace

DType dtype_of(mr_dtype type, const char* name) {
  static_assert(MR_F32 == static_cast<int>(DType::kF32) && MR_F16 == static_cast<int>(DType::kF16) &&
                MR_BF16 == static_cast<int>(DType::kBF16) && MR_F8_E4M3 == static_cast<int>(DType::kF8E4M3) &&
                MR_Q8_0 == static_cast<int>(DType::kQ8_0) && MR_Q4_0 == static_cast<int>(DType::kQ4_0) &&
                MR_Q4_1 == static_cast<int>(DType::kQ4_1) && MR_Q5_0 == static_cast<int>(DType::kQ5_0) &&
                MR_Q5_1 == static_cast<int>(DType::kQ5_1) && MR_Q4_K == static_cast<int>(DType::kQ4_K) &&
                MR_Q5_K == static_cast<int>(DType::kQ5_K) && MR_Q6_K == static_cast<int>(DType::kQ6_K) &&
                MR_MXFP4 == static_cast<int>(DType::kMXFP4) &&
                MR_MXFP4_SPLIT == static_cast<int>(DType::kMXFP4Split) &&
                MR_Q4_Z == static_cast<int>(DType::kQ4_Z));
  require_range(static_cast<int64_t>(type), MR_F32, MR_Q4_Z, name);
  return static_cast<DType>(type);
}

}  // namespace millrace::api

namespace api = millrace::api;

extern "C" {

mr_status mr_dtype_block(mr_dtype type, int32_t* elements, int32_t* bytes) {
  return api::guarded([&] {
    api::require_pointer(elements, "elements");
    api::require_pointer(bytes, "bytes");
    const millrace::DTypeInfo& block = millrace::info(api::dtype_of(type, "type"));
    *elements = block.block_elements;
    *bytes = block.block_bytes;
  });
}

const char* mr_dtype_name(mr_dtype type) {
  if (type == MR_I8) return "i8";
  if (type == MR_F8_E5M2) return "f8_e5m2";
  const bool known = static_cast<int64_t>(type) >= MR_F32 && static_cast<int64_t>(type) <= MR_Q4_Z;
  if (!known) return "unknown type";
  return millrace::info(static_cast<millrace::DType>(type)).name.data();  // names are literals
}

mr_status mr_dtype_parse(const char* name, mr_dtype* type) {
  return api::guarded([&] {
    api::require_pointer(name, "name");
    api::require_pointer(type, "type");
    *type = api::parse_type(name);
  });
}

mr_status mr_device_open(const char* name, const mr_device_options* options, mr_device** device) {
  return api::guarded([&] {
    api::require_pointer(name, "name");
    api::require_pointer(device, "device");
    *device = nullptr;
    *device = api::open_device(name, options == nullptr ? mr_device_options{} : *options).release();
  });
}

void mr_device_close(mr_device* device) { delete device; }

const char* mr_device_description(const mr_device* device) {
  return device == nullptr ? "" : device->description();
}

mr_status mr_device_synchronize(mr_device* device, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    device->synchronize(stream);
  });
}

}  // extern "C"

// The one place that knows which devices this build has.
#include <charconv>
#include <optional>

#include "backend/backend.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cuda_backend.h"
#include "backend/reference/reference_backend.h"
#include "base/error.h"

namespace millrace {
namespace {

// N of "cuda:N"; 0 of "cuda"; nothing of anything else.
std::optional<int> gpu_of(std::string_view name) {
  constexpr std::string_view kCuda = "cuda";
  if (name == kCuda) return 0;
  if (!name.starts_with("cuda:")) return std::nullopt;
  const std::string_view number = name.substr(kCuda.size() + 1);
  int gpu = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), gpu);
  if (error != std::errc() || end != number.data() + number.size() || gpu < 0) return std::nullopt;
  return gpu;
}

}  // namespace

std::unique_ptr<Backend> make_backend(std::string_view name, const BackendOptions& options) {
  if (name == "cpu") return make_cpu_backend(options);
  if (name.find('+') != std::string_view::npos) {
    throw_error(ErrorCode::kUnsupported, "device: found {}, expected one: this is done with one device alone",
                name);
  }
  const std::optional<int> gpu = gpu_of(name);
  if (options.shares != nullptr && !gpu) {
    throw_error(
        ErrorCode::kUnsupported,
        "device {}: found {} ranks that share a model, expected one: the cpu and cuda devices do that", name,
        options.shares->ranks() * options.shares->stages() * options.shares->context_ranks());
  }
  if (gpu && options.shares != nullptr && options.shares->context_ranks() > 1) {
    throw_error(
        ErrorCode::kUnsupported,
        "device {}: found {} ranks that share contexts, expected ranks that share rows or layers: only "
        "the cpu device does that",
        name, options.shares->context_ranks());
  }
  if (name == "reference") return make_reference_backend(options.fp8_prompts);
  if (gpu) {
    const bool by_rank = name == "cuda" && options.shares != nullptr;  // which GPU is left to the ranks
    return make_cuda_backend(options, by_rank ? kGpuOfRank : *gpu);
  }
  throw_error(
      ErrorCode::kBadInput,
      "device: found \"{}\", expected auto, cpu, reference, cuda, cuda:N or two with a + between them", name);
}

}  // namespace millrace

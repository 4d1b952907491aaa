#include "engine/out_tensors.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/check.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "model/architecture.h"
#include "model/model.h"
#include "model/weight_source.h"

namespace millrace {
namespace {

// A bias seen through a stride, [.., n, 1], is [.., n] in a file of its own.
TensorView plain_shape(const TensorView& view) {
  TensorView out = view;
  if (out.rank > 1 && out.cols() == 1) --out.rank;
  return out;
}

// A vector whose elements go to the file in another order is a matrix of rows of one: [n, 1].
TensorView reorderable(const TensorView& view, const WeightSpec& spec) {
  TensorView out = view;
  if (spec.interleaved_in_gguf && out.rank == 1) {
    out.rank = 2;
    out.row_stride_bytes = static_cast<int64_t>(bytes_of(out.type, 1));
  }
  return out;
}

// What each angle of plain rotation is divided by: llama.cpp's form of the llama3 scaling, and of any other.
OutTensor rope_divisors(const ModelConfig& config, const char* name, const std::vector<float>& inv_freq) {
  OutTensor out;
  out.name = name;
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double plain = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / config.rotary_dims);
    // 1e30, as llama.cpp's files have it: this pair of dimensions does not turn (Gemma 4).
    out.values.push_back(inv_freq[i] == 0.0f ? 1e30f : static_cast<float>(plain / inv_freq[i]));
  }
  out.source.name = out.name;
  out.source.rank = 1;
  out.source.shape[0] = static_cast<int64_t>(out.values.size());
  return out;
}

// What llama.cpp's files call it, where that is not its role.
std::string name_in_files(const std::string& name, const WeightSpec& spec) {
  if (spec.gguf.empty()) return name;
  return name.substr(0, name.size() - spec.role.size()) + std::string(spec.gguf.front());
}

ModelConfig as_written(const ModelConfig& config) {
  ModelConfig out = config;
  architecture_of(config).settle_written(out);
  return out;
}

}  // namespace

std::vector<int64_t> OutTensor::shape() const {
  const TensorView plain = plain_shape(source);
  return {plain.shape.begin(), plain.shape.begin() + plain.rank};
}

std::vector<OutTensor> list_tensors(const io::Checkpoint& checkpoint,
                                    const std::optional<ModelConfig>& config) {
  std::vector<OutTensor> out;
  const bool tied = has_tied_output(checkpoint);
  const auto add = [&](const std::string& name, const TensorView& view) {
    OutTensor& tensor = out.emplace_back();
    tensor.name = name;
    tensor.source = view;
    tensor.part = quant::part_of(name, view, tied);
  };
  if (checkpoint.gguf) {
    for (const TensorView& view : checkpoint.tensors()) {
      if (view.type == DType::kI32) {
        throw_error(ErrorCode::kUnsupported, "{}: tensor {}: found type i32, expected weights",
                    checkpoint.path(), view.name);
      }
      add(view.name, view);
    }
    return out;
  }
  const ModelConfig written = as_written(*config);
  refuse_unread_biases(checkpoint, written);
  WeightSource source(checkpoint, written, /*gather=*/false);
  visit_weights(source, written,
                [&](const std::string& name, const WeightSpec& spec, const TensorView& view) {
                  add(name_in_files(name, spec), reorderable(view, spec));
                  if (spec.interleaved_in_gguf) out.back().order.head_dim = config->head_dim;
                });
  if (!config->rope_long_inv_freq.empty()) {
    out.push_back(rope_divisors(*config, "rope_factors_short.weight", config->rope_inv_freq));
    out.push_back(rope_divisors(*config, "rope_factors_long.weight", config->rope_long_inv_freq));
  } else if (config->rope_as_tensor) {
    out.push_back(rope_divisors(*config, "rope_freqs.weight", config->rope_inv_freq));
  }
  return out;
}

std::map<std::string, HeadTiles> moved_columns(const io::Checkpoint& checkpoint, const ModelConfig& config) {
  std::map<std::string, HeadTiles> out;
  if (checkpoint.gguf) return out;
  const ModelConfig written = as_written(config);
  WeightSource source(checkpoint, written, /*gather=*/false);
  visit_weights(source, written, [&](const std::string& name, const WeightSpec& spec, const TensorView&) {
    if (spec.hf_tiles && spec.hf_tiles->columns) out.emplace(name, *spec.hf_tiles);
  });
  return out;
}

void visit_tensors(const io::Checkpoint& checkpoint, const std::optional<ModelConfig>& config,
                   const std::vector<OutTensor>& tensors,
                   const std::function<void(size_t index, const TensorView& source)>& take) {
  size_t index = 0;
  if (checkpoint.gguf) {
    for (; index < tensors.size(); ++index) take(index, tensors[index].source);
    return;
  }
  std::unique_ptr<ThreadPool> pool;  // made for the first weight that has to be unpacked
  const ModelConfig written = as_written(*config);
  WeightSource source(checkpoint, written, /*gather=*/true, [&](int64_t count, const auto& body) {
    if (!pool) pool = std::make_unique<ThreadPool>(0);
    pool->parallel_for(count, std::max<int64_t>(1, count / (8 * pool->size())),
                       [&](int64_t begin, int64_t end, int) { body(begin, end); });
  });
  visit_weights(source, written,
                [&](const std::string& name, const WeightSpec& spec, const TensorView& view) {
                  MILLRACE_CHECK(tensors[index].name == name_in_files(name, spec));
                  take(index++, reorderable(view, spec));
                  source.take_gathered();
                });
  for (; index < tensors.size(); ++index) take(index, tensors[index].source);
}

}  // namespace millrace

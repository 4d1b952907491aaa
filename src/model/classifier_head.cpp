#include "model/classifier_head.h"

#include <cmath>
#include <string>

#include "kernels/quant/codec.h"
#include "model/weight_source.h"

namespace millrace {
namespace {

constexpr double kSpread = 0.05;  // of a synthetic head

WeightSpec head_weight(std::string_view role, std::string_view hf, std::vector<int64_t> shape,
                       Presence presence = Presence::kRequired, double spread = kSpread) {
  const WeightUse use = shape.size() == 2 ? WeightUse::kMatrix : WeightUse::kVector;
  return {.role = role,
          .hf = hf,
          .shape = std::move(shape),
          .use = use,
          .presence = presence,
          .spread = spread,
          .on_host = true};
}

std::vector<float> floats_of(const TensorView& view) {
  std::vector<float> out(static_cast<size_t>(view.rows() * view.cols()));
  for (int64_t row = 0; row < view.rows(); ++row) {
    quant::dequantize_row(view, row, out.data() + row * view.cols());
  }
  return out;
}

}  // namespace

void add_head(std::vector<WeightSpec>& to, const ModelConfig& config, const HeadNames& names) {
  if (config.head.labels == 0) return;
  const int64_t n = config.hidden, labels = config.head.labels;
  to.push_back(head_weight("cls.weight", names.dense, {n, n}));
  to.push_back(head_weight("cls.bias", names.dense_bias, {n}, names.has_dense_bias));
  if (!names.norm.empty()) {
    to.push_back(head_weight("cls.norm.weight", names.norm, {n}, Presence::kRequired, 0.0));
    to.push_back(head_weight("cls.norm.bias", names.norm_bias, {n}, Presence::kRare));
  }
  to.push_back(head_weight("cls.output.weight", "classifier.weight", {labels, n}));
  to.push_back(head_weight("cls.output.bias", "classifier.bias", {labels}, Presence::kUsual));
}

std::optional<ClassifierHead> ClassifierHead::read(const io::Checkpoint& checkpoint,
                                                   const ModelConfig& config) {
  if (config.head.labels == 0) return std::nullopt;
  WeightSource source(checkpoint, config, /*gather=*/true);
  ClassifierHead head;
  head.norm_eps_ = config.norm_eps;
  head.activation_ = config.head.activation;
  for (const WeightSpec& spec : source.specs(-1)) {
    if (!spec.on_host) continue;
    const std::optional<TensorView> view = spec.presence == Presence::kRequired
                                               ? source.require(-1, spec.role, spec.shape)
                                               : source.find(-1, spec.role, spec.shape);
    if (!view) continue;
    std::vector<float>& to = spec.role == "cls.weight"          ? head.dense_.weight
                             : spec.role == "cls.bias"          ? head.dense_.bias
                             : spec.role == "cls.norm.weight"   ? head.norm_
                             : spec.role == "cls.norm.bias"     ? head.norm_bias_
                             : spec.role == "cls.output.weight" ? head.output_.weight
                                                                : head.output_.bias;
    to = floats_of(*view);
  }
  return head;
}

std::vector<double> ClassifierHead::Matrix::times(std::span<const double> x) const {
  std::vector<double> y;
  for (size_t row = 0; row < weight.size() / x.size(); ++row) {
    const float* w = weight.data() + row * x.size();
    double sum = bias.empty() ? 0.0 : bias[row];
    for (size_t i = 0; i < x.size(); ++i) sum += w[i] * x[i];
    y.push_back(sum);
  }
  return y;
}

std::vector<float> ClassifierHead::scores(std::span<const float> pooled) const {
  const std::vector<double> input(pooled.begin(), pooled.end());
  std::vector<double> x = dense_.times(input);
  for (double& value : x) {
    value = activation_ == ModelConfig::Head::Activation::kTanh
                ? std::tanh(value)
                : 0.5 * value * (1.0 + std::erf(value * std::sqrt(0.5)));
  }
  if (!norm_.empty()) {
    double mean = 0.0, variance = 0.0;
    for (const double value : x) mean += value / static_cast<double>(x.size());
    for (const double value : x) variance += (value - mean) * (value - mean) / static_cast<double>(x.size());
    const double by = 1.0 / std::sqrt(variance + norm_eps_);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = (x[i] - mean) * by * norm_[i] + (norm_bias_.empty() ? 0.0 : norm_bias_[i]);
    }
  }
  const std::vector<double> scores = output_.times(x);
  return {scores.begin(), scores.end()};
}

}  // namespace millrace

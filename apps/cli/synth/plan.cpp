#include "synth/plan.h"

#include <cmath>
#include <numbers>

#include "base/error.h"
#include "io/hf_directory.h"
#include "model/config_reader.h"

namespace millrace::cli {
namespace {

constexpr int64_t kMaxSize = 1 << 20;

struct ArchitectureName {
  const char* hf;
  const char* gguf;
};
constexpr ArchitectureName kArchitectures[] = {{"gpt_oss", "gpt-oss"}, {"llama", "llama"},
                                               {"mistral", "llama"},   {"qwen2", "qwen2"},
                                               {"qwen3", "qwen3"},     {"qwen3_moe", "qwen3moe"}};

std::string architecture_of(const nlohmann::json& config, const std::string& source) {
  const auto type = config.find("model_type");
  std::string known;
  for (const ArchitectureName& a : kArchitectures) {
    if (type != config.end() && *type == a.hf) return a.gguf;
    known += (known.empty() ? "" : ", ") + std::string(a.hf);
  }
  throw_error(ErrorCode::kUnsupported, "{}: model_type: found {}, expected one of {}", source,
              type == config.end() ? "nothing" : type->dump(), known);
}

// The rope_scaling object (rope_parameters in newer files), or an empty one.
nlohmann::json rope_scaling(const nlohmann::json& config) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto it = config.find(key);
    if (it != config.end() && it->is_object()) return *it;
  }
  return nlohmann::json::object();
}

std::string rope_type(const nlohmann::json& rope) {
  for (const char* key : {"rope_type", "type"}) {
    const auto it = rope.find(key);
    if (it != rope.end() && it->is_string()) return it->get<std::string>();
  }
  return "default";
}

// Writes the tensors of one model, layer by layer in the order llama.cpp's converter does.
class Planner {
 public:
  Planner(const nlohmann::json& config, const std::string& source, const SynthTypes& types) : types_(types) {
    checkpoint_.hf = std::make_shared<io::HfDirectory>();
    checkpoint_.hf->path = source;
    checkpoint_.hf->config = config;
    plan_.config = config;
    plan_.architecture = architecture_of(config, source);
    plan_.name = source;
  }

  SynthPlan make() {
    const ConfigReader read(checkpoint_, "");
    hidden_ = read.integer("", "hidden_size", 1, kMaxSize);
    const int32_t layers = read.integer("", "num_hidden_layers", 1, 1024);
    heads_ = read.integer("", "num_attention_heads", 1, 4096);
    kv_heads_ = read.integer_or("", "num_key_value_heads", 1, 4096, heads_);
    head_dim_ = read.integer_or("", "head_dim", 2, 4096, hidden_ / heads_);
    plan_.vocab = read.integer("", "vocab_size", 1, 1 << 24);
    ffn_ = read.integer("", "intermediate_size", 1, kMaxSize);
    matrix("token_embd.weight", types_.matrix, {plan_.vocab, hidden_});
    for (int32_t layer = 0; layer < layers; ++layer) add_layer(read, layer);
    ones("output_norm.weight", {hidden_});
    const auto tied = plan_.config.find("tie_word_embeddings");
    if (tied == plan_.config.end() || *tied != true)
      matrix("output.weight", types_.matrix, {plan_.vocab, hidden_});
    add_rope_factors(read);
    return std::move(plan_);
  }

 private:
  void matrix(std::string name, DType type, std::vector<int64_t> shape) {
    const int64_t cols = shape.back();
    if (cols % info(type).block_elements != 0) type = DType::kQ8_0;
    if (cols % info(type).block_elements != 0) type = DType::kF16;
    const double sigma = 1.0 / std::sqrt(static_cast<double>(cols));  // keeps a unit input a unit output
    plan_.tensors.push_back({std::move(name), type, std::move(shape), sigma, {}});
  }
  void vector(std::string name, std::vector<int64_t> shape, double sigma) {
    plan_.tensors.push_back({std::move(name), DType::kF32, std::move(shape), sigma, {}});
  }
  void ones(std::string name, std::vector<int64_t> shape) { vector(std::move(name), std::move(shape), 0.0); }

  void add_layer(const ConfigReader& read, int32_t layer) {
    const std::string& arch = plan_.architecture;
    const auto name = [&](const char* rest) { return fmt::format("blk.{}.{}", layer, rest); };
    const int64_t q = int64_t{heads_} * head_dim_, kv = int64_t{kv_heads_} * head_dim_;
    const bool oss = arch == "gpt-oss", biases = oss || arch == "qwen2";
    ones(name("attn_norm.weight"), {hidden_});
    matrix(name("attn_q.weight"), types_.matrix, {q, hidden_});
    matrix(name("attn_k.weight"), types_.matrix, {kv, hidden_});
    matrix(name("attn_v.weight"), types_.matrix, {kv, hidden_});
    matrix(name("attn_output.weight"), types_.matrix, {hidden_, q});
    if (biases) {
      vector(name("attn_q.bias"), {q}, kBiasSigma);
      vector(name("attn_k.bias"), {kv}, kBiasSigma);
      vector(name("attn_v.bias"), {kv}, kBiasSigma);
    }
    if (oss) {
      vector(name("attn_output.bias"), {hidden_}, kBiasSigma);
      vector(name("attn_sinks.weight"), {heads_}, 1.0);
    }
    if (arch == "qwen3" || arch == "qwen3moe") {
      ones(name("attn_q_norm.weight"), {head_dim_});
      ones(name("attn_k_norm.weight"), {head_dim_});
    }
    ones(name(oss ? "post_attention_norm.weight" : "ffn_norm.weight"), {hidden_});
    if (oss || arch == "qwen3moe") return add_experts(read, layer);
    matrix(name("ffn_gate.weight"), types_.matrix, {ffn_, hidden_});
    matrix(name("ffn_up.weight"), types_.matrix, {ffn_, hidden_});
    matrix(name("ffn_down.weight"), types_.matrix, {hidden_, ffn_});
  }

  void add_experts(const ConfigReader& read, int32_t layer) {
    const bool oss = plan_.architecture == "gpt-oss";
    const int64_t experts = read.integer("", oss ? "num_local_experts" : "num_experts", 1, 4096);
    const int64_t ffn = oss ? ffn_ : read.integer("", "moe_intermediate_size", 1, kMaxSize);
    const auto name = [&](const char* rest) { return fmt::format("blk.{}.{}", layer, rest); };
    plan_.tensors.push_back({name("ffn_gate_inp.weight"),
                             DType::kF32,
                             {experts, hidden_},
                             1.0 / std::sqrt(static_cast<double>(hidden_)),
                             {}});
    if (oss) vector(name("ffn_gate_inp.bias"), {experts}, kBiasSigma);
    matrix(name("ffn_gate_exps.weight"), types_.experts, {experts, ffn, hidden_});
    matrix(name("ffn_up_exps.weight"), types_.experts, {experts, ffn, hidden_});
    matrix(name("ffn_down_exps.weight"), types_.experts, {experts, hidden_, ffn});
    if (!oss) return;
    vector(name("ffn_gate_exps.bias"), {experts, ffn}, kBiasSigma);
    vector(name("ffn_up_exps.bias"), {experts, ffn}, kBiasSigma);
    vector(name("ffn_down_exps.bias"), {experts, hidden_}, kBiasSigma);
  }

  // Llama 3's scaling travels in GGUF as divisors of the frequencies, [head_dim / 2].
  void add_rope_factors(const ConfigReader& read) {
    const nlohmann::json rope = rope_scaling(plan_.config);
    if (rope_type(rope) != "llama3") return;
    const double theta = read.real_or("", "rope_theta", 10000.0);
    const double factor = read.hf_real(rope, "factor"), low = read.hf_real(rope, "low_freq_factor");
    const double high = read.hf_real(rope, "high_freq_factor");
    const double original = read.hf_real(rope, "original_max_position_embeddings");
    SynthTensor factors{"rope_freqs.weight", DType::kF32, {head_dim_ / 2}, 0.0, {}};
    for (int32_t i = 0; i < head_dim_ / 2; ++i) {
      const double wavelength = 2.0 * std::numbers::pi * std::pow(theta, 2.0 * i / head_dim_);
      const double smooth = std::clamp((original / wavelength - low) / (high - low), 0.0, 1.0);
      factors.values.push_back(static_cast<float>(1.0 / ((1.0 - smooth) / factor + smooth)));
    }
    plan_.tensors.push_back(std::move(factors));
  }

  static constexpr double kBiasSigma = 0.02;

  SynthTypes types_;
  io::Checkpoint checkpoint_;
  SynthPlan plan_;
  int32_t hidden_ = 0, heads_ = 0, kv_heads_ = 0, head_dim_ = 0, ffn_ = 0;
};

}  // namespace

DType default_expert_type(const nlohmann::json& config, DType matrix) {
  const auto type = config.find("model_type");
  return type != config.end() && *type == "gpt_oss" ? DType::kMXFP4 : matrix;
}

SynthPlan make_plan(const nlohmann::json& config, const std::string& source, const SynthTypes& types) {
  return Planner(config, source, types).make();
}

}  // namespace millrace::cli

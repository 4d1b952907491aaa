// Loads the fixtures of tests/golden (written by make_golden.py and make_smollm2.py, where the formats are
// described) into plain structs. Paths are relative to the repository root, where tests run. A fixture that
// is missing or inconsistent throws std::runtime_error: that is a broken checkout, not a model error.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace millrace::golden {

static_assert(std::endian::native == std::endian::little, "fixtures are little-endian");

inline const std::string kRoot = "tests/golden/";

// The length of a - b over that of b. Rows of different sizes are no rows of the same thing.
inline double relative_error(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) throw std::runtime_error("compared rows have different sizes");
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(b[i], 2);
  }
  return std::sqrt(difference / norm);
}

inline std::vector<std::byte> read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) throw std::runtime_error(path + ": cannot be read");
  std::vector<std::byte> bytes(static_cast<size_t>(in.tellg()));
  in.seekg(0);
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!in) throw std::runtime_error(path + ": cannot be read");
  return bytes;
}

inline nlohmann::json read_json(const std::string& path) {
  const std::vector<std::byte> bytes = read_bytes(path);
  const char* text = reinterpret_cast<const char*>(bytes.data());
  return nlohmann::json::parse(text, text + bytes.size());
}

inline std::vector<float> read_floats(const std::string& path) {
  const std::vector<std::byte> bytes = read_bytes(path);
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

struct Prompt {
  std::vector<int32_t> tokens;
  std::vector<int32_t> positions;     // ascending; where logits were recorded
  std::vector<double> router_margin;  // per position, mixtures only: a gap below the error may flip an expert
  std::vector<float> logits;          // [positions.size(), vocab_size]

  std::span<const float> row(size_t i) const {
    const size_t width = logits.size() / positions.size();
    return std::span<const float>(logits).subspan(i * width, width);
  }
};

struct Greedy {
  size_t prompt = 0;            // index into Model::prompts
  std::vector<int32_t> tokens;  // the argmax continuation; end tokens do not stop it
  std::vector<double> gaps;     // best logit minus second, per step
};

struct Text {
  std::string text;
  std::vector<int32_t> tokens;  // with the special tokens the tokenizer adds
};

struct Model {
  std::string name;
  std::string architecture;        // as GGUF spells it
  std::vector<std::string> paths;  // Hugging Face directory and/or first GGUF file: the same numbers in each
  int32_t vocab_size = 0;
  std::optional<int32_t> window;
  double float64_difference = 0;  // transformers' float32 against its float64, relative to the largest logit
  std::optional<double> min_router_margin;
  std::vector<Prompt> prompts;  // prompts[0] is the long one
  Greedy greedy;
  std::vector<Text> texts;
  nlohmann::json chat;  // {messages, text}, with add_generation_prompt
};

// The CPU, and what MILLRACE_TEST_DEVICES adds ("cuda").
inline std::vector<std::string> device_names() {
  std::vector<std::string> names = {"cpu"};
  const char* variable = std::getenv("MILLRACE_TEST_DEVICES");
  std::istringstream list(variable != nullptr ? variable : "");
  for (std::string name; std::getline(list, name, ',');) {
    if (name != "cpu" && name != "reference") names.push_back(name);
  }
  return names;
}

// Every model under tests/golden/models, by name.
inline std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kRoot + "models")) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  if (names.empty()) throw std::runtime_error(kRoot + "models: no models");
  return names;
}

inline Prompt parse_prompt(const nlohmann::json& json, std::span<const float> all, size_t vocab_size) {
  Prompt prompt;
  json.at("tokens").get_to(prompt.tokens);
  json.at("positions").get_to(prompt.positions);
  if (json.contains("router_margin")) json.at("router_margin").get_to(prompt.router_margin);
  const size_t first = json.at("offset").get<size_t>() * vocab_size;
  const size_t count = prompt.positions.size() * vocab_size;
  if (prompt.positions.empty() || first + count > all.size())
    throw std::runtime_error("golden.f32 is too short");
  prompt.logits.assign(all.begin() + static_cast<ptrdiff_t>(first),
                       all.begin() + static_cast<ptrdiff_t>(first + count));
  return prompt;
}

inline Model load_model(const std::string& name) {
  const std::string folder = kRoot + "models/" + name + "/";
  const nlohmann::json json = read_json(folder + "golden.json");
  const std::vector<float> logits = read_floats(folder + "golden.f32");
  Model model;
  model.name = name;
  json.at("architecture").get_to(model.architecture);
  for (const auto& file : json.at("files"))
    model.paths.push_back(folder + file.at("path").get<std::string>());
  json.at("vocab_size").get_to(model.vocab_size);
  if (!json.at("window").is_null()) model.window = json.at("window").get<int32_t>();
  json.at("float64_difference").get_to(model.float64_difference);
  if (!json.at("min_router_margin").is_null())
    model.min_router_margin = json.at("min_router_margin").get<double>();
  for (const auto& prompt : json.at("prompts")) {
    model.prompts.push_back(parse_prompt(prompt, logits, static_cast<size_t>(model.vocab_size)));
  }
  const auto& greedy = json.at("greedy");
  greedy.at("prompt").get_to(model.greedy.prompt);
  greedy.at("tokens").get_to(model.greedy.tokens);
  greedy.at("gaps").get_to(model.greedy.gaps);
  for (const auto& text : json.at("texts")) {
    model.texts.push_back(
        {text.at("text").get<std::string>(), text.at("tokens").get<std::vector<int32_t>>()});
  }
  model.chat = json.at("chat");
  return model;
}

// Random blocks of one type and their exact values.
struct Blocks {
  std::string type;               // as parse_dtype spells it
  size_t blocks = 0;              // elements for plain types
  std::vector<std::byte> raw;     // blocks x block bytes
  std::vector<std::byte> scales;  // mxfp4_split: one e8m0 byte per block; empty otherwise
  std::vector<float> values;
};

inline std::vector<Blocks> load_blocks() {
  const std::vector<std::byte> data = read_bytes(kRoot + "blocks.bin");
  const auto slice = [&](size_t offset, size_t bytes) {
    if (offset > data.size() || bytes > data.size() - offset)
      throw std::runtime_error("blocks.bin is too short");
    const auto begin = data.begin() + static_cast<ptrdiff_t>(offset);
    return std::vector<std::byte>(begin, begin + static_cast<ptrdiff_t>(bytes));
  };
  std::vector<Blocks> all;
  for (const auto& json : read_json(kRoot + "blocks.json")) {
    Blocks entry;
    json.at("type").get_to(entry.type);
    json.at("blocks").get_to(entry.blocks);
    entry.raw = slice(json.at("raw_offset").get<size_t>(), json.at("raw_bytes").get<size_t>());
    if (json.contains("scales_offset")) {
      entry.scales = slice(json.at("scales_offset").get<size_t>(), json.at("scales_bytes").get<size_t>());
    }
    entry.values.resize(json.at("values_count").get<size_t>());
    const auto bytes = slice(json.at("values_offset").get<size_t>(), entry.values.size() * sizeof(float));
    std::memcpy(entry.values.data(), bytes.data(), bytes.size());
    all.push_back(std::move(entry));
  }
  return all;
}

// SmolLM2-135M-Instruct against transformers on the same decoded weights.
struct SmolLm2 {
  std::string gguf_member, gguf_sha256;
  std::string chat_text;                // the rendered template
  std::vector<int32_t> chat_tokens;     // its ids
  Greedy greedy;                        // 64 tokens after chat_tokens; `prompt` unused
  std::string text_path;                // the text of the perplexity
  std::vector<int32_t> text_tokens;     // its first 2,000 ids, one context, nothing in front
  double nll_mean = 0, perplexity = 0;  // over text_tokens[1..]
  int32_t vocab_size = 0, stride = 1;   // of the logits every stride-th id is kept, from id 0
  std::vector<int32_t> positions;       // in chat_tokens
  std::vector<float> logits;            // [positions.size(), vocab_size / stride]
};

inline SmolLm2 load_smollm2() {
  const nlohmann::json json = read_json(kRoot + "smollm2.json");
  SmolLm2 out;
  json.at("gguf").at("member").get_to(out.gguf_member);
  json.at("gguf").at("sha256").get_to(out.gguf_sha256);
  json.at("chat").at("text").get_to(out.chat_text);
  json.at("chat").at("tokens").get_to(out.chat_tokens);
  json.at("greedy").at("tokens").get_to(out.greedy.tokens);
  json.at("greedy").at("gaps").get_to(out.greedy.gaps);
  const auto& perplexity = json.at("perplexity");
  out.text_path = kRoot + perplexity.at("file").get<std::string>();
  perplexity.at("tokens").get_to(out.text_tokens);
  perplexity.at("nll_mean").get_to(out.nll_mean);
  perplexity.at("perplexity").get_to(out.perplexity);
  json.at("logits").at("vocab_size").get_to(out.vocab_size);
  json.at("logits").at("stride").get_to(out.stride);
  json.at("logits").at("positions").get_to(out.positions);
  out.logits = read_floats(kRoot + "smollm2.f32");
  return out;
}

}  // namespace millrace::golden

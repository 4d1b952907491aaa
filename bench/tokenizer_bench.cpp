// tokenizer_bench VOCABULARY TEXT: load time, MB/s over a text, and the time of 1 MB and 2 MB without a
// space, which should differ by about two. VOCABULARY is a tokenizer.json, or a gguf_vocab.json of
// tools/fetch_tokenizers.py.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/mapped_file.h"
#include "tokenizer/tokenizer.h"

namespace millrace {
namespace {

// Processor time: encoding is single-threaded, and what else runs on the machine should not count.
double seconds_now() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

std::shared_ptr<const Tokenizer> load(const std::string& path, double& load_s) {
  const std::string text = read_text_file(path);
  if (!path.ends_with("gguf_vocab.json")) {
    const double start = seconds_now();
    auto tokenizer = Tokenizer::from_json(text, "", path);
    load_s = seconds_now() - start;
    return tokenizer;
  }
  const nlohmann::json j = nlohmann::json::parse(text);
  const auto tokens = j.at("tokens").get<std::vector<std::string>>();
  const auto merges = j.value("merges", std::vector<std::string>());
  GgufVocabulary v;
  v.model = j.at("model");
  v.pre = j.value("pre", "");
  v.tokens.assign(tokens.begin(), tokens.end());
  v.merges.assign(merges.begin(), merges.end());
  v.scores = j.value("scores", std::vector<float>());
  v.types = j.value("token_type", std::vector<int32_t>());
  const double start = seconds_now();
  auto tokenizer = Tokenizer::from_gguf(v, path);
  load_s = seconds_now() - start;
  return tokenizer;
}

// The best of a few runs, in seconds.
double time_encode(const Tokenizer& tokenizer, std::string_view text, size_t& num_ids) {
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    const double start = seconds_now();
    num_ids = tokenizer.encode(text).size();
    best = std::min(best, seconds_now() - start);
  }
  return best;
}

// Letters and digits without order, as base64 has them.
std::string noise(size_t bytes, std::string_view alphabet) {
  std::string out;
  uint32_t seed = 7;
  for (size_t i = 0; i < bytes; ++i) {
    seed = seed * 1664525u + 1013904223u;
    out.push_back(alphabet[(seed >> 16) % alphabet.size()]);
  }
  return out;
}

void run(const std::string& vocabulary, const std::string& text_path) {
  double load_s = 0;
  const auto tokenizer = load(vocabulary, load_s);
  const std::string text = read_text_file(text_path);
  size_t num_ids = 0;
  const double text_s = time_encode(*tokenizer, text, num_ids);
  std::printf("%s: load %.3f s; text %.1f MB/s (%.2f MB, %.2f bytes per token)\n", vocabulary.c_str(), load_s,
              static_cast<double>(text.size()) / text_s * 1e-6, static_cast<double>(text.size()) * 1e-6,
              static_cast<double>(text.size()) / static_cast<double>(num_ids));
  const std::string letters = "abcdefghijklmnopqrstuvwxyz";
  const std::string base64 = letters + "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/";
  const auto compare = [&](const char* name, const std::string& alphabet) {
    size_t ids = 0;
    const double one = time_encode(*tokenizer, noise(1'000'000, alphabet), ids);
    const double two = time_encode(*tokenizer, noise(2'000'000, alphabet), ids);
    std::printf("  %-8s 1 MB %.3f s, 2 MB %.3f s, ratio %.2f\n", name, one, two, two / one);
  };
  compare("a", "a");
  compare("letters", letters);
  compare("base64", base64);
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: tokenizer_bench VOCABULARY TEXT\n");
    return 2;
  }
  try {
    millrace::run(argv[1], argv[2]);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
  return 0;
}

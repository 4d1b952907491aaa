// Replays recorded cases of the real tokenizers: tests/golden/tokenizers/*.json, written by
// tests/golden/make_tokenizer_golden.py from Hugging Face tokenizers, tiktoken and sentencepiece. The
// vocabularies are too large to keep; tools/fetch_tokenizers.py gets them. MILLRACE_TOKENIZER_CASES names a
// folder with more cases of the same form.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/mapped_file.h"
#include "tokenizer/tokenizer.h"

namespace millrace {
namespace {

using nlohmann::json;

const std::string kVocabularies = "build/models/tokenizers/";

std::string from_hex(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    out.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return out;
}

// Text of a case: a string, or {"hex": bytes that are no UTF-8}.
std::string text_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : from_hex(value.at("hex").get<std::string>());
}

// A vocabulary's strings must outlive from_gguf only.
struct OwnedVocabulary {
  std::vector<std::string> tokens, merges;
  GgufVocabulary view;

  void finish() {
    view.tokens.assign(tokens.begin(), tokens.end());
    view.merges.assign(merges.begin(), merges.end());
  }
};

void read_gguf_vocabulary(const json& j, OwnedVocabulary& v) {
  v.view.model = j.at("model");
  v.view.pre = j.value("pre", "");
  v.tokens = j.at("tokens").get<std::vector<std::string>>();
  if (j.contains("merges")) v.merges = j.at("merges").get<std::vector<std::string>>();
  if (j.contains("scores")) v.view.scores = j.at("scores").get<std::vector<float>>();
  if (j.contains("token_type")) v.view.types = j.at("token_type").get<std::vector<int32_t>>();
  const auto id = [&](const char* name) {
    return j.contains(name) ? std::optional<TokenId>(j.at(name).get<TokenId>()) : std::nullopt;
  };
  const auto flag = [&](const char* name) {
    return j.contains(name) ? std::optional<bool>(j.at(name).get<bool>()) : std::nullopt;
  };
  v.view.bos = id("bos_token_id");
  v.view.eos = id("eos_token_id");
  v.view.unk = id("unknown_token_id");
  v.view.add_bos = flag("add_bos_token");
  v.view.add_eos = flag("add_eos_token");
  v.view.add_space_prefix = flag("add_space_prefix");
  v.finish();
}

std::shared_ptr<const Tokenizer> load(const std::string& name) {
  const std::string folder = kVocabularies + name + "/";
  if (std::filesystem::exists(folder + "tekken.json"))
    return Tokenizer::from_tekken(read_text_file(folder + "tekken.json"), folder + "tekken.json");
  if (std::filesystem::exists(folder + "tokenizer.json"))
    return Tokenizer::from_json(read_text_file(folder + "tokenizer.json"),
                                read_text_file(folder + "tokenizer_config.json"), folder + "tokenizer.json");
  OwnedVocabulary v;
  read_gguf_vocabulary(json::parse(read_text_file(folder + "gguf_vocab.json")), v);
  return Tokenizer::from_gguf(v.view, folder + "gguf_vocab.json");
}

// The same vocabulary as a GGUF converter writes it: tokens in id order, merges as "left right", gaps unused.
std::shared_ptr<const Tokenizer> load_as_gguf(const std::string& name, const std::string& pre) {
  const json file = json::parse(read_text_file(kVocabularies + name + "/tokenizer.json"));
  OwnedVocabulary v;
  const bool bert = pre == "bert";
  v.view.model = bert ? "bert" : "gpt2";
  v.view.pre = pre;
  const auto put = [&](size_t id, const std::string& token, int32_t type) {
    while (v.tokens.size() <= id) {
      v.tokens.push_back("[PAD" + std::to_string(v.tokens.size()) + "]");
      v.view.types.push_back(5);
    }
    v.tokens[id] = token;
    v.view.types[id] = type;
  };
  for (const auto& [token, id] : file.at("model").at("vocab").items())
    put(id.get<size_t>(),
        !bert                     ? token
        : token.starts_with("##") ? token.substr(2)
                                  : "\xe2\x96\x81" + token,
        1);
  for (const json& t : file.at("added_tokens"))
    put(t.at("id"), t.at("content"), t.at("special").get<bool>() ? 3 : 4);
  for (const json& m : file.at("model").value("merges", json::array()))
    v.merges.push_back(m.is_string() ? m.get<std::string>()
                                     : m[0].get<std::string>() + " " + m[1].get<std::string>());
  if (pre == "tekken") {
    v.view.bos = 1;  // <s>; that it is added, such a file need not say
  } else {
    v.view.add_bos = bert;
  }
  v.finish();
  return Tokenizer::from_gguf(v.view, name + " as GGUF");
}

struct Tally {
  size_t equal = 0;
  size_t different = 0;
};

// ids of every case, the exact bytes back where the tokenizer has all bytes, and the recorded decoded text.
Tally replay(const Tokenizer& tokenizer, const json& fixture) {
  Tally tally;
  for (const json& c : fixture.at("cases")) {
    const std::string text = text_of(c.at("text"));
    Tokenizer::EncodeOptions options;
    options.add_special = c.value("add_special", false);
    options.parse_special = c.value("parse_special", true);
    const std::vector<TokenId> expected = c.at("ids").get<std::vector<TokenId>>();
    const std::vector<TokenId> found = tokenizer.encode(text, options);
    EXPECT_LE(tokenizer.min_tokens(text), found.size())
        << c.dump(-1, ' ', true, json::error_handler_t::replace);
    const bool has_decoded = c.contains("decoded");
    // 1 stands for the text itself.
    const std::string decoded =
        has_decoded && c.at("decoded").is_string() ? c.at("decoded").get<std::string>() : text;
    const bool same = found == expected && (!has_decoded || tokenizer.decode(expected, true) == decoded);
    ++(same ? tally.equal : tally.different);
    if (!same && tally.different <= 5)
      ADD_FAILURE() << c.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 1000) << "\n  found "
                    << json(found).dump().substr(0, 1000)
                    << (has_decoded
                            ? "\n  decodes to " + json(tokenizer.decode(expected, true)).dump(-1, ' ', true)
                            : "");
  }
  return tally;
}

void replay_file(const std::string& path, const std::string& as_gguf = "") {
  const json fixture = json::parse(read_text_file(path));
  const std::string name = fixture.at("vocabulary");
  if (!std::filesystem::exists(kVocabularies + name)) {
    GTEST_SKIP() << "SKIPPED: there is no vocabulary of " << name << " in " << kVocabularies
                 << "; to run this test: tools/fetch_tokenizers.py " << name;
  }
  const auto tokenizer = as_gguf.empty() ? load(name) : load_as_gguf(name, as_gguf);
  const Tally tally = replay(*tokenizer, fixture);
  std::cout << "  " << path << (as_gguf.empty() ? "" : " as GGUF " + as_gguf) << ": " << tally.equal
            << " equal, " << tally.different << " different\n";
  EXPECT_EQ(tally.different, 0u);
  EXPECT_GT(tally.equal, 0u);
}

class TokenizerGolden : public testing::TestWithParam<const char*> {};

TEST_P(TokenizerGolden, SameIdsAsTheOracle) {
  replay_file(std::string("tests/golden/tokenizers/") + GetParam() + ".json");
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerGolden,
                         testing::Values("gpt-oss", "gpt-oss-tiktoken", "gpt2", "llama3", "qwen3", "smollm2",
                                         "mistral", "llama2", "gemma3", "gemma3-gguf", "deepseek3", "tekken",
                                         "tekken-json", "minilm"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

struct AsGguf {
  const char* name;
  const char* pre;
};
class TokenizerGoldenAsGguf : public testing::TestWithParam<AsGguf> {};

TEST_P(TokenizerGoldenAsGguf, SameIdsAsTheOracle) {
  replay_file(std::string("tests/golden/tokenizers/") + GetParam().name + ".json", GetParam().pre);
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerGoldenAsGguf,
                         testing::Values(AsGguf{"gpt-oss", "gpt-4o"}, AsGguf{"gpt2", "gpt-2"},
                                         AsGguf{"qwen3", "qwen2"}, AsGguf{"deepseek3", "deepseek-v3"},
                                         AsGguf{"tekken", "tekken"}, AsGguf{"minilm", "bert"}),
                         [](const auto& param) {
                           std::string name = param.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Every byte sequence comes back from byte-level tokens, whether it is text or not.
TEST(TokenizerGoldenBytes, GptOssGivesBackEveryByte) {
  if (!std::filesystem::exists(kVocabularies + "gpt-oss"))
    GTEST_SKIP() << "SKIPPED: to run this test: tools/fetch_tokenizers.py gpt-oss";
  const auto tokenizer = load("gpt-oss");
  uint32_t seed = 1;
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = 0; i < round % 40; ++i) {
      seed = seed * 1664525u + 1013904223u;
      text.push_back(static_cast<char>(seed >> (round % 2 == 0 ? 24 : 25)));
    }
    std::string back;
    for (const TokenId id : tokenizer->encode(text)) back += tokenizer->token_bytes(id, true);
    ASSERT_EQ(back, text);
  }
}

TEST(TokenizerGoldenMore, FolderOfCases) {
  const char* folder = std::getenv("MILLRACE_TOKENIZER_CASES");
  if (folder == nullptr) GTEST_SKIP() << "MILLRACE_TOKENIZER_CASES is not set";
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".json") replay_file(entry.path().string());
}

}  // namespace
}  // namespace millrace

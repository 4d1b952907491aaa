// Every scanner against word boundaries recorded from Hugging Face's own pre-tokenizers
// (tests/golden/tokenizers/splits.json, splits_more.json); no vocabulary is needed for that.
#include "tokenizer/pretokenizer.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/mapped_file.h"

namespace millrace {
namespace {

void cut(const char* begin, const char* end, const std::vector<Scanner>& scanners, size_t stage,
         std::vector<size_t>& lengths) {
  if (stage == scanners.size()) {
    lengths.push_back(static_cast<size_t>(end - begin));
    return;
  }
  while (begin < end) {
    const char* piece_end = scanners[stage](begin, end);
    ASSERT_GT(piece_end, begin);
    ASSERT_LE(piece_end, end);
    cut(begin, piece_end, scanners, stage + 1, lengths);
    begin = piece_end;
  }
}

std::vector<std::string> pieces(Scanner scanner, const std::string& text) {
  std::vector<size_t> lengths;
  cut(text.data(), text.data() + text.size(), {scanner}, 0, lengths);
  std::vector<std::string> out;
  size_t at = 0;
  for (const size_t n : lengths) {
    out.push_back(text.substr(at, n));
    at += n;
  }
  return out;
}

void replay(const std::string& path, const std::string& name, const std::string& pre) {
  const nlohmann::json fixture = nlohmann::json::parse(read_text_file(path));
  const auto scanners = find_gguf_pretokenizer(pre);
  ASSERT_TRUE(scanners.has_value());
  const auto& texts = fixture.at("texts");
  if (!fixture.at("lengths").contains(name)) {  // the other file has it
    replay("tests/golden/tokenizers/splits_more.json", name, pre);
    return;
  }
  const auto& expected = fixture.at("lengths").at(name);
  ASSERT_GE(texts.size(), 200u);
  size_t different = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string text = texts[i];
    std::vector<size_t> lengths;
    cut(text.data(), text.data() + text.size(), scanners->scanners, 0, lengths);
    if (lengths == expected[i].get<std::vector<size_t>>()) continue;
    if (++different <= 5)
      ADD_FAILURE() << texts[i].dump(-1, ' ', true) << "\n  expected " << expected[i].dump() << "\n  found "
                    << nlohmann::json(lengths).dump();
  }
  EXPECT_EQ(different, 0u) << "of " << texts.size();
}

struct Named {
  const char* name;
  const char* pre;
};
class PretokenizerSplits : public testing::TestWithParam<Named> {};

TEST_P(PretokenizerSplits, SameAsHuggingFace) {
  replay("tests/golden/tokenizers/splits.json", GetParam().name, GetParam().pre);
  if (const char* folder = std::getenv("MILLRACE_TOKENIZER_CASES"))
    replay(std::string(folder) + "/splits/splits.json", GetParam().name, GetParam().pre);
}

INSTANTIATE_TEST_SUITE_P(All, PretokenizerSplits,
                         testing::Values(Named{"gpt2", "gpt-2"}, Named{"llama3", "llama-bpe"},
                                         Named{"qwen2", "qwen2"}, Named{"o200k", "gpt-4o"},
                                         Named{"smollm", "smollm"}, Named{"default", "default"},
                                         Named{"tekken", "tekken"}, Named{"deepseek3", "deepseek-v3"},
                                         Named{"deepseek_coder", "deepseek-coder"},
                                         Named{"deepseek_llm", "deepseek-llm"}, Named{"seed", "seed-coder"},
                                         Named{"cl100k", "dbrx"}, Named{"qwen35", "qwen35"},
                                         Named{"kimi", "kimi-k2"}),
                         [](const auto& param) { return std::string(param.param.name); });

using Pieces = std::vector<std::string>;

TEST(Pretokenizer, Gpt2KeepsTheLastSpaceForTheWord) {
  EXPECT_EQ(pieces(scan_gpt2, "I'm  here\n\n now"), (Pieces{"I", "'m", " ", " here", "\n\n", " now"}));
}

TEST(Pretokenizer, O200kCutsBeforeCapitalsAndKeepsContractions) {
  EXPECT_EQ(pieces(scan_o200k, "HTTPServer's DON'T a/b//\n1234"),
            (Pieces{"HTTPServer's", " DON'T", " a", "/b", "//\n", "123", "4"}));
  EXPECT_EQ(pieces(scan_o200k, "camelCase XMLHttp"), (Pieces{"camel", "Case", " XMLHttp"}));
}

TEST(Pretokenizer, DigitsByThreeByOneOrAll) {
  EXPECT_EQ(pieces(scan_llama3, "12345"), (Pieces{"123", "45"}));
  EXPECT_EQ(pieces(scan_qwen2, "123"), (Pieces{"1", "2", "3"}));
  EXPECT_EQ(pieces(scan_gpt2, "12345"), (Pieces{"12345"}));
}

TEST(Pretokenizer, UnknownNamesAreNotGuessed) {
  EXPECT_EQ(find_split_scanner("\\s+"), nullptr);
  EXPECT_FALSE(find_gguf_pretokenizer("no-such-words").has_value());
}

}  // namespace
}  // namespace millrace

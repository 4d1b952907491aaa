// The tokenizers on small vocabularies: against Hugging Face (tests/golden/tokenizers/small.json, tokenizers
// in tests/fuzz/corpus/tokenizer_json), and what each bad file is told.
#include "tokenizer/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "base/mapped_file.h"
#include "base/work_budget.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/detokenizer.h"

namespace millrace {
namespace {

using nlohmann::json;
using Ids = std::vector<TokenId>;

json small_json(const std::string& name) {
  return json::parse(read_text_file("tests/fuzz/corpus/tokenizer_json/" + name + ".json"));
}

std::shared_ptr<const Tokenizer> load(const json& file, const std::string& config = "") {
  return Tokenizer::from_json(file.dump(), config, "t.json");
}

TEST(TokenizerSmall, SameAsHuggingFace) {
  const json fixture = json::parse(read_text_file("tests/golden/tokenizers/small.json"));
  ASSERT_GE(fixture.size(), 11u);
  for (const auto& [name, cases] : fixture.items()) {
    const auto tokenizer = load(small_json(name));
    for (size_t i = 0; i < cases.size(); ++i) {
      const json& c = cases[i];
      Tokenizer::EncodeOptions options;
      options.add_special = c[1];
      options.parse_special = c[2];
      const Ids expected = c[3];
      EXPECT_EQ(tokenizer->encode(c[0].get<std::string>(), options), expected)
          << name << " " << c.dump(-1, ' ', true);
      EXPECT_EQ(tokenizer->decode(expected, i % 3 != 0), c[4].get<std::string>())
          << name << " " << c.dump(-1, ' ', true);
    }
  }
}

// The bound holds for every text, and where every byte has a token it says something.
TEST(TokenizerSmall, SoManyTokensAtLeast) {
  const json fixture = json::parse(read_text_file("tests/golden/tokenizers/small.json"));
  for (const auto& [name, cases] : fixture.items()) {
    const auto tokenizer = load(small_json(name));
    for (const json& c : cases) {
      std::string text = c[0];
      for (int i = 0; i < 6; ++i) text += text.substr(0, 2000);
      for (const bool parse_special : {false, true}) {
        const size_t found = tokenizer->encode(text, {.parse_special = parse_special}).size();
        EXPECT_LE(tokenizer->min_tokens(text), found) << name << " " << c[0].dump(-1, ' ', true);
      }
    }
  }
  EXPECT_GT(load(small_json("digits"))->min_tokens(std::string(100'000, 'a')), 1000u);
  // Bytes that the vocabulary lacks say nothing, and take nothing away from what the others say.
  json some = small_json("digits");
  ASSERT_EQ(some["model"]["vocab"].erase("\u00c0"), 1u);  // byte 0xc0, which is in no text
  const auto lacking = load(some);
  EXPECT_GT(lacking->min_tokens(std::string(100'000, 'a')), 1000u);
  EXPECT_EQ(lacking->min_tokens(std::string(100'000, '\xc0')), 0u);
}

// What is far more than wanted is not read to its end.
TEST(TokenizerSmall, OneLongWordIsCut) {
  const auto tokenizer = load(small_json("digits"));
  const std::string word(size_t{32} << 20, 'a');
  const Ids some = tokenizer->encode(word, {.max_tokens = 50});
  EXPECT_GT(some.size(), 50u);
  EXPECT_LT(some.size(), 100'000u);
}

TEST(TokenizerSmall, StopsWhenThereAreMoreThanWanted) {
  for (const char* name : {"added", "digits", "llama", "metaspace_never"}) {
    const auto tokenizer = load(small_json(name));
    std::string text;
    for (int i = 0; i < 200; ++i) text += " mill " + std::to_string(i);
    const Ids whole = tokenizer->encode(text);
    EXPECT_EQ(tokenizer->encode(text, {.max_tokens = whole.size()}), whole);
    const Ids some = tokenizer->encode(text, {.max_tokens = 100});
    EXPECT_GT(some.size(), 100u);
    ASSERT_LE(some.size(), whole.size());
    EXPECT_TRUE(std::equal(some.begin(), some.end(), whole.begin()));
  }
  const WorkBudget budget({.deadline = std::chrono::steady_clock::now()});
  EXPECT_THROW(load(small_json("digits"))->encode(std::string(1 << 20, 'a')), WorkEnded);
}

TEST(TokenizerSmall, EveryByteComesBack) {
  for (const char* name : {"added", "digits", "llama", "metaspace_never"}) {
    const auto tokenizer = load(small_json(name));
    uint32_t seed = 5;
    for (int round = 0; round < 500; ++round) {
      std::string text;
      for (int i = 0; i < round % 30; ++i) {
        seed = seed * 1664525u + 1013904223u;
        // Without bytes from 0xc2 to 0xf4 no marks can appear for NFC to compose.
        const uint8_t byte = static_cast<uint8_t>(seed >> 24);
        text.push_back(static_cast<char>(byte >= 0xc2 && byte <= 0xf4 ? 0x80 : byte));
      }
      Tokenizer::EncodeOptions options;
      options.add_special = false;
      std::string back;
      for (const TokenId id : tokenizer->encode(text, options)) back += tokenizer->token_bytes(id, true);
      if (std::string(name) == "llama" && !text.empty()) back.erase(0, 1);
      ASSERT_EQ(back, text) << name;
    }
  }
}

TEST(TokenizerSmall, SpecialTokensAndRange) {
  const auto t = load(small_json("llama"), R"({"bos_token":{"content":"<s>"},"eos_token":"<unk>"})");
  EXPECT_EQ(t->bos(), 1);
  EXPECT_EQ(t->end_tokens(), (Ids{0}));
  EXPECT_EQ(t->find("<s>"), 1);
  EXPECT_EQ(t->find("nothing"), std::nullopt);
  EXPECT_TRUE(t->is_special(1));
  EXPECT_FALSE(t->is_special(5));
  EXPECT_EQ(t->token_bytes(1, true), "<s>");
  EXPECT_EQ(t->token_bytes(1, false), "");
  EXPECT_EQ(t->token_bytes(2 + 0x41, false), "A");
  EXPECT_THROW(t->token_bytes(-1, true), Error);
  EXPECT_THROW(t->token_bytes(t->vocab_size(), true), Error);
  EXPECT_THROW(t->decode(Ids{1 << 30}, true), Error);
}

TEST(TokenizerSmall, ManyThreadsAgree) {
  const auto t = load(small_json("added"));
  std::string text;
  for (int i = 0; i < 2000; ++i) text += i % 3 == 0 ? " world" : i % 7 == 0 ? "hello<lstrip> " : " he12aaaa";
  const Ids expected = t->encode(text);
  const auto fresh = load(small_json("added"));
  std::vector<Ids> found(4);
  std::vector<std::thread> threads;
  for (Ids& ids : found) threads.emplace_back([&ids, &fresh, &text] { ids = fresh->encode(text); });
  for (std::thread& thread : threads) thread.join();
  for (const Ids& ids : found) EXPECT_EQ(ids, expected);
}

TEST(StreamingDetokenizer, NeverHalfACharacter) {
  const auto t = load(small_json("digits"));
  const std::string text = "h\xc3\xa9 \xf0\x9f\x99\x82!";
  StreamingDetokenizer detokenizer(t);
  std::string all;
  for (const TokenId id : t->encode(text)) {
    const std::string part = detokenizer.push(id);
    EXPECT_EQ(part.find("\xef\xbf\xbd"), std::string::npos);
    all += part;
  }
  EXPECT_EQ(all + detokenizer.finish(), text);
  EXPECT_EQ(detokenizer.push(t->encode("\xf0")[0]), "");
  EXPECT_EQ(detokenizer.finish(), "\xef\xbf\xbd");
  EXPECT_EQ(detokenizer.push(t->encode("\xff")[0]), "\xef\xbf\xbd");
  EXPECT_EQ(detokenizer.finish(), "");
}

TEST(StreamingDetokenizer, FirstSpaceOfSentencePiece) {
  const auto t = load(small_json("llama"));
  const Ids ids = t->encode("hello hello");
  std::string fresh, continued;
  StreamingDetokenizer a(t), b(t, false, true);
  for (const TokenId id : ids) {
    fresh += a.push(id);
    continued += b.push(id);
  }
  EXPECT_EQ(fresh, "hello hello");
  EXPECT_EQ(continued, " hello hello");
}

// A SentencePiece model by scores. "b" is no piece, yet "ab" is made of it.
struct Scored {
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  GgufVocabulary v;
  Scored() {
    v.model = "llama";
    v.types = {2, 3, 3};
    v.scores = {0, 0, 0};
    for (int b = 0; b < 256; ++b) add(fmt::format("<0x{:02X}>", b), 0, 6);
    for (const auto& [piece, score] :
         std::initializer_list<std::pair<const char*, float>>{{"\xe2\x96\x81", -9},
                                                              {"a", -10},
                                                              {"aa", -3},
                                                              {"aaa", -4},
                                                              {"ab", -5},
                                                              {"\xe2\x96\x81"
                                                               "a",
                                                               -1}})
      add(piece, score, 1);
    v.bos = 1;
    v.eos = 2;
  }
  void add(const std::string& piece, float score, int32_t type) {
    tokens.push_back(piece);
    v.scores.push_back(score);
    v.types.push_back(type);
  }
  std::shared_ptr<const Tokenizer> load() {
    v.tokens.assign(tokens.begin(), tokens.end());
    return Tokenizer::from_gguf(v, "m.gguf");
  }
};

TEST(TokenizerGguf, SentencePieceMergesByScore) {
  Scored scored;
  const auto t = scored.load();
  const auto id = [&](const char* piece) { return t->find(piece).value(); };
  const TokenId mark_a =
      id("\xe2\x96\x81"
         "a");
  EXPECT_EQ(t->encode("a"), (Ids{1, mark_a}));
  EXPECT_EQ(t->encode("aaaa"), (Ids{1, mark_a, id("aaa")}));
  EXPECT_EQ(t->encode("bab"), (Ids{1, id("\xe2\x96\x81"), 3 + 'b', id("ab")}));
  EXPECT_EQ(t->encode("a</s>a"), (Ids{1, mark_a, 2, mark_a}));
  EXPECT_EQ(t->encode("\xff", {false, true}), (Ids{id("\xe2\x96\x81"), 3 + 0xff}));
  EXPECT_EQ(t->decode(t->encode("bab aaa"), false), "bab aaa");
  EXPECT_EQ(t->end_tokens(), (Ids{2}));
}

// What repr() makes of bytes is undone; the longest token wins, whatever its bytes are.
TEST(TokenizerGguf, RwkvWorldIsGreedy) {
  GgufVocabulary v;
  v.model = "rwkv";
  v.tokens = {"<s>", "a",     "ab",         "abcd",  "b",    "c",   "\\n\\n",
              "\\n", "\\xe6", "\\xe6\\xb0", "\\xb4", "\\\\", "\\'", "[PAD1]"};
  v.types = {3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5};
  v.eos = 0;
  const auto t = Tokenizer::from_gguf(v, "test");
  EXPECT_EQ(t->encode("abcdabcab"), (Ids{3, 2, 5, 2}));
  EXPECT_EQ(t->encode("a\n\n\nb"), (Ids{1, 6, 7, 4}));
  EXPECT_EQ(t->encode("\xe6\xb0\xb4\xe6\xb4"), (Ids{9, 10, 8, 10}));
  EXPECT_EQ(t->encode("\\'c"), (Ids{11, 12, 5}));
  EXPECT_EQ(t->encode("a<s>a[PAD1]"), (Ids{1, 0, 1}));  // the rest has no token
  EXPECT_EQ(t->encode("a<s>", {true, false}), (Ids{1}));
  EXPECT_EQ(t->decode(t->encode("abcd\xe6\xb0\xb4"), false), "abcd\xe6\xb0\xb4");
  EXPECT_EQ(t->end_tokens(), (Ids{0}));
}

// The same of the file that directories have: text is UTF-8, bytes are bytes, and 0 ends a text.
TEST(TokenizerRwkv, ReadsTheVocabularysOwnFile) {
  const std::string file =
      "1 '\\x00' 1\n2 'a' 1\n3 b'\\xe6' 1\n4 '\\n\\n' 2\n5 \"'\" 1\n6 '\\xa0' 2\n7 '\\u3000' 3\n"
      "8 '\\U0001f600' 4\n9 '  ' 2\n11 '\xe6\xb0\xb4' 3\n12 '\\\\' 1\n13 'b ' 2\n";
  const auto t = Tokenizer::from_rwkv(file, "test");
  EXPECT_EQ(t->vocab_size(), 14);
  EXPECT_EQ(t->encode(std::string("\0a'\n\n", 5)), (Ids{1, 2, 5, 4}));
  EXPECT_EQ(t->encode("\xc2\xa0\xe3\x80\x80\xf0\x9f\x98\x80  b "), (Ids{6, 7, 8, 9, 13}));
  EXPECT_EQ(t->encode("\xe6\xb0\xb4\xe6\\"), (Ids{11, 3, 12}));
  EXPECT_EQ(t->encode("a<|rwkv_tokenizer_end_of_text|>"), (Ids{2, 0}));
  EXPECT_EQ(t->end_tokens(), (Ids{0}));
}

template <class Function>
void expect_error(ErrorCode code, const std::string& part, Function function) {
  try {
    function();
    ADD_FAILURE() << "no error about " << part;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
  }
}

TEST(TokenizerRwkv, BadFiles) {
  for (const char* bad :
       {"1 'a' 2\n", "1 'a\n", "1 a 1\n", "0 'a' 1\n", "1 'a' 1\n1 'b' 1\n", "x 'a' 1\n",
        "9999999999 'a' 1\n", "1 '\\q' 2\n", "1 '\\ud800' 3\n", "1 '\\x4' 1\n", "1 '' 0\n"}) {
    expect_error(ErrorCode::kBadInput, "test: line ", [&] { Tokenizer::from_rwkv(bad, "test"); });
  }
  expect_error(ErrorCode::kBadInput, "found no tokens", [] { Tokenizer::from_rwkv("\n", "test"); });
}

TEST(TokenizerGguf, BadVocabularies) {
  const auto refuse = [](ErrorCode code, const std::string& part, auto change) {
    Scored scored;
    change(scored);
    expect_error(code, part, [&] { scored.load(); });
  };
  refuse(ErrorCode::kUnsupported, "tokenizer.ggml.model is \"t5\"", [](Scored& s) { s.v.model = "t5"; });
  refuse(ErrorCode::kBadInput, "scores has 1 items", [](Scored& s) { s.v.scores.resize(1); });
  refuse(ErrorCode::kBadInput, "scores[4] is not a number", [](Scored& s) { s.v.scores[4] = NAN; });
  refuse(ErrorCode::kBadInput, "token_type has 1 items", [](Scored& s) { s.v.types.resize(1); });
  refuse(ErrorCode::kBadInput, "token_type[2] is 77", [](Scored& s) { s.v.types[2] = 77; });
  refuse(ErrorCode::kBadInput, "bos_token_id is 9999", [](Scored& s) { s.v.bos = 9999; });
  refuse(ErrorCode::kBadInput, "tokens is empty", [](Scored& s) { s.tokens.clear(); });
  refuse(ErrorCode::kUnsupported, "pre is \"tek\\x0aken\"", [](Scored& s) {
    s.v.model = "gpt2";
    s.v.pre = "tek\nken";
  });
  refuse(ErrorCode::kBadInput, "merges[0]: what it makes", [](Scored& s) {
    s.v.model = "gpt2";
    s.v.pre = "gpt-2";
    s.v.merges = {"a ab"};
  });
  refuse(ErrorCode::kBadInput, "merges[0] is not two tokens", [](Scored& s) {
    s.v.model = "gpt2";
    s.v.pre = "gpt-2";
    s.v.merges = {"aab"};
  });
}

TEST(TokenizerJson, BadFiles) {
  const auto refuse = [](ErrorCode code, const std::string& part, const std::string& path,
                         const json& value) {
    json file = small_json("added");
    file[json::json_pointer(path)] = value;
    expect_error(code, part, [&] { load(file); });
  };
  const ErrorCode bad = ErrorCode::kBadInput, unsupported = ErrorCode::kUnsupported;
  refuse(unsupported, "model.type is \"Unigram\"", "/model/type", "Unigram");
  refuse(unsupported, "normalizer.type is \"NFKC\"", "/normalizer/type", "NFKC");
  refuse(unsupported, "pre_tokenizer.type is \"Whitespace\"", "/pre_tokenizer/type", "Whitespace");
  refuse(unsupported, "post_processor.type is \"Bert\"", "/post_processor/type", "Bert");
  refuse(unsupported, "decoder is ", "/decoder/type", "WordPiece");
  refuse(unsupported, "pre_tokenizer.pattern.Regex is \"a+\"", "/pre_tokenizer",
         {{"type", "Split"}, {"pattern", {{"Regex", "a+"}}}, {"behavior", "Isolated"}});
  refuse(unsupported, "model.continuing_subword_prefix", "/model/continuing_subword_prefix", "##");
  refuse(unsupported, "model.dropout", "/model/dropout", 0.1);
  refuse(bad, "model.ignore_merges is number", "/model/ignore_merges", 1);
  refuse(bad, "model.vocab is array", "/model/vocab", json::array());
  refuse(bad, "model.merges is object", "/model/merges", json::object());
  refuse(bad, "model.merges[0] is not two words", "/model/merges/0", "abc");
  refuse(bad, "model.merges[1] is not two strings", "/model/merges/0", {"a", "b", "c"});
  refuse(bad, "needs \"xyz\", which is not in model.vocab", "/model/merges/0", {"xyz", "a"});
  refuse(bad, "id of token", "/model/vocab/!", -1);
  refuse(bad, "id of token", "/model/vocab/!", 3000000000);
  refuse(bad, "expected at most", "/model/vocab/!", 2000000000);
  refuse(bad, "is there twice", "/model/vocab/!", 5);
  refuse(bad, "added_tokens[0].id is 2000000000", "/added_tokens/0/id", 2000000000);
  refuse(bad, "added_tokens[0].content is number", "/added_tokens/0/content", 1);
  refuse(unsupported, "added_tokens[0].content has 5000 bytes", "/added_tokens/0/content",
         std::string(5000, 'x'));
  refuse(bad, "post_processor puts token 123456", "/post_processor/special_tokens/<a>/ids/0", 123456);
  expect_error(bad, "t.json: byte 1 is not valid JSON", [] { Tokenizer::from_json("x", "", "t.json"); });
  expect_error(bad, "t.json: is array, expected an object", [] { Tokenizer::from_json("[]", "", "t.json"); });
  expect_error(bad, "nested", [] { Tokenizer::from_json(std::string(100000, '['), "", "t.json"); });
  expect_error(bad, "tokenizer_config.json", [] { load(small_json("added"), "{"); });
}

// Cut anywhere, a file is an Error and nothing else.
TEST(TokenizerJson, TruncatedFiles) {
  const std::string text = small_json("few_bytes").dump();
  for (size_t n = 0; n < text.size(); ++n)
    expect_error(ErrorCode::kBadInput,
                 "t.json: ", [&] { Tokenizer::from_json(text.substr(0, n), "", "t.json"); });
}

TEST(AddedTokens, LeftmostThenLongest) {
  std::vector<AddedToken> tokens(4);
  const std::vector<std::string> contents = {"<a>", "<a><b>", "a", "b><"};
  for (uint32_t i = 0; i < 4; ++i) {
    tokens[i].id = i;
    tokens[i].content = contents[i];
  }
  const AddedTokenMatcher matcher(tokens, contents);
  std::vector<AddedTokenMatcher::Piece> pieces;
  matcher.split("x<a><b><a>", true, pieces);
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[0].text, "x");
  EXPECT_EQ(pieces[1].id, 1);
  EXPECT_EQ(pieces[2].id, 0);
}

}  // namespace
}  // namespace millrace

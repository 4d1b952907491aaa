#include "quantize/vocabulary.h"

#include <map>

#include "base/error.h"
#include "engine/load_tokenizer.h"
#include "io/hf_directory.h"
#include "io/printable.h"
#include "tokenizer/pretokenizer.h"
#include "tokenizer/rwkv_world.h"
#include "tokenizer/tokenizer_json.h"

namespace millrace::cli {
namespace {

constexpr int32_t kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6;

struct WrittenVocabulary {
  bool sentencepiece = false;
  std::vector<std::string> tokens, merges;
  std::vector<int32_t> types;
  std::vector<float> scores;  // SentencePiece
};

// A piece made by an earlier merge is the better one; pieces no merge makes are the worst.
void score_pieces(const TokenizerJson& json, WrittenVocabulary& v) {
  std::map<std::string, size_t> rank;
  for (size_t i = 0; i < json.merges.size(); ++i) {
    rank.emplace(json.merges[i].first + json.merges[i].second, i);
  }
  v.scores.resize(v.tokens.size());
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    const auto found = rank.find(v.tokens[id]);
    const size_t place = found == rank.end() ? rank.size() + id : found->second;
    v.scores[id] = v.types[id] == kNormal ? -static_cast<float>(place) : 0.0f;
  }
}

WrittenVocabulary gguf_vocabulary(const TokenizerJson& json, const std::string& source, int32_t size) {
  WrittenVocabulary v;
  const nlohmann::json model = json.rest.value("model", nlohmann::json::object());
  v.sentencepiece = model.value("byte_fallback", false);
  v.tokens.resize(static_cast<size_t>(size));
  v.types.assign(v.tokens.size(), kUnused);
  const auto put = [&](int64_t id, const std::string& text, int32_t type) {
    if (id < 0 || id >= size) {
      throw_error(ErrorCode::kBadInput, "{}: token {}: found id {}, expected 0 to {}", source,
                  io::printable(text), id, size - 1);
    }
    v.tokens[static_cast<size_t>(id)] = text;
    v.types[static_cast<size_t>(id)] = type;
  };
  const std::string unknown = model.contains("unk_token") && model["unk_token"].is_string()
                                  ? model["unk_token"].get<std::string>()
                                  : "";
  for (const auto& [text, id] : json.vocab) {
    const bool byte = v.sentencepiece && text.size() == 6 && text.starts_with("<0x") && text.back() == '>';
    put(id, text, byte ? kByte : kNormal);
  }
  for (const auto& added : json.rest.value("added_tokens", nlohmann::json::array())) {
    const std::string text = added.value("content", "");
    const bool special = added.value("special", false);
    put(added.value("id", int64_t{-1}), text,
        v.sentencepiece && text == unknown ? kUnknown
        : special                          ? kControl
                                           : kUserDefined);
  }
  for (size_t id = 0; id < v.tokens.size(); ++id) {  // rows of the embedding that no token uses
    if (v.types[id] == kUnused && v.tokens[id].empty()) v.tokens[id] = fmt::format("[PAD{}]", id);
  }
  if (v.sentencepiece) {
    score_pieces(json, v);
  } else {
    for (const auto& [left, right] : json.merges) v.merges.push_back(left + " " + right);
  }
  return v;
}

// bos_token and the like: a string, or an object with its content.
std::optional<int32_t> special_id(const io::HfDirectory& hf, const Tokenizer& tokenizer, const char* name) {
  const auto& config = hf.tokenizer_config;
  if (config.is_object() && config.contains(std::string(name) + "_token")) {
    const auto& token = config[std::string(name) + "_token"];
    const auto text = token.is_object()   ? token.value("content", "")
                      : token.is_string() ? token.get<std::string>()
                                          : "";
    if (const auto id = tokenizer.find(text); id && !text.empty()) return id;
  }
  for (const nlohmann::json* from : {&hf.generation_config, &hf.config}) {
    const std::string key = std::string(name) + "_token_id";
    if (!from->is_object() || !from->contains(key)) continue;
    const auto& id = (*from)[key];
    if (id.is_number_integer()) return id.get<int32_t>();
    if (id.is_array() && !id.empty() && id[0].is_number_integer()) return id[0].get<int32_t>();
  }
  return std::nullopt;
}

// RWKV's World: tokens of bytes, the first of which ends a text; what stands for its template is its name.
void write_rwkv(const io::Checkpoint& hf, int32_t size, io::GgufWriter& writer) {
  RwkvVocabulary v = read_rwkv_vocabulary(hf.hf->rwkv_vocab, hf.path());
  for (auto id = static_cast<int32_t>(v.tokens.size()); id < size; ++id) {
    v.tokens.push_back(fmt::format("[PAD{}]", id));
    v.types.push_back(kUnused);
  }
  writer.set_string("tokenizer.ggml.model", "rwkv");
  writer.set_strings("tokenizer.ggml.tokens", v.tokens);
  writer.set_i32s("tokenizer.ggml.token_type", v.types);
  writer.set_u32("tokenizer.ggml.eos_token_id", 0);
  const std::string& own = hf.hf->chat_template;
  writer.set_string("tokenizer.chat_template", own.empty() ? "rwkv-world" : own);
}

}  // namespace

void write_vocabulary(const io::Checkpoint& hf, const ModelConfig& config, io::GgufWriter& writer) {
  if (!hf.hf->rwkv_vocab.empty()) return write_rwkv(hf, config.vocab, writer);
  if (hf.hf->tokenizer_json.empty()) return;
  const std::string source = hf.path() + "/tokenizer.json";
  const TokenizerJson json = parse_tokenizer_json(hf.hf->tokenizer_json, source);
  const WrittenVocabulary v = gguf_vocabulary(json, source, config.vocab);
  const auto tokenizer = load_tokenizer(hf);
  writer.set_string("tokenizer.ggml.model", v.sentencepiece ? "llama" : "gpt2");
  const std::string_view pre = v.sentencepiece ? "default" : tokenizer->gguf_pre();
  if (pre.empty()) {
    throw_error(ErrorCode::kUnsupported,
                "{}: pre_tokenizer: found one that GGUF has no name for, expected {}", source,
                gguf_pretokenizer_names());
  }
  writer.set_string("tokenizer.ggml.pre", pre);
  writer.set_strings("tokenizer.ggml.tokens", v.tokens);
  writer.set_i32s("tokenizer.ggml.token_type", v.types);
  if (v.sentencepiece) {
    writer.set_f32s("tokenizer.ggml.scores", v.scores);
  } else {
    writer.set_strings("tokenizer.ggml.merges", v.merges);
  }
  const auto put_id = [&](const char* name, const char* key) {
    const std::optional<int32_t> id = special_id(*hf.hf, *tokenizer, name);
    if (id && *id >= 0 && *id < config.vocab) {
      writer.set_u32(fmt::format("tokenizer.ggml.{}_token_id", key), static_cast<uint32_t>(*id));
      return id;
    }
    return std::optional<int32_t>();
  };
  const std::optional<int32_t> bos = put_id("bos", "bos"), eos = put_id("eos", "eos");
  put_id("pad", "padding");
  if (v.sentencepiece) put_id("unk", "unknown");
  const std::vector<int32_t> around = tokenizer->encode("a");
  writer.set_bool("tokenizer.ggml.add_bos_token", bos && !around.empty() && around.front() == *bos);
  writer.set_bool("tokenizer.ggml.add_eos_token", eos && !around.empty() && around.back() == *eos);
  if (v.sentencepiece) {
    const std::vector<int32_t> spaced = tokenizer->encode("a", {.add_special = false});
    writer.set_bool("tokenizer.ggml.add_space_prefix",
                    !spaced.empty() && tokenizer->token_bytes(spaced[0], false).starts_with(" "));
  }
  if (!hf.hf->chat_template.empty()) writer.set_string("tokenizer.chat_template", hf.hf->chat_template);
}

void check_vocabulary(const io::Checkpoint& hf, const io::Checkpoint& gguf) {
  if (hf.hf->tokenizer_json.empty() && hf.hf->rwkv_vocab.empty()) return;
  const auto theirs = load_tokenizer(hf), ours = load_tokenizer(gguf);
  constexpr const char* kTexts[] = {
      "The miller's wheel turned 12345 times in 1847; he'd counted, WE'LL say, \"exactly\" (or nearly).",
      "  two  spaces\tand\ttabs\n\nlines\r\n   trailing   ",
      "na\u00efve caf\u00e9 \u00dcber stra\u00dfe \u4f60\u597d\u4e16\u754c \u3053\u3093\u306b",
      "\U0001f600\U0001f44d\U0001f3fd",
      "int main() { return x[0] += 3.14e-10 / 0x1F; } // camelCase snake_case HTTPServer2",
      "",
      "a"};
  for (const char* text : kTexts) {
    if (theirs->encode(text) == ours->encode(text)) continue;
    throw_error(ErrorCode::kUnsupported,
                "{}: found a tokenizer that GGUF's keys do not name: its ids differ for {}", hf.path(),
                io::printable(text));
  }
}

}  // namespace millrace::cli

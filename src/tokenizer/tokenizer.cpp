// Tokenizer::from_json: the parts of a tokenizer.json, each recognised or refused by name.
#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "tokenizer/byte_bpe.h"
#include "tokenizer/sentencepiece.h"
#include "tokenizer/tokenizer_json.h"
#include "tokenizer/unicode.h"
#include "tokenizer/wordpiece.h"

namespace millrace {
namespace {

using nlohmann::json;

// A JSON value that knows its path, for messages.
struct Field {
  const json* value;  // nullptr: not there
  std::string path;
  const std::string* source;

  bool absent() const { return value == nullptr || value->is_null(); }
  Field operator[](const char* name) const {
    const bool there = value != nullptr && value->is_object() && value->contains(name);
    return {there ? &(*value)[name] : nullptr, path.empty() ? name : fmt::format("{}.{}", path, name),
            source};
  }
  std::vector<Field> items() const {
    if (absent()) return {};
    if (!value->is_array()) bad("an array");
    std::vector<Field> out;
    for (size_t i = 0; i < value->size(); ++i)
      out.push_back({&(*value)[i], fmt::format("{}[{}]", path, i), source});
    return out;
  }
  [[noreturn]] void bad(std::string_view expected) const {
    throw_error(ErrorCode::kBadInput, "{}: {} is {}, expected {}", *source, path,
                value == nullptr ? "missing" : value->type_name(), expected);
  }
  [[noreturn]] void unsupported(std::string_view what, std::string_view supported) const {
    throw_error(ErrorCode::kUnsupported, "{}: {} is \"{}\", supported: {}", *source, path,
                printable(what, 300), supported);
  }
  std::string string() const {
    if (value == nullptr || !value->is_string()) bad("a string");
    return value->get<std::string>();
  }
  std::string string_or(std::string fallback) const { return absent() ? std::move(fallback) : string(); }
  bool boolean_or(bool fallback) const {
    if (absent()) return fallback;
    if (!value->is_boolean()) bad("true or false");
    return value->get<bool>();
  }
  int64_t integer(int64_t low, int64_t high) const {
    if (value == nullptr || !value->is_number_integer() ||
        (value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX))
      bad("an integer");
    const int64_t v = value->get<int64_t>();
    if (v < low || v > high)
      throw_error(ErrorCode::kBadInput, "{}: {} is {}, expected {} to {}", *source, path, v, low, high);
    return v;
  }
};

// Everything the file says about the three families; which one it is comes out of the pre-tokenizer.
struct Pipeline {
  bool byte_level = false;
  ByteBpeOptions bytes;
  bool nfc = false, prepend = false, replace = false;  // normalizers
  bool metaspace = false, decodes_byte_level = false, split_at_space = false;
  SentencePieceOptions pieces;
  bool bert_normalizer = false, bert_words = false;
  WordPieceOptions words;
};

void read_normalizer(const Field& f, Pipeline& p) {
  if (f.absent()) return;
  const std::string type = f["type"].string();
  if (type == "Sequence") {
    for (const Field& item : f["normalizers"].items()) {
      if (item["type"].string() == "Sequence")
        item["type"].unsupported("Sequence", "no Sequence inside a Sequence");
      read_normalizer(item, p);
    }
  } else if (type == "NFC") {
    p.nfc = true;
  } else if (type == "Prepend") {
    const std::string text = f["prepend"].string();
    if (text != kSpaceMark) f["prepend"].unsupported(text, "U+2581");
    p.prepend = true;
  } else if (type == "Replace") {
    const std::string from = f["pattern"]["String"].string();
    const std::string to = f["content"].string();
    if (from != " " || to != kSpaceMark) f["pattern"].unsupported(from, "a space replaced by U+2581");
    p.replace = true;
  } else if (type == "BertNormalizer") {
    BertNormalizer& n = p.words.normalizer;
    n.clean_text = f["clean_text"].boolean_or(true);
    n.chinese_apart = f["handle_chinese_chars"].boolean_or(true);
    n.lowercase = f["lowercase"].boolean_or(true);
    n.strip_accents = f["strip_accents"].boolean_or(n.lowercase);
    p.bert_normalizer = true;
  } else {
    f["type"].unsupported(type, "Sequence, NFC, Prepend, Replace, BertNormalizer");
  }
}

void read_metaspace(const Field& f, Pipeline& p) {
  const std::string mark = f["replacement"].string_or(std::string(kSpaceMark));
  if (mark != kSpaceMark) f["replacement"].unsupported(mark, "U+2581");
  const std::string scheme =
      f["prepend_scheme"].string_or(f["add_prefix_space"].boolean_or(true) ? "always" : "never");
  using Prefix = SentencePieceOptions::Prefix;
  if (scheme == "always")
    p.pieces.prefix = Prefix::kAlwaysUnlessThere;
  else if (scheme == "first")
    p.pieces.prefix = Prefix::kFirst;
  else if (scheme == "never")
    p.pieces.prefix = Prefix::kNever;
  else
    f["prepend_scheme"].unsupported(scheme, "always, first, never");
  p.metaspace = true;
  p.pieces.split_at_spaces = f["split"].boolean_or(true);
}

void read_pre_tokenizer(const Field& f, Pipeline& p) {
  if (f.absent()) return;
  const std::string type = f["type"].string();
  if (p.byte_level) f["type"].unsupported(type, "nothing after ByteLevel");
  if (type == "Sequence") {
    for (const Field& item : f["pretokenizers"].items()) {
      if (item["type"].string() == "Sequence")
        item["type"].unsupported("Sequence", "no Sequence inside a Sequence");
      read_pre_tokenizer(item, p);
    }
  } else if (type == "BertPreTokenizer") {
    p.bert_words = true;
  } else if (type == "Split" && f["pattern"]["String"].value != nullptr) {
    // Gemma's: behind a normalizer that leaves no spaces it cuts nothing.
    const std::string at = f["pattern"]["String"].string();
    if (at != " ") f["pattern"].unsupported(at, "an expression, or a space behind a Replace of it");
    p.split_at_space = true;
  } else if (type == "Split") {
    const Field regex = f["pattern"]["Regex"];
    const Scanner scanner = find_split_scanner(regex.string());
    if (scanner == nullptr)
      regex.unsupported(regex.string(),
                        "the expressions of GPT-2, Llama 3, Qwen 2, o200k, Tekken, DeepSeek and Seed");
    if (f["behavior"].string() != "Isolated") f["behavior"].unsupported(f["behavior"].string(), "Isolated");
    if (f["invert"].boolean_or(false)) f["invert"].unsupported("true", "false");
    p.bytes.scanners.push_back(scanner);
  } else if (type == "Digits") {
    p.bytes.scanners.push_back(f["individual_digits"].boolean_or(false) ? scan_digit : scan_digit_run);
  } else if (type == "ByteLevel") {
    p.byte_level = true;
    p.bytes.add_prefix_space = f["add_prefix_space"].boolean_or(true);
    if (p.bytes.add_prefix_space && !p.bytes.scanners.empty())
      f["add_prefix_space"].unsupported("true", "false behind another pre-tokenizer");
    if (f["use_regex"].boolean_or(true)) p.bytes.scanners.push_back(scan_gpt2);
  } else if (type == "Metaspace") {
    read_metaspace(f, p);
  } else {
    f["type"].unsupported(type, "Sequence, Split, Digits, ByteLevel, Metaspace, BertPreTokenizer");
  }
}

void read_decoder(const Field& f, Pipeline& p) {
  if (f.absent()) return;
  const std::string type = f["type"].string();
  if (type == "Sequence") {
    for (const Field& item : f["decoders"].items()) {
      if (item["type"].string() == "Sequence")
        item["type"].unsupported("Sequence", "no Sequence inside a Sequence");
      read_decoder(item, p);
    }
  } else if (type == "ByteLevel") {
    p.decodes_byte_level = true;
  } else if (type == "Replace") {
    const std::string from = f["pattern"]["String"].string();
    const std::string to = f["content"].string();
    if (from != kSpaceMark || to != " ") f["pattern"].unsupported(from, "U+2581 replaced by a space");
  } else if (type == "Strip") {
    const std::string what = f["content"].string();
    if (what != " ") f["content"].unsupported(what, "a space");
    f["stop"].integer(0, 0);
    p.pieces.strip_left = static_cast<size_t>(f["start"].integer(0, 1000));
  } else if (type == "Metaspace") {
    p.pieces.strip_first_token = f["prepend_scheme"].string_or("always") != "never";
  } else if (type == "ByteFallback") {
    p.pieces.decode_bytes = true;
  } else if (type == "WordPiece") {
    p.words.continuing = f["prefix"].string_or("##");
    p.words.clean_up = f["cleanup"].boolean_or(true);
  } else if (type != "Fuse") {
    f["type"].unsupported(type,
                          "Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace, WordPiece");
  }
}

TokenId find_token(const TokenizerParts& parts, const std::string& content, const Field& where) {
  for (const AddedToken& token : parts.added)
    if (token.content == content) return static_cast<TokenId>(token.id);
  if (const auto id = parts.tokens.find(content)) return static_cast<TokenId>(*id);
  throw_error(ErrorCode::kBadInput, "{}: {} is \"{}\", expected a token of the vocabulary", parts.source,
              where.path, printable(content));
}

void read_post_processor(const Field& f, TokenizerParts& parts) {
  if (f.absent()) return;
  const std::string type = f["type"].string();
  if (type == "Sequence") {
    for (const Field& item : f["processors"].items()) {
      if (item["type"].string() == "Sequence")
        item["type"].unsupported("Sequence", "no Sequence inside a Sequence");
      read_post_processor(item, parts);
    }
  } else if (type == "TemplateProcessing") {
    bool behind = false;  // behind the text itself
    for (const Field& item : f["single"].items()) {
      if (item["Sequence"].value != nullptr) {
        if (behind) item.unsupported("Sequence", "one Sequence");
        behind = true;
        continue;
      }
      const Field name = item["SpecialToken"]["id"];
      const Field entry = f["special_tokens"][name.string().c_str()];
      std::vector<TokenId>& side = behind ? parts.suffix : parts.prefix;
      if (entry.absent()) side.push_back(find_token(parts, name.string(), name));
      for (const Field& id : entry["ids"].items())
        side.push_back(static_cast<TokenId>(id.integer(0, INT32_MAX - 1)));
    }
    if (!behind) f["single"].bad("a template with a Sequence");
  } else if (type == "BertProcessing" || type == "RobertaProcessing") {
    for (const char* side : {"cls", "sep"}) {
      const std::vector<Field> pair = f[side].items();
      if (pair.size() != 2) f[side].bad("a token and its id");
      (side[0] == 'c' ? parts.prefix : parts.suffix)
          .push_back(static_cast<TokenId>(pair[1].integer(0, INT32_MAX - 1)));
    }
  } else if (type != "ByteLevel") {
    f["type"].unsupported(type, "Sequence, TemplateProcessing, BertProcessing, RobertaProcessing, ByteLevel");
  }
}

// Ids above this are not the numbering of a vocabulary that a file of this many tokens has.
int64_t max_id(size_t num_tokens) { return static_cast<int64_t>(num_tokens) * 4 + 65536; }

void read_vocabulary(const TokenizerJson& file, bool byte_level, TokenizerParts& parts) {
  size_t num_bytes = 0;
  for (const auto& [token, id] : file.vocab) num_bytes += token.size();
  parts.tokens.reserve(file.vocab.size(), num_bytes);
  std::string bytes;
  for (const auto& [token, id] : file.vocab) {
    if (id > max_id(file.vocab.size()))
      throw_error(ErrorCode::kBadInput, "{}: model.vocab: id of \"{}\" is {}, expected at most {}",
                  parts.source, printable(token), id, max_id(file.vocab.size()));
    if (parts.tokens.has(static_cast<uint32_t>(id)))
      throw_error(ErrorCode::kBadInput, "{}: model.vocab: id {} is there twice", parts.source, id);
    // A token with a character that stands for no byte cannot come out of merging; it is kept as it is
    // written.
    const bool as_bytes = byte_level && decode_byte_characters(token, bytes);
    if (!parts.tokens.add(static_cast<uint32_t>(id), as_bytes ? bytes : token, as_bytes || !byte_level))
      throw_error(ErrorCode::kBadInput, "{}: model.vocab: \"{}\" is there twice", parts.source,
                  printable(token));
  }
}

void read_merges(const TokenizerJson& file, bool byte_level, TokenizerParts& parts) {
  parts.merges.reserve(file.merges.size());
  std::string joined, left_bytes, right_bytes;
  for (size_t i = 0; i < file.merges.size(); ++i) {
    const auto& [left, right] = file.merges[i];
    const auto refuse = [&](std::string_view token) {
      throw_error(ErrorCode::kBadInput, "{}: model.merges[{}] needs \"{}\", which is not in model.vocab",
                  parts.source, i, printable(token));
    };
    if (byte_level) {
      if (!decode_byte_characters(left, left_bytes)) refuse(left);
      if (!decode_byte_characters(right, right_bytes)) refuse(right);
    }
    const std::string& l = byte_level ? left_bytes : left;
    const std::string& r = byte_level ? right_bytes : right;
    joined.assign(l).append(r);
    const auto a = parts.tokens.find(l), b = parts.tokens.find(r), c = parts.tokens.find(joined);
    if (!a) refuse(left);
    if (!b) refuse(right);
    if (!c) refuse(left + right);
    parts.merges.add(*a, *b, static_cast<uint32_t>(i), *c);
  }
}

void read_added_tokens(const Field& list, bool byte_level, TokenizerParts& parts) {
  std::set<std::string> contents;
  const std::vector<Field> items = list.items();
  const int64_t highest = max_id(parts.tokens.size() + items.size());
  std::string bytes;
  for (const Field& item : items) {
    AddedToken token;
    token.content = item["content"].string();
    if (token.content.empty()) continue;
    if (token.content.size() > AddedTokenMatcher::kMaxContentBytes)
      throw_error(ErrorCode::kUnsupported, "{}: {}.content has {} bytes, supported: {}", parts.source,
                  item.path, token.content.size(), AddedTokenMatcher::kMaxContentBytes);
    if (!contents.insert(token.content).second) continue;
    token.id = static_cast<uint32_t>(item["id"].integer(0, highest));
    // The vocabulary's own id counts where it has the token, as in Hugging Face's reader.
    const bool as_bytes = !byte_level || decode_byte_characters(token.content, bytes);
    if (const auto id = as_bytes ? parts.tokens.find(byte_level ? bytes : token.content) : std::nullopt)
      token.id = *id;
    token.single_word = item["single_word"].boolean_or(false);
    token.lstrip = item["lstrip"].boolean_or(false);
    token.rstrip = item["rstrip"].boolean_or(false);
    token.special = item["special"].boolean_or(false);
    token.normalized = item["normalized"].boolean_or(!token.special);
    parts.added.push_back(std::move(token));
  }
}

// bos_token and eos_token of a tokenizer_config.json: a string, or an object with its content.
std::optional<TokenId> configured_token(const Field& f, const TokenizerParts& parts) {
  if (f.absent()) return std::nullopt;
  const std::string content = f.value->is_object() ? f["content"].string() : f.string();
  for (const AddedToken& token : parts.added)
    if (token.content == content) return static_cast<TokenId>(token.id);
  const auto id = parts.tokens.find(content);
  return id ? std::optional<TokenId>(static_cast<TokenId>(*id)) : std::nullopt;
}

void read_config(std::string_view text, TokenizerParts& parts) {
  json config = json::object();
  if (!text.empty()) {
    config = json::parse(text.begin(), text.end(), nullptr, false);
    if (!config.is_object())
      throw_error(ErrorCode::kBadInput, "{}: its tokenizer_config.json is not a JSON object", parts.source);
  }
  const std::string name = parts.source + " (tokenizer_config.json)";
  const Field root{&config, "", &name};
  parts.bos = configured_token(root["bos_token"], parts);
  if (!parts.bos && !parts.prefix.empty()) parts.bos = parts.prefix.front();
  if (const auto eos = configured_token(root["eos_token"], parts)) parts.ends.push_back(*eos);
  add_known_end_tokens(parts);
}

void read_model(const Field& model, TokenizerParts& parts, SentencePieceOptions& pieces) {
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const std::string text = model[name].string_or("");
    if (!text.empty()) model[name].unsupported(text, "null");
  }
  const Field dropout = model["dropout"];
  if (!dropout.absent() && *dropout.value != json(0.0)) dropout.unsupported(dropout.value->dump(), "null");
  parts.ignore_merges = model["ignore_merges"].boolean_or(false);
  parts.fuse_unk = model["fuse_unk"].boolean_or(false);
  pieces.byte_fallback = model["byte_fallback"].boolean_or(false);
  const Field unk = model["unk_token"];
  if (!unk.absent() && !unk.string().empty())
    parts.unk = static_cast<uint32_t>(find_token(parts, unk.string(), unk));
}

std::shared_ptr<const Tokenizer> make_byte_level(TokenizerParts parts, Pipeline p, const Field& root) {
  if (p.prepend || p.replace) root["normalizer"].unsupported("Prepend or Replace", "NFC before ByteLevel");
  if (p.metaspace || p.split_at_space)
    root["pre_tokenizer"].unsupported("Metaspace or Split at a space", "neither of them with ByteLevel");
  p.bytes.nfc = p.nfc;
  return std::make_shared<ByteBpe>(std::move(parts), std::move(p.bytes));
}

std::shared_ptr<const Tokenizer> make_sentencepiece(TokenizerParts parts, Pipeline p, const Field& root) {
  if (!p.bytes.scanners.empty())
    root["pre_tokenizer"].unsupported("Split or Digits", "those before ByteLevel only");
  if (p.nfc) root["normalizer"].unsupported("NFC", "Prepend and Replace without ByteLevel");
  if (!p.metaspace && !p.replace) root["pre_tokenizer"].unsupported("null", "ByteLevel, Metaspace");
  if (p.split_at_space && !p.replace)
    root["pre_tokenizer"].unsupported("Split", "a Split at spaces behind a Replace normalizer only");
  if (p.metaspace && (p.replace || p.prepend))
    root["pre_tokenizer"].unsupported("Metaspace", "either Metaspace or a Replace normalizer");
  p.pieces.metaspace = p.metaspace;
  if (!p.metaspace)
    p.pieces.prefix =
        p.prepend ? SentencePieceOptions::Prefix::kAlways : SentencePieceOptions::Prefix::kNever;
  for (int b = 0; b < 256; ++b) {
    const auto id = parts.tokens.find(fmt::format("<0x{:02X}>", b));
    p.pieces.byte_ids[static_cast<size_t>(b)] = id ? static_cast<int64_t>(*id) : -1;
  }
  return std::make_shared<SentencePiece>(std::move(parts), std::move(p.pieces));
}

std::shared_ptr<const Tokenizer> make_wordpiece(TokenizerParts parts, Pipeline p, const Field& root) {
  if (!p.bert_normalizer || p.nfc || p.prepend || p.replace)
    root["normalizer"].unsupported("not BertNormalizer", "BertNormalizer with WordPiece");
  if (!p.bert_words || p.byte_level || p.metaspace || p.split_at_space || !p.bytes.scanners.empty())
    root["pre_tokenizer"].unsupported("not BertPreTokenizer", "BertPreTokenizer with WordPiece");
  const Field model = root["model"];
  const std::string unk = model["unk_token"].string_or("[UNK]");
  parts.unk = static_cast<uint32_t>(find_token(parts, unk, model["unk_token"]));
  p.words.continuing = model["continuing_subword_prefix"].string_or("##");
  if (model["max_input_chars_per_word"].value != nullptr)
    p.words.max_word_chars = static_cast<size_t>(model["max_input_chars_per_word"].integer(0, INT32_MAX));
  return std::make_shared<WordPiece>(std::move(parts), std::move(p.words));
}

void check_around(const TokenizerParts& parts) {
  const int64_t size = static_cast<int64_t>(parts.tokens.size());
  for (const std::vector<TokenId>* side : {&parts.prefix, &parts.suffix}) {
    for (const TokenId id : *side) {
      const bool added = std::any_of(parts.added.begin(), parts.added.end(),
                                     [id](const AddedToken& t) { return static_cast<TokenId>(t.id) == id; });
      if (id >= size && !added)
        throw_error(ErrorCode::kBadInput, "{}: post_processor puts token {}, which is not in the vocabulary",
                    parts.source, id);
    }
  }
}

}  // namespace

std::shared_ptr<const Tokenizer> Tokenizer::from_json(std::string_view tokenizer_json,
                                                      std::string_view tokenizer_config_json,
                                                      const std::string& source) {
  const TokenizerJson file = parse_tokenizer_json(tokenizer_json, source);
  const Field root{&file.rest, "", &source};
  const Field model = root["model"];
  if (model.value == nullptr || !model.value->is_object()) model.bad("an object");
  // Old files leave the type out; BPE is the one with merges.
  const std::string type = model["type"].string_or(file.has_merges ? "BPE" : "");
  const bool wordpiece = type == "WordPiece";
  if (type != "BPE" && !wordpiece) model["type"].unsupported(type, "BPE, WordPiece");
  if (!file.has_vocab) model["vocab"].bad("an object");
  if (!file.has_merges && !wordpiece) model["merges"].bad("an array");

  TokenizerParts parts;
  parts.source = source;
  Pipeline pipeline;
  pipeline.pieces.strip_left = 0;
  pipeline.pieces.decode_bytes = false;
  read_normalizer(root["normalizer"], pipeline);
  read_pre_tokenizer(root["pre_tokenizer"], pipeline);
  read_decoder(root["decoder"], pipeline);
  if (pipeline.byte_level != pipeline.decodes_byte_level)
    root["decoder"].unsupported(pipeline.byte_level ? "not ByteLevel" : "ByteLevel",
                                "that of the pre_tokenizer");
  if (!wordpiece && pipeline.bert_normalizer)
    root["normalizer"].unsupported("BertNormalizer", "BertNormalizer with WordPiece");
  if (!wordpiece && pipeline.bert_words)
    root["pre_tokenizer"].unsupported("BertPreTokenizer", "BertPreTokenizer with WordPiece");
  read_vocabulary(file, pipeline.byte_level, parts);
  if (!wordpiece) read_merges(file, pipeline.byte_level, parts);
  read_added_tokens(root["added_tokens"], pipeline.byte_level, parts);
  if (!wordpiece) read_model(model, parts, pipeline.pieces);
  read_post_processor(root["post_processor"], parts);
  read_config(tokenizer_config_json, parts);
  check_around(parts);
  if (wordpiece) return make_wordpiece(std::move(parts), std::move(pipeline), root);
  return pipeline.byte_level ? make_byte_level(std::move(parts), std::move(pipeline), root)
                             : make_sentencepiece(std::move(parts), std::move(pipeline), root);
}

}  // namespace millrace

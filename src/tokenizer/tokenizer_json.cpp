// A SAX reader: 200,000 tokens and 450,000 merges as a JSON tree would take most of the time and memory of
// loading.
#include "tokenizer/tokenizer_json.h"

#include "base/error.h"
#include "tokenizer/unicode.h"

namespace millrace {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 64;

class TokenizerJsonReader : public json::json_sax_t {
 public:
  explicit TokenizerJsonReader(const std::string& source) : source_(source) {}
  TokenizerJson result;

  bool null() override { return value(json(nullptr)); }
  bool boolean(bool v) override { return value(json(v)); }
  bool number_integer(number_integer_t v) override { return value(json(v)); }
  bool number_float(number_float_t v, const string_t&) override { return value(json(v)); }
  bool binary(binary_t&) override { return value(json(nullptr)); }

  bool number_unsigned(number_unsigned_t v) override {
    if (place_ != Place::kVocab) return value(json(v));
    if (v > INT32_MAX)
      throw_error(ErrorCode::kBadInput, "{}: model.vocab: id of token {} is {}, expected at most {}", source_,
                  result.vocab.size(), v, INT32_MAX);
    result.vocab.emplace_back(std::move(key_), static_cast<int64_t>(v));
    return true;
  }

  bool string(string_t& v) override {
    if (place_ == Place::kMerges) {
      const size_t space = v.find(' ');
      if (space == std::string::npos || v.find(' ', space + 1) != std::string::npos)
        bad_merge("two words and a space");
      result.merges.emplace_back(v.substr(0, space), v.substr(space + 1));
      return true;
    }
    if (place_ == Place::kPair) {
      if (num_halves_ == 0)
        result.merges.emplace_back(std::move(v), std::string());
      else if (num_halves_ == 1)
        result.merges.back().second = std::move(v);
      ++num_halves_;
      return true;
    }
    return value(json(std::move(v)));
  }

  bool key(string_t& v) override {
    key_ = std::move(v);
    return true;
  }

  bool start_object(size_t) override {
    if (place_ == Place::kElsewhere && stack_.size() == 2 && in_model_ && key_ == "vocab") {
      if (result.has_vocab) throw_error(ErrorCode::kBadInput, "{}: model.vocab is there twice", source_);
      result.has_vocab = true;
      place_ = Place::kVocab;
      return true;
    }
    if (stack_.size() == 1) in_model_ = key_ == "model";
    return open(json::object());
  }

  bool end_object() override {
    if (place_ == Place::kVocab)
      place_ = Place::kElsewhere;
    else
      stack_.pop_back();
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::kMerges) {
      place_ = Place::kPair;
      num_halves_ = 0;
      return true;
    }
    if (place_ == Place::kElsewhere && stack_.size() == 2 && in_model_ && key_ == "merges") {
      if (result.has_merges) throw_error(ErrorCode::kBadInput, "{}: model.merges is there twice", source_);
      result.has_merges = true;
      place_ = Place::kMerges;
      return true;
    }
    return open(json::array());
  }

  bool end_array() override {
    if (place_ == Place::kPair) {
      if (num_halves_ != 2) bad_merge("two strings");
      place_ = Place::kMerges;
    } else if (place_ == Place::kMerges) {
      place_ = Place::kElsewhere;
    } else {
      stack_.pop_back();
    }
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception& e) override {
    throw_error(ErrorCode::kBadInput, "{}: byte {} is not valid JSON: {}", source_, position,
                printable(e.what(), 200));
  }

 private:
  enum class Place { kElsewhere, kVocab, kMerges, kPair };

  [[noreturn]] void bad_merge(std::string_view expected) const {
    throw_error(ErrorCode::kBadInput, "{}: model.merges[{}] is not {}", source_, result.merges.size(),
                expected);
  }

  json* put(json&& v) {
    if (stack_.empty()) {
      result.rest = std::move(v);
      return &result.rest;
    }
    json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(v));
      return &parent.back();
    }
    return &(parent[key_] = std::move(v));
  }

  bool value(json&& v) {
    if (place_ == Place::kVocab)
      throw_error(ErrorCode::kBadInput, "{}: model.vocab: id of token {} is {}, expected a number from 0",
                  source_, result.vocab.size(), v.type_name());
    if (place_ == Place::kMerges || place_ == Place::kPair) bad_merge("made of strings");
    put(std::move(v));
    return true;
  }

  bool open(json&& v) {
    if (place_ == Place::kVocab)
      throw_error(ErrorCode::kBadInput, "{}: model.vocab: id of token {} is {}, expected a number from 0",
                  source_, result.vocab.size(), v.type_name());
    if (place_ != Place::kElsewhere) bad_merge("made of strings");
    if (stack_.size() >= kMaxDepth)
      throw_error(ErrorCode::kBadInput, "{}: nested more than {} deep", source_, kMaxDepth);
    stack_.push_back(put(std::move(v)));
    return true;
  }

  const std::string& source_;
  std::vector<json*> stack_;  // open containers of `rest`; the first is the root, model is at depth 2
  std::string key_;
  Place place_ = Place::kElsewhere;
  bool in_model_ = false;
  int num_halves_ = 0;
};

}  // namespace

TokenizerJson parse_tokenizer_json(std::string_view text, const std::string& source) {
  TokenizerJsonReader reader(source);
  json::sax_parse(text.begin(), text.end(), &reader);
  if (!reader.result.rest.is_object())
    throw_error(ErrorCode::kBadInput, "{}: is {}, expected an object", source,
                reader.result.rest.type_name());
  return std::move(reader.result);
}

}  // namespace millrace

// What constrained output costs per token with a real vocabulary, in microseconds:
//   first   a grammar never used before: all the work for a mask, on whatever thread (processor time)
//   step    the same, asked for after a step of the model (STEP_MS of sleep): how long the engine waits (wall
//   clock) warm    the grammar was used before (processor time of this thread) grammar_bench
//   VOCABULARY_DIRECTORY [STEP_MS]    e.g. build/models/tokenizers/gpt-oss (tools/fetch_tokenizers.py)
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "grammar/grammar.h"
#include "grammar/mask_vocabulary.h"
#include "tokenizer/tokenizer.h"

namespace millrace {
namespace {

double now_us(clockid_t clock) {
  timespec now = {};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}
double cpu_us() { return now_us(CLOCK_THREAD_CPUTIME_ID); }

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// 20 fields, nested, with strings, enums, bounds, arrays and optional parts.
constexpr const char* kSchema = R"({"type": "object", "properties": {
  "id": {"type": "string", "format": "uuid"}, "name": {"type": "string", "minLength": 1, "maxLength": 80},
  "age": {"type": "integer", "minimum": 0, "maximum": 150}, "email": {"type": "string", "format": "email"},
  "status": {"enum": ["active", "inactive", "pending", "banned"]}, "score": {"type": "number", "minimum": 0, "maximum": 1},
  "created": {"type": "string", "format": "date-time"}, "note": {"type": ["string", "null"]},
  "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 20},
  "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"},
     "zip": {"type": "string", "pattern": "^\\d{5}(-\\d{4})?$"}, "country": {"type": "string"}},
     "required": ["street", "city", "zip", "country"], "additionalProperties": false},
  "items": {"type": "array", "minItems": 1, "items": {"type": "object", "properties": {
     "sku": {"type": "string"}, "quantity": {"type": "integer", "minimum": 1}, "price": {"type": "number"},
     "options": {"type": "object", "additionalProperties": {"type": "string"}}},
     "required": ["sku", "quantity", "price"], "additionalProperties": false}},
  "children": {"type": "array", "items": {"$ref": "#"}}, "verified": {"type": "boolean"},
  "comment": {"type": "string"}},
  "required": ["id", "name", "age", "email", "status", "address", "items", "comment"], "additionalProperties": false})";

constexpr const char* kText =
    R"({"id": "123e4567-e89b-12d3-a456-426614174000", "name": "Ada Lovelace", "age": 36, "email": "ada@example.org", )"
    R"("status": "active", "score": 0.97, "created": "2024-05-06T07:08:09Z", "note": "She wrote the first program, )"
    R"(and said: \"The engine weaves algebraical patterns just as the Jacquard loom weaves flowers and leaves.\"", )"
    R"("tags": ["mathematics", "poetry", "analytical engine"], "address": {"street": "12 St James's Square", )"
    R"("city": "London", "zip": "12345", "country": "United Kingdom"}, "items": [{"sku": "A-1", "quantity": 2, )"
    R"("price": 12.5, "options": {"colour": "green", "size": "large"}}, {"sku": "B-22", "quantity": 10, "price": 3}], )"
    R"("verified": true, "comment": "Nothing more to say about this customer, except that the naïve café order was )"
    R"(cancelled twice — 日本語も入っています."})";

enum class Mode { kFirst, kStep, kWarm };

struct Times {
  Mode mode;
  std::vector<double> mask = {}, accept = {};
};

void print(const char* name, Times& times) {
  constexpr const char* kNames[] = {"first", "step", "warm"};
  const auto at = [](std::vector<double>& values, double part) {
    std::sort(values.begin(), values.end());
    return values[std::min(values.size() - 1,
                           static_cast<size_t>(part * static_cast<double>(values.size())))];
  };
  std::printf(
      "%-22s %-5s %6zu tokens   mask median %8.2f  p99 %8.2f  max %8.2f us   accept median %6.2f  p99 %6.2f "
      "us\n",
      name, kNames[static_cast<int>(times.mode)], times.mask.size(), at(times.mask, 0.5),
      at(times.mask, 0.99), times.mask.back(), at(times.accept, 0.5), at(times.accept, 0.99));
}

using GrammarPtr = std::shared_ptr<const grammar::Grammar>;

class Bench {
 public:
  Bench(const std::string& directory, double step_ms) : step_(step_ms) {
    tokenizer_ = Tokenizer::from_json(read_file(directory + "/tokenizer.json"),
                                      read_file(directory + "/tokenizer_config.json"), directory);
    std::vector<std::string> bytes;
    for (TokenId t = 0; t < tokenizer_->vocab_size(); ++t) bytes.push_back(tokenizer_->token_bytes(t, false));
    const double start = cpu_us();
    vocabulary_ = grammar::make_vocabulary(bytes);
    std::printf("vocabulary of %zu tokens: trie built in %.0f ms\n", bytes.size(), (cpu_us() - start) * 1e-3);
    mask_.resize((bytes.size() + 63) / 64);
    end_ = tokenizer_->end_tokens().at(0);
  }

  // The tokens of `text` as the model would write them, again and again.
  template <class Compile>
  void run(const char* name, const Compile& compile, const std::string& text, size_t skip = 0) {
    const std::vector<TokenId> tokens =
        tokenizer_->encode(text, {.add_special = false, .parse_special = false});
    const double start = cpu_us();
    const GrammarPtr grammar = compile();
    std::printf("%-22s compiled in %.2f ms\n", name, (cpu_us() - start) * 1e-3);
    Times first{Mode::kFirst}, step{Mode::kStep}, warm{Mode::kWarm};
    follow(grammar, tokens, skip, first);
    follow(compile(), tokens, skip, step);
    for (int round = 0; round < 20; ++round) follow(grammar, tokens, skip, warm);
    for (Times* times : {&first, &step, &warm}) print(name, *times);
  }

  // A model with random weights: every path the grammar has, so masks are met for the first time all along.
  template <class Compile>
  void run_random(const char* name, const Compile& compile) {
    Times first{Mode::kFirst}, step{Mode::kStep}, warm{Mode::kWarm};
    const GrammarPtr grammar = compile(), other = compile();
    for (uint64_t seed = 0; seed < 30; ++seed) draw(grammar, seed, first);
    for (uint64_t seed = 0; seed < 3; ++seed) draw(other, seed, step);
    for (uint64_t seed = 0; seed < 30; ++seed) draw(grammar, seed, warm);
    for (Times* times : {&first, &step, &warm}) print(name, *times);
  }

 private:
  void take(TokenConstraint& constraint, TokenId token, bool counts, Times& times) {
    const double start = cpu_us(), process_start = now_us(CLOCK_PROCESS_CPUTIME_ID);
    constraint.accept(token);
    const double accept_us = cpu_us() - start;
    if (counts) times.accept.push_back(accept_us);
    if (times.mode == Mode::kFirst) {
      vocabulary_->background().wait_until_idle();
      ahead_us_ = now_us(CLOCK_PROCESS_CPUTIME_ID) - process_start - accept_us;
    } else if (times.mode == Mode::kStep) {
      std::this_thread::sleep_for(step_);
    }
  }
  void ask(TokenConstraint& constraint, bool counts, Times& times) {
    std::fill(mask_.begin(), mask_.end(), 0);
    const clockid_t clock = times.mode == Mode::kStep ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID;
    const double start = now_us(clock);
    constraint.allowed(mask_);
    const double us = now_us(clock) - start;
    if (counts) times.mask.push_back(us + (times.mode == Mode::kFirst ? ahead_us_ : 0.0));
  }

  void follow(const GrammarPtr& grammar, const std::vector<TokenId>& tokens, size_t skip, Times& times) {
    ahead_us_ = 0;  // the first mask is made with the constraint, before the engine sees it
    const auto constraint = grammar::constrain(grammar, vocabulary_, {end_});
    for (size_t i = 0; i < tokens.size(); ++i) {
      ask(*constraint, i >= skip, times);
      take(*constraint, tokens[i], i >= skip, times);
    }
    ask(*constraint, true, times);
  }

  void draw(const GrammarPtr& grammar, uint64_t seed, Times& times) {
    std::mt19937_64 random(seed);
    ahead_us_ = 0;  // the first mask is made with the constraint, before the engine sees it
    const auto constraint = grammar::constrain(grammar, vocabulary_, {end_});
    std::vector<TokenId> allowed;
    for (int i = 0; i < 200; ++i) {
      ask(*constraint, true, times);
      allowed.clear();
      for (size_t w = 0; w < mask_.size(); ++w) {
        for (uint64_t word = mask_[w]; word != 0; word &= word - 1) {
          allowed.push_back(static_cast<TokenId>(w * 64 + static_cast<size_t>(__builtin_ctzll(word))));
        }
      }
      const TokenId token = allowed[random() % allowed.size()];
      take(*constraint, token, true, times);
      if (token == end_) break;
    }
  }

  std::shared_ptr<const Tokenizer> tokenizer_;
  std::shared_ptr<const grammar::Vocabulary> vocabulary_;
  std::vector<uint64_t> mask_;
  TokenId end_ = 0;
  std::chrono::duration<double, std::milli> step_;
  double ahead_us_ = 0;  // spent on the next mask by the other thread
};

void run(const std::string& directory, double step_ms) {
  Bench bench(directory, step_ms);
  const auto object = [] { return grammar::compile_json_object(); };
  const auto schema = [] { return grammar::compile_json_schema(kSchema); };
  const auto regex = [] {
    return grammar::compile_regex(
        "(Name|Alias): [A-Z][a-z]+( [A-Z][a-z]+)*; tel\\. \\+\\d{1,3}( \\d{2,4}){2,4}; .{0,60}");
  };
  const std::string prose =
      "{\"text\": \"" + std::string(R"(It was the best of times, it was the worst of times, it was )"
                                    R"(the age of wisdom, it was the age of foolishness.)");
  bench.run("json_object", object, kText);
  bench.run("schema, 20 fields", schema, kText);
  bench.run("regex", regex,
            "Name: Ada Lovelace; tel. +44 20 7946 0958; wrote programs before there were computers");
  bench.run("inside a string", object, prose, 4);
  bench.run_random("json_object, random", object);
  bench.run_random("schema, random", schema);
  bench.run_random("regex, random", regex);
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  const double step_ms = argc == 3 ? std::atof(argv[2]) : 5.0;
  if (argc < 2 || argc > 3 || step_ms < 0) {
    std::fprintf(stderr, "usage: grammar_bench VOCABULARY_DIRECTORY [STEP_MS]\n");
    return 2;
  }
  try {
    millrace::run(argv[1], step_ms);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
  return 0;
}

// Token masks: equal, bit for bit, to trying every token's bytes; the same for clones and from many threads;
// and a model with random weights always ends with a match.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/error.h"
#include "grammar/compiled_grammar.h"
#include "grammar/grammar.h"
#include "grammar/test_walk.h"

namespace millrace::grammar {
namespace {

struct Case {
  const char* name;
  std::shared_ptr<const Grammar> grammar;
};

std::vector<Case> cases() {
  return {
      {"json_object", compile_json_object()},
      {"any value", compile_json_schema("{}")},
      {"short strings",
       compile_json_schema(
           R"({"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 20}})")},
      {"pattern", compile_json_schema(R"({"type": "string", "pattern": "^[a-fé]+\"?$", "maxLength": 30})")},
      {"object",
       compile_json_schema(
           R"({"type": "object", "properties": {"foo": {"type": "integer", "minimum": -5, "maximum": 120},
          "bar": {"enum": ["abc", "ab", null, 12.5]}, "baz": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
          "required": ["bar"], "additionalProperties": {"type": "boolean"}})")},
      {"regex", compile_regex("(abc|[^a\\n]{2,5})*\\d{1,3}(\\.5)?")},
      {"text with lines", compile_gbnf("root ::= line (\"\\n\" line)*\nline ::= [^\\n]* | \"{\" root \"}\"")},
      {"ambiguous", compile_gbnf("root ::= x \"1\" | y \"2\" | \"\"\nx ::= \"a\" root\ny ::= \"a\" root")},
      {"brackets", compile_gbnf("root ::= (\"[\" root \"]\" | \"{\" root \"}\")*")},
      {"nothing but the empty text", compile_regex("")},
      {"counted prose", compile_regex(".{0,40}|[a-z ]{3,50}")},
      {"dots", compile_regex(".{2,9}(\"[^\\n]{0,3})?")},
      {"prose with words after it",
       compile_gbnf("root ::= (w \"the\")+\nw ::= [^\\n]{1,2} | \"\\n\" w \"\\n\"")},
      {"prose and more",
       compile_gbnf("root ::= (word \"\\n\")* word\nword ::= [^\\n\\u2028]{1,6} | . \"x\"")},
  };
}

std::vector<uint64_t> mask_of(TokenConstraint& constraint, size_t num_tokens) {
  std::vector<uint64_t> mask((num_tokens + 63) / 64, 0);
  EXPECT_TRUE(constraint.allowed(mask));
  return mask;
}

bool has(const std::vector<uint64_t>& mask, size_t t) { return (mask[t / 64] >> (t % 64) & 1) != 0; }

TEST(Mask, IsWhatTryingEveryTokenGives) {
  const std::vector<std::string> tokens = test_tokens();
  const auto vocabulary = make_vocabulary(tokens);
  const int32_t end = test_end_token();
  for (const Case& c : cases()) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      std::mt19937_64 random(seed);
      const auto constraint = constrain(c.grammar, vocabulary, {end});
      std::string text;
      for (int step = 0; step < 25; ++step) {
        const std::vector<uint64_t> mask = mask_of(*constraint, tokens.size());
        std::vector<int32_t> allowed;
        for (int32_t t = 0; t <= end; ++t) {
          const bool expected =
              t == end ? matches(*c.grammar, text) : matches_beginning(*c.grammar, text + tokens[t]);
          ASSERT_EQ(has(mask, t), expected)
              << c.name << ": token '" << tokens[t] << "' after '" << text << "'";
          if (expected) allowed.push_back(t);
        }
        ASSERT_FALSE(allowed.empty()) << c.name << ": " << text;
        const int32_t token = allowed[random() % allowed.size()];
        constraint->accept(token);
        if (token == end) break;
        text += tokens[token];
      }
    }
  }
}

// A stack under a rule: up to three of its callers, their callers and so on.
NodeId some_stack(const Automaton& automaton, Stacks& stacks, RuleId rule, std::mt19937_64& random) {
  std::vector<StateId> returns;
  for (uint64_t depth = random() % 4; depth > 0; --depth) {
    std::vector<StateId> targets;
    for (const CallEdge& edge : automaton.call_edges) {
      if (edge.rule == rule) targets.push_back(edge.target);
    }
    if (targets.empty()) break;
    returns.push_back(targets[random() % targets.size()]);
    rule = automaton.states[returns.back()].rule;
  }
  NodeId stack = 0;
  for (; !returns.empty(); returns.pop_back()) {
    const StackEdge edge = {returns.back(), stack};
    stack = stacks.node({&edge, 1});
  }
  return stack;
}

// Any state, as it is or on a stack: what the compiler knows of plain characters must never show in a mask.
TEST(Mask, OfRandomStatesIsThePlainWalks) {
  std::vector<std::string> tokens = test_tokens();
  for (const char* text :
       {"\u2028", "a\u2028b", "x\u2029", "it was the best of times", "éé€é", "日本語も\"", "ab\ncd"})
    tokens.insert(tokens.end() - 1, text);
  const Vocabulary vocabulary(tokens);
  std::mt19937_64 random(11);
  for (const Case& c : cases()) {
    const Automaton& automaton = c.grammar->automaton();
    MaskCache cache(size_t{1} << 24);
    Stacks stacks;
    Stepper stepper(automaton);
    ConfigSet start, set, next;
    std::vector<Config> expanded;
    for (int trial = 0; trial < 40; ++trial) {
      const auto state = static_cast<StateId>(random() % automaton.num_states());
      start.clear();
      stepper.add(stacks, {state, some_stack(automaton, stacks, automaton.states[state].rule, random)},
                  start);
      std::vector<uint64_t> mask(vocabulary.num_words(), 0);
      cache.apply(automaton, vocabulary, stacks, start, mask);
      for (size_t t = 0; t < tokens.size(); ++t) {
        set = start;
        for (const char byte : tokens[t]) {
          stepper.expand(stacks, set.configs, expanded);
          stepper.shift(stacks, expanded, static_cast<uint8_t>(byte), next);
          std::swap(set, next);
        }
        ASSERT_EQ(has(mask, t), !tokens[t].empty() && set.alive())
            << c.name << ": token '" << tokens[t] << "', state " << start.configs[0].state << ", trial "
            << trial;
      }
    }
  }
}

TEST(Mask, IsComputedBeforeItIsAskedFor) {
  const std::vector<std::string> tokens = test_tokens();
  const auto vocabulary = make_vocabulary(tokens);
  const auto grammar =
      compile_json_schema(R"({"type": "object", "properties": {"foo": {"type": "string"}}})");
  const auto constraint = constrain(grammar, vocabulary, {test_end_token()});
  const auto computed = [&] { return grammar->masks(vocabulary)->num_computed(); };
  for (const char byte : std::string("{\"foo\":\"a")) {
    vocabulary->background().wait_until_idle();
    const size_t before = computed();
    EXPECT_GT(before, 0u);
    mask_of(*constraint, tokens.size());
    EXPECT_EQ(computed(), before) << byte;
    constraint->accept(byte);
  }
}

TEST(Mask, RandomWalksEndWithAMatch) {
  const std::vector<std::string> tokens = test_tokens();
  const auto vocabulary = make_vocabulary(tokens);
  for (const Case& c : cases()) {
    for (uint64_t seed = 0; seed < 60; ++seed) {
      const WalkResult walk = random_walk(c.grammar, vocabulary, tokens, seed);
      if (walk.ended) {
        EXPECT_TRUE(matches(*c.grammar, walk.text)) << c.name << ": " << walk.text;
      }
      EXPECT_TRUE(matches_beginning(*c.grammar, walk.text)) << c.name << ": " << walk.text;
    }
  }
}

TEST(Mask, CloneGoesItsOwnWay) {
  const std::vector<std::string> tokens = test_tokens();
  const auto vocabulary = make_vocabulary(tokens);
  const auto first = constrain(compile_regex("a(b|cd)"), vocabulary, {test_end_token()});
  first->accept('a');
  const auto second = first->clone();
  EXPECT_EQ(mask_of(*first, tokens.size()), mask_of(*second, tokens.size()));
  first->accept('b');
  second->accept('c');
  EXPECT_TRUE(has(mask_of(*first, tokens.size()), static_cast<size_t>(test_end_token())));
  EXPECT_FALSE(has(mask_of(*second, tokens.size()), static_cast<size_t>(test_end_token())));
  EXPECT_TRUE(has(mask_of(*second, tokens.size()), 'd'));
}

TEST(Mask, WrongTokensAreRefusedAndChangeNothing) {
  const std::vector<std::string> tokens = test_tokens();
  const auto constraint = constrain(compile_regex("ab"), make_vocabulary(tokens), {test_end_token()});
  for (const int32_t token : {int32_t{'b'}, test_end_token(), -1, 1'000'000})
    EXPECT_THROW(constraint->accept(token), Error);
  constraint->accept('a');
  constraint->accept('b');
  constraint->accept(test_end_token());
  EXPECT_TRUE(has(mask_of(*constraint, tokens.size()), static_cast<size_t>(test_end_token())));
  EXPECT_THROW(constraint->accept('a'), Error);
  std::vector<uint64_t> small(1);
  EXPECT_THROW(constraint->allowed(small), Error);
}

TEST(Mask, AVocabularyWithoutTheNeededBytesSaysSo) {
  const auto constraint = constrain(compile_regex("[xy]"), make_vocabulary({"a", "b", ""}), {2});
  std::vector<uint64_t> mask(1);
  EXPECT_THROW(constraint->allowed(mask), Error);
}

// A long answer with ever new stacks: what is no longer standing is forgotten.
TEST(Mask, DeepNesting) {
  const std::vector<std::string> tokens = test_tokens();
  const auto vocabulary = make_vocabulary(tokens);
  const auto grammar = compile_json_schema("{}");
  const auto constraint = constrain(grammar, vocabulary, {test_end_token()});
  for (int i = 0; i < 20'000; ++i) constraint->accept('[');
  for (int i = 0; i < 20'000; ++i) {
    if (i % 1000 == 0) mask_of(*constraint, tokens.size());
    constraint->accept(']');
  }
  EXPECT_TRUE(has(mask_of(*constraint, tokens.size()), static_cast<size_t>(test_end_token())));
}

TEST(Mask, SecondRequestComputesNothing) {
  const std::vector<std::string> tokens = test_tokens();
  const auto vocabulary = make_vocabulary(tokens);
  const auto grammar = compile_json_object();
  random_walk(grammar, vocabulary, tokens, 5);
  vocabulary->background().wait_until_idle();
  const size_t computed = grammar->masks(vocabulary)->num_computed();
  EXPECT_GT(computed, 0u);
  random_walk(grammar, vocabulary, tokens, 5);
  vocabulary->background().wait_until_idle();
  EXPECT_EQ(grammar->masks(vocabulary)->num_computed(), computed);
}

TEST(Mask, CacheIsBounded) {
  const std::vector<std::string> tokens = test_tokens();
  const Vocabulary vocabulary(tokens);
  const auto grammar = compile_regex("[a-z]{200}");
  const Automaton& automaton = grammar->automaton();
  MaskCache cache(20'000);
  Stacks stacks;
  Stepper stepper(automaton);
  ConfigSet set, next;
  std::vector<Config> expanded;
  stepper.add(stacks, {automaton.rules[automaton.root].start, 0}, set);
  std::vector<uint64_t> mask(vocabulary.num_words());
  for (int i = 0; i < 200; ++i) {
    cache.apply(automaton, vocabulary, stacks, set, mask);
    EXPECT_LE(cache.bytes(), 20'000u + 2'000u);
    stepper.expand(stacks, set.configs, expanded);
    stepper.shift(stacks, expanded, 'a', next);
    std::swap(set, next);
  }
  EXPECT_EQ(cache.num_computed(), 200u);
}

TEST(Mask, ManyThreadsOneGrammar) {
  const std::vector<std::string> tokens = test_tokens();
  const auto vocabulary = make_vocabulary(tokens);
  const auto shared =
      compile_json_schema(R"({"type": "array", "items": {"type": "string", "maxLength": 30}})");
  std::vector<std::string> expected;
  {
    const auto alone =
        compile_json_schema(R"({"type": "array", "items": {"type": "string", "maxLength": 30}})");
    for (uint64_t seed = 0; seed < 8; ++seed)
      expected.push_back(random_walk(alone, vocabulary, tokens, seed).text);
  }
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    threads.emplace_back([&, seed] {
      if (random_walk(shared, vocabulary, tokens, seed).text != expected[seed]) ++wrong;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace millrace::grammar

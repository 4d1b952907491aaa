// Sparse attention of whole models: the reference and the CPU against torch in float64 (tests/golden/
// make_sparse_golden.py, which has the rule written down a second time), and the KV cache's promise through
// an engine: a request has the bits it has alone, whatever else runs and however its prompt comes back.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/paging.h"
#include "engine/runtime.h"
#include "golden_reader.h"
#include "millrace/engine.h"

namespace millrace::sparse_models_test {
namespace {

struct Case {
  std::string name;
  int32_t pages = 0;
  size_t vocab = 0;
  double margin = 0, full = 0;  // of the choices; how far full attention is from this
  std::vector<int32_t> tokens, positions;
  std::vector<float> logits;  // [positions, vocab]
};

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::vector<float> floats = golden::read_floats(golden::kRoot + "sparse.f32");
  for (const nlohmann::json& entry : golden::read_json(golden::kRoot + "sparse.json")) {
    Case c{entry["name"], entry["pages"],  entry["vocab_size"], entry["margin"],
           entry["full"], entry["tokens"], entry["positions"],  {}};
    const auto from = floats.begin() + entry["offset"].get<int64_t>();
    c.logits.assign(from, from + static_cast<int64_t>(c.positions.size() * c.vocab));
    all.push_back(std::move(c));
  }
  return all;
}

std::string path_of(const std::string& name) { return golden::kRoot + "models/" + name + "/hf"; }

// Of each position, ascending.
std::vector<double> errors(const Case& c, const std::string& device, size_t chunk, int32_t budget) {
  const auto runtime = Runtime::open({.model = path_of(c.name),
                                      .device = device,
                                      .threads = 2,
                                      .context = 512,
                                      .kv_type = "f32",
                                      .attention = "sparse",
                                      .attention_budget = budget},
                                     {.sequences = 1, .logit_rows = 512});
  kv::Sequence sequence = runtime->make_sequence();
  std::vector<float> got;
  for (size_t at = 0; at < c.tokens.size(); at += chunk) {
    const StepInput input{&sequence, std::span(c.tokens).subspan(at, std::min(chunk, c.tokens.size() - at)),
                          StepInput::Want::kAll};
    const std::span<const float> rows = runtime->step({&input, 1});
    got.insert(got.end(), rows.begin(), rows.end());
  }
  std::vector<double> all;
  for (size_t i = 0; i < c.positions.size(); ++i) {
    const auto row = std::span(got).subspan(static_cast<size_t>(c.positions[i]) * c.vocab, c.vocab);
    all.push_back(golden::relative_error(row, std::span(c.logits).subspan(i * c.vocab, c.vocab)));
  }
  std::sort(all.begin(), all.end());
  return all;
}
double worst_error(const Case& c, const std::string& device, size_t chunk, int32_t budget) {
  return errors(c, device, chunk, budget).back();
}

TEST(SparseModels, AgreeWithTorch) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    ASSERT_GT(c.full, 0.02);  // else there would be nothing to see
    EXPECT_LT(worst_error(c, "reference", 100, c.pages * kBlockTokens), 1e-4);
    EXPECT_LT(worst_error(c, "cpu", 77, c.pages * kBlockTokens), 1e-4);
    for (const std::string& device : golden::device_names()) {
      if (device == "cpu") continue;
      // A GPU rounds what these matrices multiply to bf16: pages that weigh alike change places. Half of the
      // positions are far nearer than full attention.
      for (const size_t chunk : {size_t{77}, size_t{1}}) {
        const std::vector<double> all = errors(c, device, chunk, c.pages * kBlockTokens);
        EXPECT_LT(all[all.size() / 2], c.full / 4) << device << " by " << chunk;
      }
    }
    // A page more is something else: the test would see it.
    EXPECT_GT(worst_error(c, "cpu", 200, (c.pages + 1) * kBlockTokens), 1e-3);
  }
}

// ---------------------------------------------------------------- requests

std::vector<int32_t> prompt(int seed, int32_t length) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < length; ++i) tokens.push_back(3 + (i * 7 + seed * 31 + i * i % 11) % 200);
  return tokens;
}

struct Answer {
  std::vector<int32_t> tokens;
  int32_t cached = 0;
  bool operator==(const Answer& other) const { return tokens == other.tokens; }
};

Answer finish(EventStream stream) {
  Answer answer;
  while (const std::optional<Event> event = stream.next()) {
    if (event->kind == Event::Kind::kToken) answer.tokens.push_back(event->token);
    if (event->kind == Event::Kind::kFailed) ADD_FAILURE() << event->error;
    answer.cached = event->usage.cached_tokens;
  }
  return answer;
}

Request request(const std::vector<int32_t>& tokens, const std::string& attention, int32_t budget) {
  Request r;
  r.tokens = tokens;
  r.sampling.temperature = 0;
  r.max_tokens = 24;
  r.ignore_end = true;
  r.attention = attention;
  r.attention_budget = budget;
  return r;
}

EngineOptions options(const std::string& attention, const std::string& device = "cpu") {
  return {.model = path_of("llama3"),
          .device = device,
          .threads = 2,
          .context = 512,
          .attention = attention,
          .attention_budget = 96,
          .max_running = 8,
          .step_tokens = 64};
}

class SparseRequestsOn : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Devices, SparseRequestsOn, testing::ValuesIn(golden::device_names()),
                         [](const auto& test) { return test.param; });

TEST_P(SparseRequestsOn, ShareNothingAcrossModesAndHaveTheBitsTheyHaveAlone) {
  const std::vector<int32_t> tokens = prompt(1, 300);
  const struct {
    const char* attention;
    int32_t budget;
  } modes[] = {{"full", 0}, {"sparse", 0}, {"sparse", 128}, {"", 0}, {"sparse", 4096}};
  std::vector<Answer> alone;
  for (const auto& mode : modes) {
    const auto engine = Engine::create(options("request", GetParam()));
    alone.push_back(finish(engine->submit(request(tokens, mode.attention, mode.budget))));
    EXPECT_EQ(alone.back().cached, 0);
  }
  EXPECT_EQ(alone[3], alone[0]);  // the engine's own
  EXPECT_EQ(alone[4], alone[0]);  // more than the context
  EXPECT_FALSE(alone[1] == alone[0]);
  const auto engine = Engine::create(options("request", GetParam()));
  for (int round = 0; round < 2; ++round) {
    std::vector<EventStream> streams;
    for (const auto& mode : modes)
      streams.push_back(engine->submit(request(tokens, mode.attention, mode.budget)));
    for (size_t i = 0; i < streams.size(); ++i) {
      const Answer answer = finish(std::move(streams[i]));
      EXPECT_EQ(answer, alone[i]) << modes[i].attention << " " << modes[i].budget;
      EXPECT_GE(answer.cached, round == 0 ? 0 : 288);
    }
  }
}

TEST(SparseRequests, OfAnEngineThatIsSparse) {
  const std::vector<int32_t> tokens = prompt(1, 300);
  const auto sparse = Engine::create(options("sparse")), asked = Engine::create(options("request"));
  EXPECT_EQ(finish(sparse->submit(request(tokens, "", 0))),
            finish(asked->submit(request(tokens, "sparse", 96))));
  EXPECT_EQ(finish(sparse->submit(request(tokens, "full", 0))),
            finish(asked->submit(request(tokens, "", 0))));
}

TEST(SparseRequests, AreRefusedInOneLine) {
  const std::vector<int32_t> tokens = prompt(1, 30);
  const auto refused = [&](Engine& engine, const std::string& attention, int32_t budget,
                           const std::string& says) {
    try {
      engine.submit(request(tokens, attention, budget));
      ADD_FAILURE() << says;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
    }
  };
  const auto full = Engine::create(options("full")), sparse = Engine::create(options("sparse"));
  refused(*full, "sparse", 0, "not opened with --attention sparse");
  refused(*full, "", 128, "attention_budget: found 128 with full attention");
  refused(*sparse, "full", 128, "attention_budget: found 128 with full attention");
  refused(*sparse, "some", 0, "attention: found 'some', expected full or sparse");
  refused(*sparse, "sparse", 63, "attention_budget: found 63, expected at least 64");
  const auto opens = [&](const std::string& model, const std::string& attention, const std::string& says) {
    EngineOptions wanted = options(attention);
    wanted.model = path_of(model);
    wanted.context = 256;
    try {
      Engine::create(wanted);
      ADD_FAILURE() << says;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
    }
  };
  opens("llama3", "thin", "attention: found 'thin', expected full, sparse or request");
  opens("deepseek-v3", "sparse", "has latent attention");
  opens("mistral", "sparse", "no layer of");
}

}  // namespace
}  // namespace millrace::sparse_models_test

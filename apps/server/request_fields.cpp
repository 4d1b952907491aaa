#include "request_fields.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "api_error.h"
#include "base/work_budget.h"

namespace millrace::server {
namespace {

constexpr size_t kMaxStops = 16;
constexpr size_t kMaxStopBytes = 1000;

}  // namespace

std::vector<std::string> read_stop(const Fields& fields, std::string_view key) {
  const Json* stop = fields.find(key);
  if (stop == nullptr) return {};
  std::vector<std::string> list;
  const std::string path = fields.path_of(key);
  const auto add = [&](const Json& value, const std::string& where) {
    if (!value.is_string()) wrong_type(where, value, "a string");
    std::string text = value.get<std::string>();
    if (text.empty()) bad_field(where, "found an empty string, expected some text");
    if (text.size() > kMaxStopBytes)
      bad_field(where, fmt::format("expected at most {} bytes", kMaxStopBytes), "string_above_max_length");
    list.push_back(std::move(text));
  };
  if (!stop->is_array()) {
    if (!stop->is_string()) wrong_type(path, *stop, "a string or an array of strings");
    add(*stop, path);
    return list;
  }
  if (stop->size() > kMaxStops) {
    bad_field(path, fmt::format("found {} strings, expected at most {}", stop->size(), kMaxStops),
              "array_above_max_length");
  }
  for (size_t i = 0; i < stop->size(); ++i) add((*stop)[i], element_path(path, i));
  return list;
}

namespace {

std::map<int32_t, float> read_logit_bias(const Fields& fields, int32_t vocab) {
  std::map<int32_t, float> bias;
  const std::optional<Fields> object = fields.object("logit_bias");
  if (!object) return bias;
  // More than the vocabulary has are refused before they are read one by one.
  if (object->json().size() > static_cast<size_t>(vocab)) {
    fields.refuse("logit_bias",
                  fmt::format("found {} tokens, expected at most {}", object->json().size(), vocab));
  }
  for (const auto& [key, value] : object->json().items()) {
    spend_work(4);
    int32_t token = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    if (error != std::errc() || end != key.data() + key.size() || token < 0 || token >= vocab) {
      bad_field(object->path_of(key), fmt::format("expected token ids from 0 to {} as keys", vocab - 1));
    }
    if (value.is_null()) continue;
    if (!value.is_number()) wrong_type(object->path_of(key), value, "a number");
    const auto number = value.get<double>();
    if (!(number >= -100 && number <= 100)) {
      bad_field(object->path_of(key), fmt::format("found {}, expected -100 to 100", number));
    }
    bias[token] = static_cast<float>(number);
  }
  return bias;
}

}  // namespace

std::optional<int32_t> read_samples(const Fields& fields, std::string_view key, const ModelInfo& model) {
  const auto samples = fields.integer(key, 1, std::min<int64_t>(128, model.max_samples));
  return samples ? std::optional(static_cast<int32_t>(*samples)) : std::nullopt;
}

void check_context(size_t tokens, const ModelInfo& model, std::string_view path) {
  if (tokens > static_cast<size_t>(model.context)) {
    throw context_exceeded(tokens, model.context, std::string(path));
  }
}

StreamOptions read_stream_options(const Fields& fields) {
  StreamOptions options;
  options.stream = fields.boolean("stream").value_or(false);
  if (const std::optional<Fields> more = fields.object("stream_options")) {
    if (!options.stream) fields.refuse("stream_options", "is only allowed when stream is true");
    options.include_usage = more->boolean("include_usage").value_or(false);
  }
  return options;
}

Request read_service(const Fields& fields, const Api& api, const Client& client) {
  Request r;
  constexpr int64_t kMost = 1000000;
  const int64_t highest = client.limits.max_priority;
  const int64_t priority = fields.integer("priority", -kMost, kMost).value_or(std::min<int64_t>(0, highest));
  if (priority > highest) {
    fields.refuse("priority",
                  fmt::format("found {}, expected at most {} (see --max-priority)", priority, highest));
  }
  r.priority = static_cast<int32_t>(priority);
  if (api.options().request_timeout_s > 0) {
    r.deadline = std::chrono::steady_clock::now() +
                 std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                     std::chrono::duration<double>(api.options().request_timeout_s));
  }
  r.attention = fields.text("attention").value_or("");
  if (!r.attention.empty() && r.attention != "full" && r.attention != "sparse") {
    fields.refuse("attention", "expected full or sparse");
  }
  constexpr int64_t kLeastBudget = 64, kMostBudget = 1 << 28;
  r.attention_budget =
      static_cast<int32_t>(fields.integer("attention_budget", kLeastBudget, kMostBudget).value_or(0));
  r.cache_salt = fields.text("cache_salt").value_or("");
  // A key finds its own prompts only: how fast an answer comes would tell what others have asked.
  if (!client.key_name.empty() && !api.options().share_cache) {
    r.cache_salt = client.key_name + "\n" + r.cache_salt;
  }
  return r;
}

Request read_request(const Fields& fields, const Api& api, const ServedModel& model, const Client& client) {
  constexpr int64_t kInt = std::numeric_limits<int32_t>::max();
  Request r = read_service(fields, api, client);
  SamplingParams& s = r.sampling;
  const auto real = [&](std::string_view key, double min, double max, float& value) {
    if (const auto given = fields.number(key, min, max)) value = static_cast<float>(*given);
  };
  real("temperature", 0, 2, s.temperature);
  real("top_p", 0, 1, s.top_p);
  if (s.top_p == 0) s.top_p = std::numeric_limits<float>::min();  // the likeliest token alone
  real("min_p", 0, 1, s.min_p);
  real("presence_penalty", -2, 2, s.presence_penalty);
  real("frequency_penalty", -2, 2, s.frequency_penalty);
  real("repetition_penalty", 0.01, 100, s.repetition_penalty);
  s.top_k = static_cast<int32_t>(std::max<int64_t>(0, fields.integer("top_k", -1, kInt).value_or(0)));
  s.logit_bias = read_logit_bias(fields, model.info().vocab);
  constexpr auto kAny = std::numeric_limits<int64_t>::max();
  if (const auto seed = fields.integer("seed", -kAny, kAny)) s.seed = static_cast<uint64_t>(*seed);
  r.stop = read_stop(fields, "stop");
  r.samples = read_samples(fields, "n", model.info()).value_or(1);
  r.ignore_end = fields.boolean("ignore_eos").value_or(false);
  return r;
}

Headers warn_ignored(const Fields& fields, std::initializer_list<std::string_view> names, const Api& api,
                     const Client& client) {
  std::string list;
  for (const std::string_view name : names) {
    if (!fields.has(name)) continue;
    if (!list.empty()) list += ", ";
    list += name;
  }
  if (list.empty()) return {};
  api.log().write("warn", "fields ignored", {{"request_id", client.request_id}, {"fields", list}});
  return {{"x-millrace-ignored", list}};
}

}  // namespace millrace::server

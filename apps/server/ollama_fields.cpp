#include "ollama_fields.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "api_error.h"
#include "conversation.h"
#include "hub/known_models.h"
#include "request_fields.h"

namespace millrace::server {

std::string ollama_model(const Fields& fields, Api& api) {
  std::optional<std::string> name = fields.text("model");
  if (!name) name = fields.text("name");  // as older clients say
  if (!name) bad_field("model", "is missing, expected a string", "missing_required_parameter");
  constexpr std::string_view kLatest = ":latest";
  if (!api.models().has(*name) && name->ends_with(kLatest)) name->resize(name->size() - kLatest.size());
  return *name;
}

hub::ModelName name_on_hub(const std::string& given) {
  if (const hub::KnownModel* known = hub::find_known(given)) return *hub::parse_name(known->hub);
  if (std::optional<hub::ModelName> name = hub::parse_name(given)) return *std::move(name);
  throw ApiError(404,
                 fmt::format("'{}' names no model to fetch, expected hf.co/owner/name:Q4_K_M or a short name "
                             "such as gpt-oss-20b",
                             given.substr(0, 200)),
                 "model", "model_not_found");
}

bool ollama_streams(const Fields& fields) { return fields.boolean("stream").value_or(true); }

// ---------------------------------------------------------------- durations

namespace {

// "1h30m", "300ms", "-1": as Go writes durations; a number without a unit is seconds.
std::optional<double> parse_duration(std::string_view text) {
  const bool negative = text.starts_with("-");
  if (negative) text.remove_prefix(1);
  if (text.empty()) return std::nullopt;
  double seconds = 0;
  while (!text.empty()) {
    if (!(text[0] >= '0' && text[0] <= '9') && text[0] != '.') return std::nullopt;
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || number < 0) return std::nullopt;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    const size_t length = std::min(text.find_first_of("0123456789."), text.size());
    const std::string_view unit = text.substr(0, length);
    constexpr std::pair<std::string_view, double> kUnits[] = {
        {"", 1}, {"ns", 1e-9}, {"us", 1e-6}, {"µs", 1e-6}, {"ms", 1e-3}, {"s", 1}, {"m", 60}, {"h", 3600}};
    const auto* found =
        std::find_if(std::begin(kUnits), std::end(kUnits), [&](const auto& u) { return u.first == unit; });
    if (found == std::end(kUnits)) return std::nullopt;
    seconds += number * found->second;
    text.remove_prefix(length);
  }
  return negative ? -seconds : seconds;
}

}  // namespace

std::optional<double> read_keep_alive(const Fields& fields) {
  const Json* value = fields.find("keep_alive");
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) return value->get<double>();
  if (!value->is_string()) wrong_type("keep_alive", *value, "a duration such as \"5m\", or seconds");
  const std::optional<double> seconds = parse_duration(value->get<std::string>());
  if (!seconds) fields.refuse("keep_alive", "expected a duration such as \"5m\", or seconds");
  return seconds;
}

// ---------------------------------------------------------------- options

Request read_ollama_options(const Fields& fields, Api& api, const ServedModel& model, const Client& client) {
  const Json none = Json::object();
  const std::optional<Fields> given = fields.object("options");
  const Fields options(given ? given->json() : none, "options");
  Json sampling = Json::object();
  for (const std::string_view key :
       {"temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"}) {
    if (const Json* value = options.find(key)) sampling[std::string(key)] = *value;
  }
  if (options.integer("seed", INT64_MIN, INT64_MAX) == -1) sampling.erase("seed");  // any
  if (const Json* stop = options.find("stop"); stop != nullptr && stop->is_array() && stop->empty()) {
    sampling.erase("stop");
  }
  Request request = read_request(Fields(sampling, "options"), api, model, client);
  SamplingParams& s = request.sampling;
  const ModelInfo::Sampling& advised = model.info().sampling;
  constexpr float kTemperature = 0.8F, kTopP = 0.9F;  // Ollama's own
  constexpr int32_t kTopK = 40;
  if (!options.has("temperature")) s.temperature = advised.temperature.value_or(kTemperature);
  if (!options.has("top_p")) s.top_p = advised.top_p.value_or(kTopP);
  if (!options.has("top_k")) s.top_k = advised.top_k.value_or(kTopK);
  if (!options.has("min_p")) s.min_p = advised.min_p.value_or(s.min_p);
  if (const auto penalty = options.number("repeat_penalty", 0.01, 100)) {
    s.repetition_penalty = static_cast<float>(*penalty);
  }
  const int64_t limit = options.integer("num_predict", -2, 1 << 28).value_or(-1);
  request.max_tokens = static_cast<int32_t>(std::max<int64_t>(0, limit));
  return request;
}

Headers ollama_ignored(const Fields& fields, Api& api, const ServedModel& model, const Client& client) {
  const Json none = Json::object();
  const std::optional<Fields> given = fields.object("options");
  Json seen = given ? given->json() : none;
  // A context is what the model was loaded with; prompts that are longer are refused, never cut.
  const auto context = Fields(seen, "options").integer("num_ctx", 0, INT32_MAX);
  if (context && *context <= model.info().context) seen.erase("num_ctx");
  if (fields.has("keep_alive") && api.models().status(model.id()).keep) seen["keep_alive"] = true;
  return warn_ignored(Fields(seen),
                      {"num_ctx", "keep_alive", "num_keep", "repeat_last_n", "typical_p", "tfs_z", "mirostat",
                       "mirostat_tau", "mirostat_eta", "numa", "num_batch", "num_gpu", "main_gpu", "low_vram",
                       "vocab_only", "use_mmap", "use_mlock", "num_thread", "penalize_newline"},
                      api, client);
}

// ---------------------------------------------------------------- conversations

namespace {

chat::Message read_ollama_message(const Fields& fields) {
  chat::Message message;
  message.role = *[&] {
    auto role = fields.choice("role", {"system", "user", "assistant", "tool"});
    if (!role)
      bad_field(fields.path_of("role"), "is missing, expected a string", "missing_required_parameter");
    return role;
  }();
  message.content = fields.text("content").value_or("");
  message.images = read_ollama_images(fields);
  if (!message.images.empty() && message.role != "user") {
    fields.refuse("images", "are read in messages of a user, nowhere else");
  }
  message.reasoning = fields.text("thinking").value_or("");
  message.name = fields.text("tool_name").value_or(fields.text("name").value_or(""));
  message.tool_call_id = fields.text("tool_call_id").value_or("");
  const Json* calls = fields.array("tool_calls");
  for (size_t i = 0; calls != nullptr && i < calls->size(); ++i) {
    const Fields call((*calls)[i], element_path(fields.path_of("tool_calls"), i));
    const std::optional<Fields> function = call.object("function");
    if (!function)
      bad_field(call.path_of("function"), "is missing, expected an object", "missing_required_parameter");
    const Json* arguments = function->find("arguments");
    message.tool_calls.push_back({.id = call.text("id").value_or(""),
                                  .name = function->required_text("name"),
                                  .arguments = arguments == nullptr ? "{}" : arguments->dump()});
  }
  return message;
}

}  // namespace

std::vector<chat::MessageImage> read_ollama_images(const Fields& fields) {
  std::vector<chat::MessageImage> out;
  const Json* images = fields.array("images");
  for (size_t i = 0; images != nullptr && i < images->size(); ++i) {
    const std::string path = element_path(fields.path_of("images"), i);
    const Json& image = (*images)[i];
    if (!image.is_string()) wrong_type(path, image, "an image in base64");
    add_image(out, 0, from_base64(image.get_ref<const std::string&>(), path), path);
  }
  return out;
}

void read_think(const Fields& fields, chat::Conversation& conversation) {
  const Json* think = fields.find("think");
  if (think == nullptr) return;
  if (think->is_boolean()) {
    const bool on = think->get<bool>();
    // The name that templates look for; those of models that cannot but think have an effort instead.
    conversation.template_variables = Json({{"enable_thinking", on}}).dump();
    if (!on) conversation.reasoning_effort = "low";
  } else if (think->is_string()) {
    conversation.reasoning_effort = *fields.choice("think", {"low", "medium", "high"});
  } else {
    wrong_type("think", *think, "true, false, \"low\", \"medium\" or \"high\"");
  }
}

chat::Conversation read_ollama_conversation(const Fields& fields) {
  chat::Conversation conversation;
  const Json* messages = fields.array("messages");
  for (size_t i = 0; messages != nullptr && i < messages->size(); ++i) {
    conversation.messages.push_back(read_ollama_message(Fields((*messages)[i], element_path("messages", i))));
  }
  const Json* tools = fields.array("tools");
  for (size_t i = 0; tools != nullptr && i < tools->size(); ++i) {
    const Fields tool((*tools)[i], element_path("tools", i));
    tool.choice("type", {"function"});
    const std::optional<Fields> function = tool.object("function");
    if (!function)
      bad_field(tool.path_of("function"), "is missing, expected an object", "missing_required_parameter");
    conversation.tools.push_back(read_function(*function));
  }
  read_think(fields, conversation);
  return conversation;
}

Constraints::Grammar read_ollama_format(const Fields& fields, Constraints& constraints,
                                        chat::Conversation& conversation) {
  conversation.objects = constraints.objects(fields);
  const Json* format = fields.find("format");
  if (format == nullptr || *format == "") return nullptr;
  Json wanted;
  if (format->is_object()) {
    wanted = {{"type", "json_schema"}, {"schema", *format}};
  } else if (*format == "json") {
    wanted = {{"type", "json_object"}};
  } else {
    fields.refuse("format", "expected \"json\" or a JSON schema");
  }
  try {
    return constraints.of_format(Fields(wanted, "format"), &conversation);
  } catch (ApiError& error) {
    error.param = "format";
    throw;
  }
}

}  // namespace millrace::server

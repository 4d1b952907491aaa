// Ollama's words for which models there are: /api/tags, /api/ps, /api/show, /api/version; and what it can do
// that this server does not.
#include <fmt/core.h>

#include "api_error.h"
#include "endpoints.h"
#include "json_reply.h"
#include "ollama_answer.h"
#include "ollama_fields.h"

namespace millrace::server {
namespace {

// Clients look at the version before they use what came later: this is the one whose API is answered here.
constexpr std::string_view kOllamaVersion = "0.12.6";

std::string parameter_size(int64_t parameters) {
  const auto count = static_cast<double>(parameters);
  if (count >= 1e9) return fmt::format("{:.1f}B", count / 1e9);
  return count >= 1e6 ? fmt::format("{:.0f}M", count / 1e6) : fmt::format("{:.0f}K", count / 1e3);
}

std::string upper(std::string text) {
  for (char& c : text) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return text;
}

Json details_json(const ModelFile& file) {
  return {{"parent_model", ""},
          {"format", file.format},
          {"family", file.architecture},
          {"families", Json::array({file.architecture})},
          {"parameter_size", parameter_size(file.parameters)},
          {"quantization_level", upper(file.quantization)}};
}

Json tag_json(const ModelSet::Status& model, const std::string& name) {
  return {{"name", name},
          {"model", name},
          {"modified_at", rfc3339(static_cast<double>(model.file.modified))},
          {"size", model.file.bytes},
          {"digest", model.file.digest},
          {"details", details_json(model.file)}};
}

Json capabilities(const ModelSet::Status& model) {
  const ModelFile& file = model.file;
  const auto mentions = [&](std::string_view word) {
    return file.chat_template.find(word) != std::string::npos;
  };
  const bool harmony = model.format == "harmony" || mentions("<|channel|>");
  Json list = Json::array({"completion"});
  if (harmony || mentions("tools")) list.push_back("tools");
  if (harmony || mentions("<think>") || mentions("enable_thinking")) list.push_back("thinking");
  return list;
}

}  // namespace

Reply ollama_tags(Api& api, const HttpRequest& /*request*/, const Client& /*client*/) {
  Json list = Json::array();
  for (const ModelSet::Status& model : api.models().list()) {
    list.push_back(tag_json(model, model.name));
    for (const std::string& alias : model.aliases) list.push_back(tag_json(model, alias));
  }
  return json_reply({{"models", list}});
}

Reply ollama_ps(Api& api, const HttpRequest& /*request*/, const Client& /*client*/) {
  constexpr double kForEver = 10e9;  // the year 2286
  Json list = Json::array();
  for (const ModelSet::Status& model : api.models().list()) {
    // One that is being unloaded has its memory still, and cannot be deleted yet.
    const bool leaves = model.state == ModelSet::State::kUnloading;
    if (!model.info && !leaves) continue;
    Json item = tag_json(model, model.name);
    item.erase("modified_at");
    item["size"] = model.memory_bytes;
    item["size_vram"] = model.own_memory ? model.memory_bytes : 0;
    if (model.info) item["context_length"] = model.info->context;
    const double left = leaves ? 0 : model.unload_in_s.value_or(kForEver - unix_time());
    item["expires_at"] = rfc3339(unix_time() + left);
    list.push_back(std::move(item));
  }
  return json_reply({{"models", list}});
}

Reply ollama_show(Api& api, const HttpRequest& request, const Client& /*client*/) {
  const Json body = parse_object(request.body);
  const ModelSet::Status model = api.models().status(ollama_model(Fields(body), api));
  const ModelFile& file = model.file;
  const std::string& family = file.architecture;
  return json_reply({{"modelfile", fmt::format("FROM {}\n", model.name)},
                     {"parameters", ""},
                     {"template", file.chat_template},
                     {"details", details_json(file)},
                     {"model_info",
                      {{"general.architecture", family},
                       {"general.parameter_count", file.parameters},
                       {family + ".context_length", file.trained_context},
                       {family + ".embedding_length", file.embedding_size}}},
                     {"capabilities", capabilities(model)},
                     {"modified_at", rfc3339(static_cast<double>(file.modified))}});
}

Reply ollama_version(Api& /*api*/, const HttpRequest& /*request*/, const Client& /*client*/) {
  return json_reply({{"version", std::string(kOllamaVersion)}, {"server", "millrace " MILLRACE_VERSION}});
}

Reply ollama_not_here(Api& /*api*/, const HttpRequest& request, const Client& /*client*/) {
  throw ApiError(
      501,
      fmt::format("{} is not supported: the models of this server are the files it was started with",
                  request.path),
      "", "unsupported");
}

}  // namespace millrace::server

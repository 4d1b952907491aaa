#include "response_replay.h"

#include <fmt/core.h>

namespace millrace::server {
namespace {

class Replay {
 public:
  explicit Replay(ResponseLog& log) : log_(log) {}

  void response(const Json& response) {
    Json before = response;
    before["status"] = "in_progress";
    before["output"] = Json::array();
    for (const char* key : {"usage", "error", "incomplete_details"}) before[key] = nullptr;
    event("response.created", {{"response", before}});
    event("response.in_progress", {{"response", before}});
    const Json& output = response["output"];
    for (size_t i = 0; i < output.size(); ++i) item(i, output[i]);
    const auto status = response["status"].get<std::string>();
    event(status == "completed" || status == "incomplete" ? "response." + status : "response.failed",
          {{"response", response}});
    log_.end();
  }

 private:
  void event(const std::string& type, const Json& members) {
    Json all = {{"type", type}, {"sequence_number", sequence_++}};
    for (const auto& [key, value] : members.items()) all[key] = value;
    log_.append(fmt::format("event: {}\ndata: {}\n\n", type,
                            all.dump(-1, ' ', false, Json::error_handler_t::replace)));
  }

  void item(size_t index, const Json& item) {
    const bool has_content = item.contains("content");
    Json begun = item;
    begun["status"] = "in_progress";
    if (has_content) begun["content"] = Json::array();
    if (item.contains("arguments")) begun["arguments"] = "";
    event("response.output_item.added", {{"output_index", index}, {"item", begun}});
    const Json place = {{"output_index", index}, {"item_id", item["id"]}};
    if (has_content) {
      for (size_t i = 0; i < item["content"].size(); ++i) part(place, i, item["content"][i]);
    } else if (item.contains("arguments")) {
      Json delta = place, done = place;
      delta["delta"] = item["arguments"];
      done["name"] = item["name"];
      done["arguments"] = item["arguments"];
      event("response.function_call_arguments.delta", delta);
      event("response.function_call_arguments.done", done);
    }
    event("response.output_item.done", {{"output_index", index}, {"item", item}});
  }

  void part(Json place, size_t index, const Json& part) {
    place["content_index"] = index;
    const auto type = "response." + part["type"].get<std::string>();
    Json begun = part, added = place, delta = place, text = place, done = place;
    begun["text"] = "";
    if (part.contains("logprobs")) {
      begun["logprobs"] = Json::array();
      delta["logprobs"] = text["logprobs"] = part["logprobs"];
    }
    added["part"] = begun;
    delta["delta"] = text["text"] = part["text"];
    done["part"] = part;
    event("response.content_part.added", added);
    event(type + ".delta", delta);
    event(type + ".done", text);
    event("response.content_part.done", done);
  }

  ResponseLog& log_;
  int64_t sequence_ = 0;
};

}  // namespace

std::shared_ptr<ResponseLog> replay_response(const Json& response) {
  auto log = std::make_shared<ResponseLog>();
  Replay(*log).response(response);
  return log;
}

}  // namespace millrace::server

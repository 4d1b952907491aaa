// AnthropicAnswer: an answer in the shape of Anthropic's messages API: blocks (thinking, text, tool_use) that
// are started, filled and stopped, each with its events.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "anthropic_input.h"
#include "api.h"
#include "base/json_writer.h"
#include "chat_answer.h"
#include "generation.h"

namespace millrace::server {

class AnthropicAnswer final : public Answer {
 public:
  struct Options {
    std::string model = {};  // as the client named it
    bool stream = false;
    std::vector<std::string> stop = {};
    Headers headers = {};
  };
  AnthropicAnswer(Api& api, ModelLease model, const MessagesInput& input, const Request& request,
                  Options options, Timeline::Entry entry);

  bool streaming() const override { return options_.stream; }
  void on_ready(std::function<void()> notify) override { generation_.on_ready(notify); }
  bool advance(std::string& out, size_t max_bytes) override;
  std::optional<HttpResponse> response() override;
  Headers headers() const override { return options_.headers; }
  int64_t generated_tokens() const override { return generation_.totals().generated; }

 private:
  struct Block {
    enum class Kind { kThinking, kText, kToolUse } kind;
    std::string text, id, name;  // text: of a tool, its arguments
    std::string signature;
  };
  void take(const Event& event, std::string& out);
  void add_delta(const chat::Delta& delta, std::string& out);
  void add_text(Block::Kind kind, const std::string& text, std::string& out);
  void start(Block block, std::string& out);
  void stop(std::string& out);
  void finish(const Event& event, std::string& out);
  // An event of this type with the members that `write_members` writes; nothing where nobody reads events.
  template <typename WriteMembers>
  void event(std::string& out, std::string_view type, WriteMembers write_members) const;
  void delta_event(std::string& out, std::string_view type, std::string_view key,
                   std::string_view text) const;
  void write_message(JsonWriter& json) const;
  void write_block(JsonWriter& json, const Block& block, bool whole) const;
  void write_usage(JsonWriter& json) const;

  const Options options_;
  const std::string id_;
  const bool thinking_, omit_thinking_;
  Generation generation_;
  ChatReader reader_;
  std::vector<Block> blocks_;
  bool open_ = false;  // the last block
  int64_t prompt_ = 0, cached_ = 0;
  std::string stop_reason_;  // empty while it runs
  bool began_ = false;
};

}  // namespace millrace::server

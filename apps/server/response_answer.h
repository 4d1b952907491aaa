// ResponseAnswer: an answer in the shape of the responses API: items (reasoning, message, function calls)
// that are opened, filled and closed, each with its events.
#pragma once

#include <mutex>

#include "base/json_writer.h"
#include "chat_answer.h"
#include "generation.h"
#include "response_input.h"

namespace millrace::server {

class ResponseAnswer final : public Answer {
 public:
  ResponseAnswer(Api& api, ModelLease model, ResponseInput input, const Request& request, std::string owner,
                 Headers headers, Timeline::Entry entry);
  ~ResponseAnswer() override;

  bool streaming() const override { return input_.stream; }
  void on_ready(std::function<void()> notify) override { generation_.on_ready(notify); }
  bool advance(std::string& out, size_t max_bytes) override;
  std::optional<HttpResponse> response() override;
  Headers headers() const override { return headers_; }
  int64_t generated_tokens() const override { return generation_.totals().generated; }

  void cancel() { generation_.cancel(); }  // from any thread
  const std::string& id() const { return id_; }
  std::string running_body() const;          // as it is before anything has come
  void store(std::function<void()> cancel);  // keeps it as it is now
  // Its events, for those who follow; null: it is not stored, or nobody asked for events.
  const std::shared_ptr<ResponseLog>& events() const { return log_; }

 private:
  struct OutputItem {
    enum class Kind { kReasoning, kMessage, kCall } kind;
    std::string id, text, name, call_id, logprobs;
    bool done = false, custom = false;  // custom: a call of a custom tool, its input is the text
    bool cut = false;                   // the answer ended within it
  };
  void take(const Event& event, std::string& out);
  void add_text(OutputItem::Kind kind, const chat::Delta& delta, std::string& out);
  void open(OutputItem::Kind kind, std::string& out, const ReadCall& call = {});
  void close(std::string& out, bool cut = false);
  void finish(const Event& event, std::string& out);
  void fail(std::string& out);
  void add_to_conversation();
  // An event of this type with the members that `write_members` writes: into the log where there is one, and
  // to the client that waits for it.
  template <typename WriteMembers>
  void event(std::string& out, std::string_view type, WriteMembers write_members);
  void response_event(std::string& out, std::string_view type, std::string_view body);
  void item_event(std::string& out, std::string_view type, const Json& item);
  void write_place(JsonWriter& json) const;  // "output_index" and "item_id" of the item that is open
  Json item_json(const OutputItem& item) const;
  Json body() const;
  std::vector<chat::Message> messages() const;

  Api& api_;
  const std::string id_, owner_;
  const int64_t created_ = static_cast<int64_t>(unix_time());
  const ResponseInput input_;
  const Headers headers_;
  const std::shared_ptr<ResponseLog> log_;
  Generation generation_;
  ChatReader reader_;
  std::vector<OutputItem> items_;
  std::string status_ = "in_progress", incomplete_;
  int64_t sequence_ = 0;
  bool began_ = false, ended_ = false;
};

}  // namespace millrace::server

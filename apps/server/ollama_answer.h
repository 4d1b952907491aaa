// The answer of Ollama's chat and generate: a JSON object a line, or one object with all of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "api.h"
#include "base/json_writer.h"
#include "chat_answer.h"
#include "generation.h"

namespace millrace::server {

std::string rfc3339(double unix_time);

struct OllamaShape {
  std::string model = {};  // as the client called it
  bool chat = true;        // messages; else "response"
  bool stream = true;
  double load_s = 0;  // that the request waited for its model
};

class OllamaAnswer final : public Answer {
 public:
  // `conversation`: how the answer is to be read; absent: as the text it is.
  OllamaAnswer(Api& api, ModelLease model, const Request& request,
               const std::optional<chat::Conversation>& conversation, const std::vector<std::string>& stop,
               OllamaShape shape, Headers headers, Timeline::Entry entry);

  bool streaming() const override { return shape_.stream; }
  std::string_view content_type() const override { return "application/x-ndjson"; }
  std::string_view keep_alive() const override { return keep_alive_; }
  void on_ready(std::function<void()> notify) override { generation_.on_ready(notify); }
  Headers headers() const override { return headers_; }
  int64_t generated_tokens() const override { return generation_.totals().generated; }
  bool advance(std::string& out, size_t max_bytes) override;
  std::optional<HttpResponse> response() override;

 private:
  struct Piece {
    std::string_view content = {}, thinking = {};
    size_t first_call = 0, last_call = 0;  // of the reader's: [first, last)
  };
  void take(const Event& event, std::string& out);
  void send(std::string& out, const Piece& piece);
  void send_calls(std::string& out, size_t until);  // those that are complete and not yet sent
  void write_piece(JsonWriter& json, const Piece& piece) const;
  void write_end(JsonWriter& json) const;

  const OllamaShape shape_;
  const Headers headers_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  Generation generation_;
  std::optional<ChatReader> reader_;
  std::string text_;  // without a reader
  std::string keep_alive_;
  size_t calls_sent_ = 0;
  bool sent_ = false, ended_ = false;
  std::string finish_;
  Usage usage_;
};

// {"error": MESSAGE}: what Ollama's clients look for.
HttpResponse ollama_error(const ApiError& error);

}  // namespace millrace::server

// EmbeddingAnswer: the vectors of an answer's inputs, computed and brought to length one. Two APIs ask for
// them and differ in what the body looks like.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json_writer.h"
#include "generation.h"
#include "http.h"

namespace millrace::server {

class EmbeddingAnswer : public Answer {
 public:
  EmbeddingAnswer(ModelLease model, Timeline& timeline, const std::vector<Request>& requests,
                  size_t dimensions, Headers headers, Timeline::Entry entry)
      : generation_(std::move(model), timeline, requests, std::move(entry)),
        dimensions_(dimensions),
        headers_(std::move(headers)),
        vectors_(requests.size()) {}

  bool streaming() const override { return false; }
  void on_ready(std::function<void()> notify) override { generation_.on_ready(notify); }
  Headers headers() const override { return headers_; }
  bool advance(std::string& out, size_t max_bytes) override;
  std::optional<HttpResponse> response() override;

 protected:
  virtual std::string body() const = 0;  // once all are there; throws ApiError
  virtual HttpResponse failed(const ApiError& error) const { return error_response(error); }
  size_t inputs() const { return vectors_.size(); }
  void write_usage(JsonWriter& json) const;  // as OpenAI's clients expect it
  // The first `dimensions` numbers at length one. Throws ApiError when there are none.
  std::vector<float> unit_vector(size_t input) const;
  const std::vector<float>& vector_of(size_t input) const;  // as the engine gave it; throws the same

  Generation generation_;

 private:
  const size_t dimensions_;
  const Headers headers_;
  std::vector<std::vector<float>> vectors_;  // by input; as the engine gave them
};

}  // namespace millrace::server

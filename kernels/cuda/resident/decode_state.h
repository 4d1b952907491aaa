// The states of a resident decode and which call may follow which, without a GPU: a call asks may_*() before
// it does anything and says *_done() after its launches went through, so that a failed one changes nothing.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace millrace::cuda::resident {

class DecodeState {
 public:
  enum class Phase { kInitialized, kReady };

  explicit DecodeState(int32_t max_seq) : max_seq_(max_seq) {}

  Phase phase() const { return phase_; }
  int32_t length() const { return length_; }  // tokens attended over, or loaded as a prompt
  int32_t max_seq() const { return max_seq_; }

  // Each is empty, or a line that says why the call is out of order.
  std::string may_load_token() const {
    if (token_loaded_) return "load_qkv: a token is loaded already, expected decode_gpu before the next one";
    return room_for(1, "load_qkv");
  }
  std::string may_load_prompt(int32_t tokens) const {
    if (token_loaded_) return "load_prompt: a token is loaded, expected decode_gpu before more keys";
    return room_for(tokens, "load_prompt");
  }
  std::string may_decode() const {
    if (phase_ == Phase::kInitialized) return "decode_gpu: nothing is loaded, expected load_qkv first";
    if (!token_loaded_) return "decode_gpu: the loaded token is decoded already, expected load_qkv first";
    return "";
  }
  std::string may_get_output() const {
    if (has_output_) return "";
    return "get_output: nothing was decoded since init or reset, expected decode_gpu first";
  }

  void token_done() {
    phase_ = Phase::kReady;
    token_loaded_ = true;
  }
  void prompt_done(int32_t tokens) { length_ += tokens; }
  void decode_done() {
    token_loaded_ = false;
    has_output_ = true;
    ++length_;
  }
  void reset() { *this = DecodeState(max_seq_); }

 private:
  std::string room_for(int32_t tokens, const char* call) const {
    if (tokens <= max_seq_ - length_) return "";
    char line[160];
    std::snprintf(line, sizeof line, "%s: the sequence has %d of max_seq %d tokens, no room for %d more",
                  call, length_, max_seq_, tokens);
    return line;
  }

  Phase phase_ = Phase::kInitialized;
  bool token_loaded_ = false;  // and not decoded yet
  bool has_output_ = false;
  int32_t length_ = 0;
  int32_t max_seq_;
};

}  // namespace millrace::cuda::resident

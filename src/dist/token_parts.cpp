#include "dist/token_parts.h"

#include <vector>

namespace millrace::dist {

void collect_largest(Communicator& group, std::span<int32_t> tokens, std::span<const float> values) {
  struct Candidate {
    int32_t token;
    float value;
  };
  std::vector<Candidate> best(tokens.size());
  for (size_t i = 0; i < best.size(); ++i) best[i] = {tokens[i], values[i]};
  const auto bytes = std::as_writable_bytes(std::span(best));
  if (group.rank() != 0) return group.send(0, bytes);
  std::vector<Candidate> other(best.size());
  for (int r = 1; r < group.size(); ++r) {  // in rank order: tokens ascend, so that the first of equals stays
    group.recv(r, std::as_writable_bytes(std::span(other)));
    for (size_t i = 0; i < best.size(); ++i) {
      if (best[i].token == -1 || other[i].token == kNoTokens) continue;
      if (other[i].token == -1 || best[i].token == kNoTokens || other[i].value > best[i].value)
        best[i] = other[i];
    }
  }
  for (size_t i = 0; i < best.size(); ++i) tokens[i] = best[i].token;
}

}  // namespace millrace::dist

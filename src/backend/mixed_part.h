// What an executor offers beside backend.h's operations to be one half of a mixed one (mixed/): its residual
// stream and its routing go out to the host and come in from there. Executors that can derive from MixedPart
// beside Executor.
#pragma once

#include <cstdint>
#include <span>

#include "backend/backend.h"

namespace millrace {

// Rows of a step on the host.
struct HostRows {
  std::span<const float> residual;  // [rows, hidden]
  std::span<const int32_t> chosen;  // [rows, experts per token], or empty: without routing
  std::span<const float> weights;   // the same
};

class MixedPart {
 public:
  virtual ~MixedPart() = default;

  // Starts to send what the operations so far make of the residual stream, and of the last route() where
  // `routing`. rows_out() waits for it; it is there until the next send_rows(), without routing until the
  // next operation.
  virtual void send_rows(bool routing) = 0;
  virtual HostRows rows_out() = 0;

  // The residual stream becomes these rows, or they are added to it. They have been read on return.
  virtual void set_residual(std::span<const float> rows) = 0;
  virtual void add_residual(std::span<const float> rows) = 0;

  // As if route() had made this of these rows, with its norm; but the residual stream is zero afterwards:
  // what experts_add leaves there is what experts add.
  virtual void take_routed(const Norm& norm, const HostRows& rows) = 0;

  // Of the routing at hand: expert e is number local[e] of the weights that the next experts_add has, or -1:
  // that operation leaves it out. local: [experts], for as long as the executor is.
  virtual void keep_experts(std::span<const int32_t> local) = 0;
};

}  // namespace millrace

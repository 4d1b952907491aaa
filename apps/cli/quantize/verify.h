// quantize --verify: the file that was written against its source, by the logits of both.
#pragma once

#include <cstdint>
#include <string>

#include "millrace/options.h"

namespace millrace::cli {

struct Verification {
  int64_t tokens = 0;
  double relative_error = 0;  // root mean square of the difference of logits, over their spread
  double limit = 0;           // what the types explain: more is a wrong file
  double kl = 0;              // mean nats a token, KL(source || file)
  double top1_agreement = 0;
  bool good() const { return relative_error <= limit; }
};

// `weight_error`: the relative root mean square error of the weights, by which the types explain a
// difference. Of `options`: the source (model), device, threads.
Verification verify_logits(const EngineOptions& options, const std::string& written, double weight_error);

}  // namespace millrace::cli

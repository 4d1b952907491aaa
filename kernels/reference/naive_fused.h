// The fused operations, plainly and in double: the oracle of their tests. A row is a vector; backward
// functions take the gradient of the output and give that of the input.
#pragma once

#include <cstdint>
#include <vector>

namespace millrace::reference {

using Row = std::vector<double>;

// n = x / sqrt(mean(x^2) + eps), or (x - mean) / sqrt(variance + eps)
struct NormedRow {
  Row n;
  double mean, rstd;
};
NormedRow normed(const Row& x, bool layer, double eps);
// dx of y = n * weight; dweight += dy * n, dbias += dy
Row norm_backward(const NormedRow& of, const Row& dy, const Row& weight, bool layer, Row& dweight,
                  Row& dbias);

enum class Gate { kGelu, kGeluTanh, kSilu };
double gate_value(Gate gate, double x);
// By a difference of two values close by: it knows no formula of the gradient.
double gate_slope(Gate gate, double x);

Row softmax(const Row& x, double scale);
// scale * y * (dy - sum(y dy))
Row softmax_backward(const Row& y, const Row& dy, double scale);
double log_sum_exp(const Row& x);

}  // namespace millrace::reference

// ErrorFeedback: encoding that lets the columns still to come make up for the errors of those already
// rounded.
//
// What counts is the error of W x, not of W: e A e' over a row's errors e, with A = sum of x x' over the
// inputs seen. Once column i is rounded its error e_i is fixed; the change of the remaining columns R that
// makes e A e' least is e_i A_iR A_RR^-1, added to them before they are rounded in turn. With A = R R' (R
// upper triangular) this is e_i R_iR R_RR^-1 for every column, from one factorization. The rule is that of
// Optimal Brain Surgeon (Hassibi and Stork 1993), taken column by column (Frantar et al. 2022); a block's
// scales are chosen before its first column is rounded. Types of other than four bits are rounded block by
// block.
//
// The search for a block's scale weighs column j by the square of R_jj: what an error there costs once the
// columns after it have done what they can.
//
// A row of n columns costs n^2 / 2 multiply-adds, the factorization n^3 / 3 once per matrix.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "tensor/dtype.h"

namespace millrace::quant {

// What a matrix's inputs look like on a sample text: what its errors are weighed by and flow along.
struct MatrixInputs {
  std::vector<float> squares;  // [cols]: of each column's input
  // [cols, cols], the part with j >= i: sums of x_i x_j. Matrices of the same input share them; may be
  // absent.
  std::shared_ptr<std::vector<float>> products;
};

class ErrorFeedback {
 public:
  using Parallel = std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

  // `products` [cols, cols]: sums of x_i x_j, of which the part with j >= i is read. `block`: elements of the
  // type to be written. `damping`: the share of the mean diagonal added to it; a sample shorter than cols
  // needs it, for what it does not show must not be thought free of errors.
  ErrorFeedback(std::span<const float> products, int64_t cols, int block, double damping,
                const Parallel& parallel);

  // As quant::encode_rows(), but errors flow on along each row; `x` is changed on the way.
  void encode_rows(DType type, float* x, int64_t num_rows, std::byte* out) const;

 private:
  void round_in_order(DType type, std::byte* block, int64_t begin, float* values, float* back) const;

  int64_t cols_;
  int block_;
  // Row i: what one unit of error in column i adds to the columns after it; the rest is not used.
  std::vector<float> flow_;    // [cols, cols]
  std::vector<float> weight_;  // [cols]: R_jj^2
};

// The feedback of one matrix after the other: those that share their inputs and come in a row share it too.
class FeedbackCache {
 public:
  // None where there are no products. Valid until the next call.
  const ErrorFeedback* of(DType type, int64_t cols, const MatrixInputs& inputs,
                          const ErrorFeedback::Parallel& parallel);

 private:
  std::unique_ptr<ErrorFeedback> feedback_;
  std::shared_ptr<const std::vector<float>> products_;
  int block_ = 0;
};

}  // namespace millrace::quant

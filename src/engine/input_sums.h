// InputSums: sums of squares of what each weight's columns are multiplied with, gathered while a model reads
// a text. What an importance matrix is made of (io/imatrix.h).
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "backend/input_watcher.h"
#include "io/imatrix.h"
#include "model/model.h"

namespace millrace {

class InputSums final : public InputWatcher {
 public:
  explicit InputSums(const Model& model) : model_(model) {}

  void see(std::span<const Weight* const> weights, int64_t expert, const float* x, int64_t rows,
           int64_t stride) override;
  void see_latent(const Weight& k_b, int64_t rank, const float* x, int64_t rows, int64_t stride) override;
  // By the names that a GGUF file of the model has for its weights.
  std::map<std::string, io::ImportanceEntry> entries() const;

 private:
  struct Sums {
    const Weight* first = nullptr;  // of several with the same name, parts of a fused matrix: this one counts
    int64_t cols = 0;
    std::vector<double> squares;  // [matrices, cols]
    std::vector<double> counts;   // [matrices]
  };
  // The sums of squares of these rows' columns.
  std::span<const double> squares_of(const float* x, int64_t rows, int64_t cols, int64_t stride);

  const Model& model_;
  std::unordered_map<const Weight*, Sums*> of_;  // null: another part is counted
  std::map<std::string, Sums> sums_;
  std::vector<double> row_;
};

// The importance of a weight's columns from its entry, [matrices, cols]: means of squares, smoothed so that
// a column the text hardly used still counts a tenth of the mean; matrices without any rows count alike.
// Absent: the file says nothing of this weight. Names of fused matrices and of their parts stand for one
// another. Throws Error{kBadInput} where the sizes do not go together.
std::vector<float> importance_of(const io::ImportanceMatrix& matrix, const std::string& path,
                                 const std::string& name, int64_t matrices, int64_t cols);

}  // namespace millrace

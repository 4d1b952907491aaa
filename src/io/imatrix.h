// Importance matrices, as llama.cpp's imatrix writes them: for each weight the sums of squares of what its
// columns were multiplied with on a text. A GGUF file (X.in_sum2, X.counts for weight X), or the older form
// without a magic number, which is read too.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace millrace::io {

struct ImportanceEntry {
  int64_t matrices = 1, cols = 0;  // of experts: as many matrices
  std::vector<float> sums;         // [matrices, cols]: of squares
  std::vector<float> counts;       // [matrices]: rows that were seen; 0: none, and the sums say nothing
};

struct ImportanceMatrix {
  std::map<std::string, ImportanceEntry> entries;  // by the weight's GGUF name, "blk.0.attn_q.weight"
  std::vector<std::string> datasets;               // names of the texts
  int64_t chunks = 0, chunk_tokens = 0;
};

// Throws Error naming the field that is wrong.
ImportanceMatrix read_imatrix(const std::string& path);
// The GGUF form; appears whole or not at all.
void write_imatrix(const std::string& path, const ImportanceMatrix& matrix);

}  // namespace millrace::io

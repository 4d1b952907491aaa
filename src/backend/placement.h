// Placement: which of two devices has which weights of a model that is larger than the first one's memory.
// Plain data, made before anything is loaded, fixed from then on: a result's bits depend on it and on nothing
// else. The first device has the output matrix and as many of the last layers as fit (attention, keys and
// values, dense products, routers, shared experts); what memory that leaves goes to experts, and to the
// embedding behind all of them. The rest is the second one's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace millrace::mixed {

struct Placement {
  struct Layer {
    bool on_first = true;                // all but the experts, and the keys and values
    int32_t experts = 0;                 // it has
    std::vector<int32_t> first_experts;  // of these the first device's, ascending
    bool operator==(const Layer&) const = default;
  };
  bool embedding_on_first = false;
  std::vector<Layer> layers;

  int32_t layers_on_first() const;
  // Does the second device have experts of this layer, whose other weights are the first one's?
  bool shares_experts(int32_t layer) const;
  // "layers 4-23 and 480 of 768 experts on cuda; the embedding, layers 0-3 and 288 experts on cpu"
  std::string text(const std::string& first, const std::string& second) const;
  // In full, for names of cached blocks: two placements with equal words have equal bits.
  std::string identity() const;
  bool operator==(const Placement&) const = default;
};

// What is to be placed: bytes as the first device would hold them.
struct PlacementInput {
  struct Layer {
    size_t dense = 0;    // all but the experts
    size_t kv = 0;       // keys and values that must fit
    size_t experts = 0;  // all of them; 0: it has none
  };
  size_t memory = 0;     // the first device's, for weights, keys and values
  size_t embedding = 0;  // looked up only; 0 where the output matrix is the same
  size_t output = 0;
  int32_t experts = 0;  // of each layer that has some
  std::vector<Layer> layers;

  std::optional<int32_t> first_layers;                 // said by the user: so many of the last
  std::optional<std::vector<int32_t>> second_experts;  // said by the user: these of every layer
  std::optional<int32_t> second_count;                 // or so many: the least used, else the last
  // [layers][experts]: how often each was used; empty, or of a layer empty: nobody counted.
  std::vector<std::vector<double>> counts;
};

// Throws Error{kNoMemory} where not even the output matrix fits.
Placement plan_placement(const PlacementInput& input);

// "12": so many of each layer's experts; "0-7,12": these; "all". Throws Error{kBadInput} under the option's
// name.
void parse_experts(const std::string& option, const std::string& text, PlacementInput& input);

}  // namespace millrace::mixed

#include "model/dense_decoder.h"

#include "model/decoder_config.h"
#include "model/decoder_layer.h"
#include "model/decoder_weights.h"
#include "model/rope.h"

namespace millrace {

void DenseDecoder::read_config(const ConfigReader& reader, ModelConfig& config) const {
  read_decoder(reader, config);
  config.ffn = reader.integer("feed_forward_length", "intermediate_size", 1, 1 << 20);
  config.rope_interleaved = interleaved_in_gguf() && reader.is_gguf();
  read_own(reader, config);
  read_rope(reader, config);
}

void DenseDecoder::write_keys(GgufKeys& keys) const {
  write_sizes(keys, keys.config().ffn);
  keys.size("rope.dimension_count", keys.config().rotary_dims);
  write_norm(keys);
  write_rope(keys);
  write_own(keys);
}

std::vector<WeightSpec> DenseDecoder::layer_weights(const ModelConfig& config, int) const {
  std::vector<WeightSpec> weights;
  add_attention(weights, config, {.interleaved_in_gguf = interleaved_in_gguf()});
  weights.push_back(ffn_norm_weight(config));
  add_feed_forward(weights, config);
  return weights;
}

void DenseDecoder::layer(Executor& x, const LayerWeights& w, const ModelConfig& config, int index) const {
  x.norm_qkv(qkv_of(w, config));
  x.rope_append_kv(rope_of(config, index));
  x.attend(attend_of(w, config, index));
  x.project_add(project_of(w, config));
  x.ffn_add(ffn_of(w, config));
}

SyntheticTokenizer DenseDecoder::synthetic_tokenizer(int32_t vocab) const {
  return chatml_tokenizer("llama-bpe", vocab);
}

}  // namespace millrace

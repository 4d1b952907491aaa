"""An attention backend for vLLM, out of its tree, over torch.ops.millrace.attention_paged.

vLLM keeps keys and values in pages, [2, pages, page_tokens, kv_heads, head_dim], and gives every step as a ragged
batch: query_start_loc [batch + 1], seq_lens [batch], block_table [batch, pages]. That is what the operation takes, so
a step is two calls: the new rows are put into their slots, and attention runs over the pages. A plugin's entry point
(vllm.platform_plugins) names `MillraceBackend` in its platform's get_attn_backend_cls.

`write_rows` and `attend` need torch and millrace_kernels alone, and tests/python/kernels_examples_test.py runs them.
The classes at the end exist where vLLM is installed; they were not run here.
"""

import torch

import millrace_kernels.torch as mt


def write_rows(cache, key, value, slots):
    """key and value [rows, kv_heads, dim] into slots (page * page_tokens + place) of cache [2, pages, tokens, ..]."""
    pages, tokens = cache.shape[1:3]
    flat = cache.view(2, pages * tokens, *cache.shape[3:])
    kept = slots >= 0  # vLLM pads a step with slots of -1
    flat[0, slots[kept]] = key[kept]
    flat[1, slots[kept]] = value[kept]


def attend(query, cache, block_table, query_start_loc, seq_lens, *, scale, window=-1, softcap=0.0, sinks=None):
    """query [rows, heads, dim] of a ragged batch -> [rows, heads, dim]; each sees its sequence up to itself."""
    with torch.no_grad():
        return mt.attention_paged(query, cache[0], cache[1], block_table, seq_lens, cu_q=query_start_loc, causal=True,
                                  window=(window - 1 if window > 0 else -1, -1), scale=scale, softcap=softcap,
                                  sinks=sinks)


try:
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl
except ImportError:
    AttentionBackend = AttentionImpl = None

if AttentionImpl is not None:

    class MillraceImpl(AttentionImpl):

        def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes=None, sliding_window=None,
                     kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder",
                     kv_sharing_target_layer_name=None, sinks=None):
            if alibi_slopes is not None or attn_type != "decoder" or kv_cache_dtype != "auto":
                raise NotImplementedError("millrace: no ALiBi, no encoder, a KV cache of the model's type")
            self.scale, self.sinks = scale, sinks
            self.window, self.softcap = sliding_window or -1, logits_soft_cap or 0.0

        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, **_):
            if attn_metadata is None:  # vLLM measures memory
                return output.zero_()
            write_rows(kv_cache, key, value, attn_metadata.slot_mapping)
            rows = attn_metadata.num_actual_tokens
            output[:rows] = attend(query[:rows], kv_cache, attn_metadata.block_table, attn_metadata.query_start_loc,
                                   attn_metadata.seq_lens, scale=self.scale, window=self.window, softcap=self.softcap,
                                   sinks=self.sinks)
            return output

    class MillraceBackend(AttentionBackend):

        @staticmethod
        def get_name():
            return "MILLRACE"

        @staticmethod
        def get_impl_cls():
            return MillraceImpl

        @staticmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, *_):
            return 2, num_blocks, block_size, num_kv_heads, head_size

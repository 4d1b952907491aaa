"""An attention backend for vLLM, out of its tree, over torch.ops.millrace.attention_paged.

vLLM gives every step as a ragged batch: query_start_loc [batch + 1], seq_lens [batch], block_table [batch, pages]. That
is what the operation takes, so a step is two calls: the new rows are put into their slots, and attention runs over the
pages. The cache of a layer is [pages, kv_heads, page_tokens, 2 * head_dim] to vLLM, a head's keys before its values; in
the layout that `MillraceBackend` asks for (LBNHC) the heads of a token lie together, and no row is copied.

`register` puts the backend in the place of vLLM's own on CPUs. In a package of its own it is an entry point,

    [project.entry-points."vllm.general_plugins"]
    millrace = "vllm_attention_backend:register"

and vLLM calls it in every process it starts. tests/python/kernels_vllm_test.py runs a Llama so, with vLLM 0.33.
`write_rows` and `attend` need torch and millrace_kernels alone (tests/python/kernels_examples_test.py).
"""

from dataclasses import dataclass

import torch

import millrace_kernels.torch as mt


def write_rows(keys, values, key, value, slots):
    """key and value [rows, kv_heads, dim] into slots (page * page_tokens + place) of pages [pages, tokens, ..]."""
    kept = slots >= 0  # vLLM pads a step with slots of -1
    slots = slots[kept]
    page, place = slots // keys.shape[1], slots % keys.shape[1]
    keys[page, place] = key[kept]
    values[page, place] = value[kept]


def attend(query, keys, values, block_table, query_start_loc, seq_lens, *, scale, max_q=None, causal=True, window=-1,
           softcap=0.0, sinks=None):
    """query [rows, heads, dim] of a ragged batch -> [rows, heads, dim]; each sees its sequence up to itself.

    window: how many keys a query sees, itself among them; -1: all."""
    with torch.no_grad():
        return mt.attention_paged(query, keys, values, block_table, seq_lens, cu_q=query_start_loc, max_q=max_q,
                                  causal=causal, window=(window - 1 if window > 0 else -1, -1), scale=scale,
                                  softcap=softcap, sinks=sinks)


def register():
    """Makes vLLM's CPU platform take MillraceBackend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.MillraceBackend")


try:
    from vllm.v1.attention.backend import (AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder,
                                           MultipleOf)
    from vllm.v1.kv_cache_interface import KVCacheLayout
except ImportError:
    AttentionBackend = None

if AttentionBackend is not None:

    @dataclass
    class MillraceMetadata(AttentionMetadata):
        """What the layers of a step share."""
        rows: int
        max_q: int
        query_start_loc: torch.Tensor
        seq_lens: torch.Tensor
        block_table: torch.Tensor
        slot_mapping: torch.Tensor
        causal: bool

    class MillraceMetadataBuilder(AttentionMetadataBuilder[MillraceMetadata]):

        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common = common_attn_metadata
            if not isinstance(common.causal, bool):
                raise NotImplementedError("millrace: a batch is causal as a whole, or not at all")
            return MillraceMetadata(common.num_actual_tokens, common.max_query_len, common.query_start_loc,
                                    common.seq_lens, common.block_table_tensor, common.slot_mapping, common.causal)

    class MillraceImpl(AttentionImpl[MillraceMetadata]):

        def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
                     kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder",
                     kv_sharing_target_layer_name=None, sinks=None):
            if alibi_slopes is not None or attn_type != "decoder":
                raise NotImplementedError("millrace: no ALiBi, and decoders alone")
            self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
            self.num_kv_heads = num_kv_heads or num_heads
            self.kv_cache_dtype = kv_cache_dtype
            self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
            self.sinks = sinks
            self.window, self.softcap = sliding_window or -1, logits_soft_cap or 0.0

        def pages(self, kv_cache):
            """Views [pages, page_tokens, kv_heads, dim] of the keys and of the values."""
            by_token = kv_cache.transpose(1, 2)
            return by_token[..., :self.head_size], by_token[..., self.head_size:]

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            rows = slot_mapping.shape[0]
            write_rows(*self.pages(kv_cache), key[:rows], value[:rows], slot_mapping)

        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                    output_block_scale=None):
            if output_scale is not None or output_block_scale is not None:
                raise NotImplementedError("millrace: attention's result is not quantized")
            if attn_metadata is None:  # vLLM measures memory
                return output.zero_()
            m = attn_metadata
            output[:m.rows] = attend(query[:m.rows], *self.pages(kv_cache), m.block_table, m.query_start_loc,
                                     m.seq_lens, scale=self.scale, max_q=m.max_q, causal=m.causal, window=self.window,
                                     softcap=self.softcap, sinks=self.sinks)
            return output

    class MillraceBackend(AttentionBackend):
        supported_dtypes = [torch.float32, torch.float16, torch.bfloat16]
        supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]
        forward_includes_kv_cache_update = False  # vLLM calls do_kv_cache_update first

        @staticmethod
        def get_name():
            return "CPU_ATTN"  # whose place it takes: vLLM looks the name up in its registry

        @staticmethod
        def get_impl_cls():
            return MillraceImpl

        @staticmethod
        def get_builder_cls():
            return MillraceMetadataBuilder

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec=None):
            return [MultipleOf(16)]

        @classmethod
        def supports_head_size(cls, head_size):
            return head_size % 8 == 0 and head_size <= 256

        @classmethod
        def supported_kv_cache_layouts(cls):
            return (KVCacheLayout.LBNHC,)

        @classmethod
        def supports_sink(cls):
            return True

        @classmethod
        def supports_sliding_window(cls):
            return True

        @classmethod
        def supports_non_causal(cls):
            return True

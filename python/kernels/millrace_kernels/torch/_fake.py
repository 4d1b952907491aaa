"""Fake kernels: what an operation gives for tensors without data, so that it can be traced and compiled."""

import torch

BLOCKS = {  # elements and bytes of a block (millrace/kernels/device.h)
    "q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q4_k": (256, 144),
    "q5_k": (256, 176), "q6_k": (256, 210), "mxfp4": (32, 17), "mxfp4_split": (32, 16), "q4_z": (32, 18),
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2)
}


def fake(name):
    return torch.library.register_fake(f"millrace::{name}")


def lse_of(q):
    if q.dim() == 3:
        return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def packed(x, dtype=None):
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def per_row(x):
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@fake("attention")
def _(q, k, v, sinks=None, cu_q=None, cu_k=None, max_q=0, max_k=0, block_starts=None, block_columns=None, block_q=0,
      block_k=0, scale=0.0, softcap=0.0, window_left=-1, window_right=-1):
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse_of(q)


@fake("attention_plain")
def _(q, k, v, sinks=None, cu_q=None, cu_k=None, max_q=0, max_k=0, block_starts=None, block_columns=None, block_q=0,
      block_k=0, scale=0.0, softcap=0.0, window_left=-1, window_right=-1):
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@fake("attention_dense")
def _(q, k, v, sinks=None, heads_first=False, causal=False, scale=0.0, softcap=0.0, window_left=-1, window_right=-1):
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@fake("attention_dense_lse")
def _(q, k, v, sinks=None, heads_first=False, causal=False, scale=0.0, softcap=0.0, window_left=-1, window_right=-1):
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse_of(q.transpose(1, 2) if heads_first else q)


@fake("attention_backward")
def _(d_out, q, k, v, out, lse, sinks=None, cu_q=None, cu_k=None, max_q=0, max_k=0, block_starts=None,
      block_columns=None, block_q=0, block_k=0, scale=0.0, softcap=0.0, window_left=-1, window_right=-1,
      deterministic=True):
    heads = 0 if sinks is None else q.shape[-2]
    return packed(q), packed(k), packed(v), q.new_empty((heads,), dtype=torch.float32)


@fake("attention_fp8")
def _(q, k, v, q_scales, k_scales, v_scales, sinks=None, scale=0.0, softcap=0.0, window_left=-1, window_right=-1):
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16), lse_of(q)


@fake("attention_quantize")
def _(x, rows_per_scale, rotate=False):
    batch, seq, heads, _ = x.shape
    shape = (batch, seq, heads) if rows_per_scale == 1 else (batch, heads, (seq + 127) // 128)
    return packed(x, torch.float8_e4m3fn), x.new_empty(shape, dtype=torch.float32)


@fake("attention_paged")
def _(q, k_pages, v_pages, page_table, k_lengths, sinks=None, cu_q=None, max_q=0, scale=0.0, softcap=0.0,
      window_left=-1, window_right=-1):
    return q.new_empty((*q.shape[:-1], v_pages.shape[-1])), lse_of(q)


@fake("attention_paged_plain")
def _(q, k_pages, v_pages, page_table, k_lengths, sinks=None, cu_q=None, max_q=0, scale=0.0, softcap=0.0,
      window_left=-1, window_right=-1):
    return q.new_empty((*q.shape[:-1], v_pages.shape[-1]))


@fake("norm_plain")
def _(x, weight=None, bias=None, eps=1e-6, weight_offset=0.0, layer=False):
    return packed(x)


@fake("add_norm_plain")
def _(x, residual, weight=None, bias=None, layer=False, eps=1e-6, weight_offset=0.0):
    return packed(x), packed(residual)


@fake("rms_norm")
def _(x, weight=None, eps=1e-6, weight_offset=0.0):
    return packed(x), per_row(x)


@fake("layer_norm")
def _(x, weight=None, bias=None, eps=1e-5):
    return packed(x), per_row(x), per_row(x)


@fake("add_rms_norm")
def _(x, residual, weight=None, eps=1e-6, weight_offset=0.0):
    return packed(x), packed(residual), per_row(x)


@fake("add_layer_norm")
def _(x, residual, weight=None, bias=None, eps=1e-5):
    return packed(x), packed(residual), per_row(x), per_row(x)


@fake("norm_backward")
def _(dy, x, weight, mean, rstd, dsum=None, weight_offset=0.0, want_weight=False, want_bias=False):
    cols = x.shape[-1]
    return (packed(x), x.new_empty((cols if want_weight else 0,), dtype=torch.float32),
            x.new_empty((cols if want_bias else 0,), dtype=torch.float32))


@fake("rotary")
def _(x, positions, inv_freq, magnitude=1.0, interleaved=False, inverse=False):
    return packed(x)


@fake("activation")
def _(x, kind):
    return packed(x)


@fake("activation_backward")
def _(dy, x, kind):
    return packed(x)


@fake("gated_activation")
def _(gate, up, kind, alpha=1.702, limit=7.0):
    return packed(gate)


@fake("gated_activation_backward")
def _(dy, gate, up, kind, alpha=1.702, limit=7.0):
    return packed(gate), packed(up)


@fake("softmax")
def _(x, scale=1.0):
    return packed(x)


@fake("softmax_backward")
def _(dy, y, scale=1.0):
    return packed(y)


@fake("dropout")
def _(x, p, seed):
    return packed(x)


def loss_of(x, reduction):
    return per_row(x) if reduction == 0 else x.new_empty((), dtype=torch.float32)


@fake("cross_entropy")
def _(logits, targets, ignore_index=-100, reduction=0):
    return loss_of(logits, reduction), per_row(logits)


@fake("cross_entropy_backward")
def _(dloss, logits, targets, lse, ignore_index=-100, reduction=0):
    return packed(logits)


@fake("linear_cross_entropy")
def _(hidden, weight, targets, ignore_index=-100, reduction=0):
    return loss_of(hidden, reduction), per_row(hidden)


@fake("linear_cross_entropy_backward")
def _(dloss, hidden, weight, targets, lse, ignore_index=-100, want_hidden=True, want_weight=True, reduction=0):
    return (packed(hidden) if want_hidden else hidden.new_empty((0,)),
            packed(weight) if want_weight else weight.new_empty((0,)))


@fake("embedding")
def _(tokens, table, scale=1.0):
    return table.new_empty((*tokens.shape, table.shape[1]))


@fake("embedding_backward")
def _(dy, tokens, vocab, scale=1.0):
    return dy.new_empty((vocab, dy.shape[-1]))


@fake("linear")
def _(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@fake("matmul")
def _(a, b, transpose_a=False, transpose_b=False):
    return a.new_empty((a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1]))


OUT_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@fake("matmul_fp8")
def _(a, b, a_scales, b_scales, transpose_a=False, transpose_b=False, a_scale_rows=1, a_scale_cols=128,
      b_scale_rows=128, b_scale_cols=128, out_type="f32"):
    shape = (a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1])
    return a.new_empty(shape, dtype=OUT_TYPES[out_type])


@fake("quantize")
def _(w, type, importance=None):
    elements, size = BLOCKS[type]
    return w.new_empty((*w.shape[:-1], w.shape[-1] // elements * size), dtype=torch.uint8)


@fake("dequantize")
def _(weight, type, scales=None, scale_rows=128, scale_cols=128):
    cols = weight.shape[-1]
    if weight.dtype == torch.uint8:
        elements, size = BLOCKS[type]
        cols = cols // size * elements
    return weight.new_empty((*weight.shape[:-1], cols), dtype=torch.float32)


@fake("linear_quantized")
def _(x, weight, type, scales=None, bias=None, scale_rows=128, scale_cols=128):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@fake("weight_pack")
def _(weight, like, type, scales=None):
    return like.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.uint8)  # as the device packs it


@fake("linear_packed")
def _(x, packed, type, rows, cols, bias=None):
    return x.new_empty((*x.shape[:-1], rows))


@fake("experts_packed")
def _(x, chosen, weights, gate, up, down, type, count, ffn, gate_bias=None, up_bias=None, down_bias=None,
      activation="swiglu", alpha=1.702, limit=7.0):
    return packed(x)


LOWBIT_GROUPS = {"mxfp4": 32, "nvfp4": 16, "int4_32": 32, "int4_128": 128}
# Bytes of 64 rows x 128 columns (kernels/quant/lowbit_units.h).
LOWBIT_UNITS = {"mxfp4": 4352, "nvfp4": 4608, "int4_32": 4864, "int4_128": 4288}


@fake("lowbit_repack")
def _(codes, scales, zeros, format, packing, n, k):
    return codes.new_empty((-(-n // 64) * -(-k // 128) * LOWBIT_UNITS[format],), dtype=torch.uint8)


@fake("lowbit_linear")
def _(x, weight, format, n, k, scale=1.0, bias=None, backward=False):
    return x.new_empty((*x.shape[:-1], k if backward else n))


@fake("route")
def _(scores, k, softmax_all=False):
    shape = (scores.shape[0], k)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int32)


@fake("experts")
def _(x, chosen, weights, gate, up, down, gate_bias=None, up_bias=None, down_bias=None, type="", activation="swiglu",
      alpha=1.702, limit=7.0):
    return packed(x)


@fake("sample")
def _(logits, uniform, temperature, top_k, top_p, min_p):
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)


@fake("sample_alike")
def _(logits, uniform, temperature, top_k, top_p, min_p):
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)

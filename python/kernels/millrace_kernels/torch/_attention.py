"""Attention with every mask of the library, and torch's scaled_dot_product_attention over it."""

import warnings

import torch
import torch.nn.functional as F

from ._functional import _int32, default_scale, entry, is_compiling, is_grad_enabled, watched

ops = torch.ops.millrace
_attention, _attention_paged = entry("attention", (0, 1, 2, 3)), entry("attention_paged", ())
_dense_lse = entry("attention_dense_lse", (0, 1, 2))
_dense = getattr(ops.attention_dense.default, "_op", ops.attention_dense.default)  # without a gradient

DIM_STEP = 8  # head sizes of the library
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_fallback = "warn"


def set_fallback(how):
    """What scaled_dot_product_attention does where the library has no kernel (arbitrary masks, dropout): "warn" takes
    torch's own and says so once per reason, "error" raises, "silent" takes torch's."""
    global _fallback
    if how not in ("warn", "error", "silent"):
        raise ValueError(f'how is "{how}", expected "warn", "error" or "silent"')
    _fallback = how


def _padded(x):
    missing = -x.shape[-1] % DIM_STEP
    return F.pad(x, (0, missing)) if missing else x


def _is_plain(q, k, v):
    """No gradient is wanted, and nobody looks on: autocast has a kernel of its own for attention_dense."""
    if watched():
        return False
    return not (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))


def attention(q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, sinks=None, cu_q=None, cu_k=None,
              max_q=None, max_k=None, blocks=None, return_lse=False):
    """softmax(scale * q k^T) v over [batch, seq, heads, dim], any strides; heads may be a multiple of k's and v's.

    causal: query i sees keys j <= i + k_len - q_len. window (left, right): keys from position - left to position +
    right; a negative side is open. softcap: scores become softcap * tanh(score / softcap). sinks [heads]: a logit in
    every softmax that has no value. cu_q, cu_k int32 [batch + 1]: ragged rows [rows, heads, dim], with max_q and max_k
    the longest. blocks: (row_starts, columns, block_q, block_k), block-sparse as millrace/kernels/flash_attention.h has
    it. return_lse: also the log-sum-exp, float32 [batch, heads, seq].
    """
    if (cu_q is None) != (cu_k is None):
        raise ValueError("ragged rows: found one of cu_q and cu_k, expected both")
    left, right = window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    head_dim, value_dim = q.size(-1), v.size(-1)
    scale = head_dim**-0.5 if scale is None else default_scale(scale, head_dim)
    even = not (head_dim % DIM_STEP or value_dim % DIM_STEP)
    if even and sinks is None and cu_q is None and blocks is None:
        if not return_lse and _is_plain(q, k, v):
            return _dense(q, k, v, scale, softcap, left, right, False)
        made = _dense_lse(q, k, v, scale, softcap, left, right, False)
        return made if return_lse else made[0]
    if cu_q is not None:
        cu_q, cu_k = _int32(cu_q, "cu_q"), _int32(cu_k, "cu_k")
        max_q = int(cu_q.diff().max()) if max_q is None and cu_q.numel() > 1 else max_q or 0
        max_k = int(cu_k.diff().max()) if max_k is None and cu_k.numel() > 1 else max_k or 0
    starts, columns, block_q, block_k = blocks if blocks is not None else (None, None, 0, 0)
    if sinks is not None:
        sinks = sinks.to(torch.float32)
    if not even:
        q, k, v = _padded(q), _padded(k), _padded(v)
    out, lse = _attention(q, k, v, sinks, cu_q, cu_k, max_q or 0, max_k or 0, starts, columns, block_q, block_k, scale,
                          softcap, left, right)
    if not even:
        out = out[..., :value_dim]
    return (out, lse) if return_lse else out


def attention_paged(q, k_pages, v_pages, page_table, k_lengths, *, causal=True, window=(-1, -1), scale=None,
                    softcap=0.0, sinks=None, cu_q=None, max_q=None, return_lse=False):
    """Queries [batch, seq, heads, dim] (or ragged) against keys in pages [pages, page_tokens, kv_heads, dim].

    page_table int32 [batch, pages of the longest], k_lengths int32 [batch]; page_tokens is a multiple of 16. No
    gradient.
    """
    left, right = window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if cu_q is not None and max_q is None:
        max_q = int(cu_q.diff().max()) if cu_q.numel() > 1 else 0
    out, lse = _attention_paged(q, k_pages, v_pages, _int32(page_table, "page_table"), _int32(k_lengths, "k_lengths"),
                                None if sinks is None else sinks.to(torch.float32),
                                None if cu_q is None else _int32(cu_q, "cu_q"), max_q or 0,
                                default_scale(scale, q.shape[-1]), softcap, left, right)
    return (out, lse) if return_lse else out


_warned = set()


def _torch_instead(why, *args, **named):
    if _fallback == "error":
        raise NotImplementedError(f"millrace: scaled_dot_product_attention has no kernel for {why}")
    if _fallback == "warn" and not is_compiling() and why not in _warned:
        _warned.add(why)
        warnings.warn(f"millrace: scaled_dot_product_attention has no kernel for {why}: torch's own runs instead",
                      stacklevel=3)
    return F.scaled_dot_product_attention(*args, **named)


def _top_left_causal(q, k, v, scale):
    """torch's is_causal: query i sees keys j <= i, whatever the lengths."""
    q_len, k_len = q.shape[1], k.shape[1]
    if q_len == k_len:
        return attention(q, k, v, causal=True, scale=scale)
    if q_len < k_len:
        return attention(q, k[:, :q_len], v[:, :q_len], causal=True, scale=scale)
    first = attention(q[:, :k_len], k, v, causal=True, scale=scale)
    return torch.cat((first, attention(q[:, k_len:], k, v, scale=scale)), 1)


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                 enable_gqa=False):
    """torch.nn.functional.scaled_dot_product_attention, by this library's kernels where it has them.

    [..., heads, seq, dim]. A mask of any pattern and dropout are torch's own business (set_fallback).
    """
    shape, k_shape, v_shape, why = query.shape, key.shape, value.shape, None
    if attn_mask is not None:
        why = "an attn_mask"
    elif dropout_p != 0.0:
        why = "dropout"
    elif query.dtype not in _TYPES:
        why = f"{query.dtype}"
    elif shape[-1] > 256 or v_shape[-1] > 256:
        why = "heads of more than 256 dimensions"
    elif len(shape) < 3 or shape[:-3] != k_shape[:-3] or k_shape[:-3] != v_shape[:-3]:
        why = "tensors without heads, or batches that broadcast"
    elif query.is_nested:
        why = "nested tensors"
    elif shape[-3] != k_shape[-3] and not enable_gqa and not k_shape[-3] == v_shape[-3] == 1:
        why = "heads that differ without enable_gqa"
    if why is not None:
        return _torch_instead(why, query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
                              scale=scale, enable_gqa=enable_gqa)
    even = not (shape[-1] % DIM_STEP or v_shape[-1] % DIM_STEP)
    if len(shape) == 4 and even and (not is_causal or shape[-2] == k_shape[-2]):
        how = default_scale(scale, shape[-1]), 0.0, -1, 0 if is_causal else -1, True
        return _dense(query, key, value, *how) if _is_plain(query, key, value) else _dense_lse(query, key, value, *how)[0]
    if len(shape) != 4:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = (_top_left_causal(q, k, v, scale) if is_causal else attention(q, k, v, scale=scale)).transpose(1, 2)
    return out if len(shape) == 4 else out.reshape(*shape[:-1], v_shape[-1])

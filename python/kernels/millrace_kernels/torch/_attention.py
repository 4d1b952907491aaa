"""Attention with every mask of the library, and torch's scaled_dot_product_attention over it."""

import warnings

import torch
import torch.nn.functional as F

from ._functional import _float32, _int32, default_scale, entry, is_compiling, quick

DIM_STEP = 8  # head sizes of the library


def _padded(x):
    missing = -x.shape[-1] % DIM_STEP
    return F.pad(x, (0, missing)) if missing else x


def _of_any_head_size(compute, scale_at):
    """compute(q, k, v, ...), whose argument at `scale_at` is the scale and 0 the usual one, for heads of any size: they
    are padded, and what it gives is cut."""

    def go(q, k, v, *more):
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        if not (head_dim % DIM_STEP or value_dim % DIM_STEP):
            return compute(q, k, v, *more)
        before, scale, behind = more[:scale_at - 3], more[scale_at - 3], more[scale_at - 2:]
        made = compute(_padded(q), _padded(k), _padded(v), *before, scale or default_scale(None, head_dim), *behind)
        return made[..., :value_dim] if isinstance(made, torch.Tensor) else (made[0][..., :value_dim], *made[1:])

    return go


_WITH_GRADIENT = (0, 1, 2, 3)  # q, k, v, sinks
# By what is given: the output alone, or the log-sum-exp as well. Heads of another size take the second way.
_DENSE_SCALE, _RAGGED_SCALE = 6, 12  # places of arguments
_dense_lse = _of_any_head_size(entry("attention_dense_lse", _WITH_GRADIENT), _DENSE_SCALE)
_dense = quick("attention_dense", _WITH_GRADIENT, None,
               _of_any_head_size(entry("attention_dense_lse", _WITH_GRADIENT, 1), _DENSE_SCALE), 3, DIM_STEP)
_ragged_lse = _of_any_head_size(entry("attention", _WITH_GRADIENT), _RAGGED_SCALE)
_ragged = quick("attention_plain", _WITH_GRADIENT, None,
                _of_any_head_size(entry("attention", _WITH_GRADIENT, 1), _RAGGED_SCALE), 3, DIM_STEP)
_paged_lse, _paged = entry("attention_paged", ()), entry("attention_paged_plain", ())

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_fallback = "warn"


def set_fallback(how):
    """What scaled_dot_product_attention does where the library has no kernel (arbitrary masks, dropout): "warn" takes
    torch's own and says so once per reason, "error" raises, "silent" takes torch's."""
    global _fallback
    if how not in ("warn", "error", "silent"):
        raise ValueError(f'how is "{how}", expected "warn", "error" or "silent"')
    _fallback = how


def attention(q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, sinks=None, cu_q=None, cu_k=None,
              max_q=None, max_k=None, blocks=None, return_lse=False):
    """softmax(scale * q k^T) v over [batch, seq, heads, dim], any strides; heads may be a multiple of k's and v's.

    causal: query i sees keys j <= i + k_len - q_len. window (left, right): keys from position - left to position +
    right; a negative side is open. softcap: scores become softcap * tanh(score / softcap). sinks [heads]: a logit in
    every softmax that has no value. cu_q, cu_k int32 [batch + 1]: ragged rows [rows, heads, dim], with max_q and max_k
    the longest. blocks: (row_starts, columns, block_q, block_k), block-sparse as millrace/kernels/flash_attention.h has
    it. return_lse: also the log-sum-exp, float32 [batch, heads, seq].
    """
    if sinks is not None:
        sinks = _float32(sinks)
    left, right = window
    scale = 0.0 if scale is None else default_scale(scale, None)
    if cu_q is None and cu_k is None and blocks is None:
        return (_dense_lse if return_lse else _dense)(q, k, v, sinks, False, causal, scale, softcap, left, right)
    if causal:
        right = 0
    if cu_q is None or cu_k is None:
        if cu_q is not cu_k:
            raise ValueError("ragged rows: found one of cu_q and cu_k, expected both")
        max_q = max_k = 0
    else:
        cu_q, cu_k = _int32(cu_q, "cu_q"), _int32(cu_k, "cu_k")
        max_q, max_k = _longest(cu_q, max_q), _longest(cu_k, max_k)
    starts, columns, block_q, block_k = blocks if blocks is not None else (None, None, 0, 0)
    return (_ragged_lse if return_lse else _ragged)(q, k, v, sinks, cu_q, cu_k, max_q, max_k, starts, columns, block_q,
                                                    block_k, scale, softcap, left, right)


def _longest(starts, told):
    """The length of the longest row; 0: the operation looks itself, where the lists lie in its memory."""
    if told is not None or starts.is_cpu:
        return told or 0
    return int(starts.diff().max()) if starts.numel() > 1 else 0


def attention_paged(q, k_pages, v_pages, page_table, k_lengths, *, causal=True, window=(-1, -1), scale=None,
                    softcap=0.0, sinks=None, cu_q=None, max_q=None, return_lse=False):
    """Queries [batch, seq, heads, dim] (or ragged) against keys in pages [pages, page_tokens, kv_heads, dim].

    page_table int32 [batch, pages of the longest], k_lengths int32 [batch]; page_tokens is a multiple of 16. No
    gradient.
    """
    left, right = window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if sinks is not None:
        sinks = _float32(sinks)
    if cu_q is None:
        max_q = 0
    else:
        cu_q = _int32(cu_q, "cu_q")
        max_q = _longest(cu_q, max_q)
    return (_paged_lse if return_lse else _paged)(q, k_pages, v_pages, _int32(page_table, "page_table"),
                                                  _int32(k_lengths, "k_lengths"), sinks, cu_q, max_q,
                                                  default_scale(scale, q.shape[-1]), softcap, left, right)


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
    if (attn_mask is None and dropout_p == 0.0 and len(shape) == len(k_shape) == len(v_shape) == 4
            and query.dtype in _TYPES and not query.is_nested):
        (batch, heads, q_len, dim), (k_batch, k_heads, k_len, _), (v_batch, v_heads, _, value_dim) = shape, k_shape, v_shape
        if (batch == k_batch == v_batch and dim <= 256 and value_dim <= 256 and (not is_causal or q_len == k_len)
                and k_heads == v_heads and (heads == k_heads or enable_gqa or k_heads == 1)):
            return _dense(query, key, value, None, True, is_causal, 0.0 if scale is None else default_scale(scale, dim),
                          0.0, -1, -1)
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
    if len(shape) != 4:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = (_top_left_causal(q, k, v, scale) if is_causal else attention(q, k, v, scale=scale)).transpose(1, 2)
    return out if len(shape) == 4 else out.reshape(*shape[:-1], v_shape[-1])

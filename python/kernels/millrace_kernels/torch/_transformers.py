"""attn_implementation="millrace" for Hugging Face transformers: dense batches, padded ones (as ragged rows), sinks,
windows and soft caps, forward and backward."""

import torch

from ._attention import attention

NAME = "millrace"


def _mask(batch_size, q_length=None, kv_length=None, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
          **_):
    """What the model hands to every layer: the padding [batch, keys], or None where nothing is padded."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise NotImplementedError(f"millrace: attention_mask has shape {list(attention_mask.shape)}, expected padding "
                                  "[batch, keys]; other masks need attn_implementation=\"sdpa\"")
    mask = attention_mask.bool()
    if kv_length is not None:
        mask = mask[:, -kv_length:] if mask.shape[1] >= kv_length else mask
    return None if bool(mask.all()) else mask


def _ragged(query, key, value, padding, options):
    """Rows that are not padding, one sequence after the other; padded queries get zeros."""
    batch, q_len = query.shape[:2]
    seen_q = padding[:, -q_len:]
    lengths_q, lengths_k = seen_q.sum(1, dtype=torch.int32), padding.sum(1, dtype=torch.int32)

    def starts(lengths):
        return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    out = attention(query[seen_q], key[padding], value[padding], cu_q=starts(lengths_q), cu_k=starts(lengths_k),
                    max_q=int(lengths_q.max()), max_k=int(lengths_k.max()), **options)
    full = out.new_zeros((batch, q_len, *out.shape[1:]))
    return full.masked_scatter(seen_q[:, :, None, None], out)


def millrace_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
                       softcap=None, s_aux=None, is_causal=None, **_):
    """[batch, heads, seq, dim] in, [batch, seq, heads, dim] and None out, as transformers wants it."""
    if dropout:
        raise NotImplementedError("millrace: attention has no dropout: set attention_dropout to 0")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    left = -1 if sliding_window is None else sliding_window - 1
    options = {"causal": causal, "window": (left, -1 if causal else left), "scale": scaling, "softcap": softcap or 0.0,
               "sinks": sinks}
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None:
        return attention(query, key, value, **options), None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != key.shape[1]:
        raise NotImplementedError(f"millrace: attention_mask has shape {list(attention_mask.shape)} for "
                                  f"{key.shape[1]} keys, expected padding [batch, keys]")
    return _ragged(query, key, value, attention_mask.bool(), options), None


def register_attention():
    """Makes attn_implementation="millrace" known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, millrace_attention)
    AttentionMaskInterface.register(NAME, _mask)

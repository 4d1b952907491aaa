"""attn_implementation="millrace" for Hugging Face transformers: dense batches, padded and packed ones (as ragged
rows), sinks, windows and soft caps, forward and backward."""

import torch

from ._attention import attention

NAME = "millrace"


# What transformers builds its masks of (transformers.masking_utils), and attention() has by itself.
_PATTERNS = ("causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
             "sliding_window_bidirectional_overlay")


def _meaning(pattern):
    """What a mask is made of: (numbers of the sequences [batch, seq] that it keeps apart or None, whether it is causal)."""
    name = getattr(pattern, "__qualname__", repr(pattern))
    maker = name.split(".")[0]
    inside = {}
    if getattr(pattern, "__closure__", None):
        inside = {n: c.cell_contents for n, c in zip(pattern.__code__.co_freevars, pattern.__closure__)}
    if maker == "packed_sequence_mask_function":
        return inside["packed_sequence_mask"], False
    if maker == "remap_positions_for_packed_sequence":
        return _meaning(inside["mask_function"])
    if maker == "and_masks":
        parts = [_meaning(part) for part in inside["mask_functions"]]
        return next((ids for ids, _ in parts if ids is not None), None), any(causal for _, causal in parts)
    if maker not in _PATTERNS:
        raise NotImplementedError(f"millrace: the mask of {name} has no kernel: expected causal or "
                                  "bidirectional attention, windows, packed sequences; others need "
                                  "attn_implementation=\"sdpa\"")
    return None, maker == "causal_mask_function"


def _mask(batch_size, q_length=None, kv_length=None, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
          device=None, config=None, local_size=None, use_vmap=False, **_):
    """What the model hands to every layer: None, the padding, bool [batch, keys], or where position_ids begin anew inside
    a row the numbers of its sequences, whole and from 1 on. A padding of fewer keys than there are: a static cache, whose
    other keys are not filled yet."""
    packed, causal = None, getattr(mask_function, "__name__", "") != "bidirectional_mask_function"
    # A compiler cannot look into a function, nor tell sequences that are packed from one that is not: it goes by what is
    # told beside, masks of the model's own and chunks.
    if torch.compiler.is_compiling():
        if use_vmap or local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
            raise NotImplementedError("millrace: masks other than causal or bidirectional attention, windows and packed "
                                      "sequences have no kernel: they need attn_implementation=\"sdpa\"")
    elif mask_function is not None:
        packed, causal = _meaning(mask_function)
    filled = kv_length
    if causal and kv_length is not None and q_length is not None:
        so_far = int(q_offset) + q_length  # a static cache gives a tensor
        filled = min(kv_length, so_far - kv_offset)
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask[:, :so_far]  # some are as long as the cache
    if attention_mask is None:
        if filled != kv_length:
            return torch.ones((batch_size, filled), dtype=torch.bool, device=device)
        return None if packed is None else packed + 1
    if attention_mask.dim() != 2:
        raise NotImplementedError(f"millrace: attention_mask has shape {list(attention_mask.shape)}, expected padding "
                                  "[batch, keys]; other masks need attn_implementation=\"sdpa\"")
    mask = attention_mask.bool()
    if filled is not None and mask.shape[1] > filled:
        mask = mask[:, -filled:]
    return None if filled == kv_length and bool(mask.all()) else mask


def _starts(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _ragged(query, key, value, padding, options):
    """Rows that are not padding, one sequence after the other; padded queries get zeros."""
    batch, q_len = query.shape[:2]
    # Positions matter to a window alone. Without, queries may be those of another text, as a decoder's of an encoder are.
    alike = options["causal"] or options["window"] != (-1, -1)
    seen_q = padding[:, -q_len:] if alike else padding.new_ones((batch, q_len))
    lengths_q, lengths_k = seen_q.sum(1, dtype=torch.int32), padding.sum(1, dtype=torch.int32)
    out = attention(query[seen_q], key[padding], value[padding], cu_q=_starts(lengths_q), cu_k=_starts(lengths_k),
                    max_q=int(lengths_q.max()), max_k=int(lengths_k.max()), **options)
    full = out.new_zeros((batch, q_len, *out.shape[1:]))
    return full.masked_scatter(seen_q[:, :, None, None], out)


def _apart(query, key, value, sequences, options):
    """Each of the sequences that share a row by itself."""
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences.diff() != 0
    at = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel()).to(torch.int32)
    longest = int(at.diff().max())
    rows = (x.flatten(0, 1) for x in (query, key, value))
    return attention(*rows, cu_q=at, cu_k=at, max_q=longest, max_k=longest, **options).unflatten(0, query.shape[:2])


def millrace_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
                       softcap=None, s_aux=None, is_causal=None, position_bias=None, cache=None, **_):
    """[batch, heads, seq, dim] in, [batch, seq, heads, dim] and None out, as transformers wants it."""
    if dropout:
        raise NotImplementedError("millrace: attention has no dropout: set attention_dropout to 0")
    if position_bias is not None or cache is not None:
        raise NotImplementedError("millrace: attention takes no position_bias and no paged cache: they need "
                                  "attn_implementation=\"sdpa\"")
    causal = is_causal
    if causal is None:  # a config may make an encoder of a decoder, whose modules do not know
        causal = getattr(module, "is_causal", True) and getattr(getattr(module, "config", None), "is_causal", True)
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    left = -1 if sliding_window is None else sliding_window - 1
    options = {"causal": causal, "window": (left, -1 if causal else left), "scale": scaling, "softcap": softcap or 0.0,
               "sinks": sinks}
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None:
        return attention(query, key, value, **options), None
    if attention_mask.dim() != 2 or attention_mask.shape[1] > key.shape[1] or attention_mask.shape[1] < query.shape[1]:
        raise NotImplementedError(f"millrace: attention_mask has shape {list(attention_mask.shape)} for "
                                  f"{key.shape[1]} keys, expected padding [batch, keys]")
    if attention_mask.shape[1] < key.shape[1]:  # a static cache
        key, value = (x[:, :attention_mask.shape[1]] for x in (key, value))
        if attention_mask.dtype == torch.bool and bool(attention_mask.all()):
            return attention(query, key, value, **options), None
    layout = _ragged if attention_mask.dtype == torch.bool else _apart
    return layout(query, key, value, attention_mask, options), None


def register_attention():
    """Makes attn_implementation="millrace" known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, millrace_attention)
    AttentionMaskInterface.register(NAME, _mask)

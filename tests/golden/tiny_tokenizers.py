"""Tiny but complete tokenizers: 256 bytes, a few merges and the specials of each family.

Each is a dict: kind (bpe | spm), tokens, types (GGUF numbers), merges, scores, pre (GGUF name), specials,
bos/eos, the text of tokenizer.json and tokenizer_config.json, and a small chat template.
"""

import json

O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

FAMILIES = {
    # pre, regex, normalizer, specials, bos, eos
    "gpt-oss": ("gpt-4o", O200K, None, ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|end|>",
                                        "<|message|>", "<|channel|>", "<|call|>"], None, "<|return|>"),
    "llama3": ("llama-bpe", LLAMA3, None, ["<|begin_of_text|>", "<|end_of_text|>", "<|start|>", "<|end|>", "<|message|>"],
               "<|begin_of_text|>", "<|end_of_text|>"),
    "qwen2": ("qwen2", QWEN2, {"type": "NFC"}, ["<|endoftext|>", "<|start|>", "<|end|>", "<|message|>"], None, "<|end|>"),
    "gpt2": ("gpt-2", GPT2, None, ["<|start|>", "<|end|>", "<|message|>", "<|endoftext|>"], None, "<|endoftext|>"),
}
MERGES = ["Ġ t", "h e", "Ġt he", "Ġ a", "i n", "Ġ Ġ", "e r", "w a", "wa t", "wat er", "m i", "Ġ mi"]
BPE_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)
SPM_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
TEXTS = ["the water in the mill", "Hello,  world!\n12345 ünïcödé 水", "a<|end|>b the"]


def byte_alphabet():
    """GPT-2's printable stand-in for each byte."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for b in range(256):
        if b in keep:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return [table[b] for b in range(256)]


def added(token, index):
    return {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}


def byte_bpe(family):
    pre, regex, normalizer, specials, bos, eos = FAMILIES[family]
    tokens = byte_alphabet() + [m.replace(" ", "") for m in MERGES]
    first_special = len(tokens)
    tokens += specials
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    post = byte_level
    if bos:
        single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = single + [{"Sequence": {"id": "B", "type_id": 1}}]
        post = {"type": "TemplateProcessing", "single": single, "pair": pair,
                "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}}}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(t, first_special + i) for i, t in enumerate(specials)],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": post, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": family != "qwen2",
                  "vocab": {t: i for i, t in enumerate(tokens[:first_special])},
                  "merges": [m.split(" ") for m in MERGES]},
    }
    types = [1] * first_special + [3] * len(specials)
    return finish(dict(kind="bpe", tokens=tokens, types=types, merges=MERGES, scores=None, pre=pre, bos=bos, eos=eos,
                       add_bos=bos is not None, template=BPE_TEMPLATE, json=tokenizer))


def sentencepiece():
    """Llama 2's shape: <unk> <s> </s>, 256 byte tokens, pieces with scores; Hugging Face writes it as BPE."""
    merges = ["▁ t", "h e", "▁t he", "▁ a", "i n", "e r", "▁ m", "l l"]
    letters = ["▁", "e", "t", "a", "i", "n", "o", "h", "r", "l", "m", "w"]
    pieces = [m.replace(" ", "") for m in merges]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + pieces + letters
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(letters))]
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(t, i) for i, t in enumerate(tokens[:3])],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": single,
                           "pair": single + [{"Sequence": {"id": "B", "type_id": 1}}],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": {t: i for i, t in enumerate(tokens)}, "merges": [m.split(" ") for m in merges]},
    }
    return finish(dict(kind="spm", tokens=tokens, types=types, merges=None, scores=scores, pre="default", bos="<s>",
                       eos="</s>", add_bos=True, template=SPM_TEMPLATE, json=tokenizer))


def finish(t):
    import tokenizers

    t["tokenizer_json"] = json.dumps(t.pop("json"), ensure_ascii=False, separators=(",", ":")) + "\n"
    special = [tok for tok, kind in zip(t["tokens"], t["types"]) if kind == 3]
    t["config"] = {
        "added_tokens_decoder": {str(t["tokens"].index(s)): {k: v for k, v in added(s, 0).items() if k != "id"}
                                 for s in special},
        "bos_token": t["bos"], "eos_token": t["eos"], "clean_up_tokenization_spaces": False,
        "tokenizer_class": "LlamaTokenizer" if t["kind"] == "spm" else "PreTrainedTokenizerFast",
    }
    if t["kind"] == "spm":
        t["config"].update(add_bos_token=True, add_eos_token=False, legacy=True, unk_token="<unk>")
    encoder = tokenizers.Tokenizer.from_str(t["tokenizer_json"])
    t["texts"] = [{"text": s, "tokens": encoder.encode(s).ids} for s in TEXTS]
    return t


def make(family):
    return sentencepiece() if family == "spm" else byte_bpe(family)

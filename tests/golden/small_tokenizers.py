"""Tokenizers of a few dozen tokens that use what the large ones leave out: stripping and whole-word added tokens,
normalized added tokens, Metaspace, unknown tokens, a prefix space. The files are also the seeds of the fuzzer."""

import json


def byte_characters():
    """GPT-2's printable character of each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(moved)) for b in range(256)]


def added(token_id, content, **flags):
    base = {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}
    return {**base, **flags}


def bpe(tokens, merges, merges_as_text=False, **options):
    vocab = {}
    for token in [*tokens, *("".join(m) for m in merges)]:
        vocab.setdefault(token, len(vocab))
    base = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {**base, **options, "vocab": vocab, "merges": [" ".join(m) if merges_as_text else list(m) for m in merges]}


def tokenizer(model, **parts):
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None}
    return {**base, **parts, "model": model}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("Ġwor", "l"),
          ("Ġworl", "d"), ("Ġ", "Ġ"), ("Ã", "©"), ("1", "2"), ("a", "a"), ("aa", "aa")]
MARK_MERGES = [("▁", "h"), ("e", "l"), ("▁h", "el"), ("▁hel", "l"), ("▁hell", "o"), ("▁", "▁"), ("l", "o"), ("▁", "w"),
               ("a", "a"), ("aa", "a"), ("a", "aa")]
MARK_LETTERS = ["▁", *"helowrdab.,<>|/s"]
BYTE_TOKENS = [f"<0x{b:02X}>" for b in range(256)]
MARK_DECODER = {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}


def template(token, token_id, before=True):
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [special, text] if before else [text, special]
    pair = [text, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair,
            "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}}}


def small_tokenizers():
    """name -> the tokenizer.json as an object."""
    characters = byte_characters()
    size = 256 + len(MERGES)
    flags = [added(size, "<a>"), added(size + 1, "<lstrip>", lstrip=True), added(size + 2, "<rstrip>", rstrip=True),
             added(size + 3, "<both>", lstrip=True, rstrip=True), added(size + 4, "word", single_word=True),
             added(size + 5, "<a><b>", special=False), added(size + 6, "\u0438\u0306\u0436", normalized=True, special=False),
             added(size + 7, "two words", special=False)]
    out = {
        "added": tokenizer(bpe(characters, MERGES), added_tokens=flags, normalizer={"type": "NFC"},
                           pre_tokenizer=BYTE_LEVEL, decoder=BYTE_LEVEL, post_processor=template("<a>", size, False)),
        "digits": tokenizer(bpe(characters, MERGES, merges_as_text=True),
                            pre_tokenizer={"type": "Sequence", "pretokenizers": [
                                {"type": "Digits", "individual_digits": False}, BYTE_LEVEL]}, decoder=BYTE_LEVEL),
        "prefix_space": tokenizer(bpe(characters, MERGES, ignore_merges=True), decoder=BYTE_LEVEL,
                                  pre_tokenizer={**BYTE_LEVEL, "add_prefix_space": True}, added_tokens=[added(size, "<a>")]),
        # Half of the bytes are missing: they are dropped, or unknown.
        "few_bytes": tokenizer(bpe(characters[40:140] + ["Ġ"], [("h", "e"), ("e", "l")]), pre_tokenizer=BYTE_LEVEL,
                               decoder=BYTE_LEVEL),
        "unknown_bytes": tokenizer(bpe(["<unk>", *characters[40:140], "Ġ"], [("h", "e")], unk_token="<unk>", fuse_unk=True),
                                   pre_tokenizer=BYTE_LEVEL, decoder=BYTE_LEVEL),
    }
    pieces = ["<unk>", "<s>", *BYTE_TOKENS, *MARK_LETTERS]
    specials = [added(0, "<unk>"), added(1, "<s>")]
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, marks]}
    fallback = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    whole = added(len(bpe(pieces, MARK_MERGES)["vocab"]), "two words", normalized=True, special=False)
    out["llama"] = tokenizer(bpe(pieces, MARK_MERGES, **fallback), normalizer=prepend, added_tokens=[*specials, whole],
                             decoder=MARK_DECODER, post_processor=template("<s>", 1))
    # A token with a space inside: the text cannot be cut at spaces.
    out["llama_inner_space"] = tokenizer(bpe(pieces, [*MARK_MERGES, ("o", "▁w")], **fallback), normalizer=prepend,
                                         added_tokens=specials, decoder=MARK_DECODER)
    out["llama_no_bytes"] = tokenizer(bpe(["<unk>", "<s>", *MARK_LETTERS], MARK_MERGES, unk_token="<unk>", fuse_unk=True),
                                      normalizer=prepend, added_tokens=specials, decoder=MARK_DECODER)
    for scheme in ("always", "first", "never"):
        metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": scheme == "always"}
        decoder = MARK_DECODER if scheme == "never" else metaspace
        out[f"metaspace_{scheme}"] = tokenizer(bpe(pieces, MARK_MERGES, **fallback), pre_tokenizer=metaspace,
                                               added_tokens=specials, decoder=decoder)
    # Gemma's: no space before the text, and a Split at spaces that are no more.
    out["gemma"] = tokenizer(bpe(pieces, MARK_MERGES, **fallback), normalizer=marks, added_tokens=specials,
                             pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                                            "invert": False},
                             decoder={"type": "Sequence", "decoders": MARK_DECODER["decoders"][:3]},
                             post_processor=template("<s>", 1))
    for cased in (False, True):
        out["wordpiece_cased" if cased else "wordpiece"] = wordpiece(cased)
    return out


def wordpiece(cased):
    """BERT's: words of letters, pieces behind ##, one class of accents and Chinese characters."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "he", "wor", "##ld", "##llo", "##ds", "##d", "word", "two",
              *"abcdehlorstw_.,<>/|1", *("##" + c for c in "abcdehlorstw1"), "\u4e2d", "\u00e9", "\u0438", "##\u0306", "##\u0436",
              "##\u00e9", "E", "##t", "W", "##W"]
    vocab = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 12,
             "vocab": vocab}
    return tokenizer(model, added_tokens=[added(i, tokens[i], lstrip=tokens[i] == "[MASK]") for i in range(5)],
                     normalizer={"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                                 "strip_accents": None, "lowercase": not cased},
                     pre_tokenizer={"type": "BertPreTokenizer"},
                     post_processor={"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
                     decoder={"type": "WordPiece", "prefix": "##", "cleanup": not cased})


WORDS = ["hello", "world", "he", "word", "words", "aword", "é", "e\u0301", "\u0438\u0306\u0436", "\u0439\u0436", "été", "two words", "1212", "aaaaaaa",
         "<a>", "<a><b>", "<a", "<lstrip>", "<rstrip>", "<both>", "<s>", "<unk>", "</s>", "▁", "<0x41>", "中", "🙂", "_", "."]
# Of these small_texts draws for the tokenizers of BERT, which came later.
BERT_WORDS = [*WORDS, "[MASK]", "[CLS]", "\u00c9t\u00c9", "WORLD", "don't", "a,b", "\u4e2d\u4e2da", "\u0130", "a\u200db", "\ufffd", "hellohellohello"]
GAPS = ["", " ", "  ", "\n", "\t", "\u3000", "    "]


def small_texts(rng, count, words=WORDS):
    texts = ["", " ", "hello", " hello", "hello world"]
    while len(texts) < count:
        texts.append("".join(rng.choice(words) + rng.choice(GAPS) for _ in range(rng.randint(1, 7))))
    return texts


def dump(data):
    return json.dumps(data, ensure_ascii=True, separators=(",", ":")) + "\n"

#!/usr/bin/env python3
"""Compares Millrace's tokenizers with the real ones and keeps a few hundred cases of each as fixtures.

  tests/golden/make_tokenizer_golden.py [--count 10000] [--keep 300] [--all build/tokenizer_cases] [NAME...]

Oracles: Hugging Face tokenizers for tokenizer.json (SmolLM2's is put together from its GGUF vocabulary), tiktoken for
o200k (also for bytes that are no UTF-8), sentencepiece for Llama 2. Writes every case to --all, the kept ones to
tests/golden/tokenizers/NAME.json and word boundaries to tests/golden/tokenizers/splits.json. Then
  MILLRACE_TOKENIZER_CASES=build/tokenizer_cases build/dev/src/tokenizer/tokenizer_test --gtest_filter='*Golden*'
counts the equal and the different ones. Vocabularies come from tools/fetch_tokenizers.py. Needs the PyPI packages
tokenizers 0.23.3, tiktoken 0.14.0, sentencepiece 0.2.2, mistral-common 1.13.0 and protobuf.
"""

import argparse
import base64
import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "golden")]

import fetch_tokenizers  # noqa: E402
import small_tokenizers  # noqa: E402
from tokenizer_strings import Strings, broken_utf8  # noqa: E402

SEEDS = ROOT / "tests" / "fuzz" / "corpus" / "tokenizer_json"
FIXTURES = ROOT / "tests" / "golden" / "tokenizers"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTIONS + "?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTIONS + "?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])

TEKKEN = O200K.replace(CONTRACTIONS + "?", "").replace(r"\p{N}{1,3}", r"\p{N}")
# As the published tokenization_kimi.py has it.
KIMI = (r"[\p{Han}]+|" + O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*"))
DEEPSEEK3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
             r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# The letters that DeepSeek LLM's published expression lists.
CASED = ("A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
         "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-"
         "ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃")


def cl100k(digits):
    return (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits +
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


class HuggingFace:
    def __init__(self, tokenizer, vocabulary):
        import tokenizers
        self.name, self.tokenizer = vocabulary, tokenizer
        self.oracle = f"tokenizers {tokenizers.__version__}"
        added = tokenizer.get_added_tokens_decoder()
        self.specials = [t.content for t in added.values()][:24]
        self.tokens = [t for t in (tokenizer.decode([i]) for i in range(0, tokenizer.get_vocab_size(), 7))
                       if t and "\ufffd" not in t]

    def case(self, text, add_special, parse_special):
        self.tokenizer.encode_special_tokens = not parse_special
        ids = self.tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids, self.tokenizer.decode(ids, skip_special_tokens=False)

    bytes_case = None


def hugging_face(name):
    from tokenizers import Tokenizer
    return HuggingFace(Tokenizer.from_file(str(fetch_tokenizers.have(name) / "tokenizer.json")), name)


def smollm2():
    """Put together from the GGUF file, whose pre-tokenizer "smollm" is digits one by one, then GPT-2's expression; the
    published tokenizer.json is in no package we know of, so this reading of "smollm" is not checked against it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    data = json.loads((fetch_tokenizers.have("smollm2") / "gguf_vocab.json").read_text())
    vocab = {token: i for i, token in enumerate(data["tokens"])}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(m.split(" ")) for m in data["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True)
                                  for t, kind in zip(data["tokens"], data["token_type"]) if kind == 3])
    return HuggingFace(tokenizer, "smollm2")


class TikToken:
    """o200k with gpt-oss's special tokens."""
    name = "gpt-oss"

    def __init__(self):
        import tiktoken
        self.oracle = f"tiktoken {tiktoken.__version__}"
        lines = (fetch_tokenizers.have("o200k") / "o200k_base.tiktoken").read_bytes().split(b"\n")
        ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in lines if line)}
        added = json.loads((fetch_tokenizers.have("gpt-oss") / "tokenizer.json").read_text())["added_tokens"]
        self.encoding = tiktoken.Encoding("o200k", pat_str=O200K, mergeable_ranks=ranks,
                                          special_tokens={t["content"]: t["id"] for t in added})
        self.specials = [t["content"] for t in added]
        self.tokens = [t.decode() for t in list(ranks)[::7] if b"\xef\xbf\xbd" not in t and decodes(t)]

    def case(self, text, _, parse_special):
        ids = (self.encoding.encode(text, allowed_special="all") if parse_special
               else self.encoding.encode(text, disallowed_special=()))
        return ids, self.encoding.decode(ids)

    def bytes_case(self, data):
        return self.encoding._encode_bytes(data)


def decodes(data):
    try:
        data.decode()
        return True
    except UnicodeDecodeError:
        return False


class SentencePiece:
    """Llama 2's model from its GGUF vocabulary. A special token in the text is cut out here, as a model file has it:
    the library itself takes every text literally."""
    name = "llama2"

    def __init__(self):
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2 as proto
        self.oracle = f"sentencepiece {sentencepiece.__version__}"
        data = json.loads((fetch_tokenizers.have("llama2") / "gguf_vocab.json").read_text())
        model = proto.ModelProto()
        for token, score, kind in zip(data["tokens"], data["scores"], data["token_type"]):
            model.pieces.add(piece=token, score=score, type=kind)
        model.trainer_spec.model_type = proto.TrainerSpec.BPE
        model.trainer_spec.byte_fallback = True
        model.trainer_spec.vocab_size = len(data["tokens"])
        model.normalizer_spec.name = "identity"
        model.normalizer_spec.add_dummy_prefix = True
        model.normalizer_spec.remove_extra_whitespaces = False
        model.normalizer_spec.escape_whitespaces = True
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        self.special_ids = {t: i for i, (t, kind) in enumerate(zip(data["tokens"], data["token_type"])) if kind in (2, 3)}
        self.specials = list(self.special_ids)
        self.tokens = [t.replace("▁", " ") for t in data["tokens"][259::7]]

    def case(self, text, add_special, parse_special):
        import re
        parts = re.split("(" + "|".join(map(re.escape, self.specials)) + ")", text) if parse_special else [text]
        ids = [1] if add_special else []
        for part in parts:
            ids += [self.special_ids[part]] if parse_special and part in self.special_ids else self.processor.encode(part)
        plain = not add_special and len(parts) == 1
        return ids, text if plain and self.processor.decode(ids) == text else None

    bytes_case = None


class Tekken:
    """mistral-common on its own tekken.json; special tokens in the text are cut out here, as a model file has it."""
    name = "tekken-json"

    def __init__(self):
        import mistral_common
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer
        self.oracle = f"mistral-common {mistral_common.__version__}"
        self.tekken = Tekkenizer.from_file(str(fetch_tokenizers.have(self.name) / "tekken.json"))
        first = [self.tekken.id_to_piece(i) for i in range(self.tekken.num_special_tokens)]
        self.special_ids = {t: i for i, t in enumerate(first)}
        self.specials = first[:24]
        self.tokens = [t for t in (self.tekken.id_to_byte_piece(i, SpecialTokenPolicy.KEEP) for i in range(2000, 131072, 7)) if decodes(t)]
        self.tokens = [t.decode() for t in self.tokens]

    def case(self, text, add_special, parse_special):
        import re
        parts = re.split("(" + "|".join(map(re.escape, self.special_ids)) + ")", text) if parse_special else [text]
        ids = [self.special_ids["<s>"]] if add_special else []
        for part in parts:
            special = parse_special and part in self.special_ids
            ids += [self.special_ids[part]] if special else self.tekken.encode(part, bos=False, eos=False)
        return ids, text if not add_special else None

    bytes_case = None


def gemma3_gguf():
    """The ids of the GGUF vocabulary are those of the published tokenizer.json, but it calls more of them control tokens:
    only texts whose special tokens are parsed are the same."""
    oracle = hugging_face("gemma3")
    oracle.parses_all = True
    oracle.name = "gemma3-gguf"
    return oracle


def minilm():
    oracle = hugging_face("minilm")
    oracle.tokenizer.no_truncation()
    oracle.tokenizer.no_padding()
    return oracle


ORACLES = {
    "gpt-oss": lambda: hugging_face("gpt-oss"), "gpt-oss-tiktoken": TikToken, "gpt2": lambda: hugging_face("gpt2"),
    "llama3": lambda: hugging_face("llama3"), "qwen3": lambda: hugging_face("qwen3"), "smollm2": smollm2,
    "mistral": lambda: hugging_face("mistral"), "llama2": SentencePiece, "gemma3": lambda: hugging_face("gemma3"),
    "gemma3-gguf": gemma3_gguf, "deepseek3": lambda: hugging_face("deepseek3"), "tekken": lambda: hugging_face("tekken"),
    "tekken-json": Tekken, "minilm": minilm,
}


def make_cases(oracle, name, count):
    strings = Strings(f"millrace {name}", oracle.specials, oracle.tokens)
    rng = strings.rng
    for i in range(count):
        text = strings.text(strings.kinds[i % len(strings.kinds)])
        if oracle.bytes_case and i % 10 == 9:
            data = broken_utf8(rng, text)
            yield {"text": {"hex": data.hex()}, "parse_special": False, "ids": oracle.bytes_case(data)}
            continue
        add_special, parse_special = rng.random() < 0.1 and not oracle.bytes_case, rng.random() >= 0.1
        parse_special = parse_special or getattr(oracle, "parses_all", False)
        ids, decoded = oracle.case(text, add_special, parse_special)
        case = {"text": text, "ids": ids}
        if add_special:
            case["add_special"] = True
        if not parse_special:
            case["parse_special"] = False
        if decoded is not None:
            case["decoded"] = 1 if decoded == text else decoded
        yield case


def write_cases(path, oracle, cases):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"oracle": oracle.oracle, "vocabulary": oracle.name})
    lines = ",\n".join(json.dumps(c, ensure_ascii=True, separators=(",", ":")) for c in cases)
    path.write_text(f'{head[:-1]}, "cases": [\n{lines}\n]}}\n', encoding="ascii")


FIRST_SPLITS = ["gpt2", "llama3", "qwen2", "o200k", "smollm", "default"]  # of splits.json; the rest: splits_more.json


def make_splits(count, chosen=lambda name: True):
    """Where the expressions cut, by Hugging Face's own pre-tokenizers: pieces as their lengths in bytes."""
    from tokenizers import Regex, pre_tokenizers as p

    def split(regex):
        return p.Split(Regex(regex), "isolated")

    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    scanners = {"gpt2": split(gpt2), "llama3": split(cl100k(r"\p{N}{1,3}")), "qwen2": split(cl100k(r"\p{N}")),
                "o200k": split(O200K), "smollm": p.Sequence([p.Digits(individual_digits=True), split(gpt2)]),
                "default": p.Sequence([split(r"[\p{P}\$\+<=>\^~\|]+"), split(gpt2), split(r"\p{N}+"),
                                       split("[0-9][0-9][0-9]")]),
                "tekken": split(TEKKEN),
                "deepseek3": p.Sequence([split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
                                         split(DEEPSEEK3)]),
                "deepseek_coder": p.Sequence([split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"),
                                              split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
                                              p.Digits(individual_digits=True)]),
                "deepseek_llm": p.Sequence([split(r"[\r\n]"), split(r"\s?[" + CASED + "]+"),
                                            split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
                                            split(r"\s+$"), split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
                                            p.Digits(individual_digits=True)]),
                "qwen35": split(cl100k(r"\p{N}").replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+")
                                .replace(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+")),
                "kimi": split(KIMI),
                "seed": split(cl100k(r"\p{N}{1}").replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")),
                "cl100k": split(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
                                r"|\s*[\r\n]|\s+(?!\S)|\s+")}
    strings = Strings("millrace splits", [], ["the", " a", "ing", "中"])
    texts = [strings.text(strings.kinds[i % len(strings.kinds)]) for i in range(count)]
    return {"texts": texts,
            "lengths": {name: [[len(piece.encode()) for piece, _ in scanner.pre_tokenize_str(text)] for text in texts]
                        for name, scanner in scanners.items() if chosen(name)}}


def make_small(count):
    """Writes the small tokenizers; the cases, by Hugging Face, are [text, add_special, parse_special, ids, decoded]."""
    from tokenizers import Tokenizer
    rng = random.Random("millrace small")
    out = {}
    SEEDS.mkdir(parents=True, exist_ok=True)
    for name, data in small_tokenizers.small_tokenizers().items():
        (SEEDS / f"{name}.json").write_text(small_tokenizers.dump(data), encoding="ascii")
        tokenizer = Tokenizer.from_str(json.dumps(data))
        out[name] = []
        words = small_tokenizers.BERT_WORDS if name.startswith("wordpiece") else small_tokenizers.WORDS
        for i, text in enumerate(small_tokenizers.small_texts(rng, count, words)):
            tokenizer.encode_special_tokens = i % 5 == 4
            ids = tokenizer.encode(text, add_special_tokens=i % 2 == 0).ids
            out[name].append([text, i % 2 == 0, i % 5 != 4, ids, tokenizer.decode(ids, skip_special_tokens=i % 3 == 0)])
    return out


def keep_some(cases, keep):
    """Evenly from all of them, without the long ones."""
    short = [c for c in cases if len(json.dumps(c)) < 420]
    return short[::max(1, len(short) // keep)][:keep]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--keep", type=int, default=300)
    parser.add_argument("--all", type=Path, default=ROOT / "build" / "tokenizer_cases")
    parser.add_argument("name", nargs="*")
    args = parser.parse_args()
    for name in args.name or ORACLES:
        oracle = ORACLES[name]()
        cases = list(make_cases(oracle, name, args.count))
        write_cases(args.all / f"{name}.json", oracle, cases)
        write_cases(FIXTURES / f"{name}.json", oracle, keep_some(cases, args.keep))
        print(f"{name}: {len(cases)} cases by {oracle.oracle}", flush=True)
    if args.name:
        return
    (FIXTURES / "small.json").write_text(small_tokenizers.dump(make_small(60)), encoding="ascii")
    (args.all / "splits").mkdir(parents=True, exist_ok=True)
    (args.all / "splits" / "splits.json").write_text(json.dumps(make_splits(args.count), separators=(",", ":")))
    for file, count, first in (("splits.json", 420, True), ("splits_more.json", 210, False)):
        splits = make_splits(count, lambda name: (name in FIRST_SPLITS) == first)
        (FIXTURES / file).write_text(json.dumps(splits, separators=(",", ":")) + "\n", encoding="ascii")
    print(f"fixtures: {sum(f.stat().st_size for f in FIXTURES.glob('*.json'))} bytes")


if __name__ == "__main__":
    main()

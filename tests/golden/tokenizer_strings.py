"""Strings that are hard for tokenizers, the same for the same seed: scripts, emoji with joiners, runs of white space,
digits, code, contractions, combining marks, special tokens in the text, noise. Used by make_tokenizer_golden.py."""

import random
import unicodedata

ENGLISH = """It wasn't the miller's fault: the race had frozen over, and they'd've needed another week. "We'll see,"
she said; I'M SURE YOU'LL AGREE, HE'S RIGHT. Don't you think we're early? They ve said it's 3.14159 or 2,718 (at most).
The e-mail address is someone@example.com, the page https://example.com/a/b?c=d&e=f#g and the price $1,234.56 -- 20%
off! Antidisestablishmentarianism, pneumonoultramicroscopic... state-of-the-art; O'Neill's can't-miss offer?!""".split()

OTHER_LANGUAGES = """Größe straße naïve café façade Ærø smørrebrød žluťoučký kůň ıstanbul İSTANBUL Đà Nẵng tiếng Việt
Привет мир Съешь ещё этих мягких французских булок Ελληνικά γλώσσα ΣΊΣΥΦΟΣ שלום עולם בְּרֵאשִׁית مرحبا بالعالم السَّلَامُ
नमस्ते दुनिया हिन्दी বাংলা ভাষা தமிழ் தெலுங்கు ಕನ್ನಡ മലയാളം සිංහල ภาษาไทย สวัสดี ລາວ မြန်မာ ខ្មែរ བོད་ཡིག ქართული հայերեն አማርኛ
日本語の文章です カタカナ ｶﾀｶﾅ 漢字 简体中文 繁體中文 한국어 문장 안녕하세요 ᄒᆞᆫ글 ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐌰𐌱 ﬁnance ǅungla Ⅷ ½ ²³""".split()

EMOJI = ["😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️‍🔥", "1️⃣", "🧑🏿‍🚀", "🤷‍♀️", "☃", "✈️", "🫠", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "👩🏻‍❤️‍💋‍👨🏾", "©", "™️"]

SPACES = [" ", "  ", "   ", "    ", " " * 7, " " * 16, " " * 33, " " * 80, "\t", "\t\t", "\n", "\n\n", "\r\n", "\r\n\r\n", "\r",
          "\u00a0", "\u3000", "\u2028", "\u2029", "\u0085", "\u000b", "\u000c", "\u2009", "\u1680", " \n", "\n ", "\t \n"]

CODE = ["def f(x):\n    return x**2 + 1  # comment\n", "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i];\n\t}\n",
        "#include <vector>\r\nint main() { return 0; }\r\n", "<div class=\"a-b\">\n  <p>text</p>\n</div>\n",
        "SELECT * FROM t WHERE id = 42 AND name <> 'O''Brien';", "if x != y:\n\n\n        pass\n", "{\"key\": [1, 2.5e-3, null]}",
        "let s = `${a}/${b}//${c}`; // done\n/* x */", "\\begin{align} x &= \\frac{1}{2} \\\\ \\end{align}", "a->b::c<D&&>(e)...",
        "0xDEADBEEF 1_000_000 1e10 v1.2.3-rc4", "CamelCaseWithHTTPServer snake_case_name kConstant XMLHttpRequest2",
        "$PATH=/usr/bin:/bin\n~/.config\n", "| a | b |\n|---|---|\n| 1 | 2 |\n", "import os, sys\n\n\nclass A(B):\n    \"\"\"Doc.\"\"\"\n"]

# One or more of every class that the expressions tell apart, and the letters of the contractions.
CLASSES = ["A", "Z", "a", "s", "t", "e", "r", "v", "l", "L", "d", "D", "m", "S", "ǅ", "ʰ", "中", "ª", "\u0301", "\u0903", "1", "٣",
           "Ⅷ", "½", " ", " ", "'", "'", "’", "\n", "\r", "/", "!", "-", "$", "_", "\t", "\u00a0", "ſ", "K", "\u00ad", "\u200d",
           "🙂", "é", "É", "ß", "\x00", "\x1c", "\u0085"]

SCRIPTS = [(0x20, 0x7E), (0xA0, 0x24F), (0x250, 0x36F), (0x370, 0x3FF), (0x400, 0x52F), (0x530, 0x5FF), (0x600, 0x6FF),
           (0x900, 0x97F), (0x980, 0x9FF), (0xB80, 0xBFF), (0xE00, 0xE7F), (0x1000, 0x109F), (0x10A0, 0x10FF),
           (0x1100, 0x11FF), (0x1200, 0x137F), (0x13A0, 0x13FF), (0x1780, 0x17FF), (0x1E00, 0x1FFF), (0x2000, 0x206F),
           (0x2070, 0x218F), (0x2190, 0x27BF), (0x3000, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xABFF),
           (0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0xF900, 0xFFFD), (0x10000, 0x10FFF), (0x11000, 0x11FFF), (0x16000, 0x16FFF),
           (0x1D000, 0x1DFFF), (0x1E000, 0x1EFFF), (0x1F000, 0x1FAFF), (0x20000, 0x2A6DF), (0xE0000, 0xE01FF)]

COMBINING = [c for c in range(0x300, 0x1F000) if unicodedata.combining(chr(c))]
DECOMPOSABLE = [c for c in range(0xC0, 0x2FA1E) if unicodedata.decomposition(chr(c)).split(" ")[0][:1] not in ("", "<")]
JAMO = [*range(0x1100, 0x1113), *range(0x1161, 0x1176), *range(0x11A7, 0x11C3), 0xAC00, 0xAC01, 0xD788]


def random_code_point(rng):
    while True:
        c = rng.randrange(0x110000)
        if not 0xD800 <= c < 0xE000:
            return chr(c)


class Strings:
    """kinds: the names of the generators below; text(kind) one string of it."""

    def __init__(self, seed, specials, tokens):
        self.rng = random.Random(seed)
        self.specials = specials
        self.tokens = tokens  # texts of the vocabulary's own tokens
        self.kinds = [name[3:] for name in dir(self) if name.startswith("of_")]

    def text(self, kind):
        return getattr(self, "of_" + kind)()

    def some(self, pool, low, high):
        return [self.rng.choice(pool) for _ in range(self.rng.randint(low, high))]

    def of_english(self):
        words = self.some(ENGLISH, 1, 25)
        change = self.rng.choice([str, str, str.upper, str.title, str.swapcase])
        return self.rng.choice(["", " ", "\n"]) + change(" ".join(words))

    def of_languages(self):
        return self.rng.choice([" ", "", ", "]).join(self.some(OTHER_LANGUAGES, 1, 12))

    def of_script(self):
        first, last = self.rng.choice(SCRIPTS)
        words = []
        for _ in range(self.rng.randint(1, 6)):
            words.append("".join(chr(self.rng.randint(first, last)) for _ in range(self.rng.randint(1, 9))))
        return self.rng.choice([" ", ". ", "", "\n"]).join(words)

    def of_emoji(self):
        return "".join(self.some(EMOJI + [" ", "a", "!"], 1, 10))

    def of_spaces(self):
        return "".join(self.some(SPACES + ["x", "word", "1", "!", "'s", "é", "中"], 1, 12))

    def of_digits(self):
        pool = ["0", "1", "42", "1234567", "٣٤٥", "१२", "½", "Ⅷ", "²", ".", ",", " ", "-", "e", "x", "%", "１２３", "𝟘𝟙"]
        return "".join(self.some(pool, 1, 14))

    def of_code(self):
        text = "".join(self.some(CODE, 1, 3))
        return text.replace("    ", self.rng.choice(["    ", "\t", "  ", " "])) if self.rng.random() < 0.5 else text

    def of_classes(self):
        return "".join(self.some(CLASSES, 1, 16))

    def of_few_classes(self):
        return "".join(self.some(self.rng.sample(CLASSES, 4), 2, 20))

    def of_contractions(self):
        endings = ["'s", "'S", "'t", "'re", "'Re", "'VE", "'ve", "'m", "'ll", "'LL", "'lL", "'d", "'D", "'x", "''s", "’s", "'ſ", " 's"]
        return "".join(self.some(["I", "you", "WE", "It", " he", "é", "1", "_", "\n"] + endings, 1, 12))

    def of_marks(self):
        out = []
        for _ in range(self.rng.randint(1, 8)):
            out.append(self.rng.choice(["a", "e", "O", "각", chr(self.rng.choice(DECOMPOSABLE)), chr(self.rng.choice(JAMO))]))
            out.extend(chr(self.rng.choice(COMBINING)) for _ in range(self.rng.randint(0, 3)))
        return "".join(out)

    def of_decomposed(self):
        return unicodedata.normalize(self.rng.choice(["NFD", "NFKD", "NFC"]), self.of_languages())

    def of_specials(self):
        if not self.specials:
            return self.of_english()
        pool = self.specials + [" ", "\n", "Hello", "<", "|>", "<|", " world", "  ", "1", "</"]
        broken = self.rng.choice(self.specials)
        pool.append(broken[:self.rng.randint(1, len(broken))])
        return "".join(self.some(pool, 1, 10))

    def of_noise(self):
        return "".join(random_code_point(self.rng) for _ in range(self.rng.randint(1, 12)))

    def of_ascii(self):
        return "".join(chr(self.rng.randrange(128)) for _ in range(self.rng.randint(1, 40)))

    def of_tokens(self):
        return "".join(self.some(self.tokens, 1, 12))

    def of_letters(self):
        pool = self.rng.choice(["abcdefghijklmnopqrstuvwxyz", "aA", "ABCDEFGH", "aeiou", "xyz12", "ab "])
        return "".join(self.some(pool, 1, 120))

    def of_mixture(self):
        kinds = [kind for kind in self.kinds if kind not in ("mixture", "long")]
        return "".join(self.text(self.rng.choice(kinds)) for _ in range(self.rng.randint(2, 4)))

    def of_long(self):
        unit = self.rng.choice(["a", "ab", "=", "-", " ", "\n", "中", "haha", "0", "\t", "é", "A", "🙂", "x\n"])
        return unit * self.rng.randint(50, 400)

    def of_edges(self):
        pool = ["", " ", "\n", "a", "'", "\ufeff", "\ufffd", "▁", "▁a", " ▁", "Ġ", "<0x0A>", "\x00", "\U0010ffff", "  a", "a  ", "a "]
        return "".join(self.some(pool, 0, 3))


def broken_utf8(rng, text):
    """Bytes of text whose end is ill-formed: a character cut short, or bytes that never begin one."""
    data = text.encode()
    tail = rng.choice([b"\xff", b"\xc3", b"\xe4\xb8", b"\xf0\x9f\x98", b"\x80", b"\xed\xa0\x80", b"\xfe\xff", b"\xc0\xaf"])
    return data + tail

"""/v1/rerank, /infill and `suffix`; and what `serve` says of a tokenizer or a chat template that it cannot use."""

import json
import math
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import shared
from harness import ROOT, Server
from models import GOLDEN
from shared import describe, dot

ENCODERS = ROOT / "tests" / "golden" / "encoders"
CLASSIFIERS = ROOT / "tests" / "golden" / "classifiers"
MINILM = ROOT / "build" / "models" / "all-MiniLM-L6-v2"
# Tokens of the tiny Llama's vocabulary, called as a family with gaps calls its own.
NAMES = {"<|start|>": "<|fim_prefix|>", "<|end|>": "<|fim_suffix|>", "<|message|>": "<|fim_middle|>"}
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"


def renamed_model(folder, names):
    """The tiny Llama as a Hugging Face directory, with other names for some of its tokens."""
    path = pathlib.Path(folder) / "model"
    shutil.copytree(GOLDEN / "llama3" / "hf", path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if not (path / file).is_file():
            continue
        text = (path / file).read_text()
        for old, new in names.items():
            text = text.replace(json.dumps(old), json.dumps(new))
        (path / file).write_text(text)
    return path


class Gaps(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="millrace-gaps-test-")
        cls.path = renamed_model(cls.folder.name, NAMES)
        cls.server = Server(shared.BINARY, cls.path, "--model-id", "fim")
        cls.server.__enter__()
        describe(cls.server)

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()
        cls.folder.cleanup()

    def good(self, path, body):
        status, answer = self.server.json("POST", path, body)
        self.assertEqual(status, 200, answer)
        return answer

    def tokens(self, text, **options):
        return self.good("/tokenize", {"content": text, "add_special": False, "parse_special": False, **options})["tokens"]

    def token(self, name):
        [token] = self.tokens(name, parse_special=True)
        return token

    def prompt(self, before, behind, inside=()):
        begin = self.good("/tokenize", {"content": "a"})["tokens"][:-len(self.tokens("a"))]
        pre, suf, mid = map(self.token, NAMES.values())
        return [*begin, *inside, pre, *self.tokens(before), suf, *self.tokens(behind), mid]

    def completed(self, tokens, count):
        """What the model writes behind these tokens, by the endpoint that takes them as they are."""
        return self.good("/v1/completions", {"prompt": tokens, "max_tokens": count, "temperature": 0})["choices"][0]["text"]

    def test_the_prompt_is_what_the_model_was_trained_with(self):
        body = {"input_prefix": "def mill(", "input_suffix": "return <|fim_middle|> race", "n_predict": 12, "temperature": 0}
        tokens = self.prompt(body["input_prefix"], body["input_suffix"])
        self.assertEqual(tokens.count(self.token("<|fim_middle|>")), 1)  # its name in a text is letters
        answer = self.good("/infill", body)
        self.assertEqual(answer["content"], self.completed(tokens, 12))
        self.assertEqual((answer["tokens_evaluated"], answer["stop"], answer["model"]), (len(tokens), True, "fim"))
        self.assertEqual(answer["tokens_predicted"], 12 if answer["stop_type"] == "limit" else answer["tokens_predicted"])
        typed = self.good("/infill", {**body, "input_prefix": "def ", "prompt": "mill("})
        self.assertEqual(typed["content"], answer["content"])
        suffix = self.good("/v1/completions", {"prompt": body["input_prefix"], "suffix": body["input_suffix"], "max_tokens": 12,
                                               "temperature": 0})
        self.assertEqual(suffix["choices"][0]["text"], answer["content"])
        ollama = self.good("/api/generate", {"model": "fim", "prompt": body["input_prefix"], "suffix": body["input_suffix"],
                                             "stream": False, "options": {"num_predict": 12, "temperature": 0}})
        self.assertEqual(ollama["response"], answer["content"])

    def test_files_come_first(self):
        files = [{"filename": "a.py", "text": "mill = 1"}, {"text": "race = 2"}]
        body = {"input_prefix": "x", "input_suffix": "y", "n_predict": 8, "temperature": 0, "input_extra": files}
        inside = self.tokens("a.py\nmill = 1\n\n") + self.tokens("\nrace = 2\n\n")
        self.assertEqual(self.good("/infill", body)["content"], self.completed(self.prompt("x", "y", inside), 8))

    def test_stream(self):
        body = {"input_prefix": "the mill", "input_suffix": "race", "n_predict": 9, "temperature": 0}
        whole = self.good("/infill", body)
        status, headers, text = self.server.request("POST", "/infill", {**body, "stream": True})
        self.assertEqual((status, headers["content-type"]), (200, "text/event-stream; charset=utf-8"))
        events = [json.loads(line[6:]) for line in text.decode().split("\n\n") if line]
        self.assertEqual("".join(event["content"] for event in events), whole["content"])
        self.assertEqual([event["stop"] for event in events], [False] * (len(events) - 1) + [True])
        self.assertEqual(events[-1]["tokens_predicted"], whole["tokens_predicted"])

    def test_only_the_prompt(self):
        body = {"input_prefix": "the mill race " * 40, "input_suffix": "b", "n_predict": 0, "cache_prompt": True}
        _, headers, text = self.server.request("POST", "/infill", body)
        answer = json.loads(text)
        self.assertEqual((answer["content"], answer["tokens_predicted"]), ("", 0))
        self.assertEqual(headers["x-millrace-ignored"], "cache_prompt")
        self.assertGreater(self.good("/infill", {**body, "n_predict": 1})["tokens_cached"], 0)

    def test_refused(self):
        good = {"input_prefix": "a", "input_suffix": "b", "n_predict": 1}
        for change, param in (({"input_prefix": None}, "input_prefix"), ({"input_suffix": 1}, "input_suffix"), ({"n": 2}, "n"),
                              ({"input_extra": [1]}, "input_extra[0]"), ({"input_extra": [{}]}, "input_extra[0].text"),
                              ({"n_predict": -2}, "n_predict"), ({"input_prefix": "mill " * 100_000}, "input_prefix")):
            status, answer = self.server.json("POST", "/infill", {**good, **change})
            self.assertEqual((status, answer["error"]["param"]), (400, param), answer)
        for change, param in (({"echo": True}, "echo"), ({"prompt": [5]}, "prompt")):
            status, answer = self.server.json("POST", "/v1/completions", {"prompt": "a", "suffix": "b", **change})
            self.assertEqual((status, answer["error"]["param"]), (400, param), answer)

    def test_a_model_without_such_tokens(self):
        with Server(shared.BINARY, GOLDEN / "llama3" / "model.gguf") as server:
            status, answer = server.json("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"})
            self.assertEqual(status, 501, answer)
            self.assertIn("vocabulary", answer["error"]["message"])
            status, answer = server.json("POST", "/v1/completions", {"prompt": "a", "suffix": "b"})
            self.assertEqual((status, answer["error"]["param"]), (400, "suffix"), answer)


class Ranks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not MINILM.is_dir():
            print(f"SKIPPED: ranks against sentence-transformers because {MINILM} is not there; "
                  "python3 tools/fetch_model.py minilm", flush=True)
            raise unittest.SkipTest("no all-MiniLM-L6-v2")
        cls.server = Server(shared.BINARY, MINILM, "--model-id", "minilm")
        cls.server.__enter__()
        describe(cls.server)

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()

    def test_by_the_cosine_of_sentence_transformers(self):
        golden = json.loads((ENCODERS / "minilm.json").read_text())
        texts, vectors = [g["text"] for g in golden], [g["vector"] for g in golden]
        query, documents = texts[0], texts[1:]
        body = {"model": "minilm", "query": query, "documents": [documents[0], *({"text": t} for t in documents[1:])]}
        want = [dot(vectors[0], v) / (dot(vectors[0], vectors[0]) * dot(v, v)) ** 0.5 for v in vectors[1:]]
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            status, answer = self.server.json("POST", path, body)
            self.assertEqual(status, 200, answer)
            results = answer["results"]
            self.assertEqual(sorted(r["index"] for r in results), list(range(len(documents))))
            for result in results:
                self.assertAlmostEqual(result["relevance_score"], want[result["index"]], delta=2e-3)
                self.assertNotIn("document", result)
            scores = [r["relevance_score"] for r in results]
            self.assertEqual(scores, sorted(scores, reverse=True))
        status, best = self.server.json("POST", "/v1/rerank", {**body, "top_n": 2, "return_documents": True})
        self.assertEqual([(r["index"], r["relevance_score"]) for r in best["results"]],
                         [(r["index"], r["relevance_score"]) for r in results[:2]])
        self.assertEqual([r["document"]["text"] for r in best["results"]], [documents[r["index"]] for r in best["results"]])
        self.assertGreater(best["usage"]["total_tokens"], 0)

    def test_refused(self):
        good = {"query": "a", "documents": ["b"]}
        for change, param in (({"query": None}, "query"), ({"query": ""}, "query"), ({"documents": None}, "documents"),
                              ({"documents": []}, "documents"), ({"documents": ["b", 1]}, "documents[1]"),
                              ({"documents": [{}]}, "documents[0].text"), ({"top_n": 0}, "top_n"),
                              ({"documents": ["b"] * 2049}, "documents"), ({"return_documents": 1}, "return_documents"),
                              ({"documents": ["b", "mill " * 100_000]}, "documents[1]")):
            status, answer = self.server.json("POST", "/v1/rerank", {**good, **change})
            self.assertEqual((status, answer["error"]["param"]), (400, param), answer)


def word_pieces(words):
    """A tokenizer.json of words with numbers, between [CLS] and [SEP]."""
    vocab = {name: i for i, name in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(4, words))])}
    pieces = lambda *names: [{"SpecialToken": {"id": n, "type_id": 0}} if n[0] == "[" else {"Sequence": {"id": n, "type_id": 0}}
                             for n in names]
    special = {n: {"id": n, "ids": [vocab[n]], "tokens": [n]} for n in ("[CLS]", "[SEP]")}
    return json.dumps({
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": vocab},
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": pieces("[CLS]", "A", "[SEP]"),
                           "pair": pieces("[CLS]", "A", "[SEP]", "B", "[SEP]"), "special_tokens": special},
        "added_tokens": []})


class CrossEncoders(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="millrace-rank-test-")
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "model"

    def model(self, source):
        shutil.copytree(source / "hf", self.path)
        (self.path / "tokenizer.json").write_text(word_pieces(100))
        golden = json.loads((source / "golden.json").read_text())
        text = lambda tokens: " ".join(f"w{t}" for t in tokens)
        return [(text(p["tokens"][1:p["second"] - 1]), text(p["tokens"][p["second"]:-1]), p["scores"]) for p in golden.get("pairs", [])]

    def test_scores_of_transformers(self):
        pairs = self.model(CLASSIFIERS / "bert")
        with Server(shared.BINARY, self.path, "--device", "cpu", "--kv-type", "f32") as server:
            for query, document, (score,) in pairs:
                status, answer = server.json("POST", "/v1/rerank", {"query": query, "documents": [document]})
                self.assertEqual(status, 200, answer)
                self.assertAlmostEqual(answer["results"][0]["relevance_score"], 1 / (1 + math.exp(-score)), places=4)
            query, documents = pairs[1][0], [document for _, document, _ in pairs]
            answer = server.json("POST", "/v1/rerank", {"query": query, "documents": documents, "top_n": 3})[1]
            scores = [r["relevance_score"] for r in answer["results"]]
            self.assertEqual((len(scores), scores), (3, sorted(scores, reverse=True)))
            for bad in ({"query": ""}, {"documents": [""]}, {"documents": ["w5 " * 200]}):
                status, answer = server.json("POST", "/v1/rerank", {"query": query, "documents": documents, **bad})
                self.assertEqual(status, 400, answer)

    def test_labels_are_refused(self):
        self.model(CLASSIFIERS / "bert-labels")
        with Server(shared.BINARY, self.path) as server:
            status, answer = server.json("POST", "/v1/rerank", {"query": "w5", "documents": ["w6"]})
            self.assertEqual((status, answer["error"]["param"]), (501, "model"), answer)
            self.assertIn("3 labels", answer["error"]["message"])


class TextOfModels(unittest.TestCase):
    """What a server says at its start of a tokenizer and a template."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="millrace-text-test-")
        self.addCleanup(folder.cleanup)
        self.path = renamed_model(folder.name, {})
        self.template = self.path / "chat_template.jinja"

    def ends(self, *says):
        done = subprocess.run([shared.BINARY, "serve", self.path, "--port", "0"], capture_output=True, text=True, timeout=300)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        for piece in says:
            self.assertIn(piece, done.stderr)

    def test_a_template_that_is_no_jinja(self):
        self.template.write_text("{% for m in messages %}")
        self.ends("endfor")

    def test_a_template_with_an_unknown_construct(self):
        self.template.write_text("{{ messages[0].content | frobnicate }}")
        self.ends("frobnicate")

    def test_a_template_that_raises(self):
        self.template.write_text("{{ raise_exception('no conversations here') }}")
        self.ends("chat template", "no conversations here")

    def test_a_broken_tokenizer(self):
        (self.path / "tokenizer.json").write_text('{"model": {"type": "Frob"}}')
        self.ends("tokenizer.json")
        (self.path / "tokenizer.json").unlink()
        self.ends("tokenizer.json", "tekken.json")

    def test_of_several(self):
        self.template.write_text("{{ messages[0].content | frobnicate }}")
        with Server(shared.BINARY, f"--models={self.path.parent}") as server:
            status, answer = server.json("POST", "/v1/completions", {"model": "model", "prompt": "a"})
            self.assertEqual((status, answer["error"]["code"]), (500, "model_load_failed"), answer)
            self.assertIn("frobnicate", answer["error"]["message"])
            self.assertNotIn(str(self.path), answer["error"]["message"])

    def test_without_a_template_there_are_completions(self):
        for file in (self.template, self.path / "tokenizer_config.json"):
            if file.is_file() and file is not self.template:
                file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
            elif file.is_file():
                file.unlink()
        with Server(shared.BINARY, self.path) as server:
            self.assertIn("has no chat template", server.log())
            self.assertEqual(server.json("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0], 200)
            status, answer = server.json("POST", "/v1/chat/completions", {"messages": shared.MESSAGES})
            self.assertEqual(status, 400, answer)
            self.assertIn("chat template", answer["error"]["message"])
        self.template.write_text(TEMPLATE)
        with Server(shared.BINARY, self.path) as server:
            self.assertNotIn("chat template", server.log())
            self.assertEqual(server.json("POST", "/v1/chat/completions", {"messages": shared.MESSAGES, "max_tokens": 2})[0], 200)

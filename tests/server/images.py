"""Images through the chat, responses, Anthropic's and Ollama's APIs, with a tiny Gemma 3 that sees (tests/golden/images)."""

import base64
import pathlib
import subprocess
import tempfile
import unittest

import shared
from harness import ROOT, Server
from models import GOLDEN

IMAGES = ROOT / "tests" / "golden" / "images"
ROWS = 16
LETTER = 262  # its token for an a


def data_url(name):
    kind = "png" if name.endswith("png") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode((IMAGES / name).read_bytes()).decode()}"


def chat(*parts):
    content = [{"type": "text", "text": p} if not p.startswith("data:") else {"type": "image_url", "image_url": {"url": p}}
               for p in parts]
    # Of a random model's tokens some are no text: one of those that are, "a".
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, "logprobs": True,
            "logit_bias": {str(LETTER): 100}}


def skip_without_codecs(server):
    answer = server.json("POST", "/v1/chat/completions", chat(data_url("mill.png")))[1]
    if "this build has no" in str(answer.get("error")):
        raise unittest.SkipTest(answer["error"]["message"])


class Images(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(shared.BINARY, IMAGES / "gemma3", "--device", "cpu", "--ctx", "512", "--kv-type", "f32").__enter__()
        try:
            skip_without_codecs(cls.server)
        except unittest.SkipTest:
            cls.tearDownClass()
            raise

        cls.model = cls.server.json("GET", "/v1/models")[1]["data"][0]["id"]

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__(None, None, None)

    def good(self, path, body):
        status, answer = self.server.json("POST", path, body)
        self.assertEqual(status, 200, answer)
        return answer

    def logprobs(self, answer):
        self.assertEqual(len(answer["choices"][0]["logprobs"]["content"]), 4)
        return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]

    def test_chat(self):
        text = self.good("/v1/chat/completions", chat("look:", "here"))
        first = self.good("/v1/chat/completions", chat("look:", data_url("mill.png"), "here"))
        again = self.good("/v1/chat/completions", chat("look:", data_url("mill.png"), "here"))
        other = self.good("/v1/chat/completions", chat("look:", data_url("photo.jpg"), "here"))
        self.assertGreaterEqual(first["usage"]["prompt_tokens"], text["usage"]["prompt_tokens"] + ROWS + 2)
        self.assertEqual(self.logprobs(first), self.logprobs(again))
        self.assertGreaterEqual(again["usage"]["prompt_tokens_details"]["cached_tokens"], ROWS)
        self.assertNotEqual(self.logprobs(first), self.logprobs(other))
        both = self.good("/v1/chat/completions", chat(data_url("photo.jpg"), "and", data_url("mill.png")))
        self.assertGreater(both["usage"]["prompt_tokens"], 2 * ROWS)

    def test_counted(self):
        body = chat("look:", data_url("mill.png"))
        answer = self.good("/v1/chat/completions", body)
        self.assertEqual(self.good("/tokenize", {"messages": body["messages"]})["count"], answer["usage"]["prompt_tokens"])

    def test_names_of_control_tokens_stay_text(self):
        plain = self.good("/v1/chat/completions", chat("<start_of_image>", data_url("mill.png")))
        self.assertGreater(plain["usage"]["prompt_tokens"], ROWS)

    def test_responses(self):
        parts = [{"type": "input_text", "text": "look:"}, {"type": "input_image", "image_url": data_url("mill.png")}]
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4, "temperature": 0}
        answer = self.good("/v1/responses", body)
        self.assertGreater(answer["usage"]["input_tokens"], ROWS)
        more = self.good("/v1/responses", {"input": "and?", "previous_response_id": answer["id"], "max_output_tokens": 4})
        self.assertGreater(more["usage"]["input_tokens"], answer["usage"]["input_tokens"])
        status, refused = self.server.json("POST", "/v1/responses", {**body, "truncation": "auto"})
        self.assertEqual((status, refused["error"]["param"]), (400, "truncation"))

    def test_anthropic(self):
        """The same prompt as a chat's: its blocks are found in the cache."""
        source = lambda name: {"type": "base64", "media_type": "image/png", "data": data_url(name).split(",")[1]}
        message = lambda *blocks: {"model": self.model, "max_tokens": 4, "messages": [{"role": "user", "content": [*blocks]}]}
        image, text = {"type": "image", "source": source("mill.png")}, {"type": "text", "text": "here, a text of its own"}
        chatted = self.good("/v1/chat/completions", chat(data_url("mill.png"), text["text"]))
        body = message(image, text)
        answer = self.good("/v1/messages", body)
        usage = answer["usage"]
        self.assertEqual(usage["input_tokens"] + usage["cache_read_input_tokens"], chatted["usage"]["prompt_tokens"])
        self.assertGreaterEqual(usage["cache_read_input_tokens"], ROWS)
        counted = self.good("/v1/messages/count_tokens", {"model": self.model, "messages": body["messages"]})
        self.assertEqual(counted["input_tokens"], chatted["usage"]["prompt_tokens"])
        result = {"type": "tool_result", "tool_use_id": "x", "content": [image]}
        for blocks, says in (((image | {"source": {"type": "url", "url": "https://example.com/a.png"}},), "fetches nothing"),
                             ((image | {"source": source("mill.png") | {"data": "!"}},), "base64"), ((result,), "of a user")):
            status, refused = self.server.json("POST", "/v1/messages", message(*blocks))
            self.assertEqual(status, 400, refused)
            self.assertIn(says, refused["error"]["message"])

    def test_ollama(self):
        image = data_url("mill.png").split(",")[1]
        text = "here, another text of its own"
        chatted = self.good("/v1/chat/completions", chat(data_url("mill.png"), text))["usage"]["prompt_tokens"]
        options = {"model": self.model, "stream": False, "options": {"num_predict": 4}}
        message = {"role": "user", "content": text, "images": [image]}
        answer = self.good("/api/chat", {**options, "messages": [message]})
        self.assertEqual(answer["prompt_eval_count"], chatted)
        answer = self.good("/api/generate", {**options, "prompt": text, "images": [image]})
        self.assertEqual(answer["prompt_eval_count"], chatted)
        for path, body, says in (("/api/chat", {"messages": [message | {"role": "system"}]}, "of a user"),
                                 ("/api/chat", {"messages": [message | {"images": ["!"]}]}, "base64"),
                                 ("/api/chat", {"messages": [message | {"images": [1]}]}, "base64"),
                                 ("/api/generate", {"prompt": "a", "images": [image], "raw": True}, "raw")):
            status, refused = self.server.json("POST", path, {**options, **body})
            self.assertEqual(status, 400, refused)
            self.assertIn(says, refused["error"])

    def test_bad_images(self):
        broken = data_url("mill.png")[:120]
        for url, says in (("https://example.com/a.png", "data URL"), ("data:image/png;base64,!!", "base64"), (broken, "damaged"),
                          ("data:image/gif;base64,R0lGODlh", "neither")):
            body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
            status, answer = self.server.json("POST", "/v1/chat/completions", body)
            self.assertEqual(status, 400, answer)
            self.assertIn(says, answer["error"]["message"])
        system = {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": data_url("mill.png")}}]}]}
        self.assertEqual(self.server.json("POST", "/v1/chat/completions", system)[0], 400)


class ImagesOfAnyShape(unittest.TestCase):
    """A tiny Qwen 3 VL (tests/golden/qwen_images): as many tokens as a picture has squares, in all APIs that count them."""

    def test_qwen(self):
        folder = ROOT / "tests" / "golden" / "qwen_images" / "qwen3vl"
        with Server(shared.BINARY, folder, "--device", "cpu", "--ctx", "512", "--kv-type", "f32", "--step-tokens", "24",
                    "--max-running", "4") as server:
            skip_without_codecs(server)
            post = lambda path, body: server.json("POST", path, body)
            body = lambda *parts: {k: v for k, v in chat(*parts).items() if k != "logit_bias"}
            text = post("/v1/chat/completions", body("look:", "here"))[1]["usage"]["prompt_tokens"]
            answers = {}
            for name, tokens in (("mill.png", 40), ("photo.jpg", 36), ("alpha.png", 16)):
                request = body("look:", data_url(name), "here")
                status, answers[name] = post("/v1/chat/completions", request)
                self.assertEqual(status, 200, answers[name])
                self.assertEqual(answers[name]["usage"]["prompt_tokens"], text + 2 + tokens)
                self.assertEqual(post("/tokenize", {"messages": request["messages"]})[1]["count"], text + 2 + tokens)
                again = post("/v1/chat/completions", request)[1]
                self.assertEqual(again["choices"], answers[name]["choices"])
                self.assertGreaterEqual(again["usage"]["prompt_tokens_details"]["cached_tokens"], tokens // 16 * 16)
            self.assertNotEqual(answers["mill.png"]["choices"], answers["photo.jpg"]["choices"])
            parts = [{"type": "input_text", "text": "look:"}, {"type": "input_image", "image_url": data_url("mill.png")},
                     {"type": "input_text", "text": "here"}]
            request = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4, "temperature": 0}
            self.assertEqual(post("/v1/responses", request)[1]["usage"]["input_tokens"], text + 42)
            self.assertEqual(post("/v1/responses/input_tokens", request)[1]["input_tokens"], text + 42)
            status, refused = post("/v1/chat/completions", body(data_url("mill.png")[:120]))
            self.assertEqual(status, 400, refused)


class ImagesOfFiles(unittest.TestCase):
    """A GGUF file, with its tower in another, answers as the directory does; without, it says what is missing."""

    def test_mmproj(self):
        body = chat("look:", data_url("square.png"), "here")
        with tempfile.TemporaryDirectory(prefix="millrace-image-test-") as folder:
            path = pathlib.Path(folder) / "model.gguf"
            subprocess.run([shared.BINARY, "quantize", IMAGES / "gemma3", path, "--type", "f32"], check=True, capture_output=True)
            options = ("--device", "cpu", "--ctx", "512", "--kv-type", "f32")
            answers = []
            for model, more in ((IMAGES / "gemma3", ()), (path, ("--mmproj", IMAGES / "mmproj.gguf"))):
                with Server(shared.BINARY, model, *options, *more) as server:
                    skip_without_codecs(server)
                    status, answer = server.json("POST", "/v1/chat/completions", body)
                    self.assertEqual(status, 200, answer)
                    answers.append(answer["choices"][0])
            self.assertEqual([len(a["logprobs"]["content"]) for a in answers], [4, 4])
            for one, other in zip(*(a["logprobs"]["content"] for a in answers)):
                self.assertEqual(one["token"], other["token"])
                self.assertAlmostEqual(one["logprob"], other["logprob"], places=4)
            with Server(shared.BINARY, path, *options) as server:
                status, answer = server.json("POST", "/v1/chat/completions", body)
                self.assertEqual(status, 400)
                self.assertIn("--mmproj", answer["error"]["message"])
        done = subprocess.run([shared.BINARY, "serve", GOLDEN / "llama2" / "model.gguf", "--mmproj", IMAGES / "mmproj.gguf",
                               "--port", "0"], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 2)
        self.assertIn("take no images", done.stderr)

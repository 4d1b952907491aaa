"""Logprobs of a prompt's own tokens (echo with logprobs), against the logits that `millrace logits` writes."""

import array
import json
import math
import pathlib
import subprocess
import tempfile
import unittest

import shared
from harness import SMOLLM2, in_threads
from shared import SharedServer

TEXT = ("A mill race is the channel that carries water to a mill wheel. The faster the water runs, the more corn the miller "
        "grinds in a day, and the sooner everybody in the village has flour for their bread. ")


def reference(tokens):
    """log softmax of every row of logits, [tokens - 1][vocabulary]."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "all.npy"
        subprocess.run([shared.BINARY, "logits", SMOLLM2, "--tokens", ",".join(map(str, tokens)), "--all", "--out", out],
                       check=True, capture_output=True)
        data = out.read_bytes()
    size = 10 + int.from_bytes(data[8:10], "little")  # numpy's header, version 1
    logits = array.array("f", data[size:])
    vocab = len(logits) // len(tokens)
    rows = []
    for i in range(len(tokens) - 1):
        row = logits[i * vocab : (i + 1) * vocab]
        largest = max(row)
        total = largest + math.log(sum(math.exp(x - largest) for x in row))
        rows.append((row, total))
    return rows


@unittest.skipUnless(SMOLLM2.is_file(), "no model")
class PromptLogprobs(SharedServer):
    def score(self, prompt, **options):
        return self.good("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1,
                                                     "temperature": 0, **options})

    def test_logprobs_of_a_prompt_are_the_models_own(self):
        # Longer than the rows of logits of one step (16 run at once here), so that it comes in pieces.
        tokens = self.good("POST", "/tokenize", {"content": TEXT})["tokens"]
        self.assertGreater(len(tokens), 40)
        answer = self.score(tokens)
        found = answer["choices"][0]["logprobs"]
        self.assertEqual([len(found[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")],
                         [len(tokens) + 1] * 4)
        self.assertEqual((found["token_logprobs"][0], found["top_logprobs"][0]), (None, None))
        for i, (row, total) in enumerate(reference(tokens)):
            self.assertAlmostEqual(found["token_logprobs"][i + 1], row[tokens[i + 1]] - total, places=4)
            (text, likeliest), = found["top_logprobs"][i + 1].items()
            self.assertAlmostEqual(likeliest, max(row) - total, places=4)
        text = answer["choices"][0]["text"]
        self.assertTrue(text.startswith(TEXT))
        self.assertEqual([text[a:b] for a, b in zip(found["text_offset"], [*found["text_offset"][1:], len(text)])],
                         found["tokens"])
        self.assertEqual(answer["usage"], {"prompt_tokens": len(tokens), "completion_tokens": 1,
                                           "total_tokens": len(tokens) + 1, "prompt_tokens_details": {"cached_tokens": 0}})

    def test_in_company_and_in_every_form(self):
        tokens = self.good("POST", "/tokenize", {"content": TEXT})["tokens"]
        alone = self.score(tokens)["choices"][0]
        # As text, without a token of answer, among others of one request and of many at once, and as events.
        self.assertEqual(self.score(TEXT)["choices"][0], alone)
        none = self.score(tokens, max_tokens=0)
        self.assertEqual((none["choices"][0]["text"], none["choices"][0]["finish_reason"]), (TEXT, "length"))
        self.assertEqual(none["usage"]["completion_tokens"], 0)
        for key, column in none["choices"][0]["logprobs"].items():
            self.assertEqual(column, alone["logprobs"][key][:-1])
        together = self.score([tokens, "Once upon a time", tokens], n=2)["choices"]
        self.assertEqual(len(together), 6)
        for i in (0, 1, 4, 5):
            self.assertEqual(together[i]["logprobs"], alone["logprobs"])
        for choice in in_threads(12, lambda i: self.score(tokens)["choices"][0]):
            self.assertEqual(choice, alone)
        _, _, events = self.server.request("POST", "/v1/completions", {
            "prompt": tokens, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0, "stream": True})
        chunks = [json.loads(line[6:])["choices"][0] for line in events.decode().splitlines()
                  if line.startswith("data: {")]
        self.assertEqual("".join(c["text"] for c in chunks), alone["text"])
        self.assertEqual([x for c in chunks for x in (c["logprobs"] or {"token_logprobs": []})["token_logprobs"]],
                         alone["logprobs"]["token_logprobs"])

    def test_without_echo_or_without_logprobs_nothing_changes(self):
        plain = self.good("POST", "/v1/completions", {"prompt": "One two", "max_tokens": 2, "logprobs": 1, "temperature": 0})
        self.assertEqual(len(plain["choices"][0]["logprobs"]["tokens"]), 2)
        echoed = self.good("POST", "/v1/completions", {"prompt": "One two", "max_tokens": 2, "echo": True, "temperature": 0})
        self.assertIsNone(echoed["choices"][0]["logprobs"])
        self.assertEqual(echoed["choices"][0]["text"], "One two" + plain["choices"][0]["text"])
        one = self.score([5], max_tokens=0)["choices"][0]["logprobs"]
        self.assertEqual(one["token_logprobs"], [None])

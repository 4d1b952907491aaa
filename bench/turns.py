#!/usr/bin/env python3
"""A conversation's tenth turn: the first token after a long history that is cached, beside the time that the turn's new
tokens alone take. Both go to one server in turn; drafts off and on, and after a restart from disk.

  bench/turns.py MILLRACE MODEL [--tokens 8000] [--new 256] [--rounds 5]

Prints JSON: milliseconds (medians) and how often the new tokens' time the tenth turn takes. Tokens are random: models of
`millrace synth` will do, such as `millrace synth qwen3.5-35b-a3b short.gguf --layers 4`.
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from needles import Server  # noqa: E402

TURNS = 10
ANSWER = 24  # tokens


class Client:
    def __init__(self, url):
        self.host = url.removeprefix("http://")

    def ask(self, tokens, max_tokens, salt):
        """Milliseconds to the first token, tokens that came from the cache, and the answer's text."""
        body = {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
                "cache_salt": salt, "stream_options": {"include_usage": True}}
        link = http.client.HTTPConnection(self.host, timeout=3600)
        begin = time.perf_counter()
        link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = link.getresponse()
        if answer.status != 200:
            sys.exit(f"{answer.status}: {answer.read().decode()}")
        first, usage = None, {}
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter()
            usage = json.loads(line[6:]).get("usage") or usage
        link.close()
        details = usage.get("prompt_tokens_details") or {}
        return 1000 * (first - begin), details.get("cached_tokens", 0)


def history(client, rng, vocab, tokens, turns):
    """Turns of even length; answers' ids are not known to a client of text, so each turn brings its own."""
    told = []
    for _ in range(turns):
        told += [rng.randrange(vocab) for _ in range(tokens // turns)]
        client.ask(told, ANSWER, "conversation")
    return told


def measure(client, rng, vocab, told, new, rounds):
    alone, tenth, cached = [], [], 0
    for i in range(rounds):
        fresh = [rng.randrange(vocab) for _ in range(new)]
        alone.append(client.ask(fresh, 1, f"alone {i}")[0])
        took, cached = client.ask(told + fresh, 1, "conversation")
        tenth.append(took)
    a, t = statistics.median(alone), statistics.median(tenth)
    return {"alone_ms": round(a, 1), "tenth_turn_ms": round(t, 1), "ratio": round(t / a, 3), "first_ms": round(tenth[0], 1),
            "first_ratio": round(tenth[0] / alone[0], 3), "cached_tokens": cached}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=1000, help="token ids are below this")
    o = parser.parse_args()
    data = {"model": Path(o.model).name, "history": o.tokens, "new": o.new, "rounds": o.rounds}
    for drafts in ("off", "lookup"):
        with tempfile.TemporaryDirectory() as directory:
            words = [o.program, "serve", o.model, "--port", 0, "--ctx", o.tokens + o.new + 64, "--max-running", 1, "--kv-tokens",
                     3 * o.tokens + 4096, "--threads", o.threads, "--speculate", drafts, "--kv-dir", directory, "--kv-dir-size", 8192]
            rng = random.Random(1)
            with Server(words) as server:
                client = Client(server.url)
                told = history(client, rng, o.vocab, o.tokens, TURNS - 1)
                data[f"drafts {drafts}"] = measure(client, rng, o.vocab, told, o.new, o.rounds)
                print(json.dumps(data), file=sys.stderr, flush=True)
            with Server(words) as server:
                data[f"drafts {drafts}, restarted"] = measure(Client(server.url), rng, o.vocab, told, o.new, o.rounds)
                print(json.dumps(data), file=sys.stderr, flush=True)
    print(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()

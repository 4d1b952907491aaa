#!/usr/bin/env python3
"""Needles in a haystack: single facts put into a long text at even depths, and asked for at its end, with full and with
sparse attention. One server answers all: budgets are the requests' own, and of each budget the text is computed once.

  bench/needles.py MILLRACE MODEL TEXT.. [--tokens 8000] [--budgets 256,512,1024,2048] [--depths 10]

Prints JSON: per budget, whether each needle's four digits came out of a greedy answer, by depth.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

PLACES = ("lighthouse", "bakery", "railway station", "museum", "orchard", "harbour", "library", "observatory", "mill",
          "stadium", "chapel", "vineyard", "quarry", "greenhouse", "theatre", "castle")
DIGITS = 4


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return json.load(answer)


def haystack(lines, needles, keep):
    """The first `keep` lines, a needle at even depths between them."""
    at = {round(keep * (i + 0.5) / len(needles)): needle for i, needle in enumerate(needles)}
    out = []
    for i, line in enumerate(lines[:keep]):
        if i in at:
            out += ["", f"The code of the {at[i][0]} is {at[i][1]}.", ""]
        out.append(line)
    return "\n".join(out) + "\n"


def count_tokens(program, model, text):
    done = subprocess.run([program, "tokenize", model, "-f", "-", "--count"], input=text, check=True, capture_output=True,
                          text=True)
    return int(done.stdout)


class Server:
    def __init__(self, words):
        self.process = subprocess.Popen([str(w) for w in words], stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            found = re.search(r"http://[\d.]+:\d+", line)
            if found:
                self.url = found.group(0)
                return
        sys.exit("the server did not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


def measure(program, model, texts, tokens, budgets, depths, threads):
    rng = random.Random(1)
    needles = [(PLACES[i], "".join(rng.choice("123456789") for _ in range(DIGITS))) for i in range(depths)]
    lines = [line for text in texts for line in Path(text).read_text().splitlines() if line.strip()]
    low, high = depths, len(lines)  # as many lines as fit
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(program, model, haystack(lines, needles, middle)) <= tokens:
            low = middle
        else:
            high = middle - 1
    hay = haystack(lines, needles, low)
    data = {"model": Path(model).name, "tokens": count_tokens(program, model, hay), "depths": depths, "found": {}}
    words = [program, "serve", model, "--port", 0, "--attention", "request", "--ctx", tokens + 256, "--max-running", 1,
             "--kv-tokens", (len(budgets) + 1) * (tokens + 256), "--threads", threads]
    with Server(words) as server:
        for budget in (0, *budgets):
            body = {"max_tokens": 8, "temperature": 0}
            if budget:
                body |= {"attention": "sparse", "attention_budget": budget}
            found = []
            for place, code in needles:
                answer = post(server.url, "/v1/completions", {**body, "prompt": f"{hay}\nThe code of the {place} is"})
                found.append(answer["choices"][0]["text"].strip().startswith(code))
            data["found"][str(budget) if budget else "full"] = found
            print(budget or "full", "".join("+" if f else "-" for f in found), file=sys.stderr, flush=True)
    return data


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("text", nargs="+")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--budgets", default="256,512,1024,2048")
    parser.add_argument("--depths", type=int, default=10, choices=range(1, len(PLACES) + 1))
    parser.add_argument("--threads", type=int, default=0)
    o = parser.parse_args()
    budgets = [int(b) for b in o.budgets.split(",")]
    print(json.dumps(measure(o.program, o.model, o.text, o.tokens, budgets, o.depths, o.threads), indent=1))


if __name__ == "__main__":
    main()

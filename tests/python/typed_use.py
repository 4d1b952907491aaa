"""A program that uses the package as its users do: mypy --strict must find nothing wrong with it, and it runs."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import numpy.typing as npt

import millrace


def batch(llm: millrace.LLM) -> list[str]:
    params = millrace.SamplingParams(max_tokens=4, temperature=0.0, stop=["\n"], logprobs=1, n=2)
    llm.generate([[1, 2, 3], [4]], max_tokens=1)
    results: millrace.Results = llm.generate(["the water", "the mill"], params)
    first: millrace.RequestOutput = results[0]
    best: list[millrace.Completion] = first.outputs
    probabilities: list[millrace.Logprob] | None = best[0].logprobs
    assert probabilities is not None and best[0].cumulative_logprob is not None
    return [out.text for out in results]


def numbers(llm: millrace.LLM) -> npt.NDArray[np.float32]:
    tokens: list[int] = llm.tokenizer.encode("the mill")
    assert llm.hidden_states(tokens).shape[0] == len(tokens)
    assert llm.embed(["a", "b"], pooling="mean").shape[0] == 2
    return llm.logits(tokens)


async def events(llm: millrace.LLM) -> str:
    text = ""
    async with llm.stream("the water", max_tokens=4) as stream:
        async for event in stream:
            kind: str = event.kind
            text += event.text if kind == "text" else ""
    return text


def main(path: str) -> None:
    with millrace.LLM(path, device="cpu", ctx=128, threads=1) as llm:
        print(batch(llm), numbers(llm).shape, asyncio.run(events(llm)))
        answer: dict[str, object] = dict(llm.chat([{"role": "user", "content": "a"}], max_tokens=2))
        chunks = [chunk["choices"] for chunk in llm.chat([{"role": "user", "content": "a"}], max_tokens=2, stream=True)]
        print(answer["object"], len(chunks), llm.stats()["finished"], llm.info["name"])
        try:
            llm.generate("a", temperature=-1.0)
        except millrace.BadInputError as error:
            print(error.code, error)


if __name__ == "__main__":
    main(sys.argv[1])

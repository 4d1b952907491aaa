"""Millrace as a model of lm-evaluation-harness: `millrace` by name, or MillraceLM over an engine that is loaded.

    import lm_eval
    from lm_eval_millrace import MillraceLM

    lm_eval.simple_evaluate(model=MillraceLM(millrace.LLM("model.gguf")), tasks=["arc_easy"])
"""

from __future__ import annotations

from typing import Any

import millrace
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model


@register_model("millrace")
class MillraceLM(LM):
    """All requests of a task go in as one batch; the engine runs as many together as fit."""

    def __init__(self, pretrained: millrace.LLM | str, **options: Any) -> None:
        super().__init__()
        options = {name: value for name, value in options.items() if name not in ("batch_size", "max_batch_size")}
        self.llm = pretrained if isinstance(pretrained, millrace.LLM) else millrace.LLM(pretrained, **options)

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.info["name"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self.llm.tokenizer.apply_chat_template(chat_history, tokenize=False, add_generation_prompt=add_generation_prompt)
        return str(text)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Tokens of both, and how many are the context's: split where the whole text's tokens are."""
        spaces = len(context) - len(context.rstrip())
        if spaces:  # belong to the word behind them
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        encode = self.llm.tokenizer.encode
        whole = encode(context + continuation)
        first = encode(context) if context else whole[:1]
        return whole, max(1, min(len(first), len(whole) - 1))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [self._pair(*request.args) for request in requests]
        params = millrace.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        results = self.llm.generate([tokens[-self.llm.info["context"]:] for tokens, _ in pairs], params,
                                    use_tqdm=not disable_tqdm)
        answers = []
        for (tokens, start), out in zip(pairs, results):
            assert out.prompt_logprobs is not None
            told = out.prompt_logprobs[len(out.prompt_logprobs) - (len(tokens) - start):]
            answers.append((sum(one.logprob for one in told), all(one.top and one.top[0][0] == one.token_id for one in told)))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        context = int(self.llm.info["context"])
        windows, texts = [], []
        for index, request in enumerate(requests):
            tokens = self.llm.tokenizer.encode(request.args[0])
            for start in range(0, len(tokens), context - 1):  # the last token of a window is the first of the next
                windows.append(tokens[start:start + context])
                texts.append(index)
        params = millrace.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        sums = [0.0] * len(requests)
        for index, out in zip(texts, self.llm.generate(windows, params, use_tqdm=not disable_tqdm)):
            sums[index] += sum(one.logprob for one in (out.prompt_logprobs or [])[1:])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        results = []
        for request in requests:
            prompt, options = request.args
            params = millrace.SamplingParams(
                max_tokens=int(options.get("max_gen_toks", 256)), temperature=float(options.get("temperature", 0.0)),
                stop=options.get("until") or None, top_p=float(options.get("top_p", 1.0)))
            results.append(self.llm.generate(prompt, params))
        return [result[0].text for result in results]

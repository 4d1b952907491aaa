"""What comes out: whole answers of generate(), events of stream()."""

from __future__ import annotations

import dataclasses
import operator
import threading
from typing import Any, Callable, Iterator, Sequence, overload

from . import _millrace
from .errors import make_error


@dataclasses.dataclass(frozen=True)
class Logprob:
    """A token with its log-probability, and the likeliest ones at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  #: stop, length, cancelled or deadline
    logprobs: list[Logprob] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the logprobs of its tokens, where they were asked for."""
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt. `text`, `token_ids`, ... are those of the first."""

    prompt: str | list[int]
    outputs: list[Completion]
    usage: dict[str, Any]
    prompt_logprobs: list[Logprob] | None = None

    @property
    def text(self) -> str:
        """What the first answer says."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[Logprob] | None:
        """Of the first answer's tokens, where they were asked for."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str:
        """How the first answer ended: stop, length, cancelled or deadline."""
        return self.outputs[0].finish_reason

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool: `arguments` is JSON text, in an event of a stream a piece of it."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """Something that became certain: `kind` is text, reasoning, tool_call or finish."""

    kind: str
    index: int = 0  #: which of n answers
    text: str = ""  #: of text and reasoning
    token_id: int | None = None  #: of a stream of a prompt
    logprob: Logprob | None = None
    tool_call: ToolCall | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None  #: of finish


def _logprobs(found: Sequence[_millrace.TokenLogprob]) -> list[Logprob]:
    return [Logprob(one.token, one.logprob, tuple(one.top)) for one in found]


def make_output(prompt: str | list[int], answer: dict[str, Any], logprobs: bool) -> RequestOutput:
    """From what EventReader.collect gives. Raises the error that an answer ended with."""
    completions = []
    for index, sample in enumerate(answer["samples"]):
        end: _millrace.Event = sample["end"]
        if end.failed:
            raise make_error(end.code, end.error or "the request failed")
        found = _logprobs(sample["logprobs"]) if logprobs else None
        completions.append(Completion(index, sample["text"], sample["tokens"], end.finish, found))
    usage = answer["samples"][0]["end"].usage
    usage["completion_tokens"] = sum(len(c.token_ids) for c in completions)
    told = None if answer["prompt"] is None else _logprobs(answer["prompt"])
    return RequestOutput(prompt, completions, usage, told)


class Results(Sequence[RequestOutput]):
    """The answers to a batch of prompts, in the order of the prompts.

    They are computed together, in the background. Iterating gives each as soon as it and those before it are there;
    an index waits for that one. Dropping the object, as a loop that is left does, cancels what is not finished.
    """

    def __init__(self, prompts: Sequence[str | list[int]], submit: Callable[[int], _millrace.EventReader],
                 logprobs: Sequence[bool], window: int, bar: Any) -> None:
        self._prompts, self._submit, self._logprobs, self._window, self._bar = prompts, submit, logprobs, window, bar
        self._readers: dict[int, _millrace.EventReader] = {}
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._submitted = 0
        self._cancelled = False
        self._turn = threading.RLock()  # threads that read the same results take turns
        self._fill(0)

    def _fill(self, until: int) -> None:
        """Some ahead of the one that is waited for, so that a million prompts do not all wait inside the engine."""
        while self._submitted < min(len(self._prompts), until + self._window):
            self._readers[self._submitted] = self._submit(self._submitted)
            self._submitted += 1

    def _get(self, index: int) -> RequestOutput:
        with self._turn:
            return self._read(index)

    def _read(self, index: int) -> RequestOutput:
        found = self._outputs[index]
        if found is not None:
            return found
        if not self._cancelled:
            self._fill(index)
        reader = self._readers.get(index)
        if reader is None:
            raise make_error("busy", f"results[{index}]: was cancelled")
        try:
            output = make_output(self._prompts[index], reader.collect(), self._logprobs[index])
        except BaseException:  # also Ctrl-C: nobody reads the rest
            self.cancel()
            raise
        self._outputs[index] = output
        self._readers.pop(index, None)
        if self._bar is not None:
            self._bar.update(1)
            if all(one is not None for one in self._outputs):
                self._bar.close()
        return output

    def cancel(self) -> None:
        """Ends what is not finished; what is there stays."""
        self._cancelled = True
        for reader in list(self._readers.values()):  # one of them may be waited for by another thread
            reader.cancel()
        self._readers.clear()
        if self._bar is not None:
            self._bar.close()

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> RequestOutput: ...

    @overload
    def __getitem__(self, index: slice) -> list[RequestOutput]: ...

    def __getitem__(self, index: int | slice) -> RequestOutput | list[RequestOutput]:
        if isinstance(index, slice):
            return [self._get(i) for i in range(*index.indices(len(self)))]
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"results[{index}]: there are {len(self)}")
        return self._get(index % len(self))

    def __iter__(self) -> Iterator[RequestOutput]:
        for index in range(len(self)):
            yield self._get(index)

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        done = sum(one is not None for one in self._outputs)
        return f"<millrace.Results: {done} of {len(self)} read>"

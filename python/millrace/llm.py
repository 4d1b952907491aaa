"""LLM: a model that is loaded, and everything that it can be asked."""

from __future__ import annotations

import atexit
import json
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, Iterator, Literal, Mapping, NoReturn, Sequence, cast, overload

from . import _millrace
from ._checks import check_ids, check_messages, check_path, check_text, is_id, to_json
from ._display import Stats, card
from ._forked import Absent, leave_to_parent
from ._options import in_python, nearest, to_words
from .errors import BadInputError, Error, make_error
from .outputs import Results, StreamEvent
from .sampling import SamplingParams, params_of
from .streams import ChunkStream, PromptStream, Stream, chunks_of
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

# The fields of a chat, as the server has them; docs/server.md describes each.
_CHAT_FIELDS = (
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "regex", "grammar", "open_objects", "temperature",
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop",
    "n", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "ignore_eos", "priority", "cache_salt",
    "attention", "attention_budget",
    "reasoning_effort", "chat_template_kwargs",
)


class LLM:
    """A model, loaded.

    `model` is a GGUF file, a directory in Hugging Face's layout, a name of its hub (`hf:owner/name:Q4_K_M`) or a short
    one (`gpt-oss-20b`). `device` is cpu, cuda, cuda:N, reference or auto. The other options have the names of the
    command line, with underscores (`ctx`, `threads`, `kv_type`, `quantize`, `max_running`, ...): millrace.engine_options()
    lists them. Any thread may ask; all that is asked is computed together.

        llm = millrace.LLM("model.gguf", ctx=4096)
        for out in llm.generate(["Once upon a time"], max_tokens=50):
            print(out.text)
    """

    def __init__(self, model: str | os.PathLike[str], *, device: str = "auto", name: str | None = None,
                 open_objects: bool = False, progress: bool | None = None, **options: Any) -> None:
        if not isinstance(model, (str, os.PathLike)):
            raise BadInputError(f"model: found {model!r}, expected a path or a name")
        path_or_name = check_path("model", model)
        if name is not None and not check_text("name", name):
            raise BadInputError("name: found an empty string, expected some text")
        words = to_words({"device": device, **options}, _millrace.engine_options)
        self._bars = progress
        bar = _bar(progress, "loading", None, "B") if progress else None
        try:
            path, found = _millrace.find_model(path_or_name, bar.to if bar else None)
            self._model = _millrace.load_model(name or found, path, words, open_objects, bar.to if bar else None)
        except Error as error:
            raise type(error)(in_python(str(error))) from None
        finally:
            if bar:
                bar.close()
        self._info: dict[str, Any] = self._model.info()
        self._closed = False
        _OPEN.add(self)
        self.tokenizer = Tokenizer(self._model, self._info)

    # ---------------------------------------------------------------- text

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Mapping[str, Any] | Sequence[SamplingParams] | None = None, *,
                 use_tqdm: bool | None = None, **more: Any) -> Results:
        """Answers to a prompt or a batch of them; a prompt is text or a list of token ids.

        Arguments of SamplingParams may be given by themselves: generate(prompt, max_tokens=50); a list of SamplingParams
        has one for every prompt. The result is a sequence that fills up while it is read; leaving a loop over it cancels
        the rest.
        """
        batch = _prompts(prompts)
        if isinstance(sampling_params, (list, tuple)):
            each = [self._params(one, more) for one in sampling_params]
            if len(each) != len(batch):
                raise BadInputError(f"sampling_params: found {len(each)} for {len(batch)} prompts, expected one for each")
        else:
            each = [self._params(sampling_params, more)] * len(batch)
        for params in {id(one): one for one in each}.values():
            params._request(self._model)  # checked before anything is submitted

        def submit(index: int) -> _millrace.EventReader:
            prompt, request = batch[index], each[index]._request(self._model)
            if isinstance(prompt, str):
                request.text = prompt
            else:
                request.tokens = prompt
            return self._model.submit(request)

        wanted = self._bars if use_tqdm is None else use_tqdm
        bar = _bar(wanted, "prompts", len(batch), "") if wanted else None
        return Results(batch, submit, [one.logprobs is not None for one in each], _AHEAD, bar)

    @overload
    def chat(self, messages: Sequence[Message], *, stream: Literal[False] = False, **fields: Any) -> dict[str, Any]: ...

    @overload
    def chat(self, messages: Sequence[Message], *, stream: Literal[True], **fields: Any) -> Iterator[dict[str, Any]]: ...

    def chat(self, messages: Sequence[Message], *, stream: bool = False,
             **fields: Any) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """The answer to a conversation, as OpenAI's chat completion: a dict, or with stream=True its chunks.

        messages are {"role": ..., "content": ...}. Fields are those of POST /v1/chat/completions: tools, tool_choice,
        response_format, regex, grammar, temperature, top_p, top_k, min_p, seed, stop, n, max_tokens, logprobs,
        top_logprobs, reasoning_effort, priority, ...
        """
        call = self._chat_call(messages, stream, fields)
        if stream:
            return _chunks(call, self)
        try:
            while not call.done:
                call.poll()
                if not call.done:
                    call.wait()
        except BaseException:  # Ctrl-C, whose traceback holds the call: nobody reads the answer
            call.cancel()
            raise
        answer: dict[str, Any] = json.loads(call.body)
        return answer

    create_chat_completion = chat

    @overload
    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **more: Any) -> Stream: ...

    @overload
    def stream(self, *, messages: Sequence[Message], **more: Any) -> Stream: ...

    def stream(self, prompt: Prompt | None = None, sampling_params: SamplingParams | None = None, *,
               messages: Sequence[Message] | None = None, **more: Any) -> Stream:
        """An answer as it comes, for `async for` or `for`: events with text, reasoning, tool calls and the end.

        With `messages` a chat, and more as in chat(); with a prompt its continuation, and more as in generate().
        """
        if (prompt is None) == (messages is None):
            raise BadInputError("stream: expected a prompt or messages, one of them")
        if messages is not None:
            if sampling_params is not None:
                raise BadInputError("sampling_params: goes with a prompt, messages take fields of a chat")
            return ChunkStream(self._chat_call(messages, True, more), self)
        assert prompt is not None
        params = self._params(sampling_params, more)
        request = params._request(self._model)
        only = _one_prompt(prompt)
        if isinstance(only, str):
            request.text = only
        else:
            request.tokens = only
        return PromptStream(self._model.submit(request), params.logprobs is not None, self)

    def _params(self, given: object, more: Mapping[str, Any]) -> SamplingParams:
        params, most = params_of(given, more), int(self._info["max_samples"])
        if params.n > most:
            raise BadInputError(f"n: found {params.n}, expected 1 to {most}")
        return params

    def _chat_call(self, messages: Sequence[Message], stream: bool, fields: Mapping[str, Any]) -> _millrace.ApiCall:
        for name in fields:
            if name not in _CHAT_FIELDS:
                raise BadInputError(f"{name}: is no field of a chat{nearest(name, list(_CHAT_FIELDS))}")
        body: dict[str, Any] = {"messages": check_messages(messages), **{k: v for k, v in fields.items() if v is not None}}
        if stream:
            body.update(stream=True, stream_options={"include_usage": True})
        return self._model.call("/v1/chat/completions", to_json("messages", body))

    # ---------------------------------------------------------------- numbers

    def embed(self, inputs: Prompt | Sequence[Prompt], *, pooling: Literal["mean", "last", "cls"] | None = None,
              normalize: bool = True, dimensions: int | None = None) -> npt.NDArray[np.float32]:
        """A vector for each input, float32 [inputs, size]; `pooling` is the one of the model's makers if not given."""
        import numpy

        size = int(self._info["embedding_size"])
        if pooling not in (None, "mean", "last", "cls"):
            raise BadInputError(f"pooling: found {pooling!r}, expected mean, last or cls")
        if dimensions is not None and (isinstance(dimensions, bool) or not is_id(dimensions) or not 1 <= dimensions <= size):
            raise BadInputError(f"dimensions: found {dimensions!r}, expected a whole number, 1 to {size}")
        if not isinstance(normalize, bool):
            raise BadInputError(f"normalize: found {normalize!r}, expected True or False")
        readers = [self._embedding(one, pooling or self._info["pooling"]) for one in _prompts(inputs)]
        try:
            rows = numpy.concatenate([reader.collect_embedding(size) for reader in readers]) if readers else \
                numpy.zeros((0, size), numpy.float32)
        except BaseException:
            for reader in readers:
                reader.cancel()
            raise
        if dimensions is not None:
            rows = rows[:, :dimensions]
        if normalize:
            lengths = numpy.sqrt(numpy.square(rows, dtype=numpy.float64).sum(axis=1, keepdims=True))
            rows = (rows / numpy.where(lengths > 0, lengths, 1)).astype(numpy.float32)
        return rows

    def hidden_states(self, tokens: Prompt) -> npt.NDArray[np.float32]:
        """The hidden state of every token behind the model's last norm, float32 [tokens, hidden], not copied."""
        return self._embedding(_one_prompt(tokens), "none").collect_embedding(int(self._info["embedding_size"]))

    def logits(self, tokens: Prompt) -> npt.NDArray[np.float32]:
        """Logits, float32 [tokens, vocabulary], not copied: row i is what the model expects behind tokens[0..i]."""
        request = _millrace.Request()
        self._set_prompt(request, _one_prompt(tokens))
        request.prompt_logits, request.max_tokens, request.temperature, request.ignore_end = True, 1, 0.0, True
        return self._model.submit(request).collect_logits(int(self._info["vocab_size"]))

    def _embedding(self, prompt: str | list[int], pooling: str) -> _millrace.EventReader:
        request = _millrace.Request()
        self._set_prompt(request, prompt)
        request.set_pooling(pooling)
        return self._model.submit(request)

    @staticmethod
    def _set_prompt(request: _millrace.Request, prompt: str | list[int]) -> None:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens = prompt

    # ---------------------------------------------------------------- the model itself

    @property
    def info(self) -> dict[str, Any]:
        """What there is to know of it: name, architecture, device, context, vocab_size, memory, ..."""
        return dict(self._info)

    @property
    def chat_format(self) -> str:
        """How its family writes conversations: harmony, hermes, llama3, mistral or plain."""
        return self._model.format()

    def stats(self) -> Stats:
        """What it has done so far: requests, tokens, speed, the cache."""
        return Stats(self._model.stats())

    def close(self) -> None:
        """Cancels what runs and gives the memory back as soon as nobody reads its answers. Later requests fail."""
        if not self._closed:
            self._closed = True
            self._model.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("LLM: holds a model and its threads, expected one that is made in the process that uses it")

    def __repr__(self) -> str:
        i = self._info
        return f"<millrace.LLM {i['name']} ({i['architecture']}) on {i['device']}, context {i['context']}>"

    def _repr_html_(self) -> str:
        return card(self._info, self._model.stats())


_OPEN: weakref.WeakSet[LLM] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """The engines' threads are still before the process takes their memory away."""
    for llm in list(_OPEN):
        llm.close()


def _after_fork() -> None:
    """A forked process has none of the engines' threads: asking would wait for ever, and so would closing."""
    for llm in list(_OPEN):
        llm._closed = True
        leave_to_parent(llm._model)
        llm._model = cast(_millrace.Model, Absent("llm"))
    _OPEN.clear()


os.register_at_fork(after_in_child=_after_fork)
_AHEAD = 1024  # requests that a batch has inside the engine before they are read


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or isinstance(value, Sequence) and bool(value) and all(map(is_id, value))


def _one_prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise BadInputError("prompt: found an empty text, expected some")
        return check_text("prompt", prompt)
    if hasattr(prompt, "tolist"):  # numpy, torch
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise BadInputError(f"prompt: found {prompt!r:.60}, expected text or a list of token ids")
    if not prompt:
        raise BadInputError("prompt: found no tokens, expected at least one")
    return check_ids("prompt", prompt)


def _prompts(prompts: Any) -> list[str | list[int]]:
    if hasattr(prompts, "tolist"):  # numpy, torch, pandas
        prompts = prompts.tolist()
    if _is_prompt(prompts):
        return [_one_prompt(prompts)]
    if isinstance(prompts, (Mapping, bytes)) or not hasattr(prompts, "__iter__"):
        raise BadInputError(f"prompts: found {prompts!r}, expected text, token ids or a list of them")
    return [_one_prompt(one) for one in prompts]


def _chunks(call: _millrace.ApiCall, llm: LLM) -> Iterator[dict[str, Any]]:  # llm: whose end would be the call's
    try:
        while True:
            yield from chunks_of(call.poll())
            if call.done:
                return
            call.wait()
    finally:
        call.cancel()


class _Bar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def to(self, done: int, total: int) -> None:
        if self._bar.total != total:  # fetched, now loaded
            self._bar.reset(total)
        self._bar.update(done - self._bar.n)

    def update(self, n: int) -> None:
        self._bar.update(n)

    def close(self) -> None:
        self._bar.close()


def _bar(wanted: bool | None, what: str, total: int | None, unit: str) -> _Bar | None:
    """tqdm's progress bar, where tqdm is installed."""
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError:
        if wanted:
            print("millrace: no progress bar: tqdm is not installed", file=sys.stderr)
        return None
    return _Bar(tqdm(total=total, desc=what, unit=unit or "it", unit_scale=bool(unit)))


__all__ = ["LLM", "StreamEvent", "make_error"]

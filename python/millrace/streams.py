"""Answers as they come, for `async for` and for `for`. Leaving the loop cancels the request."""

from __future__ import annotations

import json
from collections import deque
from typing import Any, Protocol

from . import _millrace
from .errors import make_error
from .outputs import Logprob, StreamEvent, ToolCall


class _Reader(Protocol):
    """What both of the module's readers have."""

    @property
    def done(self) -> bool: ...
    @property
    def fd(self) -> int: ...
    def wait(self) -> None: ...
    def cancel(self) -> None: ...


class Stream:
    """One answer as it comes: both an asynchronous and a plain iterator of StreamEvent.

    An answer may be read by one loop, in any thread. `close()`, or dropping the object, cancels what still runs.
    """

    def __init__(self, reader: _Reader, llm: object) -> None:
        self._reader: _Reader | None = reader
        self._llm: object | None = llm  # whose end would be the stream's, if nobody else holds it
        self._ready: deque[StreamEvent] = deque()
        self._awaited = False

    def _take(self) -> None:
        """Moves what has come into `_ready`; closes the stream behind its end."""
        raise NotImplementedError

    def _next(self) -> StreamEvent | None:
        reader = self._reader  # another thread may close
        if not self._ready and reader is not None:
            try:
                self._take()
            except BaseException:
                self.close()
                raise
            if reader.done:
                self._reader = self._llm = None
        return self._ready.popleft() if self._ready else None

    def _begin_to_wait(self) -> None:
        """What comes wakes one waiter: another would wait for ever."""
        if self._awaited:
            raise make_error("busy", "stream: is read by another loop, expected one")
        self._awaited = True

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> StreamEvent:
        while True:
            event = self._next()
            if event is not None:
                return event
            reader = self._reader
            if reader is None:
                raise StopIteration
            self._begin_to_wait()
            try:
                reader.wait()
            except BaseException:  # Ctrl-C, whose traceback holds the stream
                self.close()
                raise
            finally:
                self._awaited = False

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> StreamEvent:
        while True:
            event = self._next()
            if event is not None:
                return event
            reader = self._reader
            if reader is None:
                raise StopAsyncIteration
            self._begin_to_wait()
            try:
                await _readable(reader.fd)
            finally:
                self._awaited = False

    def close(self) -> None:
        """Cancels what still runs. What has come and was not read is dropped."""
        reader, self._reader, self._llm = self._reader, None, None
        self._ready.clear()
        if reader is not None:
            reader.cancel()

    async def aclose(self) -> None:
        """The same, under the name that asynchronous generators have for it."""
        self.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def text(self) -> str:
        """Reads to the end, and gives the text of the first answer."""
        return "".join(event.text for event in self if event.kind == "text" and event.index == 0)


async def _readable(fd: int) -> None:
    import asyncio  # not before it is needed: it is most of the time that importing this package would take

    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


class PromptStream(Stream):
    """The answer to a prompt, token by token."""

    def __init__(self, reader: _millrace.EventReader, logprobs: bool, llm: object) -> None:
        super().__init__(reader, llm)
        self._events, self._logprobs = reader, logprobs

    def _take(self) -> None:
        while (event := self._events.poll()) is not None:
            if event.failed:
                raise make_error(event.code, event.error or "the request failed")
            if event.is_token:
                found = Logprob(event.token, event.logprob, tuple(event.top)) if self._logprobs else None
                self._ready.append(StreamEvent("text", event.sample, event.text, event.token, found))
                continue
            if event.text:
                self._ready.append(StreamEvent("text", event.sample, event.text))
            self._ready.append(StreamEvent("finish", event.sample, finish_reason=event.finish, usage=event.usage))


class ChunkStream(Stream):
    """The answer to a chat: events out of the chunks of OpenAI's API."""

    def __init__(self, call: _millrace.ApiCall, llm: object) -> None:
        super().__init__(call, llm)
        self._call = call
        self._finished: list[StreamEvent] = []  # wait for the usage, which comes last

    def _take(self) -> None:
        for chunk in chunks_of(self._call.poll()):
            self._read(chunk)
        if self._call.done:
            self._ready.extend(self._finished)
            self._finished.clear()

    def _read(self, chunk: dict[str, Any]) -> None:
        if not chunk["choices"]:
            self._finished = [StreamEvent("finish", e.index, finish_reason=e.finish_reason, usage=chunk.get("usage"))
                              for e in self._finished]
        for choice in chunk["choices"]:
            self._read_choice(choice)

    def _read_choice(self, choice: dict[str, Any]) -> None:
        index, delta = choice["index"], choice["delta"]
        if delta.get("reasoning"):
            self._ready.append(StreamEvent("reasoning", index, delta["reasoning"]))
        if delta.get("content"):
            found = (choice.get("logprobs") or {}).get("content") or []
            self._ready.append(StreamEvent("text", index, delta["content"], logprob=_logprob(found)))
        for call in delta.get("tool_calls") or ():
            said = call.get("function") or call.get("custom") or {}
            arguments = said.get("arguments", said.get("input", ""))
            self._ready.append(StreamEvent("tool_call", index, tool_call=ToolCall(
                call["index"], call.get("id"), said.get("name"), arguments)))
        if choice.get("finish_reason"):
            self._finished.append(StreamEvent("finish", index, finish_reason=choice["finish_reason"]))


def _logprob(found: list[dict[str, Any]]) -> Logprob | None:
    """Of the tokens of a piece of text together: a chat's API names tokens by their text, so there are no ids."""
    return Logprob(-1, sum(one["logprob"] for one in found)) if found else None


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The objects of server-sent events. Raises the error that is among them."""
    chunks = []
    for line in text.split("\n"):  # not splitlines: a text may hold other ends of lines
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line[len("data: "):])
        if "error" in chunk:
            raise make_error("busy" if chunk["error"].get("type") == "server_error" else "bad_input", chunk["error"]["message"])
        chunks.append(chunk)
    return chunks

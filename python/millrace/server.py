"""The server in this process: OpenAI's API over a model that is loaded here."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any, cast

from . import _millrace
from ._forked import Absent, leave_to_parent
from ._options import engine_options, in_python, to_words
from .errors import BadInputError, BusyError, Error
from .llm import LLM


class Server:
    """A server that listens. `url` is its address; `stop()`, or leaving a `with` block, ends it."""

    def __init__(self, llm: LLM, serving: _millrace.Serving, owns: bool) -> None:
        self.llm, self._serving, self._owns = llm, serving, owns
        self.url: str = serving.url
        self._ended = threading.Event()
        _RUNNING.add(self)

    @property
    def running(self) -> bool:
        """Whether it listens still."""
        return self._serving.running

    def stop(self) -> None:
        """Finishes what is under way, and ends. A model that serve() loaded is closed."""
        self._serving.stop()
        _RUNNING.discard(self)
        self._ended.set()
        if self._owns:
            self.llm.close()

    def wait(self) -> None:
        """Until another thread stops it, or Ctrl-C: then it is stopped."""
        try:
            self._ended.wait()
        finally:
            self.stop()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<millrace.Server {self.url}>"


_RUNNING: set[Server] = set()  # a server that nobody holds serves on


@atexit.register
def _stop_all() -> None:
    for server in list(_RUNNING):
        server.stop()


def _after_fork() -> None:
    """The threads that serve are the other process's."""
    for server in _RUNNING:
        leave_to_parent(server._serving)
        server._serving = cast(_millrace.Serving, Absent("server"))
    _RUNNING.clear()


os.register_at_fork(after_in_child=_after_fork)

# The command line's names for the one model that it serves: here an LLM has its own.
_NOT_HERE = {"model_id": "LLM(..., name=...)", "alias": "LLM(..., name=...)"}


def serve(model: LLM | str | os.PathLike[str], **options: Any) -> Server:
    """Starts the server in this process, on threads of its own, and returns when it listens.

    `model` is an LLM, which may be asked directly at the same time, or what LLM takes. Options are those of `millrace
    serve`, with underscores: host, port (0: any free one), keys, rate, cors, ...; millrace.server_options() lists them.
    Those of the engine (ctx, threads, ...) go with a model that is not loaded yet.
    """
    for name, instead in _NOT_HERE.items():
        if name in options:
            raise BadInputError(f"{name}: an LLM has its own name, expected {instead}")
    engine = {name: value for name, value in options.items() if name in engine_options() or name in _LLM_ARGUMENTS}
    if engine and isinstance(model, LLM):
        raise BadInputError(f"{next(iter(engine))}: is for loading a model, and this one is loaded")
    server = {"quiet": True, **{name: value for name, value in options.items() if name not in engine}}
    words = to_words(server, _millrace.server_options)
    if isinstance(model, LLM) and model._closed:
        raise BusyError("model: was closed, expected one that is open")
    llm = model if isinstance(model, LLM) else LLM(model, **engine)
    try:
        return Server(llm, _millrace.serve(llm._model, words), llm is not model)
    except Error as error:
        if llm is not model:
            llm.close()
        raise type(error)(in_python(str(error))) from None


_LLM_ARGUMENTS = ("name", "open_objects", "progress")

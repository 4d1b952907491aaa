"""Millrace, an LLM engine, as a Python library.

    import millrace

    llm = millrace.LLM("model.gguf")
    for out in llm.generate(["Once upon a time"], max_tokens=50):
        print(out.text)

docs/python.md describes all of it.
"""

import importlib
from types import ModuleType

from ._display import Stats
from ._millrace import __version__
from ._options import engine_options, server_options
from .errors import (BadInputError, BusyError, DeviceError, Error, FileError, InternalError, OutOfMemoryError,
                     UnsupportedError)
from .llm import LLM
from .outputs import Completion, Logprob, RequestOutput, Results, StreamEvent, ToolCall
from .sampling import SamplingParams
from .server import Server, serve
from .streams import Stream
from .tokenizer import Tokenizer

__all__ = [
    "LLM", "SamplingParams", "Tokenizer", "serve", "Server", "Stats", "Stream", "StreamEvent", "Results", "RequestOutput",
    "Completion", "Logprob", "ToolCall", "engine_options", "server_options", "Error", "BadInputError", "BusyError",
    "DeviceError", "FileError", "InternalError", "OutOfMemoryError", "UnsupportedError", "__version__",
]


def __getattr__(name: str) -> ModuleType:
    """millrace.torch and millrace.jax are the other wheel's (millrace-kernels), imported when they are asked for."""
    if name in ("torch", "jax"):
        return importlib.import_module(f"millrace.{name}")
    raise AttributeError(f"module 'millrace' has no attribute '{name}'")

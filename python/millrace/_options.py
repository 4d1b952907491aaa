"""Options by the names of the command line, with underscores: ctx=4096 is --ctx 4096."""

from __future__ import annotations

import difflib
import functools
import os
import re
from typing import Any, Callable, Mapping

from . import _millrace
from ._checks import check_text
from .errors import BadInputError

# What other engines call the same thing: named in the complaint about an unknown name.
_ELSEWHERE = {
    "n_ctx": "ctx", "context": "ctx", "max_model_len": "ctx", "max_seq_len": "ctx", "context_length": "ctx",
    "n_threads": "threads", "num_threads": "threads", "gpu_memory_utilization": "gpu_memory",
    "max_num_seqs": "max_running", "kv_cache_dtype": "kv_type", "quantization": "quantize",
    "enable_prefix_caching": "no_prefix_cache", "prefix_cache": "no_prefix_cache", "n_batch": "step_tokens",
    "max_num_batched_tokens": "step_tokens", "use_mlock": "lock", "speculative_model": "draft_model",
    "api_key": "keys", "max_waiting": "max_queue",
}


@functools.cache
def _known(list_options: Callable[[], list[tuple[str, str, bool, str]]]) -> dict[str, tuple[str, str, bool, str]]:
    return {name.replace("-", "_"): (name, kind, many, text) for name, kind, many, text in list_options()}


def engine_options() -> dict[str, str]:
    """The options of LLM(...), each with what it does."""
    return {name: in_python(entry[3]) for name, entry in _known(_millrace.engine_options).items()}


def server_options() -> dict[str, str]:
    """The options of serve(...), each with what it does."""
    return {name: in_python(entry[3]) for name, entry in _known(_millrace.server_options).items()}


def nearest(name: str, names: list[str]) -> str:
    """`; did you mean X?`, or nothing where no name is near."""
    if _ELSEWHERE.get(name) in names:
        return f"; did you mean {_ELSEWHERE[name]}?"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _word(name: str, kind: str, value: Any) -> str:
    if kind == "text":
        if isinstance(value, (str, os.PathLike)):
            return check_text(name, os.fspath(value))
        expected = "a string"
    elif kind == "integer":
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        expected = "an integer"
    elif kind == "real":
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return repr(value)
        expected = "a number"
    elif kind == "amount":
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return repr(value)
        if isinstance(value, str):
            return check_text(name, value)
        expected = 'a number or a text such as "16G"'
    else:
        if isinstance(value, bool):
            return "true" if value else "false"
        expected = "True or False"
    raise BadInputError(f"{name}: found {value!r}, expected {expected}")


def to_words(options: Mapping[str, Any], list_options: Callable[[], list[tuple[str, str, bool, str]]]) -> list[str]:
    """Options as the command line would have them; None is as good as not given."""
    known = _known(list_options)
    words = []
    for name, value in options.items():
        if name not in known:
            raise BadInputError(f"{name}: is no option{nearest(name, list(known))}")
        if value is None:
            continue
        dashed, kind, many, _ = known[name]
        for one in value if many and isinstance(value, (list, tuple)) else [value]:
            word = _word(name, kind, one)
            if kind == "flag":
                words += [f"--{dashed}"] if one else []
            else:
                words.append(f"--{dashed}={word}")
    return words


def in_python(message: str) -> str:
    """A message of the command line with the names that options have here."""
    known = {entry[0]: name for lister in (_millrace.engine_options, _millrace.server_options)
             for name, entry in _known(lister).items()}
    return re.sub(r"--([a-z][a-z-]*)", lambda m: known.get(m.group(1), m.group(0)), message)

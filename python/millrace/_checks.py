"""What is given to the engine, checked where it can still be called by its name."""

from __future__ import annotations

import json
import os
from typing import Any, Mapping, Sequence

from .errors import BadInputError

_MOST = 1 << 31  # token ids are below it, whatever the vocabulary


def check_text(name: str, text: Any) -> str:
    """A string that UTF-8 can hold: Python's may also hold halves of surrogate pairs."""
    if not isinstance(text, str):
        raise BadInputError(f"{name}: found {text!r:.60}, expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(f"{name}: found half of a surrogate pair at {error.start}, expected valid Unicode") from None
    return text


def check_path(name: str, path: str | os.PathLike[str]) -> str:
    """What an operating system's file may be called, in UTF-8."""
    text = check_text(name, os.fspath(path))
    if not text or "\0" in text:
        raise BadInputError(f"{name}: found {text!r:.60}, expected {'no zero byte' if text else 'some text'}")
    return text


def is_id(value: Any) -> bool:
    """A whole number, Python's own or numpy's or torch's."""
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def check_ids(name: str, tokens: Sequence[Any]) -> list[int]:
    """Token ids; whether the vocabulary has them is the engine's to say."""
    if not hasattr(tokens, "__iter__"):
        raise BadInputError(f"{name}: found {tokens!r:.60}, expected token ids")
    ids = []
    for token in tokens:
        if isinstance(token, bool) or not is_id(token):
            raise BadInputError(f"{name}: found {token!r:.60}, expected token ids")
        ids.append(token.__index__())
        if not -_MOST <= ids[-1] < _MOST:
            raise BadInputError(f"{name}: found a token id beyond 32 bits")
    return ids


def check_messages(messages: Any) -> list[Any]:
    """A list of dicts; what is in them is the format's to say."""
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise BadInputError(f"messages: found {messages!r:.60}, expected a list of dicts")
    return list(messages)


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, default=_plain)


def _wrong_field(name: str, value: Any) -> str:
    """Which of the fields that were given cannot be JSON."""
    for field in value if isinstance(value, Mapping) else ():
        try:
            _to_json(value[field]).encode()
        except (TypeError, ValueError, RecursionError):
            return str(field)
    return name


def to_json(name: str, value: Any) -> str:
    """JSON text of what a user gave."""
    try:
        text = _to_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInputError(f"{_wrong_field(name, value)}: {str(error)[:100]}") from None
    return check_text(name, text)

"""What is left of an engine in a process that was forked from the one that has its threads."""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import BusyError


def leave_to_parent(native: Any) -> None:
    """Never destroyed here: its end would wait for threads that only the other process has."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


class Absent:
    """In the place of the extension's object: whatever is asked of it is refused."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> NoReturn:
        raise BusyError(f"{self._what}: belongs to the process that this one was forked from, expected one that is made "
                        "here (multiprocessing: the start method \"spawn\")")

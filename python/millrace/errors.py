"""What goes wrong: one class for each of the engine's kinds of errors, with its own message."""

from __future__ import annotations


class Error(Exception):
    """The base of all errors of Millrace; `code` names the kind."""

    code = "internal"


class BadInputError(Error, ValueError):
    """A file, a prompt or an option is wrong: the caller can fix it."""

    code = "bad_input"


class UnsupportedError(Error, NotImplementedError):
    """Well-formed, but not something this build can do."""

    code = "unsupported"


class FileError(Error, OSError):
    """The operating system refused a read, a write or a mapping."""

    code = "io"


class OutOfMemoryError(Error, MemoryError):
    """It does not fit."""

    code = "no_memory"


class DeviceError(Error):
    """An accelerator failed, and stays failed."""

    code = "device"


class BusyError(Error):
    """Too many requests wait already, the model was closed, or an answer has its reader."""

    code = "busy"


class InternalError(Error):
    """A fault of the program."""

    code = "internal"


_CLASSES: dict[str, type[Error]] = {
    c.code: c for c in (BadInputError, UnsupportedError, FileError, OutOfMemoryError, DeviceError, BusyError, InternalError)
}


def make_error(code: str, message: str) -> Error:
    """The exception of a kind of error that the engine names."""
    return _CLASSES.get(code, InternalError)(message)

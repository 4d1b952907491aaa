"""Requests over HTTP for the engine's model hub, by Python's own library: what src/hub/http_client.h describes, with a
thread for each request. Whoever waits gets what has come as events."""

from __future__ import annotations

import hashlib
import queue
import threading
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from ._millrace import __version__

_PIECE = 256 << 10  # bytes
_AHEAD = 32  # pieces that may wait to be taken: a slow disk slows the network, and not memory
_SILENT_S = 30.0  # without a byte: the connection is dead


class Event(NamedTuple):
    """status and headers come first, then data, then the end, whose `error` is empty where all went well."""

    number: int
    kind: str  # "head", "data" or "end"
    status: int = 0
    headers: dict[str, str] = {}
    data: bytes = b""
    error: str = ""
    unreachable: bool = False


class _Stay(urllib.request.HTTPRedirectHandler):
    """Who asks decides what the next host may see."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _is_unreachable(error: BaseException) -> bool:
    """Not found, or nobody there: asking again will not help."""
    import socket
    import ssl

    reason = getattr(error, "reason", error)
    return isinstance(reason, (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError))


class Transfers:
    """Several requests at a time."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event] = queue.Queue(_AHEAD)
        self._running: dict[int, threading.Event] = {}  # set: it was stopped
        self._opener = urllib.request.build_opener(_Stay)

    def begin(self, number: int, url: str, head: bool, headers: list[str]) -> None:
        request = urllib.request.Request(url, method="HEAD" if head else "GET")
        request.add_header("User-Agent", f"millrace/{__version__}")
        for line in headers:
            name, _, value = line.partition(":")
            request.add_header(name, value.strip())
        self._running[number] = stopped = threading.Event()
        threading.Thread(target=self._run, args=(number, request, stopped), daemon=True).start()

    def stop(self, number: int) -> None:
        if stopped := self._running.pop(number, None):
            stopped.set()

    def close(self) -> None:
        for number in list(self._running):
            self.stop(number)

    def wait(self, seconds: float) -> list[Event]:
        """What has come, of requests that run; waits for it, at most so long."""
        events: list[Event] = []
        try:
            events.append(self._events.get(timeout=seconds))
            while len(events) < _AHEAD:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        found = [event for event in events if event.number in self._running]
        for event in found:
            if event.kind == "end":
                self._running.pop(event.number, None)
        return found

    def _put(self, event: Event, stopped: threading.Event) -> bool:
        while not stopped.is_set():
            try:
                self._events.put(event, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def _run(self, number: int, request: urllib.request.Request, stopped: threading.Event) -> None:
        end = Event(number, "end")
        try:
            try:
                answer: Any = self._opener.open(request, timeout=_SILENT_S)
            except urllib.error.HTTPError as refused:  # an answer as any other
                answer = refused
            with answer:
                told = {name.lower(): value for name, value in answer.headers.items()}
                self._put(Event(number, "head", answer.status, told), stopped)
                left = int(told["content-length"]) if told.get("content-length", "").isdigit() else None
                while request.method != "HEAD" and not stopped.is_set() and (data := answer.read1(_PIECE)):
                    left = None if left is None else left - len(data)
                    self._put(Event(number, "data", data=data), stopped)
                if request.method != "HEAD" and left:
                    end = Event(number, "end", error=f"the answer ended {left} bytes early")
        except Exception as error:  # whatever it is, the one who waits is told
            reason = getattr(error, "reason", error)
            end = Event(number, "end", error=str(reason) or type(reason).__name__, unreachable=_is_unreachable(error))
        self._put(end, stopped)


def sha256() -> Any:
    return hashlib.sha256()


def blob_sha1(size: int) -> Any:
    """git's name of a content."""
    digest = hashlib.sha1(usedforsecurity=False)
    digest.update(b"blob %d\0" % size)
    return digest

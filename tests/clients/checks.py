"""What the scripts for Python packages share: the server's address, a schema, a tool, and a line for each check that held."""

import sys
import time
from typing import Literal

from pydantic import BaseModel, Field

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
BASE = URL + "/v1"
MODEL = "smollm2"
QUESTION = "Name a colour."


class City(BaseModel):
    """A city somewhere. Nothing here has a bound: the answer has to end all the same."""

    name: str = Field(description="its name")
    country: str
    population: int
    tags: list[str] = Field(default_factory=list)


class Trip(BaseModel):
    """Objects in objects, a choice, something that may be missing."""

    by: Literal["train", "boat"]
    stops: list[City]
    price: float | None = None


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"It is sunny in {city[:20]}."


def run(package, checks):
    """Each check is a function without arguments that raises when something is wrong; its name says what it tries."""
    from importlib.metadata import version
    failed = 0
    for check in checks:
        begin = time.monotonic()
        try:
            check()
            said = "held"
        except Exception as error:  # noqa: BLE001 - every kind is a failed check
            failed += 1
            said = f"FAILED: {type(error).__name__}: {error}"
        name = check.__name__.replace("_", " ")
        print(f"{package} {version(package)}: {name}: {said} ({time.monotonic() - begin:.1f} s)", flush=True)
    print(f"{package} {version(package)}: {len(checks) - failed} of {len(checks)} held")
    sys.exit(1 if failed else 0)


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")

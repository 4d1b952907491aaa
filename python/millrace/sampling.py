"""SamplingParams: how tokens are chosen and when an answer ends, under the names that vLLM has for it."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from typing import Any, Mapping, Sequence

from . import _millrace
from ._checks import check_ids, check_text, to_json
from ._options import nearest
from .errors import BadInputError

_NUMBERS = {  # name -> (lowest, highest)
    "temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-100.0, 100.0), "frequency_penalty": (-100.0, 100.0),
}
_WHOLE = {  # name -> (lowest, highest)
    "n": (1, 1 << 16), "max_tokens": (1, (1 << 31) - 1), "top_k": (-1, (1 << 31) - 1), "seed": (-(1 << 63), (1 << 64) - 1),
    "logprobs": (0, 1000), "prompt_logprobs": (0, 1000), "priority": (-1000000, 1000000),
    "attention_budget": (64, 1 << 28),
}
_FLAGS = ("ignore_eos", "skip_special_tokens")


@dataclasses.dataclass
class SamplingParams:
    """How the tokens of an answer are chosen, and when it ends.

    The defaults sample the model's own distribution until it ends its turn or the context is full. `temperature=0` is
    greedy. The same seed gives the same tokens on every machine, whatever else runs. At most one of `json_schema`,
    `regex`, `grammar` and `choice` holds the text to a form.
    """

    n: int = 1  #: answers to each prompt
    max_tokens: int | None = None  #: of each answer; None: until the context is full
    temperature: float = 1.0  #: 0: the likeliest token, always
    top_p: float = 1.0  #: keep the fewest likeliest whose probabilities reach this
    top_k: int = 0  #: keep the k likeliest; 0 and -1: all
    min_p: float = 0.0  #: keep those at least this times as likely as the likeliest
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None  #: token id -> what is added to its logit
    seed: int | None = None  #: None: a fresh one
    stop: str | Sequence[str] | None = None  #: text before which the answer ends
    stop_token_ids: Sequence[int] | None = None  #: tokens that end it, beside the model's own
    ignore_eos: bool = False  #: the model's end tokens are tokens like any other
    skip_special_tokens: bool = True  #: False: special tokens appear in the text by name
    logprobs: int | None = None  #: of each token, with so many of the likeliest
    prompt_logprobs: int | None = None  #: of each token of the prompt
    json_schema: str | Mapping[str, Any] | bool | None = None  #: True: any JSON object
    regex: str | None = None
    grammar: str | None = None  #: GBNF
    choice: Sequence[str] | None = None  #: the answer is one of these
    priority: int = 0  #: higher goes first
    timeout: float | None = None  #: seconds, then the answer ends where it is
    cache_salt: str = ""  #: prefixes are shared only among requests with the same
    attention: str = ""  #: full or sparse, of an LLM with attention="sparse" or "request"; "": the LLM's
    attention_budget: int | None = None  #: tokens that sparse attention reads; None: the LLM's

    def __post_init__(self) -> None:
        for name, (low, high) in _NUMBERS.items():
            setattr(self, name, _number(name, getattr(self, name), low, high, whole=False))
        for name, (low, high) in _WHOLE.items():
            value = getattr(self, name)
            if value is not None or name in ("n", "top_k", "priority"):
                setattr(self, name, _number(name, value, low, high, whole=True))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise BadInputError(f"{name}: found {getattr(self, name)!r}, expected True or False")
        if self.timeout is not None:
            self.timeout = _number("timeout", self.timeout, 0.0, 1e9, whole=False)
        _check_strings("stop", self._stops())
        check_ids("stop_token_ids", self.stop_token_ids or ())
        check_text("cache_salt", self.cache_salt)
        if check_text("attention", self.attention) not in ("", "full", "sparse"):
            raise BadInputError(f"attention: found {self.attention!r}, expected full or sparse")
        if "" in self._stops():
            raise BadInputError("stop: found an empty string, expected some text")
        if self.choice is not None:
            _check_strings("choice", self.choice)
            if not self.choice:
                raise BadInputError("choice: found none, expected at least one string")
        forms = [name for name in ("json_schema", "regex", "grammar", "choice") if getattr(self, name) is not None]
        if len(forms) > 1:
            raise BadInputError(f"{forms[1]}: found {forms[0]} as well, expected one of them")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        self._constraint()
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise BadInputError(f"logit_bias: found {self.logit_bias!r:.60}, expected token ids and numbers, as a dict")
        check_ids("logit_bias", list(self.logit_bias or ()))
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(bias, numbers.Real) or not math.isfinite(bias):
                raise BadInputError(f"logit_bias: found {token!r}: {bias!r}, expected token ids and finite numbers")

    def _stops(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else (self.stop or ())

    def _constraint(self) -> str | None:
        """What the server's API has for the form of the text, as JSON."""
        if self.json_schema is True:
            return json.dumps({"response_format": {"type": "json_object"}})
        if self.json_schema is not None:
            schema: Any = self.json_schema
            try:
                schema = json.loads(schema) if isinstance(schema, str) else schema
            except ValueError as error:
                raise BadInputError(f"json_schema: {error}") from None
            if not isinstance(schema, Mapping):
                raise BadInputError(f"json_schema: found {schema!r:.60}, expected a schema, or True for any object")
            return to_json("json_schema", {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
        if self.regex is not None:
            return json.dumps({"regex": self.regex})
        if self.grammar is not None:
            return json.dumps({"grammar": self.grammar})
        if self.choice is not None:
            return json.dumps({"grammar": "root ::= " + " | ".join(json.dumps(c, ensure_ascii=False) for c in self.choice)})
        return None

    def _request(self, model: _millrace.Model) -> _millrace.Request:
        r = _millrace.Request()
        r.samples = self.n
        r.max_tokens = self.max_tokens or 0
        r.temperature, r.top_p, r.min_p = float(self.temperature), float(self.top_p), float(self.min_p)
        r.top_k = max(0, self.top_k)
        r.repetition_penalty = float(self.repetition_penalty)
        r.presence_penalty, r.frequency_penalty = float(self.presence_penalty), float(self.frequency_penalty)
        r.logit_bias = {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()}
        r.seed = None if self.seed is None else self.seed % (1 << 64)
        r.stop, r.stop_tokens = list(self._stops()), check_ids("stop_token_ids", self.stop_token_ids or ())
        r.ignore_end, r.show_special = self.ignore_eos, not self.skip_special_tokens
        r.logprobs, r.prompt_logprobs = self.logprobs, self.prompt_logprobs
        r.priority, r.cache_salt = self.priority, self.cache_salt
        r.attention, r.attention_budget = self.attention, self.attention_budget or 0
        if self.timeout is not None:
            r.set_timeout(float(self.timeout))
        constraint = self._constraint()
        if constraint is not None:
            model.set_constraint(r, constraint)
        return r


def _number(name: str, value: Any, low: float, high: float, whole: bool) -> Any:
    """Python's own number of a number, numpy's too, between the two."""
    is_whole = isinstance(value, numbers.Integral)
    if isinstance(value, bool) or not (is_whole if whole else isinstance(value, numbers.Real)):
        raise BadInputError(f"{name}: found {value!r}, expected {'a whole number' if whole else 'a number'}")
    if not low <= value <= high:
        raise BadInputError(f"{name}: found {value!r}, expected {_plain(low)} to {_plain(high)}")
    return int(value) if is_whole else float(value)


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _check_strings(name: str, values: Sequence[Any]) -> None:
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise BadInputError(f"{name}: found {values!r:.60}, expected strings")
    for value in values:
        check_text(name, value)


def params_of(params: object, more: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams, with the arguments that were given beside them."""
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    given = dict(params) if isinstance(params, Mapping) else {}
    given.update(more)
    for name in given:
        if name not in names:
            raise BadInputError(f"{name}: is no argument{nearest(name, names)}")
    if isinstance(params, SamplingParams):
        return dataclasses.replace(params, **given)
    if params is not None and not isinstance(params, Mapping):
        raise BadInputError(f"sampling_params: found {params!r}, expected SamplingParams")
    return SamplingParams(**given)

"""The model's own tokenizer and chat template."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from . import _millrace
from ._checks import check_ids, check_messages, check_text, is_id, to_json
from .errors import BadInputError


class Tokenizer:
    """What the model's own tokenizer and chat template make of a text. `llm.tokenizer` is one."""

    def __init__(self, model: _millrace.Model, info: Mapping[str, Any]) -> None:
        self._model = model
        self.vocab_size: int = info["vocab_size"]
        self.end_token_ids: list[int] = info["end_tokens"]

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids. `parse_special`: names of special tokens in the text become them."""
        return self._model.encode(check_text("text", text), add_special_tokens, parse_special)

    def decode(self, tokens: int | Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD."""
        given: Any = [tokens] if is_id(tokens) else tokens
        if not hasattr(given, "__iter__") or isinstance(given, (str, bytes)):
            raise BadInputError(f"tokens: found {given!r:.60}, expected token ids")
        return self._model.decode([self._check(token) for token in given], not skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, special ones by name."""
        return self._model.token_bytes(self._check(token))

    def is_special(self, token: int) -> bool:
        """Whether it is a control token: part of no text."""
        return self._model.is_special(self._check(token))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], tokenize: bool = True,
                            add_generation_prompt: bool = True, **variables: Any) -> str | list[int]:
        """The conversation as the model's template writes it: token ids, or text with tokenize=False."""
        values = {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt, **variables}
        text = self._model.render_chat(to_json("messages", values))
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def __len__(self) -> int:
        return self.vocab_size

    def _check(self, token: int) -> int:
        found, = check_ids("token", [token])
        if not 0 <= found < self.vocab_size:
            raise BadInputError(f"token: found {found}, expected 0 to {self.vocab_size - 1}")
        return found

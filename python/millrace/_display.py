"""How a model and its statistics look in a notebook."""

from __future__ import annotations

import html
from typing import Any, Mapping


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _table(title: str, rows: Mapping[str, str]) -> str:
    cells = "".join(f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>"
                    f"{html.escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table><caption style='text-align:left'><b>{html.escape(title)}</b></caption>{cells}</table>"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['count']} x, mean {value['mean_s'] * 1e3:.1f} ms, p99 {value['p99_s'] * 1e3:.1f} ms"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


class Stats(dict[str, Any]):
    """What an engine has done so far: a dict that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return _table("millrace: statistics", {name: _shown(value) for name, value in self.items()})


def card(info: Mapping[str, Any], stats: Mapping[str, Any]) -> str:
    """A model in a few lines."""
    memory = info["memory"]
    rows = {
        "architecture": str(info["architecture"]), "device": str(info["device"]),
        "context": f"{info['context']:,} of {info['trained_context']:,} tokens", "vocabulary": f"{info['vocab_size']:,}",
        "weights": _size(memory["weights_mapped"] + memory["weights_copied"]), "KV cache": _size(memory["kv_pool"]),
        "requests": f"{stats['finished']:,} finished, {stats['running']:,} running, {stats['waiting']:,} waiting",
        "tokens": f"{stats['prompt_tokens']:,} of prompts, {stats['generated_tokens']:,} generated",
    }
    return _table(f"millrace: {info['name']}", rows)

"""Bar charts as SVG text, by Python's own library alone: speeds as parts of a limit, ours above a peer's.

A chart is a title and groups (a machine each) of rows; render.py says which. Two themes are drawn from the same
layout, so that a page shows the one that fits its background (<picture> with prefers-color-scheme).
"""

from dataclasses import dataclass
from html import escape

THEMES = {
    "light": {"ground": "#ffffff", "text": "#1b2430", "soft": "#5b6675", "grid": "#e3e7ec", "limit": "#1b2430",
              "ours": "#0f7b8a", "peer": "#b9c2cd", "track": "#f3f5f8"},
    "dark": {"ground": "#0d1117", "text": "#e6edf3", "soft": "#9aa7b5", "grid": "#262d36", "limit": "#e6edf3",
             "ours": "#35b5c4", "peer": "#57626f", "track": "#161b22"},
}
WIDTH, LEFT, BAR_WIDTH = 900, 236, 456
SPEED_COLUMN, SHARE_COLUMN = 800, 864  # right ends of the numbers
TOP, ROW, GROUP, FOOT = 104, 40, 40, 34
BAR, PEER_BAR = 14, 9
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Row:
    label: str
    detail: str
    ours: float  # share of the limit
    ours_text: str
    peer: float = None
    peer_text: str = ""


@dataclass(frozen=True)
class Chart:
    title: str
    subtitle: str
    groups: tuple  # of (name, rows)


def text(x, y, content, color, size=13, anchor="start", weight="400"):
    return (f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" font-weight="{weight}" '
            f'text-anchor="{anchor}">{escape(content)}</text>')


def box(x, y, width, height, color, radius=2.5):
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="{radius:g}" fill="{color}"/>'


def axis(bottom, theme):
    parts = []
    for percent in (0, 25, 50, 75, 100):
        x = LEFT + BAR_WIDTH * percent / 100
        last = percent == 100
        color = theme["limit"] if last else theme["grid"]
        dash = ' stroke-dasharray="4 3"' if last else ""
        parts.append(f'<line x1="{x:g}" y1="{TOP - 12}" x2="{x:g}" y2="{bottom}" stroke="{color}"{dash}/>')
        label, color = ("limit", theme["text"]) if last else (f"{percent}%", theme["soft"])
        parts.append(text(x, TOP - 18, label, color, 12, "middle", "600" if last else "400"))
    return parts + [text(SPEED_COLUMN, TOP - 18, "tok/s", theme["soft"], 12, "end"),
                    text(SHARE_COLUMN, TOP - 18, "of limit", theme["soft"], 12, "end")]


def row_parts(row, y, theme):
    parts = [text(LEFT - 14, y + 11, row.label, theme["text"], 13, "end", "600"),
             text(LEFT - 14, y + 26, row.detail, theme["soft"], 11.5, "end"),
             box(LEFT, y, BAR_WIDTH * min(row.ours, 1.05), BAR, theme["ours"]),
             text(SPEED_COLUMN, y + 12, row.ours_text, theme["text"], 13, "end", "600"),
             text(SHARE_COLUMN, y + 12, f"{100 * row.ours:.0f}%", theme["text"], 13, "end", "600")]
    if row.peer is not None:
        parts += [box(LEFT, y + BAR + 3, BAR_WIDTH * min(row.peer, 1.05), PEER_BAR, theme["peer"]),
                  text(SPEED_COLUMN, y + BAR + 12, row.peer_text, theme["soft"], 11.5, "end"),
                  text(SHARE_COLUMN, y + BAR + 12, f"{100 * row.peer:.0f}%", theme["soft"], 11.5, "end")]
    return parts


def legend(theme):
    x, y = LEFT, 60
    return [box(x, y - 10, 12, 12, theme["ours"]), text(x + 18, y, "Millrace", theme["text"], 12.5, weight="600"),
            box(x + 96, y - 10, 12, 12, theme["peer"]),
            text(x + 114, y, "llama.cpp, the same call", theme["soft"], 12.5)]


def draw(chart, theme_name):
    """The chart as the text of an SVG file."""
    theme = THEMES[theme_name]
    height = TOP + sum(GROUP + ROW * len(rows) for _, rows in chart.groups) + FOOT - 16
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
             f'width="{WIDTH}" height="{height}" '
             f'font-family="{escape(FONT)}" role="img" aria-label="{escape(chart.title)}">',
             box(0, 0, WIDTH, height, theme["ground"], 0),
             text(20, 30, chart.title, theme["text"], 18, weight="600"),
             text(20, 60, chart.subtitle, theme["soft"], 12.5), *legend(theme), *axis(height - FOOT + 8, theme)]
    y = TOP
    for name, rows in chart.groups:
        parts.append(text(20, y + 18, name, theme["ours"], 13, weight="600"))
        y += GROUP - 8
        for row in rows:
            parts += row_parts(row, y, theme)
            y += ROW
        y += 8
    return "\n".join(parts + ["</svg>"]) + "\n"

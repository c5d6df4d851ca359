"""Drawings of the spec: the state machines, drawn from the registry, and one style for all drawings.

A drawing is legible alone, as on GitHub, in light and dark. On the site it has the colours of the page instead.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from tools.specgen.lint import RegistryError
from tools.specgen.registry import ROOT, Facts, moves

ASSETS = ROOT / "spec/assets"
_ALSO = tuple(ROOT / f"docs/assets/{name}.svg" for name in ("architecture", "moving", "ownership", "strides"))
STYLE = """<style>
  svg { color: #24292f; }
  @media (prefers-color-scheme: dark) { svg { color: #d8dee4; } }
  text { font: 12px sans-serif; fill: currentColor; }
  .head { font-weight: 600; }
  .faint { opacity: 0.75; }
  .small { font-size: 11px; }
  .box { fill: currentColor; fill-opacity: 0.05; stroke: currentColor; stroke-opacity: 0.4; }
  .line { fill: none; stroke: currentColor; stroke-opacity: 0.6; }
  .tip { fill: currentColor; fill-opacity: 0.75; }
  .dash { stroke-dasharray: 4 3; }
  .a, .b, .c, .d { fill-opacity: 0.2; }
  .a { fill: #5c6bc0; stroke: #5c6bc0; }
  .b { fill: #26a69a; stroke: #26a69a; }
  .c { fill: #ef8f35; stroke: #ef8f35; }
  .d { fill: #8d6e63; stroke: #8d6e63; }
  .line.a, .line.b, .line.c, .line.d { fill: none; stroke-opacity: 1; }
  .tip.a, .tip.b, .tip.c, .tip.d { fill-opacity: 1; }
</style>"""
"""Letters are colours: a and b tell two sides apart, c is what to be careful with, d is one more."""
_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)

Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""
_COLUMNS, _WIDTH, _ROW, _HEIGHT, _TOP = (34, 194, 354, 552), 96, 58, 28, 12
_ASIDE, _ABOVE = 32, 8
"""Room between a frame and the states in it."""
_COLOUR = {"source": "a", "sink": "b"}


@attrs.frozen
class _Plan:
    """Places of the states of a machine: column, first row, and by exception the last row and the last column."""

    about: str
    states: Mapping[str, Sequence[int]]


_PLANS = {
    "session": _Plan(
        "Hello leads from idle to greeted, Welcome to open, Describe and Description to described, Register and Registered to "
        "ready. Goodbye closes a session that is open.",
        {
            "idle": (0, 0),
            "greeted": (0, 1),
            "open": (0, 2),
            "describing": (0, 3),
            "described": (0, 4),
            "registering": (0, 5),
            "ready": (0, 6),
            "closed": (2, 1, 6),
        },
    ),
    "transfer": _Plan(
        "Transfer leads from new to asked, Accepted to accepted, Done and DoneAck to ended. Failed, Offer and Abort lead "
        "aside, and from there DoneAck, Pulled and Drained to ended.",
        {
            "new": (1, 0),
            "asked": (1, 1),
            "failed": (0, 1, 2),
            "accepted": (1, 2),
            "offered": (2, 2),
            "done": (1, 3),
            "ended": (0, 4, 4, 2),
            "aborting": (3, 0, 4),
        },
    ),
}


def drawings(facts: Facts) -> dict[Path, str]:
    """Every drawing of spec/assets: the state machines, and those that are drawn by hand, with the style renewed."""
    made = {ASSETS / f"{name}-states.svg": machine(facts, name) for name in facts["machine"]}
    by_hand = {path: path.read_text() for path in (*sorted(ASSETS.glob("*.svg")), *_ALSO) if path not in made}
    for path, text in by_hand.items():
        if not _STYLE.search(text) or "<title>" not in text:
            raise RegistryError(f"{path.relative_to(ROOT)}: a drawing needs a title, and a style, which is renewed")
    return made | {path: _STYLE.sub(lambda _: STYLE, text) for path, text in by_hand.items()}


def page_style(scope: str) -> str:
    """The style of drawings that are part of a page, within a CSS selector; the page sets the colour of their text."""
    rules = [line.strip() for line in STYLE.splitlines()[1:-1] if "svg" not in line]
    return "\n".join(
        ", ".join(f"{scope} {one.strip()}" for one in rule[: rule.index("{")].split(","))
        + f" {rule[rule.index('{') :]}"
        for rule in rules
    )


def about(name: str) -> str:
    """The drawing of a machine in words, for those who do not see it."""
    return _PLANS[name].about


def machine(facts: Facts, name: str) -> str:
    """The states of a machine as boxes and its moves as arrows; raises RegistryError if a state has no place."""
    plan, rows = _PLANS.get(name), moves(facts, name)
    states = {state["name"]: state for state in facts["machine"][name]["state"]}
    if plan is None or set(plan.states) != set(states):
        raise RegistryError(f"tools/specgen/drawings.py: the states of {name} need places: {', '.join(states)}")
    boxes = {state: _box(place) for state, place in plan.states.items()}
    inside, common = _everywhere(facts["machine"][name], states)
    frame = _around([boxes[state] for state in inside])
    body = [_rect(frame, "line dash")]
    stays = [m for m, after in common.items() if after == "same"]
    if stays:
        body += [_text(frame[2] - 8, frame[1] + 16, "small faint", "in all of these:", "end")]
        body += [_text(frame[2] - 8, frame[1] + 31 + 14 * i, "small faint", m, "end") for i, m in enumerate(stays)]
    pairs: dict[tuple[str, str], list[str]] = {}
    for before, message, after, _ in rows:
        if before != after and not (message in common and before in inside):
            pairs.setdefault((before, after), []).append(message)
    for (before, after), some in pairs.items():
        body += _arrow(boxes[before], boxes[after], some, _sender(facts, some), (after, before) in pairs)
    for message, after in common.items():
        if after != "same":
            body += _arrow(frame, boxes[after], [message], _sender(facts, [message]), False)
    for state, box in boxes.items():
        body += _state(box, state, states[state].get("feature", ()))
    low, right = max(b[3] for b in (*boxes.values(), frame)) + 26, max(b[2] for b in (*boxes.values(), frame)) + 2
    body += _legend(low)
    return _svg(f"States of a {name}", plan.about, right, low + 8, body)


def _box(place: Sequence[int]) -> Box:
    column, row = place[0], place[1]
    last_row, last_column = (*place[2:], *(row, column)[len(place[2:]) :])
    left, top = _COLUMNS[column], _TOP + _ROW * row
    return (left, top, _COLUMNS[last_column] + _WIDTH, _TOP + _ROW * last_row + _HEIGHT)


def _everywhere(machine: Facts, states: Mapping[str, Facts]) -> tuple[set[str], dict[str, str]]:
    """The states that share the moves of "*", and these moves: message to next state."""
    common = {move["message"]: move for move in machine["move"] if move["from"] == "*"}
    outside = {frozenset(move["but"]) for move in common.values()}
    if len(outside) != 1:
        raise RegistryError("tools/specgen/drawings.py draws one set of states with common moves")
    return set(states) - min(outside), {message: move["to"] for message, move in common.items()}


def _around(boxes: Sequence[Box]) -> Box:
    left, top = min(b[0] for b in boxes), min(b[1] for b in boxes)
    wide = max(max(b[2] for b in boxes), left + 200)
    return (left - _ASIDE, top - _ABOVE, wide + _ASIDE, max(b[3] for b in boxes) + _ABOVE)


def _sender(facts: Facts, messages: Sequence[str]) -> str:
    senders = {facts["message"][m]["sender"] for m in messages if m != "Error"}
    return _COLOUR.get(min(senders), "") if len(senders) == 1 else ""


def _arrow(start: Box, end: Box, messages: Sequence[str], colour: str, both: bool) -> Iterator[str]:
    """A straight arrow across the gap between two boxes, with the messages that make the move."""
    said, tip = " or ".join(messages), f"tip {colour}".strip()
    low, high = max(start[0], end[0]), min(start[2], end[2])
    if low < high:
        down = start[3] <= end[1]
        x = (low + high) / 2 + (0 if not both else -18 if down else 18)
        y0, y1, way = (start[3], end[1], 1) if down else (start[1], end[3], -1)
        side = -6 if both and down else 6
        yield f'<path d="M{x:g} {y0:g} V{y1 - 6 * way:g}" class="{f"line {colour}".strip()}"/>'
        yield f'<path d="M{x - 4:g} {y1 - 7 * way:g} h8 L{x:g} {y1:g} Z" class="{tip}"/>'
        yield _text(x + side, (y0 + y1) / 2 + 1, "small", said, "end" if side < 0 else "start")
        return
    low, high = max(start[1], end[1]), min(start[3], end[3])
    if low >= high:
        raise RegistryError(f"tools/specgen/drawings.py: no straight arrow for {said}")
    y, right = (low + high) / 2, start[2] <= end[0]
    x0, x1, way = (start[2], end[0], 1) if right else (start[0], end[2], -1)
    yield f'<path d="M{x0:g} {y:g} H{x1 - 6 * way:g}" class="{f"line {colour}".strip()}"/>'
    yield f'<path d="M{x1 - 7 * way:g} {y - 4:g} v8 L{x1:g} {y:g} Z" class="{tip}"/>'
    yield _text((x0 + x1) / 2, y - 5, "small", said, "middle")


def _state(box: Box, name: str, features: Sequence[str]) -> Iterator[str]:
    yield _rect(box, "box dash" if features else "box")
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2 + 4
    yield _text(x, y - (6 if features else 0), "head", name, "middle")
    if features:
        yield _text(x, y + 7, "small faint", " or ".join(features), "middle")


def _legend(y: float) -> Iterator[str]:
    """Yield the legend: whose message an arrow is."""
    x = 4
    for colour, said in (("b", "sent by the sink"), ("a", "sent by the source"), ("", "by either")):
        yield f'<path d="M{x} {y - 4:g} h22" class="{f"line {colour}".strip()}"/>'
        yield f'<path d="M{x + 21} {y - 8:g} v8 L{x + 28} {y - 4:g} Z" class="{f"tip {colour}".strip()}"/>'
        yield _text(x + 34, y, "small faint", said)
        x += 140


def _rect(box: Box, kind: str) -> str:
    left, top, right, bottom = box
    return f'<rect x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}" rx="4" class="{kind}"/>'


def _text(x: float, y: float, kind: str, said: str, anchor: str = "start") -> str:
    at = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:g}" y="{y:g}"{at} class="{kind}">{html.escape(said)}</text>'


def _svg(title: str, about: str, width: float, height: float, body: Sequence[str]) -> str:
    lines = [
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" xmlns="http://www.w3.org/2000/svg" role="img">',
        f"<title>{html.escape(title)}</title>",
        f"<desc>{html.escape(about)}</desc>",
        STYLE,
        "",
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"

"""Drawings of the spec against the library and the vectors, reasons below clauses, and tables of the site."""

import html
import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from kvproto import Cache, Geometry, Parallel, Plan, lay_out, plan
from kvproto.wire import decode_struct
from tools import site_tables
from tools.specgen import clauses, drawings
from tools.specgen.registry import ROOT, SPEC, load

BF16 = 2
TOKENS = 128
"""Of the stream that is drawn: two pages."""
REASON = re.compile(r"^ *(\*Why:\* .*(?:\n *\S.*)*)", re.MULTILINE)


def texts(name: str) -> list[tuple[float, float, str]]:
    """Where each text of a drawing is, and what it says."""
    root = ElementTree.parse(drawings.ASSETS / f"{name}.svg").getroot()
    found = root.iter("{http://www.w3.org/2000/svg}text")
    return [(float(text.attrib["x"]), float(text.attrib["y"]), text.text or "") for text in found]


def said(name: str) -> list[str]:
    return [text for _, _, text in texts(name)]


def planned(cache: Cache, source: int, sink: int) -> Plan:
    return plan(lay_out([cache], Parallel(tp=source)), lay_out([cache], Parallel(tp=sink)))


def test_heads_in_the_drawing_of_planning_are_those_of_the_plan() -> None:
    head = 128 * BF16
    made = planned(Cache.gqa("kv", layers=1, kv_heads=6, head_dim=128, page=16), 3, 2)
    pieces = [
        (box.lo // head, box.hi // head, f"P{route.source} → D{route.sink}")
        for route in made.routes
        for box in route.boxes
        if box.part == 0
    ]
    pieces.sort()
    drawn = said("planning")
    assert [text for text in drawn if "→" in text] == [who for _, _, who in pieces]
    cuts = [f"head {lo}" if hi == lo + 1 else f"heads {lo}-{hi - 1}" for lo, hi, _ in pieces]
    assert [text for text in drawn if re.fullmatch(r"heads? [\d-]+", text)] == cuts


def test_layers_in_the_drawing_of_planning_come_from_the_sources_of_the_plan() -> None:
    made = planned(Cache.mla("kv", layers=61, latent=512, rope=64, page=64), 8, 4)
    drawn = texts("planning")
    columns = {x: text for x, _, text in drawn if re.fullmatch(r"P\d", text)}
    for _, row, layer in [cell for cell in drawn if cell[2] in ("layer 0", "layer 1", "layer 2")]:
        cells = {(columns[x], text) for x, y, text in drawn if x in columns and abs(y - row) < 3 and text[0] == "D"}
        number = int(layer[-1])
        wanted = {
            (f"P{route.source}", f"D{route.sink}")
            for route in made.routes
            for box in route.boxes
            if box.layer_lo <= number < box.layer_hi
        }
        assert cells == wanted


def example(name: str) -> dict[str, Any]:
    cases = json.loads((SPEC / "vectors/codec/example.json").read_text())["cases"]
    return next(case for case in cases if case["id"] == name)


def test_offsets_in_the_drawing_of_a_stream_are_those_of_the_example() -> None:
    source, sink = (decode_struct(Geometry, bytes.fromhex(example(side)["bytes"])) for side in ("source", "sink"))
    offsets = [0]
    for route in plan(source, sink).between(1, 3):
        for box in sorted(route.boxes, key=lambda box: (box.model, box.layer_lo, box.part)):
            for _ in range(box.layer_lo, box.layer_hi):
                offsets.append(offsets[-1] + (box.hi - box.lo) * TOKENS)
    assert [text for text in said("stream") if re.fullmatch(r"[\d,]+", text)] == [f"{at:,}" for at in offsets]


def test_pieces_in_the_drawing_of_a_stream_are_as_long_as_data_may_be() -> None:
    facts = load()
    longest = next(field["max"] for field in facts["message"]["Data"]["field"] if field["name"] == "data")
    credit = facts["limit"]["max_credit"]["value"]
    assert f"Data: offset 0, {longest:,} bytes" in said("stream")
    assert any(f"max_credit = {credit:,}" in text for text in said("stream"))


def test_columns_and_regions_in_the_drawing_of_handles_are_those_of_the_example() -> None:
    fields = example("register")["fields"]
    drawn = said("handles")
    offsets = [f"offset {int(at):,}" for columns in fields["columns"] for at in columns["offset"]]
    lengths = [f"{region['kind']}, {int(region['length']):,} bytes" for region in fields["regions"]]
    assert [text for text in drawn if text.startswith("offset ")] == offsets
    assert [text for text in drawn if text.endswith(" bytes")] == lengths


@pytest.mark.parametrize("rows", [8, 16])
def test_rows_in_the_drawing_of_windows_are_positions_in_their_rings(rows: int) -> None:
    drawn = texts("windows")
    x, row = next((x, y) for x, y, text in drawn if text == f"ring of {rows}, mod {rows}")
    tokens = [int(text) for _, y, text in drawn if text.isdigit() and y == next(y for _, y, t in drawn if t == "19")]
    assert [int(text) for left, y, text in drawn if y == row and left > x] == [token % rows for token in tokens]


def test_a_drawing_says_in_a_page_what_it_says_of_itself() -> None:
    pages = "\n".join(path.read_text() for path in sorted(SPEC.glob("*.md")))
    shown = {name: words for words, name in re.findall(r"^!\[(.*)\]\(\.\./assets/([\w-]+)\.svg\)$", pages, re.M)}
    for path in drawings.ASSETS.glob("*.svg"):
        title, about = (re.findall(f"<{tag}>(.*)</{tag}>", path.read_text())[0] for tag in ("title", "desc"))
        assert shown[path.stem].startswith(html.unescape(title))
        assert shown[path.stem].endswith(html.unescape(about))


def test_a_machine_with_a_state_that_has_no_place_is_not_drawn() -> None:
    facts = load()
    facts["machine"]["session"]["state"].append({"name": "asleep", "doc": "Nothing moves."})
    with pytest.raises(drawings.RegistryError, match=r"need places: .*asleep"):
        drawings.machine(facts, "session")


@pytest.mark.parametrize("page", sorted(path.name for path in SPEC.glob("*.md")))
def test_reasons_bind_nobody(page: str) -> None:
    """A line that begins with Why has no normative word."""
    for reason in REASON.findall((SPEC / page).read_text()):
        assert not re.search(r"\b(must|should|may|shall|required)\b", reason, re.IGNORECASE), reason


def cells(table: str) -> list[str]:
    return re.findall(r"<t[hd][^>]*>[^<]*", table)


def test_numbers_of_a_column_stand_at_its_right() -> None:
    table = "<table><tr><th>limit</th><th>value</th></tr><tr><td>a</td><td>4,096</td></tr><tr><td>b</td><td></td></tr></table>"
    assert cells(site_tables.laid_out(table))[:4] == [
        "<th>limit",
        '<th class="number">value',
        "<td>a",
        '<td class="number">4,096',
    ]


def test_rows_with_a_sentence_may_become_cards_that_name_their_columns() -> None:
    sentence = "Time after which an unanswered request is given up."
    table = f"<table><tr><th>limit</th><th>unit</th><th>meaning</th></tr><tr><td>a</td><td>ms</td><td>{sentence}</td></tr></table>"
    made = site_tables.laid_out(table)
    assert made.startswith("<table data-cards>")
    assert f'<td data-head="meaning" data-long>{sentence}' in made


def test_every_clause_can_be_filtered_once_by_what_it_says() -> None:
    facts = load()
    known = clauses.clauses(facts)
    rows = "".join(f"<tr><td><code>{name}</code></td></tr>" for name in [*known, *known])
    marked = re.findall(
        r'<tr id="(.*?)" data-role="(.*?)" data-profile=".+?" data-page="(.*?)"',
        site_tables.filterable(rows, known, facts),
    )
    assert marked == [(clause.id, clause.role, clause.page.removesuffix(".md")) for clause in known.values()]


def test_the_index_of_decisions_has_every_record() -> None:
    text = (ROOT / "spec/rationale/choices.md").read_text()
    records = re.findall(r"^## \d{4}-\d\d-\d\d: (.*)$", text, re.M)
    listed = re.findall(r"^\* \[(.*)\]\(#", text, re.M)
    assert sorted(listed) == sorted(records)


def test_colours_of_a_page_reach_only_its_drawings() -> None:
    rules = drawings.page_style("figure.drawing").splitlines()
    assert rules
    for rule in rules:
        assert all(one.startswith("figure.drawing ") for one in rule[: rule.index("{")].split(", "))


def test_the_core_is_small() -> None:
    """At most 130 KB to read, 160 clauses of a source and 115 of a sink."""
    first = (SPEC / "../README.md").read_text()
    listed = first.partition("The core, in this order")[2].partition("If you need it")[0]
    pages = re.findall(r"\]\(v1/([\w-]+\.md)\)", listed)
    assert len(pages) == 12
    assert len(first) + sum(len((SPEC / page).read_text()) for page in pages) <= 130_000
    facts = load()
    core = [clause for clause in clauses.clauses(facts).values() if facts["profile"][clause.profile]["kind"] == "core"]
    assert {clause.page for clause in core} <= {*pages, "parts.md", "dcp.md"}
    source, sink = (sum(clauses.binds(clause, side) for clause in core) for side in ("source", "sink"))
    assert source <= 160
    assert sink <= 115
    assert f"The smallest source keeps {source} clauses and the smallest sink {sink}," in first

"""Tables of the prose that follow from the registry: marked blocks in pages whose sentences are written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tools.specgen.clauses import Clause, binds, clauses
from tools.specgen.drawings import about
from tools.specgen.lint import RegistryError
from tools.specgen.named import REASONS, exemptions
from tools.specgen.registry import HEAD, ROOT, SPEC, Facts, moves, of_core, version

_COMMON = ("session", "request", "sequence")
"""Fields of many messages, in the order of their ids, with one meaning in all of them."""
_STORED = {"Manifest", "Component", "KeptPage"}
"""Structs that no message of the core uses."""


def messages(facts: Facts) -> str:
    """Messages, structs and enums of the core."""
    facts = of_core(facts)
    core = {name: m for name, m in facts["message"].items() if "feature" not in m}
    out = [_index(facts, core), "", "## Fields of many messages", "", *_rows(_common(facts)), ""]
    out += [
        "A message has those of them that its line *header* names. A reply echoes the ids of its request.",
        "",
        "## Messages",
    ]
    for name, body in core.items():
        out += _body(facts, name, body, "message")
    out += ["", "## Structs"]
    for name, body in facts["struct"].items():
        if name not in _STORED:
            out += _body(facts, name, body, "struct")
    out += ["", "## Enums"]
    for name, enum in ((name, enum) for name, enum in facts["enum"].items() if name != "Feature"):
        out += [
            "",
            f"### {name}",
            "",
            f"{'Open' if enum['open'] else 'Closed'}. {enum['doc']}",
            "",
            "| value | name | meaning |",
        ]
        out += ["|---|---|---|", *(f"| {v} | {k} | {enum['docs'][k]} |" for k, v in enum["values"].items())]
    out += ["", "### Feature", "", "Open: [features](messages-extensions.md#features)."]
    out += ["", "### ErrorCode", "", "Open: [errors](errors.md)."]
    return "\n".join(out)


def extension_messages(facts: Facts) -> str:
    """Messages of features, and structs that only these and stored pages have."""
    behind = {name: m for name, m in facts["message"].items() if "feature" in m}
    out = [_index(facts, behind), "", "## Messages"]
    for name, body in behind.items():
        out += _body(facts, name, body, "message")
    out += ["", "## Structs"]
    for name in facts["struct"]:
        if name in _STORED:
            out += _body(facts, name, facts["struct"][name], "struct")
    return "\n".join(out)


def _index(facts: Facts, some: dict[str, Facts]) -> str:
    out = ["| id | message | sender | delivery | answered by | heard in state | status | meaning |"]
    out.append("|---|---|---|---|---|---|---|---|")
    for name, m in some.items():
        reply = ", ".join(m["reply"]) or "-"
        cells = (m["sender"], m["delivery"], reply, _heard(name, facts), _status(m), m["doc"])
        out.append(f"| `0x{m['id']:04X}` | [{name}](#{name.lower()}) | {' | '.join(cells)} |")
    return "\n".join(out)


def _common(facts: Facts) -> list[Facts]:
    """The rows of the fields of many messages, as Transfer has them."""
    rows: list[Facts] = [f for f in facts["message"]["Transfer"]["field"] if f["name"] in _COMMON]
    return rows


def _body(facts: Facts, name: str, body: Facts, kind: str) -> list[str]:
    """The section of a message or struct: what it is, its fields, its rules."""
    common = {f["name"]: f["type"] for f in _common(facts)} if kind == "message" else {}
    fields = body["field"]
    head = [f for f in fields if f["name"] in common and f["presence"] == "required" and f["type"] == common[f["name"]]]
    out = ["", f"### {name}", "", _about(name, body, kind)]
    if head:
        names = [f"`{f['name']}`" for f in head]
        out += ["", f"Header: {', '.join(names)}."]
    out += ["", *_rows([f for f in fields if f not in head])] if len(head) < len(fields) else []
    if body.get("rule"):
        out += ["", "Rules, in order:", ""]
        out += [f"* `{r['rule']}({', '.join(map(str, r['args']))})`, else `{r['error']}`" for r in body["rule"]]
    return out


def _rows(fields: Sequence[Facts]) -> list[str]:
    out = ["| id | field | type | presence | range | meaning |", "|---|---|---|---|---|---|"]
    for f in fields:
        type_ = f["type"].replace("<", "&lt;").replace(">", "&gt;")
        unit = "" if f["unit"] == "none" or type_ in ("bytes", "str") else f" Unit: {f['unit']}."
        more = f" ({', '.join(f'`{c}`' for c in f['clauses'])})" if f.get("clauses") else ""
        secret = " Secret." if f.get("secret") else ""
        cells = (str(f["id"]), f"`{f['name']}`", type_, f["presence"], _span(f), f"{f['doc']}{unit}{secret}{more}")
        out.append(f"| {' | '.join(cells)} |")
    return out


def _about(name: str, body: Facts, kind: str) -> str:
    if kind == "struct":
        return str(body["doc"])
    return f"`0x{body['id']:04X}`, {body['delivery']}, {_status(body)}, since {body['since']}. {body['doc']}"


def _status(body: Facts) -> str:
    return f"{body['status']} ({' or '.join(body['feature'])})" if "feature" in body else str(body["status"])


def _heard(name: str, facts: Facts) -> str:
    """The states that a message is heard in, machine by machine."""
    if name == "Error":
        return "all"
    parts = []
    for key, machine in facts["machine"].items():
        states = [s["name"] for s in machine["state"]]
        here = {before for before, message, _, _ in moves(facts, key) if message == name}
        if len(here) > 4:
            parts.append(
                "all but " + ", ".join(s for s in states if s not in here) if len(here) < len(states) else "all"
            )
        elif here:
            parts.append(", ".join(s for s in states if s in here))
    return "; ".join(parts) or "all"


def _span(f: Facts) -> str:
    if "length" in f:
        return f"{f['length']} bytes"
    if "min" not in f and "max" not in f:
        return ""
    unit = {"s": " bytes", "b": " bytes", "l": " elements", "a": " elements"}.get(f["type"][0], "")
    return f"{f.get('min', '')}..{f.get('max', '')}{unit}"


def errors(facts: Facts) -> str:
    """Every error and what to do."""
    out = ["| code | name | class | recovery | meaning |", "|---|---|---|---|---|"]
    out += [
        f"| `0x{e['code']:04X}` | `{n}` | {e['class']} | {e['recovery']} | {e['doc']} |"
        for n, e in facts["error"].items()
    ]
    return "\n".join(out)


def limits(facts: Facts, scope: str = "body") -> str:
    """The limits of a scope; by default those of every reader."""
    out = ["| limit | value | unit | meaning |", "|---|---|---|---|"]
    rows = ((n, r) for n, r in facts["limit"].items() if r["scope"] == scope)
    out += [f"| `{n}` | {r['value']} | {r['unit']} | {r['doc']} |" for n, r in rows]
    return "\n".join(out)


def session_limits(facts: Facts) -> str:
    """Times and numbers of a session."""
    return limits(facts, "session")


def net_limits(facts: Facts) -> str:
    """Times and numbers of connections."""
    return limits(facts, "net")


def plan_limits(facts: Facts) -> str:
    """Limits of Descriptions, plans and Transfers."""
    return limits(facts, "plan")


def metrics(facts: Facts) -> str:
    """Metrics, the values of their labels, and their buckets."""
    out = ["Every metric has the labels `engine`, `replica` and `rank` of the side that shows it, and its `role`.", ""]
    out += ["| metric | type | unit | shown by | labels | meaning |", "|---|---|---|---|---|---|"]
    for name, row in facts["metric"].items():
        labels = ", ".join(f"`{label}`" for label in row["labels"]) or "-"
        out.append(
            f"| `{name}` | {row['type']} | {row['unit']} | {', '.join(row['roles'])} | {labels} | {row['doc']} |"
        )
    out += ["", "| label | value | meaning |", "|---|---|---|"]
    for name, values in facts["metric_label"].items():
        out += [f"| `{name}` | `{value}` | {doc} |" for value, doc in values.items()]
    out += ["| `code` | names of [errors](errors.md) | |", "| `group` | names of the side's own groups | |"]
    out += ["| `version`, `spec` | versions of this side's own software | |", ""]
    return "\n".join([*out, f"Buckets, in seconds: {', '.join(f'{b:g}' for b in facts['metric_buckets']['second'])}."])


def index(facts: Facts) -> str:
    """Every clause with its sentence, by profile."""
    known, out = list(clauses(facts).values()), []
    for name, profile in facts["profile"].items():
        out += [f"## {profile['title']}", "", "| clause | page | role | sentence |", "|---|---|---|---|"]
        for c in (c for c in known if c.profile == name):
            sentence = " ".join(c.text.split()).replace("|", "\\|").replace("](#", f"]({c.page}#")
            out.append(f"| `{c.id}` | [{c.page.removesuffix('.md')}]({c.page}) | {c.role} | {sentence} |")
        out.append("")
    return "\n".join(out).rstrip()


def profiles(facts: Facts) -> str:
    """Profiles that an implementation may have, and what each extension adds."""
    out, known = [], clauses(facts).values()
    for kind, title in {"core": "Core", "extension": "Extensions", "beside": "Beside the protocol"}.items():
        rows = {name: row for name, row in facts["profile"].items() if row["kind"] == kind}
        heads = ["profile", "what it is", "needs", "feature", "status", "clauses", "check"]
        if not any("features" in row for row in rows.values()):
            heads.remove("feature")
        out += [f"**{title}**", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        out += [_profile(name, row, facts, known, "feature" in heads) for name, row in rows.items()]
        out += ["", *(_smallest(facts) if kind == "core" else ())]
    return "\n".join(out).rstrip()


def _profile(name: str, row: Facts, facts: Facts, known: Collection[Clause], with_feature: bool) -> str:
    own = [clause for clause in known if clause.profile == name]
    source, sink = (sum(binds(clause, side) for clause in own) for side in ("source", "sink"))
    kept = sum(clause.keyword != "MAY" for clause in own)
    counts = str(kept) if source == sink or "engine" not in _needed(name, facts) else f"source {source}, sink {sink}"
    statuses = {feature: facts["feature"][feature]["status"] for feature in row.get("features", ())}
    status = row.get("status", "stable")
    if statuses:
        one = len(set(statuses.values())) == 1
        status = statuses[row["features"][0]] if one else ", ".join(f"{f} {s}" for f, s in statuses.items())
    needs = ", ".join(facts["profile"][other]["title"].lower() for other in row["needs"])
    check = f"`{row['check']}`" if row["check"].startswith("--") else row["check"]
    feature = [", ".join(statuses)] if with_feature else []
    link = f"[{row['title']}](v1/clauses.md#{_anchor(row['title'])})"
    return f"| {' | '.join((link, row['doc'], needs, *feature, status, counts, check))} |"


def _needed(name: str, facts: Facts) -> set[str]:
    """A profile and all that it needs."""
    return {name}.union(*(_needed(other, facts) for other in facts["profile"][name]["needs"]))


def _smallest(facts: Facts) -> list[str]:
    """Clauses, messages and commands of the smallest engines, on one host and between two."""
    known = clauses(facts).values()
    core = {name for name, row in facts["profile"].items() if row["kind"] == "core"}
    inline = core | _needed("inline", facts)
    here, unshared, there = (
        {side: sum(binds(clause, side) for clause in known if clause.profile in which) for side in ("source", "sink")}
        for which in (core, inline, inline | _needed("curve", facts))
    )
    title = {name: facts["profile"][name]["title"] for name in ("inline", "curve")}
    names = [name for name, message in facts["message"].items() if "feature" not in message]
    return [
        f"The smallest source keeps {here['source']} clauses and the smallest sink {here['sink']}, of {len(known)} in all; both have"
        f" {len(names)} messages: {', '.join(names)}.",
        "",
        f"Shared memory (SHM) is not required: in its place *{title['inline']}* (INLINE) is enough, with {unshared['source']} and"
        f" {unshared['sink']} clauses. Such an engine claims `inline`; without the claim, wrong Data and Credit are not tried. On one host no keys are needed; between two, *{title['curve']}* come with INLINE:"
        f" {there['source']} and {there['sink']} clauses, all of them stable.",
        "",
        "```",
        "kvproto-conformance clauses --role sink   # the clauses of a core sink, each with the levels that test it",
        "kvproto-conformance run --role sink --level L4 --extension inline --extension curve --live-sink ./my-adapter -- ./my-testee",
        "```",
        "",
    ]


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def exempt(facts: Facts) -> str:
    """Clauses that no test names, and why."""
    out = ["| reason | means |", "|---|---|", *(f"| {name} | {doc} |" for name, doc in REASONS.items())]
    out += ["", "| clause | reason | shown by | because |", "|---|---|---|---|"]
    for id_, row in exemptions(facts).items():
        shown = f"`{row['shown']}`" if "shown" in row else ""
        out.append(f"| `{id_}` | {row['reason']} | {shown} | {row['note']} |")
    return "\n".join(out)


def fact_names(facts: Facts) -> str:
    """Names of identity facts."""
    out = ["| fact | rule | meaning |", "|---|---|---|"]
    return "\n".join([*out, *(f"| `{n}` | {r['rule']} | {r['doc']} |" for n, r in facts["fact"].items())])


def parts(facts: Facts) -> str:
    """Names of parts, and their aliases."""
    out = ["| part | a lane | a row | meaning | aliases |", "|---|---|---|---|---|"]
    for name, row in facts["part"].items():
        doc = row["doc"] + (f" A share of `{row['of']}`." if "of" in row else "")
        doc += f" `{row['scales']}` means nothing without them." if "scales" in row else ""
        doc += " Optional." if row.get("optional") else ""
        out.append(f"| `{name}` | {row['lane']} | {row['row']} | {doc} | {', '.join(row['aliases'])} |")
    return "\n".join(out)


def conversions(facts: Facts) -> str:
    """Conversions between two forms of a part, and the fields that name them."""
    out = [*_rows([field for field in facts["struct"]["Part"]["field"] if "feature" in field]), ""]
    out += ["| conversion | wide form | narrow form | scales of the narrow form |", "|---|---|---|---|"]
    where = {"stated": "`x_scales`", "part": "a part of F32"}
    return "\n".join(
        [
            *out,
            *(
                f"| `{n}` | {r['wide']} | {r['narrow']} | {where[r['scales']]}: {r['doc']} |"
                for n, r in facts["conversion"].items()
            ),
        ]
    )


def part_groups(facts: Facts) -> str:
    """Groups of the field, by their parts."""
    out = ["| group | items | parts | perhaps | meaning | also called |", "|---|---|---|---|---|---|"]
    for name, row in facts["group"].items():
        cells = (", ".join(f"`{x}`" for x in row[key]) or "-" for key in ("has", "may"))
        out.append(
            f"| {name} | {', '.join(row['kinds'])} | {' | '.join(cells)} | {row['doc']} | {', '.join(row['aliases'])} |"
        )
    return "\n".join(out)


def predicates(facts: Facts) -> str:
    """The closed list of cross-field rules."""
    return "\n".join(
        ["| predicate | holds if |", "|---|---|", *(f"| `{n}` | {doc} |" for n, doc in facts["predicate"].items())]
    )


def features(facts: Facts) -> str:
    """Optional behaviour."""
    out = ["| value | feature | status | meaning | clauses |", "|---|---|---|---|---|"]
    of = {feature: row["title"] for row in facts["profile"].values() for feature in row.get("features", ())}
    for n, r in facts["feature"].items():
        where = f"[{of[n].lower()}](clauses.md#{_anchor(of[n])})"
        out.append(f"| {r['value']} | `{n}` | {r['status']} | {r['doc']} | {where} |")
    return "\n".join(out)


def machines(facts: Facts) -> str:
    """Both machines: a drawing, and a table of states and messages."""
    out = []
    for name, machine in facts["machine"].items():
        out += [f"### States of a {name}", "", machine["doc"], ""]
        out += [f"![States of a {name}: {about(name)}](../assets/{name}-states.svg)", ""]
        out += ["| state | meaning |", "|---|---|", *(f"| {s['name']} | {s['doc']} |" for s in machine["state"]), ""]
        out += ["| state | message | next state | needs |", "|---|---|---|---|"]
        cells: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
        for before, message, after, features in moves(facts, name):
            cells.setdefault((before, after, features), []).append(message)
        for state in machine["state"]:
            for (before, after, features), some in cells.items():
                if before == state["name"]:
                    goes = "stays" if after == before else after
                    out.append(f"| {before} | {', '.join(some)} | {goes} | {' or '.join(features)} |")
        out.append("")
    return "\n".join(out).rstrip()


def delivery(facts: Facts) -> str:
    """Delivery classes and statuses."""
    out = ["| delivery | meaning |", "|---|---|", *(f"| {n} | {doc} |" for n, doc in facts["delivery"].items())]
    return "\n".join(
        [*out, "", "| status | meaning |", "|---|---|", *(f"| {n} | {doc} |" for n, doc in facts["status"].items())]
    )


def dump(facts: Facts) -> str:
    """The worked example, byte by byte."""
    from kvproto.wire import explain  # late: it needs the generated modules

    cases = json.loads((SPEC / "vectors/codec/example.json").read_text())["cases"]
    frame = next(c["bytes"] for c in cases if c["id"] == "register")
    return f"```\n{explain(bytes.fromhex(frame), secrets=True)}\n```"


_TOPICS = {
    "Wire format": ("conventions", "framing", "messages", "negotiation"),
    "Planning": ("model", "dcp", "planning"),
    "Lowering": ("lowering", "verify"),
    "Sessions and transfers": ("session", "registration", "transfers", "epochs", "handoff"),
    "Transports and keys": ("pull", "packed", "zeromq"),
    "Cached pages": ("tiers",),
}
"""Pages to which a topic of decision records belongs, for those that have pages."""
_RECORD = re.compile(r"^## (\d{4}-\d\d-\d\d): (.*)\n(?:<!-- topic: (.*) -->\n)?", re.MULTILINE)


def decisions(_facts: Facts) -> str:
    """Decision records by topic, each topic with its pages; records that name none come last."""
    topics: dict[str, list[str]] = {topic: [] for topic in _TOPICS}
    for date, title, topic in _RECORD.findall((SPEC / "../rationale/choices.md").read_text()):
        link = re.sub(r"[^\w -]", "", f"{date}-{title}".lower()).replace(" ", "-")
        topics.setdefault(topic or "Other", []).append(f"* [{title}](#{link})")
    out = []
    for topic, records in sorted(topics.items(), key=lambda item: item[0] == "Other"):
        pages = ", ".join(f"[{page}](../v1/{page}.md)" for page in _TOPICS.get(topic, ()))
        out += [f"### {topic}", "", *([f"Pages: {pages}.", ""] if pages else []), *records, ""]
    return "\n".join(out).rstrip()


def stated(facts: Facts) -> str:
    """The specification's version."""
    return f"Version {version(facts)}."


def candidates(facts: Facts) -> str:
    """Every candidate and why it was opened."""
    out = ["| candidate | day | why |", "|---|---|---|"]
    return "\n".join([*out, *(f"| {row['version']} | {row['day']} | {row['why']} |" for row in facts["candidate"])])


PAGES: dict[str, dict[str, Callable[[Facts], str]]] = {
    "../README.md": {"version": stated, "profiles": profiles},
    "../rationale/choices.md": {"decisions": decisions},
    "../versions.md": {"candidates": candidates},
    "clauses.md": {"clauses": index, "exemptions": exempt},
    "conversion.md": {"conversions": conversions},
    "example-register.md": {"dump": dump},
    "messages.md": {"messages": messages},
    "messages-extensions.md": {"features": features, "extension-messages": extension_messages},
    "errors.md": {"errors": errors},
    "framing.md": {"limits": limits, "predicates": predicates},
    "model.md": {"facts": fact_names},
    "planning.md": {"plan-limits": plan_limits},
    "metrics.md": {"metrics": metrics},
    "parts.md": {"parts": parts, "groups": part_groups},
    "keys.md": {"net-limits": net_limits},
    "session.md": {"machines": machines, "delivery": delivery, "session-limits": session_limits},
}


def pages(facts: Facts) -> dict[Path, str]:
    """Every page that holds generated blocks, renewed."""
    texts = {}
    for page, blocks in PAGES.items():
        path = (SPEC / page).resolve()
        text = path.read_text()
        for name, make in blocks.items():
            text = renewed(text, name, make(facts), path)
        texts[path] = text
    return texts


def renewed(text: str, name: str, block: str, path: Path) -> str:
    """The page with one block renewed; the prose around it stays."""
    begin, end = f"<!-- begin {name}. {HEAD} -->", f"<!-- end {name} -->"
    before, marked, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not marked or not ended:
        raise RegistryError(f"{path.relative_to(ROOT)}: no marks for the block {name}")
    return f"{before}{begin}\n\n{block}\n\n{end}{after}"

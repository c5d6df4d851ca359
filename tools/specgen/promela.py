"""Promela that follows from the registry: the moves that the models of `spec/v1/lifecycle` make."""

from __future__ import annotations

from tools.specgen.registry import HEAD, Facts, moves


def rows(facts: Facts) -> list[tuple[str, str, str, str, tuple[str, ...]]]:
    """Every row (machine, from, message, to, features) of the states table, in the order of its number in the models."""
    return [(name, *row) for name in facts["machine"] for row in moves(facts, name)]


def moves_model(facts: Facts) -> str:
    """spec/v1/lifecycle/moves.pml: an inline for each machine and message, which moves a state or breaks LEGAL."""
    states = [f"{name}_{s['name']}" for name, machine in facts["machine"].items() for s in machine["state"]]
    messages = list(dict.fromkeys(message for _, _, message, _, _ in rows(facts)))
    out = [f"/* The table of states as the models walk it. {HEAD} */", ""]
    out += [f"mtype = {{ {', '.join(names)} }}" for names in (states, messages)]
    for machine in facts["machine"]:
        for message in messages:
            out += _inline(facts, machine, message)
    return "\n".join(out) + "\n"


def _inline(facts: Facts, machine: str, message: str) -> list[str]:
    numbered = [(n, *row[1:]) for n, row in enumerate(rows(facts)) if (row[0], row[2]) == (machine, message)]
    if not numbered:
        return []
    out = ["", f"inline {machine}_{message}(state) {{", "  if"]
    for n, before, _, after, features in numbered:
        line = f"  :: state == {machine}_{before} -> ROW({n}, {machine}_{before}, {message}, {machine}_{after}); "
        line += f"state = {machine}_{after}"
        out += [f"#if {' || '.join(f'defined({f})' for f in features)}", line, "#endif"] if features else [line]
    return [*out, "  :: else -> BROKEN(LEGAL)", "  fi", "}"]

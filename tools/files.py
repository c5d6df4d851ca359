"""Generated files: written if they differ from what they should be, or only compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def renew(files: Mapping[Path, str], check: bool) -> bool:
    """Write every stale file, or with `check` only name it; returns whether there was one."""
    stale = [(path, text) for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path, text in stale:
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(_ROOT)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return bool(stale)

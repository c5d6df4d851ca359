"""The interface of libkvproto as it was kept: `python -m tests.library.abi` keeps what it is now (`make lib-abi`)."""

import re
import subprocess
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "libkvproto"
KEPT = LIBRARY / "abi/libkvproto.xml"
CONSTANTS = LIBRARY / "abi/constants.txt"
"""The numbers of the header, which compilers put into programs and abidiff does not see."""
_DUMP = "abidw --no-corpus-path --no-comp-dir-path --no-show-locs --drop-private-types --headers-dir"


def built(folder: Path) -> Path:
    """The shared library with what abidw reads; in a folder."""
    subprocess.run(["make", "-s", "-C", LIBRARY, f"BUILD={folder}", "CFLAGS=-O2 -g"], check=True, timeout=100)
    return folder / "libkvproto.so"


def constants() -> dict[str, str]:
    """Of the header as it is."""
    return dict(re.findall(r"\b(KVP_\w+) = (-?\d+)", (LIBRARY / "include/kvproto.h").read_text()))


if __name__ == "__main__":
    library = built(LIBRARY.parent / "build/abi")
    KEPT.write_bytes(
        subprocess.run([*_DUMP.split(), LIBRARY / "include", library], check=True, capture_output=True).stdout
    )
    CONSTANTS.write_text("".join(f"{name} {value}\n" for name, value in constants().items()))

"""`python amalgamate.py FOLDER`: libkvproto as one kvproto.c beside its kvproto.h."""

import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(folder: Path) -> None:
    """Write both files; in kvproto.c every part stands where it is included."""
    folder.mkdir(parents=True, exist_ok=True)
    text = (HERE / "src/kvproto.c").read_text()
    whole = re.sub(r'#include "(\w+\.c)"\n', lambda part: (HERE / "src" / part[1]).read_text() + "\n", text)
    (folder / "kvproto.c").write_text(whole)
    shutil.copy(HERE / "include/kvproto.h", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""An engine that knows no message of an extension: `core_engine.py source|sink`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "conformance/testees"))
from toy_engine import serve

from kvproto.wire import codec
from tools.specgen.registry import CORE, load, profiles

_HAVE = profiles(load())
for _known in (codec._MESSAGES, codec._KNOWN):
    for _key, _cls in list(_known.items()):
        if _HAVE[_cls.__name__] != [CORE]:
            del _known[_key]

if sys.argv[1] == "source":
    from live_source import Prefill

    serve(Prefill())
else:
    from live_sink import Decode

    serve(Decode())

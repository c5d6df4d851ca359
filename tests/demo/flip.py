"""A decode engine in whose memory one exponent bit of each arriving request flips: `flip.py target|draft ...`."""

import sys

from kvproto.node import SinkNode
from kvproto.node.sink import Received
from kvproto.session.events import Arrived, Lost
from kvproto_reference.demo.decode import main
from kvproto_reference.engine.description import DRAFT, TARGET

GROUP = {"target": TARGET, "draft": DRAFT}[sys.argv[1]]


class Flipping(SinkNode):
    """Flips the top exponent bit of one float of the first page, layer 0."""

    def _received(self, event: Arrived) -> Received | Lost:
        page = int(self._grants[event.transfer][GROUP].items[0])
        part = self.pool.side.group(GROUP).parts[-1].name
        self.pool.array(GROUP, 0, part)[page, 3, 0, 3] ^= 0x40
        return super()._received(event)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], Flipping))

"""The plans of an endpoint, each made once for a Description of a peer, at once or outside turns."""

from collections import OrderedDict
from collections.abc import Callable

import attrs

from kvproto.errors import KvprotoError
from kvproto.planning.plan import Plan, plan
from kvproto.session.descriptions import Stated
from kvproto.wire import messages as m

_Key = tuple[bytes, bytes, bool, tuple[int, ...]]
"""Digests of the peer's and the own Description, whether the peer is the source, and the features of the session."""
_KEPT = 16
"""The number of plans kept, the latest ones; all ranks of a replica state the same Description."""


@attrs.frozen(eq=False)
class Planned:
    """A peer's Description, and the plan that follows from it."""

    theirs: Stated
    plan: Plan


_Then = Callable[[Planned | KvprotoError], None]


def _at_once(work: Callable[[], Planned], then: _Then) -> None:
    try:
        planned: Planned | KvprotoError = work()
    except KvprotoError as error:
        planned = error
    then(planned)


class Plans:
    """The plans of one side's Description with those of its peers."""

    def __init__(self) -> None:
        self.defer: Callable[[Callable[[], Planned], _Then], None] = _at_once
        """Does the work and passes its result on: at once, or later if nothing should wait for it."""
        self._made: OrderedDict[_Key, Planned] = OrderedDict()
        self._waiting: dict[_Key, list[_Then]] = {}

    def make(
        self,
        message: m.Describe | m.Description,
        own: Stated,
        from_source: bool,
        features: tuple[int, ...],
        then: _Then,
    ) -> None:
        """Read a peer's Description, whose digest was checked, and plan; call `then` with the plan or the error."""
        key = bytes(message.digest), own.digest, from_source, features

        def work() -> Planned:
            theirs = Stated.read(message)
            sides = (theirs, own) if from_source else (own, theirs)
            common_plan = plan(sides[0].geometry, sides[1].geometry, features)
            common_plan.required(0)  # builds the table of routes here
            return Planned(theirs, common_plan)

        def pass_on(planned: Planned | KvprotoError) -> None:
            if isinstance(planned, Planned):
                self._made[key] = planned
                while len(self._made) > _KEPT:
                    self._made.popitem(last=False)
            for continuation in self._waiting.pop(key):
                continuation(planned)

        if (known := self._made.get(key)) is not None:
            then(known)
        elif (waiting := self._waiting.get(key)) is not None:
            waiting.append(then)
        else:
            self._waiting[key] = [then]
            self.defer(work, pass_on)

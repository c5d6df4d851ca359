"""A source's cached pages, listed in pieces by id, with the number of the last change (feature CATALOGUE, tiers.md)."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice

import attrs

from kvproto.errors import RemoteError
from kvproto.session import limits
from kvproto.session.core import Extension, Session
from kvproto.session.table import SessionState
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, KeyForm, Tier

Changes = Mapping[bytes, Tier | None]
"""The tier where each page is now, by id; None if it is not kept any more."""
_BUCKETS = 4096
"""The number of ranges that ids are sorted in: as digests they spread evenly, so a piece of the list sorts few."""


class Catalogue:
    """The cached pages of one rank, and the number of Kept messages that announced them."""

    def __init__(self, namespace: bytes, page: int, form: KeyForm) -> None:
        """The fields of Watched: the namespace, the tokens of a page, and the form of ids."""
        self.namespace, self.page, self.form = namespace, page, form
        self.number = 0
        """The number of the last Kept (KVP-CAT-NUMBER)."""
        self._buckets: list[dict[bytes, Tier]] = [{} for _ in range(_BUCKETS)]

    def change(self, pages: Changes) -> list[tuple[int, tuple[m.KeptPage, ...]]]:
        """Record changes; return the number and pages of each Kept that announces what they change (KVP-CAT-ONCE)."""
        changed = []
        for id, tier in sorted(pages.items()):
            bucket = self._buckets[_bucket(id)]
            if bucket.get(id) is tier:
                continue
            if tier is None:
                del bucket[id]
            else:
                bucket[id] = tier
            changed.append(m.KeptPage(id=id, tier=tier))
        made = []
        for first in range(0, len(changed), limits.MAX_TOLD):
            self.number += 1
            made.append((self.number, tuple(changed[first : first + limits.MAX_TOLD])))
        return made

    def after(self, id: bytes | None) -> tuple[tuple[m.KeptPage, ...], bool]:
        """The pages above an id (None: all), as many as one Watched holds, and whether more follow (KVP-CAT-LIST)."""
        first = 0 if id is None else _bucket(id)
        above = (
            m.KeptPage(id=each, tier=bucket[each])
            for bucket in self._buckets[first:]
            for each in sorted(bucket)
            if id is None or each > id
        )
        found = [*islice(above, limits.MAX_TOLD + 1)]
        return tuple(found[: limits.MAX_TOLD]), len(found) > limits.MAX_TOLD


def _bucket(id: bytes) -> int:
    return int.from_bytes(id[:2], "big") * _BUCKETS >> 16


class SourceCatalogue(Extension):
    """Announces the pages of this rank to a sink that watches."""

    def __init__(self, session: Session, catalogue: Catalogue) -> None:
        super().__init__(session)
        self._catalogue, self._watched = catalogue, False

    def tell(self, kept: Iterable[tuple[int, tuple[m.KeptPage, ...]]]) -> None:
        """Send changes, if the sink has asked for them."""
        watched = self._watched and self._session.state == SessionState.OPEN  # a sink that describes itself gets none
        for number, pages in kept if watched else ():
            self._session.step("Kept")
            self._session.notice(m.Kept(session=self._session.session, number=number, pages=pages))

    def _watch(self, message: m.Watch, now: float) -> None:
        self._session.step("Watch")
        self._session.step("Watched")
        self._watched, known = True, self._catalogue
        pages, more = known.after(None if message.after is None else bytes(message.after))
        self._session.reply(
            m.Watched,
            message,
            number=known.number,
            namespace=known.namespace,
            page=known.page,
            form=known.form,
            pages=pages,
            more=more,
        )

    handlers = ((m.Watch, _watch),)


@attrs.frozen
class Listed:
    """The list of a source rank's cached pages is complete; from now on it is kept up to date."""

    session: int
    peer: str


class SinkCatalogue(Extension):
    """The pages of a source rank, as a watching sink knows them."""

    def __init__(self, session: Session, now: float, listed: Callable[[Listed], None], room: Callable[[], int]) -> None:
        """`listed` is called whenever the list has become complete; `room` says how many more pages are remembered."""
        super().__init__(session)
        self._listed, self._room = listed, room
        self.pages: dict[bytes, int] = {}
        """The nearest Tier of each page a moment ago, by id; it may be a value of a later version."""
        self.head: m.Watched | None = None
        """The latest piece of the list, which states what the ids mean; None if nothing is known yet."""
        self._number = 0
        self._after: bytes | None = None
        self._asked = 0
        self._ask(now)

    @property
    def whole(self) -> bool:
        """Whether the list is complete."""
        return self.head is not None and not self.head.more

    def reconnected(self) -> None:
        self.head = None
        self._session.answered(self._asked)  # it is not sent again, as the list is asked for from the beginning
        self._session.host.timers.at(0.0, self._again)

    def _again(self, now: float) -> None:
        """Forget all pages, and ask for the list from the beginning (KVP-CAT-GAP)."""
        self.pages, self.head, self._after = {}, None, None
        self._session.answered(self._asked)
        if self._session.open:
            self._ask(now)

    def _ask(self, now: float) -> None:
        self._session.step("Watch")
        self._asked = self._session.request(m.Watch, now, after=self._after)

    def _watched(self, message: m.Watched, now: float) -> None:
        self._session.step("Watched")
        if message.request != self._asked or not self._session.answered(message.request, m.Watch):
            return
        if self._after is not None and message.number != self._number:
            self._again(now)
            return
        ids = [bytes(page.id) for page in message.pages]
        if (message.more and not ids) or (ids and self._after is not None and ids[0] <= self._after):
            mine = "ids above those before, and some if there are more"
            error = RemoteError(ErrorCode.FIELD_CONFLICT, "pages", mine, "others", "this is a bug of the source")
            self._session.give_up(error)
            return
        self.head, self._number = message, message.number
        self._take(message.pages)
        if message.more:
            self._after = ids[-1]
            self._ask(now)
        else:
            self._after = None
            self._listed(Listed(self._session.session, self._session.name))

    def _kept(self, message: m.Kept, now: float) -> None:
        self._session.step("Kept")
        if self.head is None:
            return  # the list will include it
        if message.number != self._number + 1:
            self._again(now)
            return
        self._number = message.number
        self._take(message.pages)

    def _take(self, pages: Iterable[m.KeptPage]) -> None:
        most = len(self.pages) + self._room()
        for page in pages:
            if page.tier is None:
                self.pages.pop(bytes(page.id), None)
            elif len(self.pages) < most:
                self.pages[bytes(page.id)] = page.tier

    handlers = ((m.Watched, _watched), (m.Kept, _kept))

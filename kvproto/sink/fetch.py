"""A fetch, the record of one request at a sink: what it asks for, what is granted, its deadline and its pool."""

import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvproto.copying.grants import granted_below, items_before, items_by_now
from kvproto.errors import KvprotoError, LocalError, RemoteError, check_type, check_whole, type_name
from kvproto.events import Arrived, Lost, PagesFree, PagesWanted
from kvproto.planning.kinds import KINDS
from kvproto.prompt import Ticket
from kvproto.rank.base import EngineRank
from kvproto.rank.handles import Handle
from kvproto.rank.page_tables import PageTables, check_distinct, check_names, table_of
from kvproto.rank.pool import Pool
from kvproto.session.records import SinkAttempt, SinkTransfer
from kvproto.session.timers import Timer
from kvproto.sink.registered_pool import RegisteredPool
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants

if TYPE_CHECKING:
    from kvproto.sink.link import SourceLink

_NO_ITEMS = np.empty(0, np.uint32)


class Fetch(Handle[Arrived]):
    """The handle of a request that is being fetched; it ends with Arrived, or with the error that lost the request.

    The ticket's deadline, d, bounds a fetch as follows. It is lost with DEADLINE if the source has not answered
    within d of `Sink.fetch`. A source answers at once, even before `Source.request`. It then ends the fetch with
    UNKNOWN_TICKET if there is no request within `ticket_wait`, 10 s, and with DEADLINE once d has passed since the
    request. A source that does neither is given up: d + 40 s (d, `ticket_wait` and `patience`) after that call the
    fetch is aborted with DEADLINE, and the answer to that is awaited for at most 30 s. To bound it yourself, call
    `wait` with a timeout and then `abort`: the timeout alone does not end the fetch.
    """

    def __init__(
        self,
        rank: EngineRank,
        ticket: Ticket,
        content: bytes,
        pool: Pool,
        epoch: int,
        asked: Mapping[int, Grants],
        end: int,
        *,
        axes: Collection[str] = (),
        seconds: float | None = None,
        deferred: bool = False,
        spans: bool = False,
        on_wanted: Callable[[PagesWanted], PageTables | None] | None = None,
    ) -> None:
        """`asked` holds windows by group id, without items if they are `deferred`, and piece by piece with `spans`.

        `content` is the prompt's digest, `end` the end of the fetch in tokens, and `axes` are those whose lengths the
        prompt states. The source has `seconds` to accept it (None: without limit).
        """
        super().__init__(rank)
        self.ticket, self.pool = ticket, pool
        self.pages_free = False
        """Whether nobody can write its pages any more; PagesFree reports it if that is later than the loss."""
        self.number = 0
        """The fetch's number at this sink, from 1."""
        self.epoch = epoch
        """The epoch of its pool."""
        self._on_wanted, self._granting = on_wanted, threading.Lock()
        self._granted: Mapping[int, Grants] = {} if deferred else asked
        """The items that the engine has named so far, by group id; they are marked as in use."""
        self._tracked, self._useful = True, end
        # the rest is the node's alone
        self.content, self.asked, self.end, self.axes, self.seconds = content, asked, end, axes, seconds
        self.deferred, self.spans = deferred, spans
        self.grants = self._granted
        """The items that the node knows as granted, by group id."""
        self.whole = not deferred
        """Whether that is everything, or no more is wanted."""
        self.link: SourceLink | None = None
        """The link that has it; None until the node has found one."""
        self.transfer: SinkTransfer | None = None
        """The transfer of all source ranks; None while it waits for the link to be ready."""
        self.registered: RegisteredPool | None = None
        """The pool and the plan by which it was last requested."""
        self.versions: tuple[int, ...] = ()
        """Versions of the Descriptions by which it was last requested (KVP-TRN-CHANGED)."""
        self.deadline: Timer | None = None
        """The timer for the source to accept it, and later to serve it."""
        self.wanted: tuple[int | None, ...] = ()
        """The number of tokens (None: all) of the last PagesWanted, if there was one."""
        self.offers: list[SinkAttempt] = []
        """Attempts whose offer waits for items to be read into."""

    # calls of the engine

    def grant(self, pages: PageTables, tokens: int | None = None) -> bool:
        """Name pages for a fetch that began without them; False if it had ended and did not take them.

        `pages` holds page tables by group name from the page of token 0 on, including pages granted before, and
        `tokens` is the number of tokens that they hold (None: as PagesWanted last said; only with `spans` may it be
        less than all). May be called from any thread at any time, even before PagesWanted. Raises LocalError, and
        grants nothing: OUT_OF_RANGE for `tokens`, BAD_GRANT for tables that do not fit, OUT_OF_REGION for pages outside
        the pool, ITEM_ALIAS for a page that is named twice or by another fetch, UNEXPECTED_MESSAGE if `fetch` was given
        the pages.
        """
        if not self.deferred:
            mine, yours = "a fetch that began without pages", "one whose pages `fetch` was given"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "grant", mine, yours, "name the pages once")
        end = self._useful if tokens is None else check_whole("tokens", tokens, 0, self.end)
        if self.done:
            return False
        with self._granting:
            grants = self._named(pages, end)
            with self._rank._handles_lock:
                if self.done or not self._tracked:
                    return False
                self.pool._pages.take(self._more(grants), pages)
                self._granted = grants
            whole = all(grants[id].count == asked.count for id, asked in self.asked.items())
            self._post(lambda: self.link.grant(self, grants, whole) if self.link is not None else None)
        return True

    def abort(self, reason: str = "aborted") -> None:
        """Stop the fetch; its pages may be reused when `pages_free`. Harmless once done.

        It ends with ABORTED as soon as the source has answered, or has been given up. If the source has not heard of
        the fetch yet, it ends at once and the source is not told: tell the engine that computes the prompt as well.
        """
        check_type("reason", reason, str, "a str")
        if not self.done:
            error = RemoteError(ErrorCode.ABORTED, "", advice=reason)
            self._post(lambda: self._give_up(error))

    def _give_up(self, error: KvprotoError) -> None:
        if self.link is not None:
            self.link.abort(self, error)

    def _ask(self, wanted: PagesWanted) -> None:
        """Ask the engine's `claim` for pages; an exception that it raises ends only this fetch."""
        try:
            pages = self._on_wanted(wanted) if self._on_wanted is not None and not self.done else None
            if pages is not None:
                self.grant(pages, wanted.tokens)
        except Exception as error:
            advice = "the callable that names pages has raised"
            own = LocalError(ErrorCode.ABORTED, "claim", "pages, or None", f"{type_name(error)}: {error}", advice)
            cause = error if isinstance(error, KvprotoError) else own
            if not self._rank._driver.closed:
                self._post(lambda: self._give_up(cause))

    # on the node

    def want(self, tokens: int | None) -> PagesWanted | None:
        """The event that pages for `tokens` tokens (None: all) are of use; None if there is nothing new to report."""
        if self.whole or (tokens is not None and not self.spans) or self.wanted == (tokens,):
            return None
        self.wanted, self._useful = (tokens,), self.end if tokens is None else tokens
        event = PagesWanted(self, self._useful, self.lengths(self._useful))
        if self._on_wanted is not None:
            self._rank._driver.later(lambda: self._ask(event))
        return event

    def arrive(self, event: Arrived) -> Arrived:
        """End with Arrived."""
        self.pages_free = True
        self.release()
        self._end(event)
        return event

    def lose(self, error: KvprotoError, proven: bool, raised: Exception | None = None) -> Lost:
        """End with an error, or `raised` in its place; `proven` frees the pages, which nothing can write any more."""
        self.pages_free = proven
        if proven:
            self.release()
        self._end(None, raised or error)
        return Lost(self, error, proven)

    def free(self) -> PagesFree:
        """Free the pages of a lost request, as nothing can write them any more; the event for that."""
        self.pages_free = True
        self.release()
        return PagesFree(self)

    def release(self) -> None:
        """Mark its pages as not in use: nothing writes them any more, or this sink can no longer find out."""
        with self._rank._handles_lock:
            if self._tracked:
                self._tracked = False
                self.pool._pages.free(self._granted)

    def expect_nothing(self) -> None:
        """Cancel its deadline, and want no more items."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        self.whole = True
        self.offers.clear()

    # page tables

    def lengths(self, tokens: int) -> dict[str, int]:
        """The number of entries that page tables need for tokens below `tokens`, by group name."""
        lengths = {}
        for grant in granted_below(self.pool.layout, tuple(self.asked.values()), tokens, self.end):
            group = self.pool.layout.groups[grant.group]
            if KINDS[group.kind].has_memory:
                skip, need = self._span(grant)
                lengths[group.name] = skip + need if need else 0
        return lengths

    def _span(self, grant: Grants) -> tuple[int, int]:
        """The number of pages in a table before the first of a grant, and the number that the grant needs."""
        layout = self.pool.layout
        if grant.group not in layout.shares:  # hand-off data that other ranks of this engine own
            return 0, 0
        group, cp_rank = layout.groups[grant.group], layout.shares[grant.group].cp_rank
        need = items_by_now(group, cp_rank, grant, self.asked[grant.group])
        return items_before(group, cp_rank, grant.first), need

    def _named(self, pages: PageTables, tokens: int) -> dict[int, Grants]:
        """The grants by these page tables, for tokens below `tokens` and everything that was granted before.

        Raises LocalError: BAD_GRANT for a group that is missing, unknown or short of pages, or whose pages differ from
        those granted before, OUT_OF_REGION for a page that the pool does not have, ITEM_ALIAS for a page named twice.
        """
        layout, grants = self.pool.layout, dict[int, Grants]()
        groups = self.pool.page_rules.names
        check_names(pages, groups)
        for grant in granted_below(layout, tuple(self.asked.values()), tokens, self.end):
            group, before = layout.groups[grant.group], self._granted.get(grant.group)
            if before is not None and before.count >= grant.count:
                grant = attrs.evolve(grant, count=before.count)
            skip, need = self._span(grant)
            if group.name not in groups or not need:
                grants[group.id] = attrs.evolve(grant, items=_NO_ITEMS)
                continue
            table = table_of(layout, pages, group, skip, skip + need, f"{grant.first + grant.count} tokens")
            items = table[skip : skip + need]
            check_distinct(group, items, skip)
            known = before.items if before is not None and before.items is not None else _NO_ITEMS
            if differ := np.flatnonzero(items[: known.size] != known).tolist():
                i = differ[0]
                path, advice = f'pages["{group.name}"][{skip + i}]', "granted pages stay: only add pages after them"
                raise LocalError(ErrorCode.BAD_GRANT, path, f"page {known[i]}, as granted", f"page {items[i]}", advice)
            grants[group.id] = attrs.evolve(grant, items=items.astype(np.uint32))
        return grants

    def _more(self, grants: Mapping[int, Grants]) -> dict[int, Grants]:
        """These grants with only the items that were not granted before."""
        return {
            id: attrs.evolve(grant, items=items[self._count(id) :])
            for id, grant in grants.items()
            if (items := grant.items) is not None
        }

    def _count(self, group: int) -> int:
        """The number of items of a group granted so far."""
        before = self._granted.get(group)
        return 0 if before is None or before.items is None else before.items.size

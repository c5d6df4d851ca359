"""A source's own row in etcd, which goes when it drains, ends or is silent for as long as its lease."""

from __future__ import annotations

import hashlib
import logging
import threading
import time

from kvproto import KvprotoError, Source
from kvproto.errors import LocalError, bad
from kvproto.net import encrypted, is_wildcard, read_keys
from kvproto.observability.records import shown
from kvproto.planning.geometry import encode_geometry
from kvproto_discovery.etcd import NONSENSE, Etcd, plain, silent, text
from kvproto_discovery.rows import Row, name_of, read_row, write_row

__all__ = ["Registration"]

_log = logging.getLogger("kvproto.discovery")
_TURN = 0.25
"""Seconds between looks at the source."""


class Registration:
    """The row of one rank of a source, kept by a thread until `close` or until the source drains."""

    def __init__(self, etcd: Etcd, source: Source, replicas: int = 1, lease: float = 10.0) -> None:
        """`replicas` have the source's name; the row goes `lease` seconds after the source was last heard of.

        Raises LocalError(OUT_OF_RANGE) for a source that can be reached at no one address.
        """
        if is_wildcard(source.address):
            raise bad("listen", "an address that can be dialled", source.address, "state one as `advertise`")
        self._etcd, self._source, self._replicas, self._seconds = etcd, source, replicas, lease
        keyed = source.options.keys is not None and encrypted(source.address)
        self._key = read_keys(source.options.keys).public.decode() if keyed and source.options.keys else None
        self._digest = hashlib.sha256(encode_geometry(source.geometry)).hexdigest()
        self._name = name_of(etcd.prefix, source.name, source.geometry.replica, source.pool.rank)
        self._lease: str | None = None
        self._told = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvproto register", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the row; returns once that is done, or etcd has not answered."""
        self._stop.set()
        self._thread.join(4 * _TURN + 2 * self._seconds)

    def _run(self) -> None:
        due = 0.0
        while not (self._stop.is_set() or self._source.draining or self._source.failure is not None):
            if time.monotonic() >= due:
                try:
                    self._keep()
                    self._told = ""
                except NONSENSE as error:
                    self._warn(shown(silent("it", error)))
                except KvprotoError as error:
                    self._warn(shown(error))
                due = time.monotonic() + self._seconds / 3
            self._stop.wait(_TURN)
        try:
            if self._lease is not None:
                self._etcd.call("lease/revoke", ID=self._lease)
        except KvprotoError as error:
            self._warn(shown(error))

    def _warn(self, why: str) -> None:
        if why != self._told:
            self._told = why
            _log.warning("%s is not in the directory: %s", self._name, why)

    def _keep(self) -> None:
        """Keep the lease alive or take a new one, and write the row if it has changed, here or there."""
        if self._lease is not None:
            answer = self._etcd.call("lease/keepalive", ID=self._lease)
            if int(answer.get("result", {}).get("TTL", 0)) <= 0:  # it has ended, and the row with it
                self._lease = None
        if self._lease is None:
            self._lease = str(self._etcd.call("lease/grant", TTL=str(max(round(self._seconds), 1)))["ID"])
        self._write(self._row())

    def _row(self) -> Row:
        source = self._source
        return Row(
            engine=source.name, replica=source.geometry.replica, rank=source.pool.rank, address=source.address,
            key=self._key, replicas=self._replicas, incarnation=source.incarnation, digest=self._digest,
            load=source.in_flight, state=source.unready or "ready",
        )  # fmt: skip

    def _write(self, row: Row) -> None:
        """Write the row if etcd has another, unless it is of a later run that lives; raises LocalError."""
        name = text(self._name)
        found = self._etcd.call("kv/range", key=name).get("kvs", [])
        revision, value = (found[0]["mod_revision"], plain(found[0].get("value", ""))) if found else ("0", b"")
        lease = str(found[0].get("lease", "0")) if found else "0"
        if value == write_row(row).encode() and lease == self._lease:
            return
        try:
            there = read_row(self._name, value).incarnation
        except LocalError:  # not a row
            there = 0
        if there > row.incarnation and lease not in ("0", self._lease):  # without a lease it is no run's own
            advice = "give each engine a name or a replica of its own; if that run does not exist, delete the key"
            raise bad(self._name, f"the row of run {row.incarnation}", f"one of run {there}, which is later", advice)
        compare = {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": revision}
        put = {"request_put": {"key": name, "value": text(write_row(row)), "lease": self._lease}}
        if not self._etcd.call("kv/txn", compare=[compare], success=[put]).get("succeeded"):
            raise bad(self._name, "this run's row", "one that another run has just written", "")

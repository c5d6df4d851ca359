"""Back ends for stored pages beside each other: files, packs, and RocksDB; boto3 and obstore against moto's server.

512 pages, each an object of 590 KB, one of 74 KB and a manifest of 300 B, written to this disk and read from it.

`python benchmarks/tiers_stores.py [--out]`; needs rocksdict and boto3 (extras bench and test).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import boto3
import numpy as np
import rocksdict
from harness import arguments, facts, keep
from moto.server import ThreadedMotoServer
from tiers import dropped, timed

from kvproto.tiers.file_store import FileStore
from kvproto.tiers.object_store import ObjectStore
from kvproto.tiers.pack_store import PackStore

PAGES, SIZES = 512, (8 * 64 * 1152, 64 * 1152, 300)
CALLS = 100


class Rocks:
    """RocksDB without compression, large values in blob files, as its makers advise for such; synced or not."""

    def __init__(self, root: Path, durable: bool) -> None:
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        options.set_enable_blob_gc(True)
        self.db, self.how = rocksdict.Rdict(str(root), options=options), rocksdict.WriteOptions()
        self.how.sync = durable

    def put(self, key: str, data: bytes) -> None:
        self.db.put(key.encode(), data, self.how)

    def get(self, key: str) -> bytes | None:
        figures: bytes | None = self.db.get(key.encode())
        return figures


STORES: dict[str, Callable[[Path], Any]] = {
    "files": FileStore,
    "files, synced": partial(FileStore, durable=True),
    "packs": PackStore,
    "packs, synced": partial(PackStore, durable=True),
    "rocksdb": partial(Rocks, durable=False),
    "rocksdb, synced": partial(Rocks, durable=True),
}


def measure(make: Callable[[Path], Any], pages: int) -> dict[str, float]:
    """Rates in MB/s, and the time to find 512 manifests."""
    data = [np.random.default_rng(g).bytes(size) for g, size in enumerate(SIZES)]
    keys = [f"o/{i:064x}.{'ab' * 32}.{g}.{'cd' * 32}" for i in range(pages) for g in range(len(SIZES))]
    total, figures = pages * sum(SIZES) / 1e6, {}
    with TemporaryDirectory(dir=".") as name, ThreadPoolExecutor(4) as pool:
        store = make(root := Path(name) / "store")
        figures["write_mb_s"] = total / timed(lambda: [store.put(key, data[i % 3]) for i, key in enumerate(keys)])
        figures["read_cached_mb_s"] = total / timed(lambda: [store.get(key) for key in keys])
        dropped(root)
        figures["read_mb_s"] = total / timed(lambda: [store.get(key) for key in keys])
        dropped(root)
        figures["read_4_threads_mb_s"] = total / timed(lambda: [*pool.map(store.get, keys)])
        figures["lookup_of_512_manifests_ms"] = min(
            1e3 * timed(lambda: [store.get(key) for key in keys[2::3]]) for _ in range(5)
        )
        used = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
        figures["disk_a_byte"] = used / 1e6 / total
    return {key: round(value, 2 if value < 10 else 0) for key, value in figures.items()}


def clients(count: int) -> dict[str, dict[str, float]]:
    """Milliseconds a call, of both clients, against one server in this process."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    common = {"region_name": "us-east-1", "aws_access_key_id": "a", "aws_secret_access_key": "b"}
    theirs = boto3.client("s3", endpoint_url=url, **common)
    theirs.create_bucket(Bucket="pages")
    ours = ObjectStore.at("s3://pages", endpoint=url, region="us-east-1", access_key_id="a", secret_access_key="b")
    calls: dict[str, tuple[Callable[[str, bytes], Any], Callable[[str], Any]]] = {
        "boto3": (
            lambda key, data: theirs.put_object(Bucket="pages", Key=key, Body=data),
            lambda key: theirs.get_object(Bucket="pages", Key=key)["Body"].read(),
        ),
        "obstore": (ours.put, ours.get),
    }
    rows: dict[str, dict[str, float]] = {}
    for name, (put, get) in calls.items():
        for size in (SIZES[0], SIZES[2]):
            data, row = bytes(size), rows.setdefault(name, {})
            puts = timed(lambda put=put, data=data: [put(f"o/{i}", data) for i in range(count)])
            gets = timed(lambda get=get: [get(f"o/{i}") for i in range(count)])
            row |= {f"put_{size}_ms": round(1e3 * puts / count, 1), f"get_{size}_ms": round(1e3 * gets / count, 1)}
    server.stop()
    return rows


def main() -> int:
    """Measure, print, keep."""
    args = arguments(__doc__, "tiers_stores", quick="few of everything, to see that it works").parse_args()
    pages, calls = (4, 2) if args.quick else (PAGES, CALLS)
    stores = {name: measure(make, pages) for name, make in STORES.items()}
    figures = {"pages": pages, "stores": stores, "s3": clients(calls)}
    print(json.dumps(figures, indent=1))
    keep(args.out, facts() | figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

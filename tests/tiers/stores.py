"""Every back end there is, each for real: S3 is moto's server, in a thread."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from obstore.store import MemoryStore, S3Store

from kvproto.tiers.file_store import FileStore
from kvproto.tiers.object_store import ObjectStore
from kvproto.tiers.pack_store import PackStore
from kvproto.tiers.store import Store
from tests.tiers.schedules import Memory

STORES = ("memory", "files", "packs", "objects", "s3")
"""`objects` are in obstore's own memory."""
BUCKET = "pages"
KEYS = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1"}


@cache
def server() -> str:
    """The URL of an S3 server, which runs as long as the process, with a bucket."""
    import boto3  # half a second, which most workers save
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    url = f"http://{host}:{port}"
    boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="reader", aws_secret_access_key="none", region_name="us-east-1"
    ).create_bucket(Bucket=BUCKET)
    return url


@contextmanager
def opened(kind: str, root: Path | None = None) -> Iterator[Store]:
    """A back end; what it keeps in files is in `root`, or in memory that looks like a disk."""
    with ExitStack() as stack:
        memory = Path("/dev/shm")
        if root is None:
            root = Path(stack.enter_context(TemporaryDirectory(dir=memory if memory.is_dir() else None)))
        if kind == "memory":
            yield Memory()
        elif kind == "files":
            yield FileStore(root)
        elif kind == "packs":
            yield PackStore(root)
        elif kind == "objects":
            yield ObjectStore(MemoryStore())
        else:
            yield ObjectStore(
                S3Store(
                    BUCKET, prefix=root.name, endpoint=server(), access_key_id="reader", secret_access_key="none",
                    region="us-east-1", client_options={"allow_http": True},
                )
            )  # fmt: skip

"""Python of pages for operators, which assumes an engine: each runs with one, and at places of this machine."""

import re
import textwrap
from pathlib import Path

import pytest

from kvproto.net.keys import make_keys
from tests.demo.test_by_hand import free_port
from tests.examples.test_examples import example
from tests.examples.test_pages import ROOT
from tests.processes import Command, imported

imported(__name__, "torch.distributed", "kvproto.tiers")

ENGINE = """
import kvproto
from kvproto import *

geometry = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=16)])
pool = Pool.allocate(geometry, pages=8)
"""
HAND_OVER = """
ticket, prompt = new_ticket("prefill"), Prompt(range(16))
request, fetch = source.request(ticket, prompt), sink.fetch(ticket, prompt, {"kv": [0]})
request.finish({"kv": [1]})
assert sum(fetch.wait(30).bytes.values()) == 16 * 128
"""
CLOSE = """
for each in (sink, source):
    each.close()
"""
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
WRITTEN = re.compile(r"cat > /etc/kvproto/(\w+\.toml) <<'END'\n(.*?)^ *END$", re.DOTALL | re.MULTILINE)
RECORD = re.compile(r"(DEBUG|INFO|WARNING):kvproto\.events:")
KEYS = ("F%hA2%nlpEP8i&.P/v!Kt3OzS:dlwEZmeNBW%0vJ", "AJGuL^3aRJm.=Z*4>K3AD+Rn?gl([[JK?G?&u/0F")


def run(tmp_path: Path, program: str) -> None:
    """Run it; it must end well and print nothing on stderr but records of events, which come as fast as engines connect."""
    file = tmp_path / "page.py"
    file.write_text(program)
    status, _, said = Command(example, [file]).wait()
    assert status == 0, said
    assert [line for line in said.splitlines() if not RECORD.match(line)] == []


def python_of(page: str) -> str:
    """Its blocks as one program, those within lists too."""
    return "\n".join(textwrap.dedent(block) for _, block in BLOCK.findall((ROOT / page).read_text()))


def test_times_of_the_reference_may_be_set(tmp_path: Path) -> None:
    page = python_of("docs/reference.md")
    run(tmp_path, f"{page}\nassert limits.PATIENCE == 60.0\nfrom kvproto import Source")


def test_metrics_log_and_feed_begin_as_the_page_says(tmp_path: Path) -> None:
    page = python_of("docs/operations.md").replace("9000", "0").replace("/run/kv", str(tmp_path))
    given = f'{ENGINE}\nsources = {{"prefill": "ipc://{tmp_path}/prefill-0"}}\n'
    checks = """
from pathlib import Path
assert list(Path(FOLDER).glob("feed-prefill-*"))
assert any(family.samples for family in REGISTRY.collect() if family.name.startswith("kvproto_"))
""".replace("FOLDER", repr(str(tmp_path)))
    tmp_path.chmod(0o700)
    run(tmp_path, given + page + checks + CLOSE)


def test_two_hosts_of_the_page_of_keys_hand_over(tmp_path: Path) -> None:
    """With both files that the page writes. One host stands for two, so both engines have the keys of either."""
    text = (ROOT / "docs/security.md").read_text()
    folder = tmp_path / "keys"
    public = make_keys(folder).public.decode()
    port = free_port()

    def here(page: str) -> str:
        for key in KEYS:
            page = page.replace(key, public)
        page = page.replace("10.0.0.1:7100", f"127.0.0.1:{port}").replace("10.0.0.1:710{rank}", f"127.0.0.1:{port}")
        return page.replace("/etc/kvproto", str(folder)).replace('"nixl"', '"inline"')

    files = dict(WRITTEN.findall(text))
    assert sorted(files) == ["allow.toml", "sources.toml"]
    for name, rows in files.items():
        (folder / name).write_text(here(textwrap.dedent(rows)))
        (folder / name).chmod(0o600)
    run(tmp_path, ENGINE + here(python_of("docs/security.md")) + HAND_OVER + CLOSE)


def test_ranks_agree_and_routers_find_as_the_page_of_tiers_says(tmp_path: Path) -> None:
    places = [f"ipc://{tmp_path}/{name}" for name in ("a", "b")]
    given = f"""
import torch

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
tokens, key_of_a, key_of_b, other = list(range(32)), None, None, Pool.allocate(geometry, pages=8)
tiers, none = (Tiers(each, {{"weights.target": "example 1"}}, page=16, host=16) for each in (pool, other))
lease = tiers.open(tiers.chain(tokens), room=2)
lease.leave(rows=32)
tiers.drain()
prompts = [(tiers.chain(tokens), 3)]
source = Source("a", pool, "{places[0]}")
sink = Source("b", other, "{places[1]}")
sink.tell(none)
"""
    page = python_of("docs/tiers.md")
    for written, place in zip(("tcp://10.0.0.5:7700", "tcp://10.0.0.6:7700"), places, strict=True):
        page = page.replace(written, place)
    checks = """
assert [lease.pages for lease in leases] == [2]
assert [(held.engine, held.tokens) for held in finder.find(tokens)] == [("a", 32), ("b", 0)]
leases[0].leave()
finder.close()
"""
    tmp_path.chmod(0o700)
    run(tmp_path, ENGINE + given + page + checks + CLOSE + "\ntiers.close(), none.close()\n")


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_the_page_are_those_that_it_prints(key: str) -> None:
    assert (ROOT / "docs/security.md").read_text().count(key) >= 2

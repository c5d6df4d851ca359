"""Which rule of election pays when."""

import json
from pathlib import Path

import pytest

from kvproto.cli.plans import ANSWER, SHARE, Spread, advise_spread, spread
from kvproto.copying.program import Runs
from kvproto.planning.layout import Parallel
from kvproto.transport.bench import Constants, CostedWay
from kvproto.wire import to_json
from kvproto_catalog.models import PRESETS, describe
from tests.commands import Ran

LINK = [CostedWay("link", "link", "copy", Constants(link=1e6, run=1e-3, start=0.5))]


def test_a_rule_is_costed_by_its_busiest_ranks() -> None:
    """A million bytes a second, a thousandth of a second a run, half a second a program."""
    rule = spread("even", {(0, 0): Runs(100, 1_000_000), (0, 1): Runs(200, 500_000), (1, 1): Runs(0, 250_000)}, LINK)
    assert rule.awaited == 2
    assert rule.source == pytest.approx(1.6 + 1.2)
    assert rule.sink == pytest.approx(1.2 + 0.75)
    assert rule.seconds == pytest.approx(2.8 + 2 * ANSWER)
    assert rule.rate == pytest.approx(SHARE / 2.8)


def test_few_sources_pay_until_the_busiest_has_no_time_left() -> None:
    even, few = Spread("even", 8, 0.001, 0.004), Spread("few", 2, 0.002, 0.004)
    assert few.seconds < even.seconds
    assert (
        advise_spread([even, few]) == "few up to 350 requests a second from one source replica, even beyond, up to 700"
    )
    # the same number of sources: nothing speaks against the even load
    assert advise_spread([even, Spread("few", 8, 0.002, 0.004)]) == "even: the fastest, and no rule bears more requests"


def test_plan_says_which_rule_pays(tmp_path: Path, ran: Ran) -> None:
    config, *drafts = PRESETS["deepseek-v3-eagle3"]
    files = []
    for tp in (8, 4):
        files.append(str(tmp_path / f"{tp}.json"))
        Path(files[-1]).write_text(json.dumps(to_json(describe(config, drafts, Parallel(tp=tp)))))
    rules = json.loads(ran("plan", *files, "--tokens", "1000", "--json"))["rules"]
    assert {name: rule["awaited"] for name, rule in rules.items()} == {"even": 4, "few": 2, "one": 2}
    assert rules["even"]["source_s"] < rules["few"]["source_s"]
    assert "advice: few up to" in ran("plan", *files, "--tokens", "1000")
    # heads that have one owner each leave nothing to elect
    assert "rules of election" not in ran("plan", files[1], files[1], "--tokens", "1000")

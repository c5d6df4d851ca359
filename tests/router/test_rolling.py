"""Every engine of a fleet is restarted under load, and one is killed: nothing is lost, and no answer differs."""

import re

import pytest

from kvproto_reference.router.rolling import main
from tests.processes import Command, imported

imported("kvproto_reference.router.rolling")


@pytest.mark.timeout(400)
def test_a_rolling_restart_with_a_kill_loses_nothing() -> None:
    status, out, said = Command(main, ["--minutes", 1]).wait(380)
    assert status == 0, out + said
    served, lost, wrong, restarts, kills = map(int, re.findall(r"\d+", out)[:5])
    assert (lost, wrong, kills) == (0, 0, 1)
    assert served > 100
    assert restarts >= 8  # of each of the eight engines

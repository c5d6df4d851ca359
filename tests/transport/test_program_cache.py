"""What is made once for a rank pair's operations, and let go with them."""

import gc

import numpy as np
import pytest

from kvproto.copying.program import OP
from kvproto.transport.cuda.kernel import PerProgramCache


def test_it_is_made_once_for_operations_and_the_rest() -> None:
    once, made = PerProgramCache[int](), list[int]()

    def make() -> int:
        made.append(len(made))
        return made[-1]

    ops = [np.zeros(2, OP) for _ in range(2)]
    assert [once.get(o, rest, make) for o in ops for rest in ("a", "b")] == [0, 1, 2, 3]
    assert [once.get(o, rest, make) for o in ops for rest in ("a", "b")] == [0, 1, 2, 3]
    assert len(made) == 4


def test_it_goes_with_the_operations() -> None:
    once = PerProgramCache[str]()
    kept = np.zeros(1, OP)
    once.get(kept, None, lambda: "kept")
    for n in range(5):
        ops = np.zeros(1, OP)  # most likely where the last one was
        assert once.get(ops, None, lambda: str(n)) == str(n)  # noqa: B023
        del ops
        gc.collect()
    assert len(once._made) == 1
    assert once.get(kept, None, lambda: "anew") == "kept"


def test_what_could_not_be_made_is_tried_again() -> None:
    once, ops = PerProgramCache[int](), np.zeros(1, OP)

    def fail() -> int:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        once.get(ops, 1, fail)
    assert once.get(ops, 1, lambda: 5) == 5
    once.clear()
    assert once.get(ops, 1, lambda: 6) == 6
    del ops
    gc.collect()
    assert len(once._made) == 0

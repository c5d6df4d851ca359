"""What the fuzzer found worth keeping: nothing but WireError comes out of any of it, and both readers agree."""

from tests.fuzz.run import CORPUS, seeds
from tests.fuzz.target import NAMES, one_input


def test_corpus() -> None:
    inputs = [bytes.fromhex(line) for line in CORPUS.read_text().split()]
    assert len(inputs) > 1000
    for data in inputs:
        one_input(data)


def test_seeds() -> None:
    for data in seeds(NAMES):
        one_input(data)

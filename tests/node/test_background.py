import select
import time

from kvproto.rank.background import Background


def test_a_turn_leaves_results_to_the_next_when_they_take_long() -> None:
    background, passed = Background(), list[int]()

    def then(result: object) -> None:
        assert isinstance(result, int)
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass
        passed.append(result)

    poll = select.poll()
    poll.register(background.fileno(), select.POLLIN)
    for n in range(3):
        background.defer(lambda n=n: n, then)
    while len(background.results) < 3:
        poll.poll(1000)
    for turn in range(1, 4):
        assert poll.poll(0)
        background.turn()
        assert passed == list(range(turn))
    assert not poll.poll(0)
    background.close()

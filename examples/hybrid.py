"""An engine of a hybrid model that finds its pages and recurrent states again: `python examples/hybrid.py`.

Its first and last layers are gated linear attention, whose state each token changes; the layer between them is softmax
attention over pages. The pool has an item of state for each page: the state after the last token of the page. A request
that continues after n pages reads item `slots[n - 1]`, and works in item `slots[n]` until that page is full.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvproto import Cache, DType, Pool, Tiers, lay_out

WIDTH, HEADS, DIM, WORDS, PAGE = 32, 4, 8, 64, 4
RECURRENT, SOFTMAX = (0, 2), 1
GEOMETRY = lay_out([
    Cache.gqa("kv", [SOFTMAX], kv_heads=HEADS, head_dim=DIM, page=PAGE, dtype=DType.F32),
    Cache.state("state", RECURRENT, parts={"s": (DType.F32, HEADS, 4 * DIM * DIM)}),
])  # fmt: skip
NAMES = {"weights.target": "hybrid example 1", "rope.target": "none", "dtype.target": "F32"}

Floats = npt.NDArray[np.float32]


class Engine:
    """One request at a time, a token at a time."""

    def __init__(self, pages: int, host: int, storage: Path | None = None) -> None:
        """A pool of `pages` pages, and as many as `host` on the host."""
        rng = np.random.default_rng(0)
        self._weights = [
            {name: rng.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32) for name in "qkvgo"} for _ in range(3)
        ]
        self._words = rng.normal(0, 1, (WORDS, WIDTH)).astype(np.float32)
        self.pool = Pool.allocate(GEOMETRY, pages)
        self._kv = [self.pool.array("kv", SOFTMAX, part).view(np.float32) for part in ("k", "v")]
        self._states = {layer: self.pool.array("state", layer, "s").view(np.float32) for layer in RECURRENT}
        self.tiers = Tiers(self.pool, NAMES, page=PAGE, host=host, storage=storage)

    def answer(
        self, prompt: Sequence[int], count: int, states: Iterable[int] | None = None
    ) -> tuple[list[int], dict[str, int]]:
        """The most likely `count` tokens after a prompt, and the pages of it that were found.

        `states`: numbers of tokens after which the state is kept, for later requests to go on from; None: each page.
        """
        chain = self.tiers.chain(prompt[:-1])  # the last token's logits are wanted, so it is computed in any case
        fetch = self.tiers.fetch(chain, float("inf"))
        while not fetch.over(0.0):
            continue
        fetch.take()
        lease = self.tiers.open(chain, -(-(len(prompt) + count) // PAGE))
        assert lease is not None
        self.tiers.step()
        tokens = [*prompt]
        for at in range(lease.pages * PAGE, len(prompt) + count - 1):
            logits = self._token(tokens[at], at, lease.slots)
            if at == len(tokens) - 1:
                tokens.append(int(logits.argmax()))
        chain.extend(tokens[len(prompt) - 1 :])
        lease.leave(len(tokens) - 1, None if states is None else {*states})
        self.tiers.drain()
        return tokens[len(prompt) :], lease.found

    def state_before(self, layer: int, at: int, slots: Sequence[int]) -> Floats:
        """The state after the tokens before this one, [head, key, value]."""
        if not at:
            return np.zeros((HEADS, DIM, DIM), np.float32)
        return self._states[layer][slots[(at - 1) // PAGE], 0].reshape(HEADS, DIM, DIM)

    def _token(self, token: int, at: int, slots: Sequence[int]) -> Floats:
        x = self._words[token]
        for layer, w in enumerate(self._weights):
            q, k, v, g = ((x @ w[name]).reshape(HEADS, DIM) for name in "qkvg")
            if layer in RECURRENT:
                gate = 1 / (1 + np.exp(-2 - g))
                state = gate[:, :, None] * self.state_before(layer, at, slots) + k[:, :, None] * v[:, None]
                self._states[layer][slots[at // PAGE], 0] = state.reshape(HEADS, -1)
                out = np.einsum("hk,hkv->hv", q, state)
            else:
                for rows, new in zip(self._kv, (k, v), strict=True):
                    rows[slots[at // PAGE], at % PAGE] = new
                keys, values = (rows[slots[: at // PAGE + 1]].reshape(-1, HEADS, DIM)[: at + 1] for rows in self._kv)
                scores = np.exp(np.einsum("hd,thd->ht", q, keys) / DIM**0.5)
                out = np.einsum("ht,thd->hd", scores / scores.sum(1, keepdims=True), values)
            x = np.tanh(x + out.reshape(-1) @ w["o"])
        logits: Floats = self._words @ x
        return logits

    def close(self) -> None:
        """Wait for storage, and free the pool."""
        self.tiers.close()


def main() -> None:
    """Three conversations of three turns on a device that holds one, beside an engine that never evicts."""
    with tempfile.TemporaryDirectory() as folder:
        small, large = Engine(pages=16, host=24, storage=Path(folder)), Engine(pages=128, host=1)
        so_far: list[list[int]] = [[], [], []]
        for turn in range(3):
            for who, said in enumerate(so_far):
                said += np.random.default_rng((turn, who)).integers(0, WORDS, 9).tolist()
                (tokens, found), (right, _) = small.answer(said, 8), large.answer(said, 8)
                here, host = found["device"], found["host"]
                print(f"{len(said)} tokens: {here} pages on the device, {host} from the host, same: {tokens == right}")
                said += tokens
        small.close()
        large.close()


if __name__ == "__main__":
    main()

"""Rates of rotary embeddings: radians by which each pair of a head is rotated from one position to the next."""

import math

Rates = tuple[float, ...]


def plain_rates(dim: int, theta: float) -> Rates:
    """Rates of `dim / 2` pairs, from 1 down to nearly 1 / theta."""
    return tuple(theta ** (-i / dim) for i in range(0, dim, 2))


def llama3_rates(rates: Rates, original: int, factor: float, low: float, high: float) -> Rates:
    """Slow by `factor` the pairs that make less than `low` turns in `original` positions, and none above `high`.

    As in the code that came with Llama 3.1.
    """

    def kept(rate: float) -> float:
        turns = original * rate / (2 * math.pi)
        return min(max((turns - low) / (high - low), 0.0), 1.0)

    return tuple(rate * (kept(rate) + (1 - kept(rate)) / factor) for rate in rates)


def yarn_rates(rates: Rates, theta: float, original: int, factor: float, fast: float, slow: float) -> Rates:
    """Slow by `factor` the pairs that make less than `slow` turns in `original` positions, and none above `fast`.

    YaRN, arXiv 2309.00071, section 3.2, with the ramp of the authors' code: by pair, between bounds rounded outwards.
    """
    dim = 2 * len(rates)

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), dim - 1)
    width = (high - low) or 0.001
    slowed = [min(max((i - low) / width, 0.0), 1.0) for i in range(len(rates))]
    return tuple(rate * (1 - s + s / factor) for rate, s in zip(rates, slowed, strict=True))


def yarn_gain(factor: float, weight: float = 1.0) -> float:
    """The factor of queries and of keys that sharpens attention over a context longer by `factor` (section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

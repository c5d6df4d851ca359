"""Rates of rotary embeddings: radians that each pair of a head turns from one position to the next."""

import math

Rates = tuple[float, ...]


def plain_rates(dim: int, theta: float) -> Rates:
    """Rates of `dim / 2` pairs, from 1 down to nearly 1 / theta."""
    return tuple(theta ** (-i / dim) for i in range(0, dim, 2))


def llama3_rates(rates: Rates, original: int, factor: float, low: float, high: float) -> Rates:
    """Slows by `factor` the pairs that make less than `low` turns in `original` positions, none above `high`.

    Llama 3.1, by the code that came with it.
    """

    def kept(rate: float) -> float:
        turns = original * rate / (2 * math.pi)
        return min(max((turns - low) / (high - low), 0.0), 1.0)

    return tuple(rate * (kept(rate) + (1 - kept(rate)) / factor) for rate in rates)


def yarn_rates(rates: Rates, theta: float, original: int, factor: float, fast: float, slow: float) -> Rates:
    """Slows by `factor` the pairs that make less than `slow` turns in `original` positions, none above `fast`.

    YaRN, arXiv 2309.00071, section 3.2, with its authors' code's ramp: by pair, between bounds rounded outwards.
    """
    dim = 2 * len(rates)

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), dim - 1)
    width = (high - low) or 0.001
    slowed = [min(max((i - low) / width, 0.0), 1.0) for i in range(len(rates))]
    return tuple(rate * (1 - s + s / factor) for rate, s in zip(rates, slowed, strict=True))


def yarn_gain(factor: float, weight: float = 1.0) -> float:
    """What attention scores over a context longer by `factor` are sharpened by, from each side (section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

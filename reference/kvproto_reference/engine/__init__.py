"""The engine around a model: pages, prefill, sampling, speculative decode."""

from .pages import PageAllocator, pages_for
from .pool import KVPool, PagedCache
from .prefill import PrefillStep, first_token, prefill, prefill_steps
from .runner import ModelRunner, PrefillChunk
from .sampling import SamplingParams, sample
from .sequence import Sequence, SpeculationStats, rows_needed
from .speculative import SpeculativeDecoder
from .undivided import Result, Undivided

__all__ = [
    "KVPool",
    "ModelRunner",
    "PageAllocator",
    "PagedCache",
    "PrefillChunk",
    "PrefillStep",
    "Result",
    "SamplingParams",
    "Sequence",
    "SpeculationStats",
    "SpeculativeDecoder",
    "Undivided",
    "first_token",
    "pages_for",
    "prefill",
    "prefill_steps",
    "rows_needed",
    "sample",
]

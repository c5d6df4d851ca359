"""Chaos: engines without a model, in real processes with real sockets, and everything that can go wrong, by seed.

`python -m kvproto_reference.chaos --seed 7` runs one world; docs/chaos.md says what it does and what counts.
"""

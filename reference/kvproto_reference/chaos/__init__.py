"""Chaos: engines without a model, real processes and sockets, and everything that can go wrong, from one seed.

`python -m kvproto_reference.chaos --seed 7` runs one world; docs/chaos.md says what is done and what counts.
"""

"""Reads what other engines state about their caches today into a Description, by tables, as far as it goes.

A capture (captures.py) becomes messages; a message is read by the table of its engine and release (tables.py,
values.py, reading.py). What the messages of a fleet state together, with what the caller says in addition, becomes a
Description (fleet.py); two fleets are compared field by field (compare.py). Nothing here writes such messages, and no
pickle is ever loaded.
"""

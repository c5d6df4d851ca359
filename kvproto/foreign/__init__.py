"""What other engines say of their caches today, read by tables into a Description as far as it goes.

A capture (captures.py) becomes messages; a message is read by the table of its engine and release (tables.py,
values.py, reading.py). What the messages of a fleet state together, and what is said beside them, becomes a
Description (fleet.py); two fleets are compared field by field (compare.py). Nothing here writes those messages, and no
pickle is ever loaded.
"""

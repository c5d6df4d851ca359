"""Captures of the messages of other engines, read by tables into Descriptions as far as they say.

A capture (capture.py) holds messages; a message is read by the table of its engine and release (tables.py, values.py,
interpreter.py). The words that the messages of a fleet state, with those that the caller adds, become a Description
(fleet.py); two fleets are compared field by field (compare.py). command.py adds `kvproto import`, and captures to
`kvproto check`. Nothing here writes such messages, and no pickle is ever loaded.
"""

from kvproto.distributions import check_versions

check_versions("kvproto-engines")

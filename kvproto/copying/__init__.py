"""Requests into strided copy programs, their checksums, and the numpy executor; nothing here knows a transport."""

# numpy.unique loads it when it is first called: not in the midst of a copy, where no file may be left to open
import numpy.ma  # noqa: F401

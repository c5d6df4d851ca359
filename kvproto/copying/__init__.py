"""Requests into strided copy programs, their checksums, and the numpy executor; nothing here knows a transport."""

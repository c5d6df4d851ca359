"""Metrics, log records and a local feed of a Source or Sink, all derived from its events."""

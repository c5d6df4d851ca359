"""What an operator sees of a Source or Sink: metrics, log records and a local feed, all derived from its events."""

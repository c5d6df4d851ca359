"""What an operator sees of a Source or Sink: metrics, log records and a local feed, made of its events alone."""

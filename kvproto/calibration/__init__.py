"""What the transports of this machine cost, measured and kept in a file."""

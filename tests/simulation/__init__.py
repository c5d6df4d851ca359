"""A simulation: the real Source and Sink in one thread, in a world that one seed decides (docs/simulation.md)."""

"""Shared parts of the adapters of engines: facts that two different engines state alike."""

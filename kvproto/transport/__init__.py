"""Transports: they map memory and run copy programs."""

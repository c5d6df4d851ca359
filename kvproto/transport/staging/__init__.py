"""Packed bytes through staging slots: what transports that stage have in common."""

"""Tools for people."""

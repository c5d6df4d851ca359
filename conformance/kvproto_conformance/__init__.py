"""Conformance suite for engines that speak kvproto."""

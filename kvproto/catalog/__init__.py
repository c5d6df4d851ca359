"""Engines and models of today: their caches, the layouts of their pools, and their Descriptions."""

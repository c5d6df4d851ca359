"""Engines and models of today: their caches, the layouts of their pools, and their Descriptions.

It has nothing to do with the feature CATALOGUE, by which sources list cached pages (`kvproto.session.catalogue`).
"""

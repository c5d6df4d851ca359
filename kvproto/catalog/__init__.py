"""Engines and models of today: caches, pools and Descriptions; not the feature CATALOGUE (`session.catalogue`)."""

"""Engines and models of today: caches, pools and Descriptions; not the feature CATALOGUE (`kvproto.session.catalogue`).

A config.json is read into the kinds of its layers (config.py, types.py), these become caches (models.py), and an
engine's tables the pools that hold them (engines.py, vllm.py, tensors.py). command.py adds `kvproto describe`.
"""

from kvproto.distributions import check_versions

check_versions("kvproto-engines")

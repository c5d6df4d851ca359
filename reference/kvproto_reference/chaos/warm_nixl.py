"""The same as warm.py, with NIXL, whose import takes a second or two."""

import nixl._api as nixl

from . import warm as warm

__all__ = ["nixl"]

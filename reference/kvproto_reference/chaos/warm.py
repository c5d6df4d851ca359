"""Preparations of the server of processes before it starts engines, so that each of them starts within milliseconds."""

from kvproto import Pool
from kvproto.transport import load

from . import world as world
from .labels import GEOMETRY

with Pool.allocate(GEOMETRY, 1):
    load("shm")

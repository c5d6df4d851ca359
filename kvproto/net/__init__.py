"""Sockets, keys and allow-lists over ZeroMQ; no other package imports zmq."""

from kvproto.net.addresses import Seed, check_address, encrypted, is_wildcard, private_address, read_sources
from kvproto.net.allow_list import AllowList
from kvproto.net.keys import KeyPair, check_public, make_keys, read_keys
from kvproto.net.sockets import RECEIVE_TIME, Dialer, Listener

__all__ = [
    "RECEIVE_TIME", "AllowList", "Dialer", "KeyPair", "Listener", "Seed", "check_address", "check_public", "encrypted",
    "is_wildcard", "make_keys", "private_address", "read_keys", "read_sources",
]  # fmt: skip

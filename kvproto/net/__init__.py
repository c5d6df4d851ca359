"""ZeroMQ: the only importer of zmq."""

from kvproto.net.sockets import Dialer, Listener, private_address

__all__ = ["Dialer", "Listener", "private_address"]

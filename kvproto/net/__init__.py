"""ZeroMQ: the only importer of zmq."""

from kvproto.net.sockets import Dialer, Listener, check_address, private_address

__all__ = ["Dialer", "Listener", "check_address", "private_address"]

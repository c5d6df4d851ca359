"""libzmq's send, receive and poll, called without releasing the interpreter lock.

pyzmq releases the lock around each send and receive. Next to a thread that computes in Python, each release costs up to
5 ms (`sys.getswitchinterval`), although a call that never waits takes a microsecond. Through ctypes.PyDLL the lock is
kept. If libzmq cannot be found in pyzmq's extension module, pyzmq's own calls are used.
"""

import ctypes
from typing import Any

import zmq


class _ZmqMessage(ctypes.Structure):
    """zmq_msg_t of libzmq 4: opaque, 64 bytes, aligned as a pointer."""

    _fields_ = (("_opaque", ctypes.c_void_p * 8),)


def _library() -> Any:
    try:
        from zmq.backend.cython import _zmq

        library = ctypes.PyDLL(_zmq.__file__)  # dlsym also searches the libraries that it is linked with
        pointer, number = ctypes.c_void_p, ctypes.c_int
        for name, result, arguments in (
            ("zmq_send", number, (pointer, ctypes.c_char_p, ctypes.c_size_t, number)),
            ("zmq_msg_init", number, (pointer,)),
            ("zmq_msg_recv", number, (pointer, pointer, number)),
            ("zmq_msg_data", pointer, (pointer,)),
            ("zmq_msg_more", number, (pointer,)),
            ("zmq_msg_gets", ctypes.c_char_p, (pointer, ctypes.c_char_p)),
            ("zmq_msg_close", number, (pointer,)),
            ("zmq_getsockopt", number, (pointer, number, pointer, pointer)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (ImportError, OSError, AttributeError):
        return None
    return library


_zmq = _library()
_MOST_FRAMES, _MOST_READ = 3, 1 << 14
"""The most frames of a message that are kept, as no valid message has more, and that one call reads."""
_NOWAIT, _MORE, _EVENTS, _IN = int(zmq.DONTWAIT), int(zmq.SNDMORE), int(zmq.EVENTS), int(zmq.POLLIN)
_INT = ctypes.sizeof(ctypes.c_int)


class Inbox:
    """A socket with an edge-triggered descriptor, to be checked before sleeping; only for the thread that owns it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket, self.fd = socket, int(socket.getsockopt(zmq.FD))
        self.look = False
        """Whether the socket was used since `take` found nothing; if not, the descriptor announces every message."""
        self._unread = False
        """Whether the current message has not been read to its end."""

    @property
    def pending(self) -> bool:
        """Whether a message waits unannounced: it was not taken, or came during `send`; check before sleeping."""
        if self.look:
            self.look = _readable(self.socket)
        return self.look

    @property
    def readable(self) -> bool:
        """Whether a message waits, for callers that receive it through pyzmq."""
        self.look = _readable(self.socket)
        return self.look

    def take(self, who: bool = False) -> list[bytes] | None:
        """The first three frames of the next message; None if there is none.

        With `who`, two more items come first: the key that the connection proved (empty if it proved none), and the
        connection's descriptor in digits. The list is empty for a message with more frames than one call reads, and so
        are the lists of the calls that read its rest.
        """
        frames: list[bytes] = []
        socket = self.socket
        more = (_read if _zmq is None or socket.closed else _read_directly)(socket, frames, who)
        self.look = more is not None
        if more is None:
            return None
        rest, self._unread = self._unread, more
        return [] if more or rest else frames

    def send(self, frames: list[bytes]) -> bool:
        """Send one message without waiting; False if it cannot be sent now."""
        self.look = True
        socket = self.socket
        if _zmq is None or socket.closed:
            try:
                socket.send_multipart(frames, zmq.DONTWAIT)
            except zmq.ZMQError:
                return False
            return True
        pointer, flags = socket.underlying, [_NOWAIT | _MORE] * (len(frames) - 1) + [_NOWAIT]
        for frame, flag in zip(frames, flags, strict=True):
            if _zmq.zmq_send(pointer, frame, len(frame), flag) < 0:
                return False
        return True


def _read(socket: zmq.Socket[bytes], frames: list[bytes], who: bool) -> bool | None:
    """Read one message into `frames`; whether it has more frames than one call reads. None if no message waits."""
    for n in range(_MOST_READ):
        try:
            frame = socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        if who and not n:
            frames += (_proven(frame), str(frame.get(zmq.SRCFD)).encode())
        if n < _MOST_FRAMES:
            frames.append(frame.bytes)
        if not socket.rcvmore:
            return False
    return True


def _proven(frame: zmq.Frame) -> bytes:
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""


def _read_directly(socket: zmq.Socket[bytes], frames: list[bytes], who: bool) -> bool | None:
    message, pointer = _ZmqMessage(), socket.underlying
    at = ctypes.addressof(message)
    _zmq.zmq_msg_init(at)
    try:
        for n in range(_MOST_READ):
            size = _zmq.zmq_msg_recv(at, pointer, _NOWAIT)
            if size < 0:
                return None
            if who and not n:
                frames += (_zmq.zmq_msg_gets(at, b"User-Id") or b"", _zmq.zmq_msg_gets(at, b"__fd") or b"")
            if n < _MOST_FRAMES:
                frames.append(ctypes.string_at(_zmq.zmq_msg_data(at), size))
            if not _zmq.zmq_msg_more(at):
                return False
    finally:
        _zmq.zmq_msg_close(at)
    return True


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits; this also makes ZeroMQ process what has come."""
    if _zmq is None or socket.closed:
        return bool(int(socket.getsockopt(zmq.EVENTS)) & _IN)
    events, size = ctypes.c_int(), ctypes.c_size_t(_INT)
    _zmq.zmq_getsockopt(socket.underlying, _EVENTS, ctypes.addressof(events), ctypes.addressof(size))
    return bool(events.value & _IN)

"""Descriptors of device memory go over a socket; any descriptor will do to test that."""

import os

import pytest

from kvproto.transport.cuda.descriptors import fetch, offer, withdraw


def test_descriptors_go_to_those_who_know_their_name() -> None:
    read, write = os.pipe()
    path, token = offer(read)
    got = fetch(path, token)
    os.write(write, b"x")
    assert os.read(got, 1) == b"x"
    for wrong in (bytes(16), token[:8]):
        with pytest.raises(OSError, match="no descriptor"):
            fetch(path, wrong)
    withdraw(token)
    with pytest.raises(OSError, match="no descriptor"):
        fetch(path, token)
    os.close(got), os.close(write)


def test_one_who_says_nothing_holds_up_no_other() -> None:
    import socket

    read, write = os.pipe()
    path, token = offer(read)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path)
        os.close(fetch(path, token))
    withdraw(token)
    os.close(write)

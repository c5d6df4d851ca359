"""Sources by DNS: through the C library's resolver, and settings that name them wrongly."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvproto import LocalError
from kvproto_discovery import directory_of, read_found

PROGRAM = Path(__file__).with_name("names.py")


def test_pods_are_found_by_their_names_whatever_their_addresses(tmp_path: Path) -> None:
    apart = ["unshare", "--mount", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "ip", "link"], capture_output=True).returncode:
        pytest.skip("no namespaces may be made here")
    ran = subprocess.run([*apart, sys.executable, PROGRAM, tmp_path], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "before": "it is connected to no source",
        "IPv4": ["tcp://127.0.0.2:7100"],
        "moved": ["tcp://127.0.0.3:7100"],
        "IPv6": ["tcp://[::1]:7100"],
        "no answer": [["prefill", 0]],
        "no name": [["prefill", 0]],
        "after": "it is connected to no source",
    }


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ("dns:prefill-0:7100", "dns:ENGINE=HOST:PORT"),
        ("dns:a=h:1,a=i:1", "each engine once"),
        ("dns:a=h", "HOST:PORT"),
        ("dns:a=h:0", "HOST:PORT"),
        ("dns:a=h-{0-1}-{0-1}:7100", "one range"),
        ("dns:a=h-{n}:7100", "one range"),
        ("dns:a=h-{3-1}:7100", "rises"),
        ("dns:a=h-{0-999}:7100", "256 at most"),
        ("etcd:", "http://HOST:PORT"),
        ("etcd:host:2379", "http://HOST:PORT"),
        ("etcd:http://host:2379/rows", "http://HOST:PORT"),
        ("etcd:http://host:2379?user=x", "'user'"),
        ("etcd:https://host:2379?ca=/no/such.pem", "PEM files"),
        ("consul:http://host", "dns:ENGINE=HOST:PORT or etcd:URL"),
    ],
)
def test_a_directory_that_is_named_wrongly(places: str, says: str) -> None:
    with pytest.raises(LocalError) as caught:
        directory_of(places)
    assert says in str(caught.value)


def test_all_that_dns_names_have_one_key(tmp_path: Path) -> None:
    key = "AJGuL^3aRJm.=Z*4>K3AD+Rn?gl([[JK?G?&u/0F"
    (tmp_path / "keys").write_text(f"{key}\n{key[::-1]}\n")
    with pytest.raises(LocalError, match="one key"):
        read_found("dns:a=h:1", tmp_path / "keys")
    for text, says in (("", "a public key in the file"), ("short\n", "characters of Z85")):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(LocalError, match=says):
            read_found("dns:a=h:1", tmp_path / "keys")
    with pytest.raises(LocalError, match="a file of public keys"):
        read_found("dns:a=h:1", tmp_path / "none")

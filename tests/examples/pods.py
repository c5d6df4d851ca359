"""`unshare --mount --net python pods.py FOLDER`: the engines of deploy/kubernetes.yaml as two pods, each with PID and IPC
namespaces of its own, and Secrets as kubelet mounts them; prints what their probes say as JSON.

Their pods share an address, so that decode's probes are at the next port; the name of prefill's pod is in /etc/hosts.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from kvproto.cli.main import main as command

MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes.yaml"
PROBES = {"prefill": 9400, "decode": 9401}
_BIND, _PRIVATE, _RECURSIVE = 1 << 12, 1 << 18, 1 << 14


def mount(folder: Path, *names: str) -> None:
    """Put files of a folder in the place of those in /etc, for this mount namespace alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None)
    for name in names:
        failed = failed or libc.mount(bytes(folder / name), f"/etc/{name}".encode(), None, _BIND, None)
    if failed:
        raise OSError(ctypes.get_errno(), "mount")


def volume(folder: Path, made: Path, lists: dict[str, str]) -> None:
    """Keys and lists as kubelet projects them: links to a folder that it replaces as a whole, in a sticky directory."""
    inner = folder / "..2026"
    inner.mkdir(parents=True)
    folder.chmod(0o1777)
    (folder / "..data").symlink_to("..2026")
    for name, text in {**{each.name: each.read_text() for each in made.iterdir()}, **lists}.items():
        (inner / name).write_text(text)
        (inner / name).chmod(0o440)
        (folder / name).symlink_to(f"..data/{name}")


def start(role: str, folder: Path) -> "subprocess.Popen[str]":
    """An engine with the manifest's options, in its pod."""
    (own,) = (
        each for each in yaml.safe_load_all(MANIFEST.read_text())
        if (each["kind"], each["metadata"]["name"]) == ("StatefulSet", role)
    )  # fmt: skip
    (container,) = own["spec"]["template"]["spec"]["containers"]
    arguments = [each.replace("=/", f"={folder}/{role}/") for each in container["args"]]
    arguments = [each.replace(":9400", f":{PROBES[role]}").replace("$(ORDINAL)", "0") for each in arguments]
    program = f"import sys; from kvproto_reference.commands import {role}; sys.exit({role}())"
    apart = ["unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.Popen([*apart, sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True)


def ask(role: str, path: str) -> tuple[int, Any]:
    """The status and the JSON of a probe; 0 before anybody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PROBES[role]}{path}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError:
        return 0, None


def until(condition: Callable[[], bool]) -> None:
    end, pause = time.monotonic() + 120, threading.Event()
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{condition} of {[ask(role, '/ready') for role in PROBES]}")
        pause.wait(0.1)


def main(folder: Path) -> None:
    """Start both, end prefill by SIGTERM, then decode."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    (folder / "hosts").write_text("127.0.0.1 localhost prefill-0.prefill\n")
    mount(folder, "hosts")
    for role in PROBES:
        if command(["keygen", str(folder / "made" / role)]):
            raise RuntimeError("keygen")
        (folder / role / "run/kv").mkdir(parents=True)
    key = {role: (folder / "made" / role / "public.key").read_text().strip() for role in PROBES}
    allow = f'[[client]]\nkey = "{key["decode"]}"\nengine = "decode"\n'
    for role in PROBES:
        lists = {"allow.toml": allow, "sources.keys": f"{key['prefill']}\n"}
        volume(folder / role / "etc/kvproto", folder / "made" / role, lists)
    pods, said = {role: start(role, folder) for role in PROBES}, dict[str, Any]()
    until(lambda: [ask(role, "/ready")[0] for role in PROBES] == [200, 200])
    said["ready"] = ask("decode", "/ready")[1]["ranks"][0]["sources"]
    for role, pod in pods.items():
        (engine,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
        os.kill(int(engine), signal.SIGTERM)
        said[f"status of {role}"] = pod.wait(120)
        if role == "prefill":
            until(lambda: ask("decode", "/ready")[0] == 503)
            said["without"], said["live"] = ask("decode", "/ready")[1]["ranks"][0]["why"], ask("decode", "/live")[0]
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

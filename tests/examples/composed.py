"""`unshare --mount --net python composed.py FOLDER`: the services of deploy/compose.yaml as processes, each with an address,
PID and IPC namespaces of its own; prints what the router and the probes say as JSON."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from kvproto.cli.main import main as command
from tests.examples.pods import mount, until

COMPOSE = Path(__file__).parents[2] / "deploy/compose.yaml"
SERVICES = yaml.safe_load(COMPOSE.read_text())["services"]
HOSTS = {name: f"127.0.0.{n}" for n, name in enumerate(SERVICES, 10)}
ETCD = shutil.which("etcd") or str(Path(sys.prefix, "debian/usr/bin/etcd"))


def start(name: str, folder: Path) -> "subprocess.Popen[str]":
    """A service with the options that the file gives it; its volumes are in `folder`."""
    first, *given = (each.replace("0.0.0.0", HOSTS[name]) for each in SERVICES[name]["command"])
    role = first.removeprefix("kvproto-")
    if first == "etcd":
        return subprocess.Popen([ETCD, *given, f"--data-dir={folder}/etcd"], stderr=subprocess.DEVNULL, text=True)
    for place, mounted in (("keys" , "/etc/kvproto"), ("sources.keys", "/etc/sources.keys"), ("run", "/run/kv")):  # fmt: skip
        at = folder / name.partition("-")[0] if place == "keys" else folder / place
        given = [each.replace(f"={mounted}", f"={at}") for each in given]
    program = f"import sys; from kvproto_reference.commands import {role}; sys.exit({role}())"
    apart = ["unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.Popen([*apart, sys.executable, "-c", program, *given], stderr=subprocess.PIPE, text=True)


def ask(url: str, body: Any = None) -> tuple[int, str]:
    """The status and the text of an answer; 0 before anybody answers."""
    try:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def main(folder: Path) -> None:
    """Start all, ask for a completion, look at what Prometheus would scrape, and end all by SIGTERM."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    (folder / "hosts").write_text(
        "".join(f"{address} {name}\n" for name, address in HOSTS.items()) + "127.0.0.1 localhost\n"
    )
    mount(folder, "hosts")
    for role in ("prefill", "decode"):
        if command(["keygen", str(folder / role)]):
            raise RuntimeError("keygen")
    shutil.copy(folder / "prefill/public.key", folder / "sources.keys")
    client = (folder / "decode/public.key").read_text().strip()
    (folder / "prefill/allow.toml").write_text(f'[[client]]\nkey = "{client}"\nengine = "decode"\n')
    (folder / "run").mkdir(mode=0o700)
    running, said = {name: start(name, folder) for name in SERVICES if name != "prometheus"}, dict[str, Any]()
    router = f"http://{HOSTS['router']}:8000"
    until(
        lambda: all(
            not why for why in json.loads(ask(f"{router}/ready")[1] or '{"engines": {"": "x"}}')["engines"].values()
        )
    )
    until(lambda: all(ask(f"http://{HOSTS[f'decode-{n}']}:9400/ready")[1].count("/") >= 2 for n in range(2)))
    status, answer = ask(f"{router}/v1/completions", {"prompt": "Alice", "max_tokens": 4})
    said["answer"] = [status, json.loads(answer)["usage"]["completion_tokens"]]
    said["sources"] = sorted(json.loads(ask(f"http://{HOSTS['decode-0']}:9400/ready")[1])["ranks"][0]["sources"])
    targets = yaml.safe_load(yaml.safe_load(COMPOSE.read_text())["configs"]["prometheus"]["content"])
    scraped = targets["scrape_configs"][0]["static_configs"][0]["targets"]
    said["scraped"] = [ask(f"http://{each}/metrics")[1].count("# TYPE kvproto_peers") for each in scraped]
    for name in [each for each in running if each != "etcd"]:
        (engine,) = Path(f"/proc/{running[name].pid}/task/{running[name].pid}/children").read_text().split()
        os.kill(int(engine), signal.SIGTERM)
    said["ended"] = [running[name].wait(60) for name in running if name != "etcd"]
    running["etcd"].kill()
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

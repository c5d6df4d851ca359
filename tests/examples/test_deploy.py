"""deploy/kubernetes.yaml beside the software that it starts: options, addresses, probes, times."""

import http.client
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvproto import Source
from kvproto.probes import Probes
from kvproto_reference.demo.options import EngineOptions, parse, rank_address
from tests.door.doors import address_in, filled

yaml = pytest.importorskip("yaml")
MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes.yaml"
FOUND: dict[tuple[str, str], Any] = {
    (each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(MANIFEST.read_text())
}
KEY = "AJGuL^3aRJm.=Z*4>K3AD+Rn?gl([[JK?G?&u/0F"


def pod(role: str) -> Any:
    return FOUND["StatefulSet", role]["spec"]["template"]["spec"]


def options(role: str, folder: Path) -> EngineOptions:
    """The options of an engine, with its volumes in a folder."""
    for volume in ("run/kv", "etc/kvproto"):
        (folder / volume).mkdir(parents=True)
    (folder / "etc/kvproto/sources.keys").write_text(f"{KEY}\n")
    (container,) = pod(role)["containers"]
    assert container["command"] == [f"kvproto-{role}"]
    (ordinal,) = container["env"]
    given = [argument.replace("=/", f"={folder}/") for argument in container["args"]]
    assert ordinal["name"] == "ORDINAL"
    return parse(role, [argument.replace("$(ORDINAL)", "1") for argument in given])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_accepts_its_options_and_ends_within_its_grace_period(role: str, tmp_path: Path) -> None:
    made, (container,) = options(role, tmp_path), pod(role)["containers"]
    assert made.drain_for + 10 <= pod(role)["terminationGracePeriodSeconds"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert made.probes == f"0.0.0.0:{ports['probes']}"
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted.keys() == {each["name"] for each in pod(role)["volumes"]}


def test_prefill_is_reached_by_the_name_of_its_pod(tmp_path: Path) -> None:
    made, service = options("prefill", tmp_path), FOUND["Service", "prefill"]["spec"]
    stateful = FOUND["StatefulSet", "prefill"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"] == stateful["template"]["metadata"]["labels"] == stateful["selector"]["matchLabels"]
    (port,) = {each["port"] for each in service["ports"]}
    assert made.address == f"tcp://0.0.0.0:{port}"
    assert made.advertise is not None
    assert rank_address(made.advertise, made.replica, 0) == f"tcp://prefill-1.{stateful['serviceName']}:{port}"
    found = options("decode", tmp_path / "decode").found
    assert found is not None
    (place,) = [each for each in pod("decode")["containers"][0]["args"] if each.startswith("--sources=")]
    assert place == f"--sources=dns:prefill=prefill-{{0-7}}.{stateful['serviceName']}:{port}"
    assert stateful["replicas"] <= 8
    policy = FOUND["NetworkPolicy", "prefill"]["spec"]
    assert policy["podSelector"]["matchLabels"] == service["selector"]
    ((rule,),) = [policy["ingress"]]
    assert rule["ports"] == [{"port": port}]
    decode = FOUND["StatefulSet", "decode"]["spec"]["template"]["metadata"]["labels"]
    assert rule["from"] == [{"podSelector": {"matchLabels": decode}}]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_probes_ask_for_what_is_answered(role: str, tmp_path: Path) -> None:
    (container,) = pod(role)["containers"]
    asked = {container[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe", "startupProbe")}
    with Source("prefill", filled(), address_in(tmp_path)) as source, Probes("127.0.0.1:0", source) as probes:
        for path in asked:
            connection = http.client.HTTPConnection(probes.address, timeout=30)
            connection.request("GET", path)
            assert connection.getresponse().status == 200
            connection.close()
    assert asked == {"/ready", "/live"}


def test_two_pods_find_each_other_and_drain(tmp_path: Path) -> None:
    """By the manifest's own options, in namespaces that stand for pods."""
    apart = ["unshare", "--mount", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "ip", "link"], capture_output=True).returncode:
        pytest.skip("no namespaces may be made here")
    program = Path(__file__).with_name("pods.py")
    ran = subprocess.run([*apart, sys.executable, program, tmp_path], capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "ready": {"prefill/0": ""}, "status of prefill": 0, "without": "prefill/0: stopped", "live": 200,
        "status of decode": 0,
    }  # fmt: skip

"""Files of deploy/ beside the software that they start: options, addresses, probes, times."""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvproto import Source
from kvproto.probes import Probes
from kvproto_reference.demo.options import EngineOptions, parse, rank_address
from kvproto_reference.router.server import router_parser
from tests.door.doors import address_in, filled

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFEST, UNITS = DEPLOY / "kubernetes.yaml", DEPLOY / "systemd"
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


def in_namespaces(program: str, folder: Path) -> Any:
    """What a program says last, as JSON, in mount and network namespaces of its own."""
    apart = ["unshare", "--mount", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "ip", "link"], capture_output=True).returncode:
        pytest.skip("no namespaces may be made here")
    file = Path(__file__).with_name(program)
    ran = subprocess.run([*apart, sys.executable, file, folder], capture_output=True, text=True, timeout=400)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_two_pods_find_each_other_and_drain(tmp_path: Path) -> None:
    """By the manifest's own options, in namespaces that stand for pods."""
    assert in_namespaces("pods.py", tmp_path) == {
        "ready": {"prefill/0": ""}, "status of prefill": 0, "without": "prefill/0: stopped", "live": 200,
        "status of decode": 0,
    }  # fmt: skip


@pytest.mark.timeout(400)
def test_the_services_of_compose_find_each_other_and_serve(tmp_path: Path) -> None:
    """By the file's own options, in namespaces that stand for containers, with a real etcd and keys."""
    assert in_namespaces("composed.py", tmp_path) == {
        "answer": [200, 4], "sources": ["prefill/0", "prefill/1"], "scraped": [1, 1, 1, 1], "ended": [0, 0, 0, 0, 0],
    }  # fmt: skip


def test_services_of_compose_have_time_to_drain_and_the_places_that_they_name() -> None:
    made = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in made["services"].items():
        for argument in service.get("command", ()):
            if argument.startswith("--drain-for="):
                seconds = int(service["stop_grace_period"].removesuffix("s"))
                assert int(argument.partition("=")[2]) + 10 <= seconds, name
            if "=/" in argument:
                place = argument.partition("=")[2]
                assert any(place == volume.split(":")[1] for volume in service["volumes"]), argument
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in made["volumes"] or source == "./alerts.yaml" or source.startswith("./keys/")
    targets = yaml.safe_load(made["configs"]["prometheus"]["content"])["scrape_configs"][0]["static_configs"][0][
        "targets"
    ]
    probed = {name for name, each in made["services"].items() if any("--probes" in a for a in each.get("command", ()))}
    assert set(targets) == {f"{name}:9400" for name in probed}


def said_by(program: str, *given: object) -> str:
    """The complaints of a program about a file; empty if it has none."""
    found = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{program} is not here: make deploy-test installs it")
    ran = subprocess.run([found, *map(str, given)], capture_output=True, text=True, timeout=100)
    return ran.stderr + ran.stdout * bool(ran.returncode)


def test_compose_itself_reads_its_file(tmp_path: Path) -> None:
    text, wrong = (DEPLOY / "compose.yaml").read_text(), tmp_path / "compose.yaml"
    wrong.write_text(text.replace("stop_grace_period", "stop_after"))
    assert said_by("docker-compose", "-f", DEPLOY / "compose.yaml", "config", "--quiet") == ""
    assert "stop_after" in said_by("docker-compose", "-f", wrong, "config", "--quiet")


def test_manifests_are_as_the_api_of_kubernetes_says(tmp_path: Path) -> None:
    wrong = tmp_path / "kubernetes.yaml"
    wrong.write_text(MANIFEST.read_text().replace("terminationGracePeriodSeconds", "terminationSeconds"))
    said = said_by("kubernetes-validate", "--strict", MANIFEST)
    assert all(" passed for resource " in line for line in said.splitlines()), said
    assert "terminationSeconds" in said_by("kubernetes-validate", "--strict", wrong)


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.iterdir()))
def test_a_unit_is_systemds_own_and_starts_what_there_is(unit: str, tmp_path: Path) -> None:
    text = (UNITS / unit).read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *given = start.split()
    (tmp_path / "sources.keys").write_text(f"{KEY}\n")
    filled_in = {"%t/kvproto": str(tmp_path / "run"), "%i": "1", "%H": "here", "/etc/kvproto/": f"{tmp_path}/"}
    for short, long in filled_in.items():
        given = [each.replace(short, long) for each in given]
    role = Path(program).name.removeprefix("kvproto-")
    if role == "router":
        assert router_parser().parse_args(given).prefill == 1
    else:
        made = parse(role, given)
        assert made.replica == 1
        (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
        assert made.drain_for + 10 <= int(seconds)
    (tmp_path / unit).write_text(text.replace(program, "/bin/true"))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    ran = subprocess.run(["systemd-analyze", "verify", tmp_path / unit], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")

"""deploy/alerts.yaml and deploy/dashboard.json beside the registry of metrics, by promtool."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvproto.observability.names import BASE, BUCKETS, METRICS

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROMTOOL = shutil.which("promtool") or str(Path(sys.prefix, "debian/usr/bin/promtool"))
VALUES = tomllib.loads((ROOT / "spec/v1/registry/metrics.toml").read_text())["metric_label"]
"""The values that labels may have."""
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "dashboard.json").read_text())
RULES = [rule for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
_MATCHER = re.compile(r'(\w+)(=~|=|!=)"([^"]*)"')
_SERIES = re.compile(r"\b(kvproto_\w+)(\{[^}]*\})?")


def expressions() -> list[tuple[str, str]]:
    panels = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*panels, *((rule["alert"], rule["expr"]) for rule in RULES)]


def promtool(*arguments: object) -> str:
    ran = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_rules_are_prometheus_own_and_fire_on_what_they_are_for() -> None:
    assert f"SUCCESS: {len(RULES)} rules found" in promtool("check", "rules", DEPLOY / "alerts.yaml")
    promtool("test", "rules", DEPLOY / "alerts_test.yaml")


def test_each_alert_is_tested() -> None:
    tested = yaml.safe_load((DEPLOY / "alerts_test.yaml").read_text())["tests"]
    fires = {case["alertname"] for each in tested for case in each["alert_rule_test"] if case["exp_alerts"]}
    assert fires == {rule["alert"] for rule in RULES}


def test_expressions_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{n}", "expr": expr.replace("$engine", ".*")} for n, (_, expr) in enumerate(expressions())
    ]
    (tmp_path / "panels.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "panels.yaml")


@pytest.mark.parametrize(("title", "expr"), expressions())
def test_an_expression_names_metrics_labels_and_values_of_the_registry(title: str, expr: str) -> None:
    series = _SERIES.findall(expr)
    assert series
    for name, matchers in series:
        kind = METRICS.get(name, METRICS.get(name.removesuffix("_bucket")))
        assert kind is not None, name
        assert name.endswith("_bucket") == (kind[0] == "histogram"), name
        assert ("rate(" in expr or "increase(" in expr) == (kind[0] != "gauge"), expr
        labels = {*BASE, *kind[1], "le"}
        for label, _, value in _MATCHER.findall(matchers):
            assert label in labels, f"{name} has no label {label}"
            assert value == "$engine" or label not in VALUES or value in VALUES[label], value
        for grouped in re.findall(r"by \(([^)]*)\)", expr):
            assert {each.strip() for each in grouped.split(",")} <= labels, grouped


def test_each_metric_has_a_panel() -> None:
    shown = {name.removesuffix("_bucket") for _, expr in expressions() for name, _ in _SERIES.findall(expr)}
    assert METRICS.keys() - shown <= {"kvproto_tier_held_pages"}


def test_legends_and_annotations_name_labels_that_are_left() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            by = {each.strip() for some in re.findall(r"by \(([^)]*)\)", target["expr"]) for each in some.split(",")}
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= (by or {*BASE}), target


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_bounds_of_times_are_those_of_buckets() -> None:
    """Between two buckets a quantile is a guess."""
    (slow,) = [rule["expr"] for rule in RULES if rule["alert"] == "KvprotoSlowFetches"]
    assert float(slow.rpartition(">")[2]) in BUCKETS

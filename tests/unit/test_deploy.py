"""What lies in deploy/ names what the router exposes; each check is shown to find a wrong name."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from millpond.config import load_settings
from millpond.router.attribution import attribute
from millpond.router.errors import Ended
from millpond.router.metrics import Metrics
from millpond.router.options import METRICS_PATH
from millpond.router.placement.estimates import Estimates
from millpond.router.records import Record
from millpond.router.replicas import Replicas
from millpond.service.protocol import Report
from tests.meta.checks import ROOT

# ---------------------------------------------------------------- what there is

Exposed = Mapping[str, Mapping[str, set[str]]]
"""Values seen by label by the name of a sample."""

ADDED_BY_PROMETHEUS: Final = {"instance", "job"}
WORDS: Final = {"sum", "by", "rate", "increase", "histogram_quantile", "label_values"}
"""Functions and keywords of PromQL and Grafana that the dashboard uses."""


def exposed() -> Exposed:
    """Return the metrics of a router that has seen one request of everything."""
    replicas = Replicas()
    replicas.add("b", "http://b:1")
    metrics = Metrics(replicas, Estimates())
    record = Record("r", "POST", "/v1/completions", "cost", is_own_id=True, arrived_ns=0)
    record.replica, record.holder, record.tried, record.status = "b", "a", ["a", "b"], 200
    record.is_stream, record.first_byte_ns, record.ended = True, 1, Ended.COMPLETE
    report = Report(
        request_id="cmpl-r-0",
        prompt_tokens=10,
        computed_tokens=1,
        local_tokens=2,
        loaded_tokens=7,
        writers={"a": 7},
    )
    record.attribution = attribute(record, [("b", report)])
    metrics.add(record)
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
            _ = found[sample.name]
    return found


# ---------------------------------------------------------------- the dashboard


def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "deploy/grafana/millpond.json").read_text(encoding="utf-8"))


def panels(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in cast("Sequence[dict[str, Any]]", document["panels"]):
        yield panel
        yield from panels(panel) if "panels" in panel else ()


def queries(document: Mapping[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """Yield each expression, with the labels that legends and transformations ask of it."""
    for panel in panels(document):
        asked = {
            str(transformation["options"][field])
            for transformation in panel.get("transformations", ())
            for field in ("rowField", "columnField")
        }
        for target in panel.get("targets", ()):
            yield target["expr"], asked | set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"], set()


def wrong_names(expression: str, asked: set[str], known: Exposed) -> list[str]:
    """Return names that are no metric, and labels and values that a metric does not have."""
    matched = re.findall(r'(\w+)\s*(?:=|!=|=~|!~)\s*"([^"]*)"', expression)
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    grouped += re.findall(r"label_values\([^,]*,([^)]*)\)", expression)
    labels = asked | {label.strip() for labels in grouped for label in labels.split(",")}
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", " ", expression)
    bare = re.sub(r"(label_values\([^,]*),[^)]*\)", r"\1)", bare)
    names = set(re.findall(r"[A-Za-z_:][\w:]*", bare)) - WORDS
    found = [f"no metric {name}" for name in sorted(names - known.keys())]
    if not names:
        found.append(f"no metric in {expression}")
    for name in sorted(names & known.keys()):
        there = known[name].keys() | ADDED_BY_PROMETHEUS
        found += [
            f"{name} has no label {label}"
            for label in sorted((labels | {label for label, _ in matched}) - there)
        ]
        found += [
            f"{name} has no {label} {value}"
            for label, value in matched
            if label in known[name] and value not in known[name][label]
        ]
    # What is grouped away is not there for a legend.
    if grouped and asked:
        kept = {label.strip() for label in ",".join(grouped).split(",")}
        found += [f"{label} is grouped away" for label in sorted(asked - kept)]
    return found


def test_the_dashboard_asks_for_what_the_router_exposes() -> None:
    known = exposed()
    asked = list(queries(dashboard()))
    assert len(asked) > 15
    assert [wrong for query in asked for wrong in wrong_names(*query, known)] == []


@pytest.mark.parametrize(
    ("expression", "asked", "wrong"),
    [
        ("rate(millpond_router_request_total[5m])", "", "no metric millpond_router_request_total"),
        ("sum(vllm:num_requests_running)", "", "no metric vllm:num_requests_running"),
        ("histogram_quantile(0.9, gone)", "", "no metric gone"),
        ("millpond_router_ttft_seconds", "", "no metric millpond_router_ttft_seconds"),
        (
            'sum by (policy) (rate(millpond_router_moved_requests_total{job="m"}[5m])) / gone',
            "policy",
            "no metric gone",
        ),
        (
            "sum by (le, replica) (rate(millpond_router_ttft_seconds_bucket[5m]))",
            "",
            "millpond_router_ttft_seconds_bucket has no label replica",
        ),
        (
            'millpond_router_replica_ready{name="a"}',
            "",
            "millpond_router_replica_ready has no label name",
        ),
        (
            'millpond_router_ended_total{ended!="completed"}',
            "",
            "millpond_router_ended_total has no ended completed",
        ),
        (
            "millpond_router_replica_ready",
            "name",
            "millpond_router_replica_ready has no label name",
        ),
        (
            "sum by (reader) (millpond_router_loaded_tokens_total)",
            "writer",
            "writer is grouped away",
        ),
        (
            "label_values(millpond_router_base_seconds, replica)",
            "",
            "millpond_router_base_seconds has no label replica",
        ),
    ],
)
def test_wrong_names_are_found(expression: str, asked: str, wrong: str) -> None:
    assert wrong_names(expression, set(asked.split()), exposed()) == [wrong]


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    document = dashboard()
    assert document["schemaVersion"] >= 36, "data sources are objects from there on"
    assert document.get("id") is None, "the number is given by the Grafana that imports it"
    assert document["uid"]
    assert document["title"]
    ids = [panel["id"] for panel in panels(document)]
    assert len(set(ids)) == len(ids)
    variables = {each["name"]: each for each in document["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == (
        "datasource",
        "prometheus",
    )
    for place in [*data_sources(document["panels"]), *data_sources(document["templating"])]:
        assert place == {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels(document):
        if panel["type"] == "row":
            continue
        for place in (panel, *panel["targets"]):
            assert "datasource" in place, panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) > 0, panel["title"]


def data_sources(place: object) -> Iterator[object]:
    if isinstance(place, dict):
        for key, value in cast("dict[str, object]", place).items():
            yield from [value] if key == "datasource" else data_sources(value)
    elif isinstance(place, list):
        for value in cast("list[object]", place):
            yield from data_sources(value)


def test_no_panel_lies_on_another() -> None:
    cells = [
        (x, y)
        for panel in panels(dashboard())
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24, "Grafana's grid has so many columns"


# ---------------------------------------------------------------- the scrape example


def test_prometheus_scrapes_where_the_router_is_by_default() -> None:
    document = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text(encoding="utf-8"))
    (job,) = document["scrape_configs"]
    (group,) = job["static_configs"]
    router = load_settings({}, config_file=None, flags={"router.replicas": "a=http://x"}).router()
    assert job["metrics_path"] == METRICS_PATH
    assert group["targets"] == [f"{router.host}:{router.port}"]

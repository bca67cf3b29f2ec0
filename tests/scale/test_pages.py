"""What several replicas say, told as one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ostinato.serve.merged import merged_health, merged_metrics, merged_slots


def page(value: float) -> str:
    registry = CollectorRegistry()
    Counter("asked", "By path.", ("path",), registry=registry).labels('a"{b} c').inc(value)
    Gauge("slots", "All.", registry=registry).set(value)
    return generate_latest(registry).decode()


def test_every_sample_keeps_its_value_and_gets_its_replica() -> None:
    families = list(text_string_to_metric_families(merged_metrics({"x": page(1), "y": page(2)}).decode()))
    assert len({family.name for family in families}) == len(families)
    found = {(s.name, s.labels["replica"]): s for family in families for s in family.samples}
    assert found["slots", "x"].value == 1
    assert found["asked_total", "y"].value == 2
    assert found["asked_total", "y"].labels["path"] == 'a"{b} c'


def test_health_is_ready_where_one_is_and_adds_up_the_seats() -> None:
    one = {"replica": "x", "pid": 1, "ready": True, "status": "ok", "slots": 4, "slots_busy": 1, "waiting": 0}
    other = {"replica": "y", "pid": 2, "ready": False, "status": "dead", "slots": 4, "slots_busy": 0, "waiting": 2}
    on_progress = merged_health([other, one], draining=False)
    assert on_progress["ready"]
    assert (on_progress["slots"], on_progress["slots_busy"], on_progress["waiting"]) == (8, 1, 2)
    assert [each["replica"] for each in on_progress["replicas"]] == ["y", "x"]
    assert "pid" not in on_progress
    assert not merged_health([one], draining=True)["ready"]
    assert not merged_health([other], draining=False)["ready"]
    assert not merged_health([], draining=False)["ready"]


def test_slots_are_told_with_their_replica() -> None:
    on_progress = merged_slots(
        [
            {"replica": "x", "slots": [{"slot": 0}], "waiting": 1, "gaps": None, "tokens": 3, "steps": 2},
            {"replica": "y", "slots": [{"slot": 0}], "waiting": 1, "gaps": {"n": 1}, "pages": {"all": 5}},
        ]
    )
    assert [slot["replica"] for slot in on_progress["slots"]] == ["x", "y"]
    assert (on_progress["waiting"], on_progress["tokens"], on_progress["gaps"], on_progress["pages"]["all"]) == (
        2,
        3,
        {"n": 1},
        5,
    )

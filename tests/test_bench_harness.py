"""The harness's arithmetic, order and JSON. Nothing here depends on how fast anything is."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.harness import (
    Reach,
    Result,
    Row,
    Sample,
    Settings,
    Sides,
    Worst,
    measure,
    percentile,
    run_rounds,
    spread,
    summarise,
    worst_of,
)
from bench.report import as_json, table, write_json


@pytest.fixture(autouse=True)
def no_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round collects garbage first, which takes half a minute in a process that has run thousands of tests."""
    monkeypatch.setattr("bench.harness.gc.collect", lambda: 0)


LOWER = Row("slow", "ms", "ms", "a time", Reach("ratio", "<=", 1.25))
HIGHER = Row("fast", "mib_per_s", "MiB/s", "a speed", Reach("ratio", ">=", 0.9))


def settings(tmp_path: Path, **changes: int) -> Settings:
    return Settings(tmp_path, **changes)


def result(row: Row, value: float, limit: float, limit_spread: float = 0.0) -> Result:
    return Result(row, value, limit, limit_spread, 12, 1, value / limit)


class Scripted:
    """An experiment whose samples are given; it records what was called."""

    name = "scripted"
    rows = (LOWER,)

    def __init__(self, ours: list[float], limits: list[list[float]]) -> None:
        self.calls: list[str] = []
        self.opened = 0
        self._ours = ours
        self._limits = limits

    @contextmanager
    def open(self, settings: Settings) -> Iterator[Sides]:
        ours, limits = iter(self._ours * 100), iter(self._limits[self.opened] * 100)
        self.opened += 1

        def sample(side: str, values: Iterator[float]) -> Sample:
            self.calls.append(side)
            return {"ms": next(values)}

        yield Sides(
            lambda: sample("A", ours),
            lambda: sample("B", limits),
            lambda: self.calls.append("check"),
            ("a note",),
        )


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([4, 1, 3, 2, 5], 0.5) == 3
    assert percentile([0, 10], 0.1) == pytest.approx(1)
    assert percentile([7], 0.9) == 7
    assert spread([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == pytest.approx((10 - 2) / 6)


def test_rounds_are_ours_limit_limit_ours() -> None:
    experiment = Scripted([1.0], [[1.0]])
    with experiment.open(Settings(Path())) as sides:
        pairs = run_rounds(sides, 2, lambda text: None)
    assert "".join(experiment.calls) == "ABcheck" + 2 * "ABBAcheck"
    assert [(len(ours), len(limits)) for ours, limits in pairs] == [(2, 2), (2, 2)]


def test_a_row_is_the_medians_of_all_samples_without_the_warm_up() -> None:
    pairs: list[tuple[list[Sample], list[Sample]]] = [
        ([{"ms": 2.0}, {"ms": 4.0}], [{"ms": 1.0}, {"ms": 1.0}]),
        ([{"ms": 3.0}, {"ms": 90.0}], [{"ms": 2.0}, {"ms": 4.0}]),
    ]
    found = summarise(LOWER, pairs, 1)
    assert (found.value, found.limit) == (3.5, 1.5)
    assert found.ratio == pytest.approx(3.5 / 1.5)
    assert found.ratio_by_round == pytest.approx((6 / 2 + 93 / 6) / 2)
    assert found.spread == pytest.approx((3.4 - 1.0) / 1.5)


@pytest.mark.parametrize(
    ("row", "value", "limit", "limit_spread", "verdict"),
    [
        (LOWER, 1.25, 1.0, 0.25, "ok"),
        (LOWER, 1.26, 1.0, 0.0, "short"),
        (HIGHER, 0.9, 1.0, 0.0, "ok"),
        (HIGHER, 0.89, 1.0, 0.0, "short"),
        (HIGHER, 0.5, 1.0, 0.26, "unmeasurable"),
        (HIGHER, 1.5, 1.0, 0.26, "unmeasurable"),
        (Row("x", "us", "us", "", Reach("value", "<=", 8)), 7.9, 0.1, 0.0, "ok"),
        (Row("x", "us", "us", "", Reach("value", "<=", 8)), 8.1, 8.1, 0.0, "short"),
        (Row("x", "ms", "ms", "", Reach("excess", "<=", 60)), 69.0, 10.0, 0.0, "ok"),
        (Row("x", "ms", "ms", "", Reach("excess", "<=", 60)), 71.0, 10.0, 0.0, "short"),
        (Row("x", "ms", "ms", "", Reach("excess", "<=", 60)), 9.0, 10.0, 0.0, "ok"),
        (Row("x", "ms", "ms", ""), 9.0, 10.0, 0.9, "shown"),
    ],
)
def test_verdicts(row: Row, value: float, limit: float, limit_spread: float, verdict: str) -> None:
    assert result(row, value, limit, limit_spread).verdict == verdict


def test_a_wavering_limit_is_measured_again_and_the_calmest_attempt_counts(tmp_path: Path) -> None:
    wild, calm = [1.0, 9.0], [2.0, 2.0]
    experiment = Scripted([2.0], [wild, calm, wild])
    (found,) = measure(experiment, settings(tmp_path), lambda text: None)
    assert experiment.opened == 2
    assert (found.limit, found.attempts, found.verdict) == (2.0, 2, "ok")
    assert found.notes == ("a note",)


def test_a_limit_that_never_calms_down_is_unmeasurable(tmp_path: Path) -> None:
    experiment = Scripted([2.0], [[1.0, 9.0], [4.0, 6.0], [1.0, 9.0]])
    (found,) = measure(experiment, settings(tmp_path, attempts=3), lambda text: None)
    assert experiment.opened == 3
    assert (found.limit, found.attempts, found.verdict) == (5.0, 3, "unmeasurable")


def test_a_check_that_fails_ends_the_measurement(tmp_path: Path) -> None:
    class Wrong(Scripted):
        @contextmanager
        def open(self, settings: Settings) -> Iterator[Sides]:
            def check() -> None:
                raise RuntimeError("the bytes differ")

            with super().open(settings) as sides:
                yield Sides(sides.ours, sides.limit, check)

    with pytest.raises(RuntimeError, match="the bytes differ"):
        measure(Wrong([1.0], [[1.0]]), settings(tmp_path), lambda text: None)


def test_the_worst_row_is_the_one_that_keeps_its_bound_least() -> None:
    tcp, unix = (
        Row("get_tcp", "us", "us", "", Reach("ratio", "<=", 1.25)),
        Row("get_unix", "us", "us", "", Reach("ratio", "<=", 1.25)),
    )
    worst = Worst("get", ("get_tcp", "get_unix"))
    found = worst_of(worst, [result(tcp, 12, 10), result(unix, 6.5, 5)])
    assert found is not None
    assert (found.row.name, found.value, found.limit, found.verdict) == ("get", 6.5, 5, "short")
    shaky = worst_of(worst, [result(tcp, 12, 10, 0.5), result(unix, 5, 5)])
    assert shaky is not None
    assert shaky.verdict == "unmeasurable"
    assert worst_of(worst, [result(tcp, 12, 10)]) is None


def test_json_has_the_agreed_fields_and_null_for_what_is_not_known(tmp_path: Path) -> None:
    results = [
        result(LOWER, 3.0, 2.0),
        result(HIGHER, 9.5, 10.0, 0.5),
        result(Row("x", "ms", "ms", ""), 1.0, 2.0),
    ]
    path = tmp_path / "sub" / "edges.json"
    write_json(path, results, {"gone": "no server"})
    rows = json.loads(path.read_text())
    assert list(rows) == ["slow", "fast", "x", "gone"]
    assert {name: rows[name]["ok"] for name in rows} == {"slow": False, "fast": None, "x": None, "gone": None}
    assert {key: rows["slow"][key] for key in ("value", "limit", "ratio", "unit", "better", "reach")} == {
        "value": 3.0,
        "limit": 2.0,
        "ratio": 1.5,
        "unit": "ms",
        "better": "lower",
        "reach": "ratio <= 1.25",
    }
    assert rows["fast"]["verdict"] == "unmeasurable"
    assert rows["fast"]["better"] == "higher"
    assert rows["gone"]["value"] is None
    assert rows["gone"]["missing"] == "no server"
    for row in rows.values():
        assert {"value", "limit", "ratio", "unit"} <= row.keys()


def test_json_holds_no_figures_that_json_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", [result(LOWER, math.inf, 1.0)], {})


def test_the_table_names_every_row_and_its_verdict() -> None:
    text = table([result(LOWER, 3.0, 2.0), result(HIGHER, 1234.0, 1000.0, 0.5)], {"gone": "no server"})
    slow, fast, gone = text.splitlines()[1:]
    assert "1.50" in slow
    assert slow.endswith("short")
    assert "1,234" in fast
    assert fast.endswith("unmeasurable")
    assert gone.split()[0] == "gone"
    assert gone.endswith("not measured: no server")
    assert as_json([], {}) == {}

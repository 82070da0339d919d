"""The page says what was measured, and what was not."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.records import Record, at_least, ratio_record, value_record
from benchmarks.report import page
from benchmarks.scenarios import SCENARIOS
from tests.benchmarks.results import SURROUNDINGS, result_of


def test_the_page_says_which_goals_are_reached() -> None:
    def rate(batch: int, ours: list[float]) -> list[Record]:
        case, figure, of = {"batch": batch}, "rate", [100.0] * 3
        goal = at_least(0.5)
        return [
            ratio_record(figure, "fairqueue", case, ours, "1/s", reference="limit", of=of, wanted=goal),
            ratio_record(figure, "blocks", case, [10.0] * 3, "1/s", reference="limit", of=of),
            value_record(figure, "limit", case, of, "1/s"),
        ]

    records = [*rate(1, [40.0, 60.0, 80.0]), *rate(10, [20.0, 30.0, 30.0])]
    text = page({"dequeueing": result_of(records, SURROUNDINGS)}, SCENARIOS, {})
    assert (
        "| [Dequeueing](#dequeueing) | rate: fairqueue / limit | ≥ 0.5 | 0.300 to 0.600 | tiny | **1 of 2** |" in text
    )
    # 40 and 80 are so far from 60, and 20 from 30; half of the cases have no spread.
    spread = "The pair farthest from the median: 17% off in a typical row, 33% off in the worst."
    assert f"**Rate**; over limit. {spread}" in text
    assert "| batch | fairqueue | limit, 1/s | blocks |\n" in text
    assert "| 1 | 0.600 | 100 | 0.100 |\n| 10 | **0.300** | 100 | 0.100 |\n" in text
    text = page({"dequeueing": result_of([r for r in records if r.system != "blocks"], SURROUNDINGS)}, SCENARIOS, {})
    assert "| batch | fairqueue | limit | fairqueue / limit |\n" in text
    assert "| 10 | 30 | 100 | **0.300** |\n" in text


def test_the_page_says_on_which_machine_each_scenario_was_measured() -> None:
    def on(processor: str) -> dict[str, Any]:
        return result_of([], SURROUNDINGS | {"processor": processor})

    text = page({"dequeueing": on("fast"), "growth": on("slow"), "peers": on("fast")}, SCENARIOS, {})
    assert "\ndequeueing, peers:\n\n|  |  |\n|---|---|\n| processor | fast |\n" in text
    assert "\ngrowth:\n\n|  |  |\n|---|---|\n| processor | slow |\n" in text
    assert [line for line in text.splitlines() if ", slow, load" in line and "growth.json" in line]


def test_goals_of_different_bounds_have_rows_of_their_own() -> None:
    def over(peer: str, batch: int, bound: float, ours: float) -> Record:
        case, goal = {"batch": batch}, at_least(bound)
        return ratio_record("rate", "fairqueue", case, [ours], "1/s", reference=peer, of=[1.0], wanted=goal)

    records = [over("a", 1, 3, 2.0), over("b", 1, 1, 2.0), over("a", 10, 3, 4.0), over("c", 10, 1, 5.0)]
    text = page({"peers": result_of(records, SURROUNDINGS)}, SCENARIOS, {})
    rows = [line.partition(" | rate: ")[2] for line in text.splitlines() if " | rate: " in line]
    assert rows == [
        "fairqueue / a | ≥ 3 | 2 to 4 | tiny | **1 of 2** |",
        "fairqueue / reference | ≥ 1 | 2 to 5 | tiny | 2 of 2 |",
    ]


@pytest.mark.parametrize("failed", [{}, {"failed": 0}, {"failed": 1}], ids=str)
def test_the_page_says_how_much_was_not_measured(failed: dict[str, int]) -> None:
    """Also where nothing is left that has a goal. Earlier results don't say, and had none."""
    records = [value_record("rate", "fairqueue", {}, [2.0], "1/s", wanted=at_least(1))]
    results = {"flood": result_of(records, SURROUNDINGS, **failed), "cost": result_of([], SURROUNDINGS, **failed)}
    text = page(results, SCENARIOS, {})
    assert ("| 1 of 1 |" in text) == (not failed.get("failed"))
    assert ("| **1 of 1, 1 not measured** |" in text) == bool(failed.get("failed"))
    assert ("| none | tiny | **1 not measured** |" in text) == bool(failed.get("failed"))
    assert ("or single systems in one, that failed" in text) == bool(failed.get("failed"))

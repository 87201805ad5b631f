"""The simulated day: placements, ends of pods, and the display of the figures."""

import sys
from dataclasses import fields
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from bench.day import DRAWN, OURS, STOCK, UNITS, main, picture, rows
from bench.day_figure import Pair, draw, shown
from bench.day_placements import KubeScheduler, WithIdlegpu
from bench.day_pods import CARDS, HOST, LARGEST, NODES, WHOLE, FleetPods, draw_fleet_pods
from bench.day_run import DIES_AFTER_STEPS, FleetDay
from bench.sharing_day import NO_POD

SVG = "{http://www.w3.org/2000/svg}"


def few(
    count: int = 4, *, gpus: int = 1, is_whole: bool = True, millicores: int = 8000
) -> FleetPods:
    """Return pods that arrive together, run for long, and have equal requests."""
    drawn = draw_fleet_pods(0, load=0.05)
    # The longest run times of the day: none of the pods ends within a test.
    order = np.argsort(-drawn.works, kind="stable")[:count]
    rest = ("series", "owner")
    values = {
        each.name: getattr(drawn, each.name)[order]
        for each in fields(drawn)
        if each.name not in rest
    }
    values |= {
        "arrives": np.zeros(count),
        "gpus": np.full(count, gpus),
        "is_whole": np.full(count, is_whole),
        "millicores": np.full(count, millicores),
        "host_bytes": np.full(count, 1 << 30),
    }
    return FleetPods(
        **values, series=drawn.series, owner=tuple(drawn.owner[at] for at in order.tolist())
    )


def quiet(pods: FleetPods) -> FleetDay:
    """Return a day without broken cards and without processes outside Kubernetes."""
    day = FleetDay(0, pods)
    day.broken[:] = False
    day.foreign.utilization[:] = day.foreign.memory[:] = 0.0
    return day


def test_equal_seeds_draw_equal_pods_that_fit_a_node() -> None:
    pods, again = draw_fleet_pods(3, load=0.1), draw_fleet_pods(3, load=0.1)

    assert all(np.array_equal(getattr(pods, f.name), getattr(again, f.name)) for f in fields(pods))
    assert (pods.millicores <= HOST.millicores).all()
    assert (pods.gpus[~pods.is_whole] == 1).all()
    assert set(pods.gpus.tolist()) <= {1, 2, 4, LARGEST}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_pod_fits_where_gpus_and_cpu_are_left(is_whole: bool) -> None:
    day = quiet(few(2, is_whole=is_whole, millicores=HOST.millicores // 2 + 1))
    of_kind = [node for node in range(NODES) if (node < WHOLE.nodes) == is_whole]

    assert day.nodes_for(0) == of_kind
    assert day.place(KubeScheduler(0), 0)
    (card,) = np.flatnonzero((day.slots == 0).any(axis=1)).tolist()
    assert day.nodes_for(1) == [node for node in of_kind if node != card // CARDS]


def test_an_arrival_without_a_whole_node_is_counted_once() -> None:
    day = quiet(few(WHOLE.nodes + 1, gpus=LARGEST))
    day.slots[: WHOLE.devices : CARDS, 0] = WHOLE.nodes  # one GPU of each node is held

    assert [day.place(KubeScheduler(0), 0) for _ in range(2)] == [False, False]
    assert day.counts.shut_out == 1
    day.note_waiting([0])
    assert day.counts.idle_hours == LARGEST / 240  # as many as it requests, for 15 s


def test_a_broken_card_ends_its_pod_after_half_a_minute() -> None:
    day, placement = quiet(few(1)), KubeScheduler(0)
    day.broken[:] = True
    day.place(placement, 0)
    failed = []
    for day.at in range(1, DIES_AFTER_STEPS + 1):
        failed.append(day.pass_step(placement))

    assert failed == [[], [0]]
    assert (day.counts.on_broken, day.counts.broken_ends) == (1, 1)
    assert (day.slots == NO_POD).all()
    assert day.millicores.sum() == day.progress[0] == 0


def test_a_gpu_is_at_rest_once_its_pod_has_ended() -> None:
    day, placement = quiet(few(1)), KubeScheduler(0)
    day.place(placement, 0)
    day.progress[0] = day.pods.alone[0] - 1.0

    assert day.pass_step(placement) == []
    assert (day.slots == NO_POD).all()
    assert day.utilization.sum() == day.memory_bytes.sum() == 0


@pytest.mark.parametrize("fault", ["broken", "foreign"])
def test_idlegpu_avoids_the_busy_node_that_kube_scheduler_prefers(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = quiet(few(5))
    placement = WithIdlegpu(0)
    bad = [*range(CARDS, WHOLE.devices)]  # all but those of the first node
    if fault == "broken":
        day.broken[:, bad] = True
    else:
        day.foreign.utilization[:, bad], day.foreign.memory[:, bad] = 0.9, 0.4
    day.place(KubeScheduler(0), 0)
    monkeypatch.setattr(placement, "start", lambda *_: None)  # placed above
    for day.at in range(12):
        day.pass_step(KubeScheduler(0))
        placement.step(day)

    assert placement.choose(day, 1, day.nodes_for(1)) == 0
    placement.close()


def days(stock: float, ours: float) -> dict[str, list[dict[str, float]]]:
    """Return two days of each placement, the second with twice the figures."""
    return {
        name: [dict.fromkeys(UNITS, value), dict.fromkeys(UNITS, 2 * value)]
        for name, value in ((STOCK, stock), (OURS, ours))
    }


def test_the_table_shows_means_and_spread_in_100_columns() -> None:
    table = rows(days(1000.0, 0.0))

    assert table[0] == {
        "figure": "1-GPU pods: mean wait, min",
        STOCK: "1,500 (1,000 to 2,000)",
        OURS: "0.00 (0.00 to 0.00)",
    }
    assert len(table) == len(UNITS)
    assert max(len(" | ".join(map(str, row.values()))) for row in table) <= 96


def test_the_picture_is_svg_with_a_pair_of_bars_for_each_figure() -> None:
    root = ET.fromstring(picture(days(3.0, 30.0)))  # noqa: S314 - our own text

    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert set(DRAWN) <= set(texts)
    bars = [each for each in root.iter(f"{SVG}rect") if each.get("height") == "16"]
    assert len(bars) == 2 * len(DRAWN)
    # The worse placement has the longer bar.
    assert float(bars[1].get("width", 0)) == pytest.approx(
        10 * float(bars[0].get("width", 0)), 0.01
    )


def test_a_figure_that_is_zero_everywhere_is_drawn() -> None:
    text = draw("title", "about", [Pair(label="a < b", unit="", stock=[0.0], ours=[0.0])])

    assert "a &lt; b" in text
    assert text.count(">0.00<") == 2


@pytest.mark.parametrize(("value", "text"), [(0.0, "0.00"), (12.34, "12.3"), (1234.5, "1,234")])
def test_figures_have_few_digits(value: float, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize("option", ["--seeds", "--processes"])
@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "", "9" * 5000])
def test_a_number_that_cannot_be_meant_is_refused(
    option: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.day", f"{option}={text}"])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert f"{option}: '{text[:40]}' must be a whole number from 1 on" in capsys.readouterr().err

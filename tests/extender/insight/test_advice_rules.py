"""Recommendations from measurements."""

import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from extender.core.devices.gpu_models import (
    _MIG_CARDS,
    _NAMES,
    SharingWay,
    is_vgpu,
    mig_layout,
    short_model,
)
from extender.core.quantity import GIB
from extender.fleet.pods import LEAST_SAMPLES, Use
from extender.insight.advice import _card_words, _memory_words, _tenth_words
from extender.insight.advice_rules import (
    _FAR_BYTES,
    _FAR_RATIO,
    FULL_RATIO,
    KEPT_BACK_BYTES,
    MOST_REPLICAS,
    Bound,
    Card,
    CardVerdict,
    MemoryVerdict,
    _compare,
    _quantiles,
    advise,
    fit,
    judge_memory,
    uses,
    uses_a_tenth,
)

ratios = st.floats(0.0, 1.0)
totals = st.floats(4.0, 200.0).map(lambda gib: gib * GIB)
pods = st.integers(1, 16)
H100 = "NVIDIA H100 80GB HBM3"


def use(activity: float | None = 0.5, gib: float = 10.0, samples: int = 60) -> Use:
    return Use(
        activity_ratio=activity,
        memory_bytes=gib * GIB,
        memory_most_bytes=gib * GIB,
        samples=samples,
        seconds=60.0 * samples,
    )


def card(
    used: Use, *, pods: int = 1, replicas: int = 1, model: str = H100, gib: float = 80
) -> Card:
    return Card(
        model=model,
        memory_bytes=gib * GIB,
        replicas=replicas,
        is_shared=replicas > 1,
        pods=pods,
        use=used,
    )


# --- number of replicas ---------------------------------------------------------------------------


@given(pods, ratios, ratios, totals)
def test_recommended_replicas_fit_by_activity_and_memory(
    count: int, activity: float, used: float, total: float
) -> None:
    fitting = fit(count, activity, used * total, total)

    assert 1 <= fitting.count <= MOST_REPLICAS
    if fitting.count > 1:
        assert fitting.count * activity / count <= FULL_RATIO * (1 + 1e-6)
        assert fitting.count * used * total / count <= (total - KEPT_BACK_BYTES) * (1 + 1e-6)


@given(pods, ratios, ratios, totals)
def test_one_more_would_not_fit_because_of_the_bound(
    count: int, activity: float, used: float, total: float
) -> None:
    fitting = fit(count, activity, used * total, total)
    more = fitting.count + 1

    if fitting.bound is Bound.ACTIVITY:
        assert more * activity / count > FULL_RATIO * (1 - 1e-6)
    elif fitting.bound is Bound.MEMORY:
        assert more * used * total / count > (total - KEPT_BACK_BYTES) * (1 - 1e-6)
    else:
        assert fitting.count == MOST_REPLICAS


@given(pods, ratios, ratios, ratios, totals)
def test_more_use_never_gives_room_for_more(
    count: int, activity: float, more: float, used: float, total: float
) -> None:
    assume(more >= activity)

    assert (
        fit(count, more, used * total, total).count
        <= fit(count, activity, used * total, total).count
    )
    assert (
        fit(count, activity, max(used, more) * total, total).count
        <= fit(count, activity, used * total, total).count
    )


@given(st.integers(2, 16), st.floats(FULL_RATIO + 0.01, 1.0))
def test_a_card_that_is_always_busy_is_never_given_more_or_as_many(
    count: int, activity: float
) -> None:
    assert fit(count, activity, 0.0, 80 * GIB).count < count


# --- measurements ---------------------------------------------------------------------------------


@given(st.lists(st.none() | ratios, min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_a_quantile_is_a_value_that_this_share_does_not_exceed(
    values: list[float | None], quantile: float
) -> None:
    known = sorted(value for value in values if value is not None)
    column = np.array([[math.nan if value is None else value] for value in values])

    (found,) = _quantiles(column, quantile).tolist()

    if not known:
        assert math.isnan(found)
        return
    assert found in known
    share = sum(value <= found for value in known) / len(known)
    assert share >= quantile - 1e-6
    below = [value for value in known if value < found]
    assert len(below) / len(known) < quantile + 1e-6


def test_samples_from_before_the_tenants_changed_say_nothing() -> None:
    times = np.arange(0.0, 600.0, 60.0)
    activity = np.full((10, 2), 0.1)
    activity[:5] = 0.9
    memory = np.full((10, 2), 5.0 * GIB)

    old, new = uses(times, activity, memory, np.array([-np.inf, 299.0]))

    assert (old.activity_ratio, old.samples, old.seconds) == (0.9, 10, 540.0)
    assert (new.activity_ratio, new.samples, new.seconds) == (0.1, 5, 240.0)
    assert new.memory_bytes == 5 * GIB


def test_unmeasured_values_are_unknown_and_not_zero() -> None:
    nothing = np.full((3, 1), np.nan)

    (unknown,) = uses(np.arange(3.0), nothing, nothing, np.array([-np.inf]))
    (never,) = uses(np.zeros(0), nothing[:0], nothing[:0], np.array([-np.inf]))

    assert unknown == never == Use()
    assert not unknown.is_enough


@given(ratios, st.integers(0, LEAST_SAMPLES - 1))
def test_too_few_samples_are_no_history(activity: float, samples: int) -> None:
    shared = card(use(activity, samples=samples), pods=2, replicas=4)

    advice = advise(shared)

    assert advice is not None
    assert (advice.verdict, advice.replicas, advice.bound) == (CardVerdict.NOT_MEASURED, 2, None)
    assert advise(card(use(activity, samples=samples))) is None
    assert not uses_a_tenth([use(0.0, samples=samples)])


# --- cards ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activity", "gib", "verdict", "replicas", "bound"),
    [
        pytest.param(0.9, 40.0, CardVerdict.KEEP, 4, Bound.ACTIVITY, id="just-right"),
        pytest.param(0.3, 20.0, CardVerdict.MORE, 12, Bound.ACTIVITY, id="little-activity"),
        pytest.param(0.3, 76.0, CardVerdict.KEEP, 4, Bound.MEMORY, id="memory-is-full"),
        pytest.param(1.0, 10.0, CardVerdict.FEWER, 3, Bound.ACTIVITY, id="always-busy"),
        pytest.param(0.01, 1.0, CardVerdict.MORE, 16, Bound.MOST, id="next-to-nothing"),
    ],
)
def test_replicas_are_as_many_as_fit(
    activity: float, gib: float, verdict: CardVerdict, replicas: int, bound: Bound
) -> None:
    advice = advise(card(use(activity, gib), pods=4, replicas=4))

    assert advice is not None
    assert (advice.verdict, advice.replicas, advice.bound) == (verdict, replicas, bound)
    assert advice.memory_bytes == pytest.approx(79 * GIB / replicas)


def test_a_shared_card_that_one_tenant_fills_should_not_be_shared() -> None:
    advice = advise(card(use(0.9), pods=1, replicas=4))

    assert advice is not None
    assert (advice.verdict, advice.replicas, advice.way) == (CardVerdict.DO_NOT_SHARE, 1, None)


@pytest.mark.parametrize(
    ("model", "total", "way", "layout"),
    [
        (H100, 79.6, SharingWay.MIG, "2x 3g.40gb"),
        ("NVIDIA-A100-SXM4-40GB", 39.5, SharingWay.MIG, "2x 3g.20gb"),
        ("NVIDIA A30", 23.5, SharingWay.MIG, "2x 2g.12gb"),
        ("NVIDIA H200", 140.0, SharingWay.MIG, "2x 3g.71gb"),
        ("Tesla T4", 14.8, SharingWay.MPS, ""),
        ("NVIDIA-L40S", 44.9, SharingWay.MPS, ""),
        ("Tesla P100-PCIE-16GB", 15.9, SharingWay.TIME_SLICING, ""),
        ("GeForce of another maker", 8.0, SharingWay.TIME_SLICING, ""),
        ("NVIDIA H100 of a size that is not listed", 50.0, SharingWay.MPS, ""),
    ],
)
def test_without_history_there_are_two_replicas_as_the_card_allows(
    model: str, total: float, way: SharingWay, layout: str
) -> None:
    advice = advise(card(Use(), pods=0, replicas=4, model=model, gib=total))

    assert advice is not None
    assert (advice.verdict, advice.replicas) == (CardVerdict.NOT_MEASURED, 2)
    assert (advice.way, advice.layout) == (way, layout)
    assert advice.memory_bytes == pytest.approx((total - 1) * GIB / 2)


@given(ratios, st.floats(0.0, 80.0))
def test_a_whole_card_should_be_shared_where_two_of_its_pods_would_fit(
    activity: float, gib: float
) -> None:
    advice = advise(card(use(activity, gib)))

    fits_twice = 2 * activity <= FULL_RATIO and 2 * gib <= 79.0
    if advice is None:
        assert not fits_twice or math.isclose(2 * activity, FULL_RATIO, rel_tol=1e-6)
    else:
        assert advice.verdict is CardVerdict.SHARE
        assert 2 * activity <= FULL_RATIO * (1 + 1e-6)
        assert 2 * gib <= 79.0 * (1 + 1e-6)


@given(st.sampled_from(_MIG_CARDS), pods, st.floats(0.1, 100.0))
def test_a_layout_has_room_for_each_pod_and_no_more_parts_than_pods(
    mig: object, count: int, gib: float
) -> None:
    assert isinstance(mig, type(_MIG_CARDS[0]))
    cut = mig_layout(f"NVIDIA {mig.name.upper()}", mig.gib * GIB, count, gib * GIB)

    if cut is not None:
        parts, profile = cut
        assert parts <= count
        assert mig.layouts[parts] == profile
        size = float(profile.split(".")[1].removesuffix("gb"))
        assert size >= gib
        assert parts * size <= mig.gib


@given(st.text(max_size=60))
def test_any_name_of_a_model_becomes_one_of_few(name: str) -> None:
    assert short_model(name) in _NAMES | {"any", "other"}


@pytest.mark.parametrize(
    ("model", "gib", "replicas", "way"),
    [
        ("NVIDIA GeForce GTX 1070", 7.9, 2, SharingWay.TIME_SLICING),
        ("NVIDIA GeForce GTX 1660 Ti", 5.8, 2, SharingWay.MPS),
        ("NVIDIA GeForce RTX 3060", 11.99, 4, SharingWay.MPS),
        ("NVIDIA-GeForce-RTX-3090", 23.99, 8, SharingWay.MPS),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.9, 4, SharingWay.MPS),
        ("NVIDIA GeForce RTX 4090", 23.98, 8, SharingWay.MPS),
        ("NVIDIA TITAN Xp", 11.9, 4, SharingWay.TIME_SLICING),
        ("NVIDIA TITAN RTX", 23.6, 8, SharingWay.MPS),
        ("Quadro RTX 8000", 47.5, 8, SharingWay.MPS),
        ("NVIDIA RTX A4500", 19.7, 4, SharingWay.MPS),
        ("NVIDIA RTX 6000 Ada Generation", 47.9, 8, SharingWay.MPS),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, 2, SharingWay.MIG),
        ("Tesla T4", 15.0, 2, SharingWay.MPS),
        ("NVIDIA GeForce MX150", 2.0, 2, SharingWay.TIME_SLICING),
        ("NVIDIA A40-48Q", 48.0, 2, SharingWay.TIME_SLICING),
        ("GRID A100-2-10C", 10.0, 2, SharingWay.TIME_SLICING),
        ("GRID A100-1-5CME", 5.0, 2, SharingWay.TIME_SLICING),
        ("GRID T4-2B4", 2.0, 2, SharingWay.TIME_SLICING),
        ("NVIDIA RTX A1000", 7.9, 2, SharingWay.MPS),
        ("Quadro GV100", 31.7, 8, SharingWay.MPS),
        ("NVIDIA RTX PRO 2000 Blackwell", 15.9, 4, SharingWay.MPS),
    ],
)
def test_an_unmeasured_card_is_shared_by_its_model_and_memory(
    model: str, gib: float, replicas: int, way: SharingWay
) -> None:
    measured = Card(
        model=model, memory_bytes=gib * GIB, replicas=4, is_shared=True, pods=0, use=Use()
    )
    advice = advise(measured)

    assert advice is not None
    assert (advice.replicas, advice.way) == (replicas, way)
    assert ("hypervisor" in _card_words(measured, advice)) == is_vgpu(model)


def test_an_unmeasured_whole_card_gets_no_advice() -> None:
    assert advise(card(Use(), pods=0)) is None


USED = "19 samples of 20"


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (
            card(use(0.2, 4.0), model="Tesla T4", gib=15),
            f"its pod uses 20% busy and 4.0 GiB of 15.0 GiB full, {USED}: 3 such pods would fit, "
            "memory allows no more, 1 GiB kept back; under MPS, which caps the memory of each",
        ),
        (
            card(use(0.9), replicas=4),
            f"1 of 4 replicas in use, which together use 90% busy and 10.0 GiB of 80.0 GiB full, "
            f"{USED}: not two of these fit, activity allows no more",
        ),
        (
            card(use(0.01, 1.0), pods=4, replicas=4),
            f"4 of 4 replicas in use, which together use 1% busy and 1.0 GiB of 80.0 GiB full, "
            f"{USED}: 16 fit, more are never recommended",
        ),
        (
            card(Use(), pods=0, replicas=4),
            "no samples of the pods' use; until there are, the default is 2 replicas of 39.5 GiB, "
            "1 GiB kept back, as MIG instances, 2x 3g.40gb",
        ),
        (
            card(Use(), pods=0, replicas=4, model="Tesla P100-PCIE-16GB", gib=16),
            "no samples of the pods' use; until there are, the default is 2 replicas of 7.5 GiB, "
            "1 GiB kept back, time-sliced: nothing there protects memory",
        ),
    ],
)
def test_advice_on_a_card_is_explained_by_its_figures(measured: Card, words: str) -> None:
    advice = advise(measured)

    assert advice is not None
    assert _card_words(measured, advice) == words


# --- pods -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "per_card", "words"),
    [
        (1, 9, f"its GPU is 5% busy and 8.0 GiB of 80.0 GiB full, {USED}: 9 pods that use so much "
         "would fit on one"),
        (2, 2, f"none of its 2 GPUs is more than 5% busy and 8.0 GiB of 80.0 GiB full, {USED}: "
         "2 pods that use so much would fit on one"),
        (1, 1, f"its GPU is 5% busy and 8.0 GiB of 80.0 GiB full, {USED}: but for its memory one "
         "GPU would do for more"),
    ],
)  # fmt: skip
def test_a_pod_that_barely_uses_its_gpus_is_explained(gpus: int, per_card: int, words: str) -> None:
    assert _tenth_words(gpus, use(0.05, 8.0), 80 * GIB, per_card) == words


@pytest.mark.parametrize(
    ("requested", "used", "words"),
    [
        (40, 8, "requests 40.0 GiB of each GPU and never used more than 8.0 GiB: 10.0 GiB would "
         "suffice, and leave room for others"),
        (10, 30, "requests 10.0 GiB of each GPU and used up to 30.0 GiB: with 36.0 GiB it is "
         "placed on a GPU with enough room"),
    ],
)  # fmt: skip
def test_a_wrong_memory_request_is_explained(requested: int, used: int, words: str) -> None:
    advice = judge_memory(requested * GIB, used * GIB, 80 * GIB)

    assert advice is not None
    assert _memory_words(requested * GIB, use(0.5, used), advice) == words


def test_twice_the_used_memory_and_two_gibs_more_are_too_much() -> None:
    advice = judge_memory(4 * GIB, 2 * GIB, 80 * GIB)

    assert advice is not None
    assert (advice.verdict, advice.suggested_bytes) == (MemoryVerdict.TOO_MUCH, 3 * GIB)


def test_pod_uses_a_tenth_only_if_no_gpu_is_busier() -> None:
    assert uses_a_tenth([use(0.1), use(0.0)])
    assert not uses_a_tenth([use(0.11), use(0.0)])
    assert not uses_a_tenth([use(None), use(0.0)])
    assert not uses_a_tenth([])


@given(st.floats(0.25, 80.0), st.floats(0.0, 80.0))
@example(2.5, 0.75)
def test_memory_request_is_judged_far_off_only_beyond_the_limits(
    requested: float, used: float
) -> None:
    advice = judge_memory(requested * GIB, used * GIB, 80 * GIB)

    if advice is None:
        return
    assert advice.suggested_bytes % GIB == 0
    assert used * GIB <= advice.suggested_bytes <= 80 * GIB
    if advice.verdict is MemoryVerdict.TOO_LITTLE:
        assert used > requested
        assert advice.suggested_bytes > requested * GIB
    else:
        assert requested >= used * _FAR_RATIO
        assert (requested - used) * GIB >= _FAR_BYTES * (1 - 1e-9)
        assert advice.suggested_bytes < requested * GIB


@pytest.mark.parametrize(
    ("requested", "used", "verdict", "suggested"),
    [
        (40.0, 8.0, MemoryVerdict.TOO_MUCH, 10),
        (10.0, 30.0, MemoryVerdict.TOO_LITTLE, 36),
        (70.0, 79.0, MemoryVerdict.TOO_LITTLE, 80),
        (3.0, 0.0, MemoryVerdict.TOO_MUCH, 1),
        (2.0, 0.0, MemoryVerdict.TOO_MUCH, 1),
    ],
)
def test_suggested_memory_is_a_fifth_above_the_use(
    requested: float, used: float, verdict: MemoryVerdict, suggested: int
) -> None:
    advice = judge_memory(requested * GIB, used * GIB, 80 * GIB)

    assert advice is not None
    assert (advice.verdict, advice.suggested_bytes) == (verdict, suggested * GIB)


@pytest.mark.parametrize(
    ("requested", "used"), [(1.9, 0.0), (3.9, 2.0), (11.0, 10.0), (10.0, 11.0)]
)
def test_a_memory_request_that_is_little_off_is_right(requested: float, used: float) -> None:
    assert judge_memory(requested * GIB, used * GIB, 80 * GIB) is None


@pytest.mark.parametrize(
    ("replicas", "fitting", "verdict"),
    [
        (2, 1, CardVerdict.DO_NOT_SHARE),
        (2, 2, CardVerdict.KEEP),
        (4, 2, CardVerdict.FEWER),
        (2, 4, CardVerdict.MORE),
    ],
)
def test_a_card_keeps_the_replicas_that_fit(
    replicas: int, fitting: int, verdict: CardVerdict
) -> None:
    assert _compare(replicas, fitting) is verdict

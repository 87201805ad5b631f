"""Devices of a node that pods hold through ResourceClaims."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from extender.core.nodes.inventory import ClaimedDevice
from tests.extender.core.holding import pod, row_of, young

BY_CLAIMS = MappingProxyType({"is_by_claims": True})
ONE, TWO = (ClaimedDevice(uuid=f"GPU-{number}", name=f"gpu-{number}") for number in (1, 2))
INSTANCE = ClaimedDevice(uuid="GPU-2", mig_profile="1g.10gb", name="gpu-2-mig")


def test_a_pod_that_holds_a_device_through_a_claim_is_its_tenant() -> None:
    claims = pod("claims", 0, has_claims=True)

    shown = row_of([("claims",), ()], claims, serving=BY_CLAIMS)
    hidden = row_of(2, claims, serving=BY_CLAIMS)

    assert (shown.used, shown.held, shown.is_agreed) == ((1, 0), 1, True)
    assert (hidden.used, hidden.held, hidden.taken, hidden.is_agreed) == ((0, 0), 1, 1, False)


@pytest.mark.parametrize(
    ("pods", "serving", "is_agreed", "counted"),
    [
        pytest.param({"has_claims": True}, {}, True, 0, id="the-plugin-offers-every-gpu"),
        pytest.param(
            {"has_claims": True}, {"is_by_claims": True}, False, 1, id="claims-serve-gpus"
        ),
        pytest.param({"has_claims": True}, {"count": 1}, False, 0, id="one-is-left-for-claims"),
        pytest.param(
            {"has_claims": True, "has_gpu_claims": True}, {}, False, 0, id="a-claim-of-a-gpu-class"
        ),
        pytest.param({}, {"is_by_claims": True}, True, 0, id="no-claim-at-all"),
    ],
)
def test_a_claim_is_distrusted_only_where_it_may_be_for_a_gpu(
    pods: dict[str, bool], serving: dict[str, Any], is_agreed: bool, counted: int
) -> None:
    row = row_of(2, pod("claims", 0, **pods), serving=serving)

    assert (row.is_agreed, row.held) == (is_agreed, counted)


@pytest.mark.parametrize(
    ("claimed", "is_agreed", "hidden"),
    [
        pytest.param((), True, 0, id="no-gpu"),
        pytest.param((INSTANCE,), True, 0, id="behind-another-resource"),
        pytest.param((ONE,), True, 0, id="shown"),
        pytest.param((ONE, TWO), False, 1, id="not-all-are-shown"),
        pytest.param((ONE, replace(TWO, uuid="")), False, 1, id="one-that-no-slice-names"),
    ],
)
def test_known_claims_need_no_guess(
    claimed: tuple[ClaimedDevice, ...], is_agreed: bool, hidden: int
) -> None:
    known = pod("known", 0, has_claims=True, has_gpu_claims=True, claimed=claimed)

    row = row_of([("known",) if ONE in claimed else (), ()], known, serving=BY_CLAIMS)

    assert (row.is_agreed, row.held, row.taken) == (is_agreed, (ONE in claimed) + hidden, hidden)


def test_pods_that_share_a_claim_hold_its_device_once() -> None:
    sharing = [pod(name, 0, has_claims=True, claimed=(ONE,)) for name in ("a", "b")]

    row = row_of([("a", "b"), ()], *sharing, serving=BY_CLAIMS)

    assert (row.used, row.held, row.is_agreed) == ((1, 0), 1, True)


def test_a_claimed_instance_counts_without_knowing_which_it_is() -> None:
    pods = [pod(name, 0, has_claims=True, claimed=(ONE,)) for name in ("a", "sharing-it")]
    other = pod("other", 0, has_claims=True, claimed=(TWO,))

    row = row_of([("other",), (), ()], *pods, other, serving=BY_CLAIMS)

    assert (row.used, row.held, row.taken, row.is_agreed) == ((1, 0, 0), 2, 1, False)


def test_a_claim_that_the_mapping_shows_on_a_device_holds_it_anywhere() -> None:
    row = row_of([("claims",), ()], pod("claims", 0, has_claims=True))

    assert (row.used, row.held, row.is_agreed) == ((1, 0), 1, True)


def test_a_claim_holds_a_shared_device_whole() -> None:
    claims = pod("claims", 0, has_claims=True)

    assert row_of([("claims",), ()], claims, replicas=4, serving=BY_CLAIMS).used == (4, 0)


def test_claim_does_not_cover_plugin_devices_of_its_pod() -> None:
    both = pod("both", 1, has_claims=True, claimed=(ONE,))

    row = row_of([("both",), (), ()], both, serving={"count": 2})
    late = row_of(
        [("late",), (), ()], young("late", 1, has_claims=True, claimed=(ONE,)), serving={"count": 2}
    )
    shown = row_of([("both",), ("both",), ()], both, serving={"count": 2})

    assert (row.used, row.held, row.taken, row.is_agreed) == ((1, 0, 0), 2, 1, False)
    assert (late.taken, late.is_agreed) == (1, True)
    assert (shown.used, shown.held, shown.taken, shown.is_agreed) == ((1, 1, 0), 2, 0, True)


def test_a_resource_that_claims_serve_is_counted_once() -> None:
    served = pod("served", 1, has_claims=True, claimed=(ONE,))

    row = row_of([("served",), ()], served, serving=BY_CLAIMS)

    assert (row.used, row.held, row.taken, row.is_agreed) == ((1, 0), 1, 0, True)

"""Devices that CUDA shows: its documented rules, which PyTorch follows, too."""

import pytest

from worker_device.visible import Card, Device, Instance, visible_devices

A, B, C = (
    "GPU-aaaaaaaa-0000-4000-8000-000000000001",
    "GPU-aaaabbbb-0000-4000-8000-000000000002",
    "GPU-cccccccc-0000-4000-8000-000000000003",
)
MIG_1, MIG_2 = (
    "MIG-11111111-0000-4000-8000-000000000001",
    "MIG-22222222-0000-4000-8000-000000000002",
)
CARDS = [Card(uuid=A, minor=5), Card(uuid=B, minor=6), Card(uuid=C, minor=7)]
PARTITIONED = [
    Card(
        uuid=A,
        minor=5,
        instances=(
            Instance(uuid=MIG_1, gpu_instance_id=7, compute_instance_id=0),
            Instance(uuid=MIG_2, gpu_instance_id=9, compute_instance_id=0),
        ),
    ),
    Card(uuid=B, minor=6, instances=()),
    Card(uuid=C, minor=7),
]


def shown(cards: list[Card], **environment: str) -> tuple[Device, ...]:
    return visible_devices(cards, environment).devices


@pytest.mark.parametrize(
    ("listed", "uuids"),
    [
        pytest.param("0,1,2", [A, B, C], id="all"),
        pytest.param("2,0", [C, A], id="in-the-order-listed"),
        pytest.param(" 1 , 2 ", [B, C], id="spaces"),
        pytest.param("", [], id="empty-hides-all"),
        pytest.param(" ", [], id="blank-hides-all"),
        pytest.param("-1", [], id="minus-one-hides-all"),
        pytest.param("0,-1,1", [A], id="ends-at-minus-one"),
        pytest.param("1,7,0", [B], id="ends-at-an-index-that-is-not-there"),
        pytest.param("2,3,0", [C], id="ends-at-the-number-of-cards"),
        pytest.param("0,,1", [A], id="ends-at-nothing"),
        pytest.param("NoDevFiles", [], id="no-number"),
        pytest.param("1gpu,2", [B, C], id="reads-as-far-as-there-are-digits"),
        pytest.param("+1", [B], id="sign"),
        pytest.param("0,1,0", [], id="twice-hides-all"),
        pytest.param(f"{C},{A}", [C, A], id="uuids"),
        pytest.param("GPU-cc", [C], id="shortened"),
        pytest.param("GPU-CC", [C], id="in-capitals"),
        pytest.param("GPU-aaaab", [B], id="shortened-as-far-as-it-is-one"),
        pytest.param("GPU-aaaa", [], id="shortened-too-far"),
        pytest.param(f"GPU-cc,GPU-aaaa,{B}", [C], id="ends-at-an-ambiguous-one"),
        pytest.param(f"{A},GPU-ffff,{B}", [A], id="ends-at-an-unknown-uuid"),
        pytest.param(f"{A},{A}", [], id="uuid-twice-hides-all"),
        pytest.param(f"{A},GPU-aaaaa", [], id="the-same-one-shortened-hides-all"),
        pytest.param(f"{A},1", [A], id="uuids-end-at-an-index"),
        pytest.param(f"1,{A}", [B], id="indices-end-at-a-uuid"),
        pytest.param(f"{MIG_1}", [], id="an-instance-that-is-not-there"),
    ],
)
def test_cuda_visible_devices_is_parsed_as_by_cuda(listed: str, uuids: list[str]) -> None:
    devices = shown(CARDS, CUDA_VISIBLE_DEVICES=listed)

    assert [device.id for device in devices] == uuids
    assert [device.index for device in devices] == list(range(len(uuids)))
    assert not any(device.needs_selector for device in devices)


def test_without_the_variable_all_cards_are_visible() -> None:
    assert [device.id for device in shown(CARDS)] == [A, B, C]
    assert [device.selector for device in shown(CARDS)] == [A, B, C]


@pytest.mark.parametrize(
    ("listed", "ids"),
    [
        pytest.param(None, [MIG_1, MIG_2, C], id="unset"),
        pytest.param("0", [MIG_1, MIG_2], id="a-card-means-its-instances"),
        pytest.param("1", [], id="a-card-without-any"),
        pytest.param(f"{MIG_2},{MIG_1}", [MIG_2, MIG_1], id="uuids"),
        pytest.param(f"MIG-{A}/9/0", [MIG_2], id="as-older-drivers-name-them"),
        pytest.param(f"MIG-{A.upper()}/9/0", [MIG_2], id="as-older-drivers-in-capitals"),
        pytest.param(f"MIG-{A}/8/0", [], id="an-instance-that-is-gone"),
        pytest.param(f"MIG-{A}/9/1", [], id="a-part-of-an-instance-that-is-gone"),
        pytest.param(f"MIG-{B}/9/0", [], id="an-instance-of-another-card"),
        pytest.param("MIG-2222", [MIG_2], id="shortened"),
        pytest.param(f"{MIG_1},{C}", [MIG_1], id="instances-end-at-a-card"),
    ],
)
def test_among_several_devices_a_mig_instance_needs_its_selector(
    listed: str | None, ids: list[str]
) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}

    devices = shown(PARTITIONED, **environment)

    assert [device.id for device in devices] == ids
    assert [device.selector for device in devices] == ids
    assert {device.needs_selector for device in devices} <= {len(ids) > 1}
    assert {device.index for device in devices} <= {0}


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        pytest.param("all", [A, B, C], id="all"),
        pytest.param("void", [A, B, C], id="void-says-nothing"),
        pytest.param("", [A, B, C], id="empty-says-nothing"),
        pytest.param(" None ", [], id="none"),
        pytest.param("VOID", [A, B, C], id="void-in-capitals"),
        pytest.param(f"{C},{A}", [A, C], id="a-privileged-container-sees-more-than-it-was-given"),
        pytest.param(f"{B}::3,{B}::5", [B], id="shares"),
        pytest.param("0,1", [A, B, C], id="indices-are-the-machines"),
        pytest.param("GPU-of-another-place", [A, B, C], id="not-of-this-place"),
    ],
)
def test_nvidia_visible_devices_limits_the_devices(given: str, ids: list[str]) -> None:
    assert [device.id for device in shown(CARDS, NVIDIA_VISIBLE_DEVICES=given)] == ids


def test_allocated_devices_keep_their_cuda_index() -> None:
    devices = shown(CARDS, NVIDIA_VISIBLE_DEVICES=C, CUDA_VISIBLE_DEVICES="1,2")

    assert [(device.id, device.index) for device in devices] == [(C, 1)]


def test_cards_without_a_uuid_are_identified_by_their_index() -> None:
    unnamed = [Card(uuid="", minor=0), Card(uuid="", minor=1)]

    devices = shown(unnamed, CUDA_VISIBLE_DEVICES="1")

    assert [(device.id, device.selector, device.index) for device in devices] == [("#1", "1", 0)]
    assert shown(unnamed, CUDA_VISIBLE_DEVICES="GPU-") == ()


@pytest.mark.parametrize(
    ("cards", "environment", "why"),
    [
        pytest.param([], {}, "no GPU found", id="none"),
        pytest.param(CARDS, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is ''", id="hid"),
        pytest.param(CARDS, {"NVIDIA_VISIBLE_DEVICES": "none"}, "is none", id="not-given"),
        pytest.param([Card(uuid=A, instances=())], {}, "no MIG instance", id="no-instance"),
    ],
)
def test_without_devices_the_reason_is_given(
    cards: list[Card], environment: dict[str, str], why: str
) -> None:
    seen = visible_devices(cards, environment)

    assert seen.devices == ()
    assert why in seen.reason

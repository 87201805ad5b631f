import orjson
from hypothesis import given
from hypothesis import strategies as st

from agent.report.contract import (
    VERSION,
    Device,
    Foreign,
    Place,
    Problem,
    Process,
    Report,
    Tenant,
    Verdict,
    encode,
)
from testkit.agent.json_report import decode_report


def full_report() -> Report:
    device = Device(
        uuid="GPU-1",
        gpu_instance_id="7",
        mig_uuids=("MIG-1", "MIG-2"),
        mig_profile="1g.10gb",
        index=3,
        model="NVIDIA H100 80GB HBM3",
        pci_bus_id="00000000:1A:00.0",
        numa_node=0,
        nvlink_peers=("switch",),
        activity_source="gpm",
        age_seconds=0.0,
        xid_age_seconds=12.5,
        allocated_to=(Tenant(namespace="ml", pod="train-0", container="main", replicas=("2",)),),
        used_by=(Process(pid=403, name="python", memory_bytes=1 << 30, place=Place.POD, uid="u"),),
        foreign=Foreign(memory_bytes=5, utilization_ratio=0.5, pids=(7,)),
        verdict=Verdict(is_idle=False, reason="busy", action="exclude", cause="XID 79"),
        problem=Problem(code="Hung", text="it hangs"),
    )
    return Report(
        node="gpu-7",
        agent_version="1.0",
        started_at=1000.0,
        sequence=17,
        at=2000.0,
        driver_version="580.95.05",
        devices=(device, Device(uuid="GPU-2", allocated_to=(), used_by=None)),
        signals={"power_watts": (80.5, None), "xid": (79.0, None)},
        problem=Problem(code="Hung", text="not everything is seen"),
    )


def test_a_written_report_can_be_read() -> None:
    report = full_report()

    assert decode_report(encode(report)) == report


ratios = st.none() | st.floats(0, 1)
devices = st.builds(
    Device,
    uuid=st.text(min_size=1, max_size=5),
    index=st.none() | st.integers(0, 15),
    age_seconds=st.none() | st.floats(0, 100),
    allocated_to=st.none()
    | st.lists(st.builds(Tenant, namespace=st.text(), pod=st.text()), max_size=2).map(tuple),
    used_by=st.none() | st.lists(st.builds(Process, pid=st.integers(1, 9)), max_size=2).map(tuple),
)


@given(found=st.lists(devices, max_size=4), data=st.data())
def test_any_report_round_trips(found: list[Device], data: st.DataObject) -> None:
    values = data.draw(st.lists(ratios, min_size=len(found), max_size=len(found)))
    report = Report(
        node="n", at=1.0, devices=tuple(found), signals={"sm_active_ratio": tuple(values)}
    )

    assert decode_report(encode(report)) == report


def test_unknown_and_empty_holders_differ() -> None:
    unknown, unheld = Device(uuid="a"), Device(uuid="a", allocated_to=(), used_by=())
    report = Report(node="n", at=1.0, devices=(unknown, unheld))

    first, second = decode_report(encode(report)).devices

    assert (first.allocated_to, first.used_by) == (None, None)
    assert (second.allocated_to, second.used_by) == ((), ())


def test_unknown_fields_of_a_newer_agent_are_ignored_at_every_level() -> None:
    content = orjson.loads(encode(full_report()))
    content["weather"] = {"in": "Berlin"}
    content["devices"][0]["color"] = "green"
    content["devices"][0]["used_by"][0]["nice"] = 19
    content["signals"]["noise_decibels"] = [40.0, None]

    report = decode_report(orjson.dumps(content))

    assert report.devices == full_report().devices
    assert report.signals["noise_decibels"] == (40.0, None)


def test_the_version_is_always_encoded() -> None:
    assert orjson.loads(encode(Report(node="n", at=1.0)))["version"] == VERSION


def test_sent_at_is_the_senders_time() -> None:
    assert decode_report(encode(full_report(), sent_at=2001.5)).sent_at == 2001.5


def test_missing_values_are_left_out_of_a_devices_signals() -> None:
    report = full_report()

    assert report.signals_of(0) == {"power_watts": 80.5, "xid": 79.0}
    assert report.signals_of(1) == {}


def test_a_report_of_eight_gpus_is_small() -> None:
    signals = {f"some_signal_of_a_device_{number}": (0.1234,) * 8 for number in range(25)}
    device = full_report().devices[0]
    report = Report(node="gpu-7", at=1.0, devices=(device,) * 8, signals=signals)

    assert len(encode(report)) < 8 * 1024

"""Facts from files, recognized by content."""

import base64
import json
from pathlib import Path

import pytest
import yaml

from extender.cli.doctor.fact_collector import FactCollector, add_files
from extender.cli.doctor.facts import Facts
from extender.cli.transports import ClientError, Failure
from testkit.certificates import issue
from tests.extender.cli.doctor.things import NOW, device, entry, node, pod

DCGM = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-0",Hostname="node-1"} 5\n'
OURS = (
    "# TYPE idlegpu_agents gauge\nidlegpu_agents 3\n"
    'idlegpu_certificate_end_timestamp_seconds{certificate="webhooks"} 1.8e9\n'
)


def read(folder: Path, **files: str) -> Facts:
    """Write files (`_` stands for the dot in a name) and read them."""
    paths = []
    for name, text in files.items():
        path = folder / name.replace("_", ".", 1)
        path.write_text(text)
        paths.append(str(path))
    pile = FactCollector()
    add_files(pile, paths)
    return pile.facts(NOW)


def listed(*items: object, kind: str = "List") -> str:
    return json.dumps({"kind": kind, "items": list(items)})


def test_objects_are_sorted_by_kind(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        all_json=listed(node(), pod()),
        more_yaml=yaml.safe_dump_all([node("node-2"), {"kind": "DaemonSet", "metadata": {}}]),
        raw_json=listed(pod("other"), kind="PodList"),
    )

    assert len(facts.nodes or ()) == 2
    assert len(facts.pods or ()) == 2
    assert len(facts.daemon_sets or ()) == 1
    assert facts.config_maps is None


def test_items_of_a_typed_list_need_no_kind(tmp_path: Path) -> None:
    bare = {key: value for key, value in pod().items() if key != "kind"}

    assert len(read(tmp_path, raw_json=listed(bare, kind="PodList")).pods or ()) == 1


def test_an_empty_list_is_known_by_its_name(tmp_path: Path) -> None:
    assert read(tmp_path, pods_json=listed()).pods == ()
    assert read(tmp_path, any_json=listed(kind="PodList")).pods == ()
    with pytest.raises(ClientError, match="is not recognized"):
        read(tmp_path, any_json=listed())


def test_configurations_are_known_by_themselves(tmp_path: Path) -> None:
    scheduler = {"kind": "KubeSchedulerConfiguration", "extenders": [entry()]}
    plugin = {"version": "v1", "sharing": {"timeSlicing": {}}}
    facts = read(
        tmp_path,
        scheduler_yaml=yaml.safe_dump(scheduler),
        sliced_yaml=yaml.safe_dump(plugin),
        settings_yaml=yaml.safe_dump({"listen": "0.0.0.0:8888", "prometheus": {"url": "x"}}),
    )

    assert [one.config for one in facts.schedulers or ()] == [scheduler]
    assert dict(facts.plugin_configs or {}) == {"sliced": plugin}
    assert (facts.settings or {})["listen"] == "0.0.0.0:8888"


def test_api_server_version_is_read_from_kubectl_version(tmp_path: Path) -> None:
    printed = {"clientVersion": {"gitVersion": "v1.37.2"}, "serverVersion": {"gitVersion": "v1.35"}}

    assert read(tmp_path, version_json=json.dumps(printed)).version == "v1.35"


def test_config_maps_are_looked_into(tmp_path: Path) -> None:
    data = {
        "kube-scheduler.yaml": yaml.safe_dump({"kind": "KubeSchedulerConfiguration"}),
        "sliced": yaml.safe_dump({"version": "v1", "sharing": {}}),
        "other": "}{ no YAML",
        "text": "just words",
    }
    item = {"kind": "ConfigMap", "metadata": {"name": "c", "namespace": "n"}, "data": data}

    facts = read(tmp_path, configmaps_json=listed(item))

    assert [one.source for one in facts.schedulers or ()] == ["ConfigMap n/c kube-scheduler.yaml"]
    assert list(facts.plugin_configs or {}) == ["sliced"]


def test_expositions_are_distinguished(tmp_path: Path) -> None:
    facts = read(tmp_path, dcgm_prom=DCGM, ours_prom=OURS)

    assert [one.name for one in facts.exporter or ()] == ["DCGM_FI_DEV_GPU_UTIL"]
    assert "idlegpu_agents" in {one.name for one in facts.metrics or ()}
    assert [one.ends_at for one in facts.certificates or ()] == [1.8e9]


def test_agent_metrics_are_not_taken_for_the_extenders(tmp_path: Path) -> None:
    assert read(tmp_path, agent_prom="idlegpu_agent_reads_gpus 1\n").metrics is None


def test_a_recorded_scrape_can_be_read(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "data" / "dcgm"
    for file in sorted(folder.glob("*.prom")):
        assert read(tmp_path, any_prom=file.read_text()).exporter, file


def test_answers_of_the_extender_are_known_by_their_keys(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        bypassed_json='{"unjudged": 0, "bound": [], "likely_causes": []}',
        gpus_json=json.dumps({"gpus": [device()]}),
        nodes_json='{"nodes": [], "sources": {"prometheus": {"unmatched_series": 0}}}',
        readyz_json='{"status": "degraded", "degraded": {"prometheus": "down"}}',
    )

    assert (facts.bypassed or {})["bound"] == []
    assert len(facts.devices or ()) == 1
    assert dict(facts.sources or {}) == {"prometheus": {"unmatched_series": 0}}
    assert dict(facts.degraded or {}) == {"prometheus": "down"}
    assert facts.nodes is None


def test_certificates_are_read_from_files_and_secrets(tmp_path: Path) -> None:
    issue(tmp_path)
    pem = (tmp_path / "extender" / "tls.crt").read_text()
    data = {"tls.crt": base64.b64encode(pem.encode()).decode(), "tls.key": "c2VjcmV0"}
    secret = {"kind": "Secret", "metadata": {"name": "s", "namespace": "n"}, "data": data}

    facts = read(tmp_path, own_crt=pem, secrets_json=listed(secret))

    reported = {one.source for one in facts.certificates or ()}
    assert reported == {str(tmp_path / "own.crt"), "Secret n/s tls.crt"}
    assert "c2VjcmV0" not in repr(facts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not recognized"),
        ("kind: Endpoints", "is not recognized"),
        ("listen: x", "is not recognized"),
        ("up 1\n", "is not recognized"),
        ("{", "is not recognized"),
        ("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----", "malformed certificate"),
    ],
)
def test_an_unrecognized_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ClientError, match=words) as raised:
        read(tmp_path, file_txt=text)

    assert raised.value.failure is Failure.BAD_REQUEST


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ClientError, match="cannot read /nowhere"):
        add_files(FactCollector(), ["/nowhere"])

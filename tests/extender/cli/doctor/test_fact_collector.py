"""Facts from files, recognized by content."""

import base64
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from extender.cli.client import Client
from extender.cli.cluster import Cluster
from extender.cli.doctor import fact_collector
from extender.cli.doctor.fact_collector import (
    FactCollector,
    add_files,
    gather_cluster,
    gather_extender,
)
from extender.cli.doctor.facts import Facts
from extender.cli.doctor.rights import _NEEDS, ACCOUNT
from extender.cli.transports import ClientError, Failure
from testkit.certificates import issue
from tests.extender.cli.doctor.described import service
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


USER = "system:serviceaccount:idlegpu:idlegpu-extender"
REVIEWS = "/apis/authorization.k8s.io/v1"
ACCESS = f"{REVIEWS}/subjectaccessreviews"
SELF = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


class Server:
    """Server with answers by path, which refuses all other paths.

    Attributes:
        requested: method and path of each request.
        bodies: bodies of requests by path.
    """

    def __init__(self, answers: Mapping[str, Any], refusal: Failure = Failure.REFUSED) -> None:
        self._answers = answers
        self._refusal = refusal
        self.requested: list[str] = []
        self.bodies: dict[str, list[Any]] = {}

    def request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> bytes:
        self.requested.append(f"{method} {path}")
        if body is not None:
            self.bodies.setdefault(path, []).append(json.loads(body))
        answer = self._answers.get(path)
        if answer is None:
            raise ClientError("that is forbidden", self._refusal)
        if callable(answer):
            answer = answer(dict(params or {}))
        return answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()

    @property
    def cluster(self) -> Callable[[], Cluster]:
        return lambda: Cluster(self)  # type: ignore[arg-type] # asks as a UrlWay does


def gathered(server: Server) -> Facts:
    pile = FactCollector()
    gather_cluster(pile, server.cluster, ACCOUNT)
    return pile.facts(NOW)


def asked_of(server: Server) -> Facts:
    pile = FactCollector()
    gather_extender(pile, lambda: Client(server), time.time())
    return pile.facts(NOW)


def items(*objects: object) -> dict[str, object]:
    return {"items": list(objects), "metadata": {}}


@pytest.mark.parametrize("is_same", [True, False])
def test_a_list_without_an_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, *, is_same: bool
) -> None:
    monkeypatch.setattr(fact_collector, "_MOST_PAGES", 7)

    def page(params: dict[str, str]) -> object:
        before = params.get("continue", "")
        return {"items": [], "metadata": {"continue": "x" if is_same else before + "x"}}

    server = Server({"/api/v1/nodes": page})

    facts = gathered(server)

    assert server.requested.count("GET /api/v1/nodes") == (2 if is_same else 7)
    assert "does not end" in facts.missing["nodes"]


def test_a_long_list_is_read_page_by_page() -> None:
    def page(params: dict[str, str]) -> object:
        if "continue" in params:
            return items(node("node-2"))
        return items(node("node-1")) | {"metadata": {"continue": "more"}}

    facts = gathered(Server({"/api/v1/nodes": page}))

    assert [one["metadata"]["name"] for one in facts.nodes or ()] == ["node-1", "node-2"]  # type: ignore[index] # a node


def test_pods_that_no_check_reads_are_left_out() -> None:
    kept = [pod("train", 1), pod("my-dcgm-exporter"), pod("karpenter-x"), pod("idlegpu-agent-x")]

    facts = gathered(Server({"/api/v1/pods": items(*kept, pod("web"), pod("database"))}))

    assert list(facts.pods or ()) == kept


def test_cluster_without_the_claims_api_has_no_claims() -> None:
    assert gathered(Server({}, Failure.NOT_FOUND)).claims == ()
    assert gathered(Server({})).claims is None


def test_refused_facts_are_missing_and_the_others_collected() -> None:
    facts = gathered(Server({"/api/v1/nodes": items()}))

    assert facts.nodes == ()
    for name in ("pods", "daemon_sets", "config_maps", "schedulers", "certificates", "rights"):
        assert getattr(facts, name) is None
        assert "that is forbidden" in facts.why_missing(name)
    assert facts.why_missing("exporter").endswith("no pod of dcgm-exporter runs")


def test_without_a_kubeconfig_all_of_the_cluster_is_missing() -> None:
    def none() -> Cluster:
        raise ClientError("no such file", Failure.BAD_REQUEST)

    pile = FactCollector()
    gather_cluster(pile, none, ACCOUNT)

    for name in ("nodes", "pods", "schedulers", "rights", "services", "version", "exporter"):
        assert pile.facts(NOW).why_missing(name).endswith("no such file")


def test_config_maps_are_looked_for_where_schedulers_run() -> None:
    config = yaml.safe_dump({"kind": "KubeSchedulerConfiguration", "extenders": [entry()]})
    found = {"metadata": {"name": "c", "namespace": "mine"}, "data": {"config": config}}
    server = Server(
        {
            "/api/v1/pods": items(pod("my-kube-scheduler-x", namespace="mine"), pod("other")),
            "/api/v1/namespaces/mine/configmaps": items(found),
            "/api/v1/namespaces/kube-system/configmaps": items(),
            "/api/v1/namespaces/idlegpu/configmaps": items(),
        }
    )

    facts = gathered(server)

    assert [one.source for one in facts.schedulers or ()] == ["ConfigMap mine/c config"]
    assert "GET /api/v1/namespaces/team/configmaps" not in server.requested


def test_the_service_and_the_version_are_read() -> None:
    answers = {
        "/api/v1/namespaces/idlegpu/services": items(service()),
        "/version": {"gitVersion": "v1.36.1+k3s1"},
    }

    facts = gathered(Server(answers))

    assert facts.services == (service(),)
    assert facts.version == "v1.36.1+k3s1"
    assert "that is forbidden" in gathered(Server({})).why_missing("version")


def test_doctor_reads_only_our_secrets() -> None:
    server = Server({"/api/v1/pods": items()}, Failure.NOT_FOUND)

    facts = gathered(server)

    secrets = [path.rpartition("/")[2] for path in server.requested if "/secrets" in path]
    assert secrets == ["idlegpu-extender-tls", "idlegpu-kube-scheduler-tls", "idlegpu-ca"]
    assert "no Secret idlegpu-extender-tls or" in facts.why_missing("certificates")


def test_exporters_are_queried_through_the_proxy() -> None:
    exporter = pod("dcgm-exporter-x", namespace="gpu")
    path = "/api/v1/namespaces/gpu/pods/dcgm-exporter-x:9400/proxy/metrics"
    known = {"/api/v1/pods": items(exporter)}

    facts = gathered(Server({**known, path: 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 5\n'}))

    assert len(facts.exporter or ()) == 1
    assert gathered(Server(known)).exporter is None
    assert gathered(Server({**known, path: "<html>"})).exporter is None


@pytest.mark.parametrize(("user", "is_self"), [(USER, True), ("admin", False)])
def test_rights_are_reviewed_for_their_account(user: str, *, is_self: bool) -> None:
    path = f"{REVIEWS}/selfsubjectaccessreviews" if is_self else ACCESS
    server = Server(
        {SELF: {"status": {"userInfo": {"username": user}}}, path: {"status": {"allowed": True}}}
    )

    rights = gathered(server).rights or ()

    assert len(rights) == sum(len(need.verbs) for need in _NEEDS if need.when({}))
    assert all(right.is_allowed for right in rights)
    spec = server.bodies[path][0]["spec"]
    assert spec["resourceAttributes"] == {"resource": "nodes", "verb": "list"}
    assert spec.get("user") == (None if is_self else USER)
    if not is_self:
        assert "system:serviceaccounts:idlegpu" in spec["groups"]


def test_a_right_that_is_not_there_is_reported() -> None:
    rights = gathered(Server({SELF: {}, ACCESS: {"status": {"allowed": False}}})).rights or ()

    assert rights
    assert not any(right.is_allowed for right in rights)


def test_an_extender_reports_all_that_it_knows() -> None:
    at = datetime.fromtimestamp(time.time() + 60, UTC).isoformat()
    facts = asked_of(
        Server(
            {
                "/readyz": {"status": "ready", "degraded": {}},
                "/v1/bypassed": {"bound": [], "likely_causes": []},
                "/v1/gpus": {"gpus": [device()]},
                "/v1/nodes": {
                    "nodes": [],
                    "sources": {"prometheus": {}},
                    "unreadable": {"pods": ["team/a", None]},
                },
                "/metrics": "idlegpu_agents 3\n",
                "/v1/holders": {"at": at},
            }
        )
    )

    for name in ("degraded", "bypassed", "devices", "sources", "metrics"):
        assert getattr(facts, name) is not None
    assert facts.unreadable == {"pods": ("team/a", "one that you may not read")}
    assert facts.extender_at is not None


def test_an_extender_that_wants_a_token_still_reports_its_health() -> None:
    facts = asked_of(Server({"/readyz": {"degraded": {}}, "/metrics": "idlegpu_agents 3\n"}))

    assert (facts.degraded, len(facts.metrics or ())) == ({}, 1)
    assert facts.bypassed is None
    assert "that is forbidden" in facts.why_missing("bypassed")
    assert facts.extender_at is None


def test_a_clock_that_is_ahead_is_known() -> None:
    before = time.time()
    at = datetime.fromtimestamp(before + 60, UTC).isoformat()
    pile = FactCollector()

    gather_extender(pile, lambda: Client(Server({"/v1/holders": {"at": at}})), before)

    ahead = (pile.extender_at or 0.0) - before
    assert 50 < ahead <= 60.001


def test_a_plugins_configuration_is_known_by_its_version_and_sections(tmp_path: Path) -> None:
    flags = {"version": "v1", "flags": {"migStrategy": "single"}}

    assert dict(read(tmp_path, plain_yaml=yaml.safe_dump(flags)).plugin_configs or {}) == {
        "plain": flags
    }
    for other in ({"version": "v1"}, {"version": "v2", "flags": {}}):
        with pytest.raises(ClientError, match="is not recognized"):
            read(tmp_path, other_yaml=yaml.safe_dump(other))


def test_a_secret_that_is_not_base64_has_no_certificate(tmp_path: Path) -> None:
    issue(tmp_path)
    pem = (tmp_path / "extender" / "tls.crt").read_bytes()
    data = {"tls.crt": "!" + base64.b64encode(pem).decode()}
    secret = {"kind": "Secret", "metadata": {"name": "s", "namespace": "n"}, "data": data}

    assert not read(tmp_path, secrets_json=listed(secret)).certificates


def test_metrics_that_cannot_be_read_are_missing() -> None:
    facts = asked_of(Server({"/readyz": {"degraded": {}}, "/metrics": "<html>"}))

    assert facts.metrics is None
    assert facts.missing["metrics"]


def test_an_api_server_that_is_gone_answers_no_question_about_rights() -> None:
    facts = gathered(Server({ACCESS: {"status": {"allowed": True}}}, Failure.UNREACHABLE))

    assert facts.rights is None
    assert "that is forbidden" in facts.why_missing("rights")
    refused = gathered(Server({ACCESS: {"status": {"allowed": True}}}))
    assert refused.rights  # without its own name

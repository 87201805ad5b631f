"""Collect facts from files, a cluster and an extender.

Unreadable facts of a cluster are recorded with the reason, and the collection continues.
"""

import base64
import binascii
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from cryptography import x509
from prometheus_client.parser import text_string_to_metric_families

from extender.cli.client import Client
from extender.cli.cluster import Cluster
from extender.cli.doctor.checks.neighbours import AUTOSCALERS
from extender.cli.doctor.checks.nodes import DRA_WORDS, MANAGER_WORDS, MPS_WORDS, PLUGIN_WORDS
from extender.cli.doctor.facts import (
    AGENT_WORDS,
    EXPORTER_WORDS,
    Certificate,
    Facts,
    Object,
    Right,
    Sample,
    Scheduler,
    is_called,
    is_running,
    key_of,
    name_of,
    parse_time,
    requested_gpus,
)
from extender.cli.doctor.rights import ACCOUNT, read_rights, review_rights
from extender.cli.transports import ClientError, Failure, cause_of
from extender.core.untyped import items_of, mapping_of, objects_of, text_of
from extender.runtime.decoding import MalformedError, decode_with
from extender.runtime.yaml_documents import yaml_documents

_KINDS: Final = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
_HOW: Final = (
    "pass the output of kubectl get clusterroles,clusterrolebindings,roles,rolebindings -A -o json"
)

_PEM: Final = "-----BEGIN CERTIFICATE-----"
_END_METRIC: Final = "idlegpu_certificate_end_timestamp_seconds"
_SCHEDULER_KIND: Final = "KubeSchedulerConfiguration"
_SETTINGS_KEYS: Final = frozenset(
    {"listen", "status_listen", "prometheus", "freshness", "tls", "agents", "peers", "wire"}
)
"""Sections that identify an extender settings file; two of them are enough."""
_PLURALS: Final = {
    "nodes": "Node",
    "pods": "Pod",
    "daemonsets": "DaemonSet",
    "resourceclaims": "ResourceClaim",
    "configmaps": "ConfigMap",
    "services": "Service",
    "secrets": "Secret",
    **{f"{kind.lower()}s": kind for kind in _KINDS},
}


class FactCollector:
    """Collects documents and builds `Facts` from them.

    Attributes:
        missing: reason why a fact is unknown, by the fact's name.
        extender_at: the extender's clock at the time of the facts, None if unknown.
        rights: rights of the extender's account according to the API server, None if unknown.
        account: the extender's service account, `namespace/name`.
    """

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        self.extender_at: float | None = None
        self.rights: tuple[Right, ...] | None = None
        self.account = ACCOUNT
        self._objects: dict[str, list[Object]] = {}
        self._schedulers: list[Scheduler] = []
        self._plugin_configs: dict[str, Object] = {}
        self._settings: Object | None = None
        self._version: str | None = None
        self._answers: dict[str, Object] = {}
        self._metrics: list[Sample] | None = None
        self._exporter: list[Sample] | None = None
        self._certificates: list[Certificate] = []

    def add_list(self, kind: str, items: Iterable[object]) -> None:
        """Add all objects of a kind; an empty list means that there are none."""
        objects = self._objects.setdefault(kind, [])
        for item in items:
            if not isinstance(item, dict):
                continue
            self._unpack(kind, item)
            if kind != "Secret":  # do not store private keys in memory
                objects.append(item)

    def add_certificates(self, found: Iterable[Certificate]) -> None:
        """Add parsed certificates to the facts."""
        self._certificates += found

    def add_samples(self, samples: Iterable[Sample]) -> bool:
        """Add the samples of an exposition; return whether they are metrics of DCGM or idlegpu."""
        every = list(samples)
        ours = [one for one in every if one.name.startswith("idlegpu_")]
        theirs = [one for one in every if one.name.lower().startswith("dcgm_")]
        # Metrics of a node agent are not the extender's.
        if any(not one.name.startswith("idlegpu_agent_") for one in ours):
            self._metrics = [*(self._metrics or ()), *ours]
        if theirs:
            self._exporter = [*(self._exporter or ()), *theirs]
        return bool(ours or theirs)

    def add_answer(self, name: str, answer: object) -> None:
        """Add an answer of the extender's API under its fact name, such as bypassed or devices."""
        self._answers[name] = mapping_of(answer)

    def add_version(self, version: Object) -> None:
        """Add the API server's version from its answer to /version."""
        self._version = text_of(version.get("gitVersion")) or None

    def add(self, source: str, document: object, *, stem: str = "") -> bool:
        """Add a document; return whether its kind was recognized.

        Args:
            source: file or object that contains the document, for messages.
            document: the decoded document.
            stem: the file's name up to the first dot.
        """
        if not isinstance(document, dict):
            return False
        kind = text_of(document.get("kind"))
        if kind == _SCHEDULER_KIND:
            self._schedulers.append(Scheduler(source=source, config=document))
            return True
        if kind.endswith("List"):
            return self._add_items(kind.removesuffix("List"), document, stem)
        if kind in _PLURALS.values():
            self.add_list(kind, [document])
            return True
        return not kind and self._add_unnamed(source, document, stem)

    def _add_items(self, kind: str, document: Object, stem: str) -> bool:
        """Add a list; take the kind of a kubectl List from its items or from the file name."""
        items = objects_of(document.get("items"))
        of_kind = kind or _PLURALS.get(stem.lower(), "")
        if of_kind in _PLURALS.values() and not items:
            self.add_list(of_kind, ())
            return True
        is_known = False
        for item in items:
            item_kind = text_of(item.get("kind")) or kind
            if item_kind in _PLURALS.values():
                self.add_list(item_kind, [item])
                is_known = True
        return is_known

    def _add_unnamed(self, source: str, document: Object, stem: str) -> bool:
        """Add a document without a kind: an answer of the extender, or a settings file."""
        if "likely_causes" in document:
            self.add_answer("bypassed", document)
        elif "gpus" in document:
            self.add_answer("devices", document)
        elif "sources" in document:
            self.add_answer("sources", document)
        elif "degraded" in document:
            self.add_answer("degraded", document)
        elif "serverVersion" in document:
            self.add_version(mapping_of(document["serverVersion"]))
        elif document.get("version") == "v1" and ("sharing" in document or "flags" in document):
            self._plugin_configs[stem or source] = document
        elif len(_SETTINGS_KEYS & document.keys()) > 1:
            self._settings = document
        else:
            return False
        return True

    def _unpack(self, kind: str, item: Object) -> None:
        """Add the certificates in a Secret, and the documents in a ConfigMap."""
        data = mapping_of(item.get("data"))
        if kind == "Secret":
            self._certificates += _read_secret(f"Secret {key_of(item)}", data)
        if kind != "ConfigMap":
            return
        for name, value in data.items():
            try:
                documents = decode_with(yaml_documents, text_of(value))
            except MalformedError:
                continue  # a ConfigMap may contain any text
            for document in documents:
                if isinstance(document, dict) and not text_of(document.get("kind")).endswith(
                    "List"
                ):
                    self.add(f"ConfigMap {key_of(item)} {name}", document, stem=name)

    def facts(self, at: float) -> Facts:
        """Return the collected facts.

        Args:
            at: time of the facts, seconds since the epoch.
        """
        answers = self._answers
        degraded = answers.get("degraded")
        devices = answers.get("devices")
        return Facts(
            at=at,
            extender_at=self.extender_at,
            nodes=self._kind("Node"),
            pods=self._kind("Pod"),
            daemon_sets=self._kind("DaemonSet"),
            claims=self._kind("ResourceClaim"),
            config_maps=self._kind("ConfigMap"),
            services=self._kind("Service"),
            version=self._version,
            schedulers=tuple(self._schedulers) or None,
            plugin_configs=self._plugin_configs or None,
            settings=self._settings,
            bypassed=answers.get("bypassed"),
            degraded=None if degraded is None else _texts(degraded.get("degraded")),
            devices=None if devices is None else tuple(objects_of(devices.get("gpus"))),
            sources=self._sources(),
            unreadable=self._unreadable(),
            metrics=_tuple(self._metrics),
            exporter=_tuple(self._exporter),
            certificates=(*self._certificates, *self._from_metrics()) or None,
            rights=self._rights(),
            missing={"rights": _HOW, **self.missing},
        )

    def _rights(self) -> tuple[Right, ...] | None:
        """Return the account's rights, according to the API server or else to the RBAC objects."""
        if self.rights is None and all(kind in self._objects for kind in _KINDS):
            return read_rights(self._objects, self.account, self._settings or {})
        return self.rights

    def _sources(self) -> Mapping[str, Object] | None:
        answer = self._answers.get("sources")
        if answer is None:
            return None
        sources = mapping_of(answer.get("sources"))
        return {name: mapping_of(state) for name, state in sources.items()}

    def _unreadable(self) -> Mapping[str, tuple[str, ...]]:
        unreadable = mapping_of(self._answers.get("sources", {}).get("unreadable"))
        return {
            resource: tuple(
                text_of(name) or "one that you may not read" for name in items_of(names)
            )
            for resource, names in unreadable.items()
        }

    def _kind(self, kind: str) -> tuple[Object, ...] | None:
        found = self._objects.get(kind)
        return None if found is None else tuple(found)

    def _from_metrics(self) -> Iterable[Certificate]:
        """Yield the certificates whose expiry time the extender exports as a metric."""
        for sample in self._metrics or ():
            if sample.name == _END_METRIC:
                source = f"the extender's {sample.labels.get('certificate', '')}"
                yield Certificate(source=source, subject="", ends_at=sample.value)


def parse_exposition(text: str) -> tuple[Sample, ...]:
    r"""Parse a text in Prometheus exposition format into samples.

    Raises:
        ValueError: the text is malformed.

    Example:
        >>> parse_exposition('up{job="a"} 1\n')
        (Sample(name='up', labels={'job': 'a'}, value=1.0),)
    """
    return tuple(
        Sample(name=sample.name, labels=dict(sample.labels), value=float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )


def _read_certificates(source: str, text: str) -> Iterator[Certificate]:
    """Parse the certificates in a PEM text; a text without certificates yields none.

    Raises:
        ValueError: a certificate is malformed.
    """
    if _PEM not in text:
        return
    for certificate in x509.load_pem_x509_certificates(text.encode()):
        yield Certificate(
            source=source,
            subject=certificate.subject.rfc4514_string(),
            ends_at=certificate.not_valid_after_utc.timestamp(),
        )


def _read_secret(source: str, data: Mapping[str, object]) -> Iterator[Certificate]:
    """Parse the certificates in a Secret's data; private keys are not read."""
    for name, value in data.items():
        if not name.endswith(".crt"):
            continue
        try:
            text = base64.b64decode(text_of(value), validate=True).decode()
            yield from _read_certificates(f"{source} {name}", text)
        except (binascii.Error, ValueError):
            continue  # the component that uses the certificate reports the error


def _tuple(samples: list[Sample] | None) -> tuple[Sample, ...] | None:
    return None if samples is None else tuple(samples)


def _texts(value: object) -> Mapping[str, str]:
    return {name: str(text) for name, text in mapping_of(value).items()}


_ALLOWED: Final = (
    "must be objects of the API server as JSON or YAML (nodes, pods, daemonsets, configmaps, "
    "services, secrets, roles and their bindings), the output of kubectl version, a "
    "KubeSchedulerConfiguration, metrics of dcgm-exporter or the extender, answers of "
    "/v1/bypassed, /v1/gpus, /v1/nodes or /readyz, the extender's settings, or certificates"
)


def add_files(collector: FactCollector, files: Iterable[str]) -> None:
    """Load each file into the fact collector.

    Raises:
        ClientError: a file cannot be read, or its content is not recognized.
    """
    for file in files:
        path = Path(file)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ClientError(
                f"cannot read {file}: {cause_of(error)}", Failure.BAD_REQUEST
            ) from error
        if not _add_text(collector, file, text):
            raise ClientError(
                f"the content of {file} is not recognized: {_ALLOWED}", Failure.BAD_REQUEST
            )


def _add_text(collector: FactCollector, file: str, text: str) -> bool:
    """Add the content of a file; return whether it was recognized."""
    stem = Path(file).name.partition(".")[0]
    if text.lstrip().startswith(_PEM[:10]):
        try:
            found = list(_read_certificates(file, text))
        except ValueError as error:
            raise ClientError(
                f"{file}: malformed certificate: {error}", Failure.BAD_REQUEST
            ) from error
        collector.add_certificates(found)
        return bool(found)
    # A list, so that every document is added: `any` on a generator would stop at the first.
    known = [collector.add(file, document, stem=stem) for document in _documents(text)]
    return any(known) or _add_samples(collector, text)


def _documents(text: str) -> Iterator[object]:
    """Decode a text as JSON or YAML; yield nothing if it is neither."""
    try:
        yield decode_with(msgspec.json.decode, text)
        return
    except MalformedError:
        pass
    try:
        yield from decode_with(yaml_documents, text)
    except MalformedError:
        return


def _add_samples(collector: FactCollector, text: str) -> bool:
    try:
        return collector.add_samples(parse_exposition(text))
    except (ValueError, KeyError, IndexError):  # errors of the parser on malformed input
        return False


_PAGE: Final = "500"
_MOST_PAGES: Final = 1000
"""Page limit of one list: half a million objects."""
_LISTS: Final = {
    "nodes": ("Node", "/api/v1/nodes"),
    "pods": ("Pod", "/api/v1/pods"),
    "daemon_sets": ("DaemonSet", "/apis/apps/v1/daemonsets"),
    "claims": ("ResourceClaim", "/apis/resource.k8s.io/v1/resourceclaims"),
}
_CONFIG_WORDS: Final = (
    *("kube-scheduler", "idlegpu", "nvidia-device-plugin", "nvidia-gpu-device-plugin"),
    *("dcgm-exporter", "cluster-autoscaler"),
)
"""Words in names of pods whose namespaces are searched for ConfigMaps."""
_KEPT_WORDS: Final = (
    *_CONFIG_WORDS,
    *PLUGIN_WORDS,
    *DRA_WORDS,
    *MPS_WORDS,
    *MANAGER_WORDS,
    *AUTOSCALERS,
    *EXPORTER_WORDS,
    *AGENT_WORDS,
)
"""Words in names of pods without GPUs that checks need; other pods without GPUs are dropped."""
_SECRETS: Final = ("idlegpu-extender-tls", "idlegpu-kube-scheduler-tls", "idlegpu-ca")
_EXPORTER_PORT: Final = 9400
_MOST_EXPORTERS: Final = 2
"""Number of dcgm-exporter pods to query: usually all belong to one DaemonSet."""

_NO_SCHEDULER: Final = (
    "no readable ConfigMap holds one (kubeadm keeps it in a file on the control plane): pass "
    "the file, idlegpu doctor FILE"
)


def gather_cluster(collector: FactCollector, cluster: Callable[[], Cluster], account: str) -> None:
    """Collect facts from an API server.

    Args:
        collector: receives the facts, and the reason for each missing one.
        cluster: returns the client, or raises ClientError.
        account: the extender's service account, `namespace/name`.
    """
    try:
        server = cluster()
    except ClientError as error:
        names = (*_LISTS, "config_maps", "schedulers", "exporter", "certificates", "rights")
        names += ("services", "version")
        collector.missing |= dict.fromkeys(names, str(error))
        return
    found: dict[str, list[Object]] = {}
    for name, (kind, path) in _LISTS.items():
        try:
            found[name] = [item for item in _pages(server, path) if _is_needed(kind, item)]
            collector.add_list(kind, found[name])
        except ClientError as error:
            if name == "claims" and error.failure is Failure.NOT_FOUND:
                collector.add_list(kind, ())  # before Kubernetes 1.34
            else:
                collector.missing[name] = str(error)
    pods, namespace = found.get("pods", []), account.partition("/")[0]
    _add_config_maps(collector, server, pods, namespace)
    _add_secrets(collector, server, namespace)
    _add_service_and_version(collector, server, namespace)
    _add_exporters(collector, server, pods)
    try:
        collector.rights = review_rights(server, account, collector.facts(0.0).settings or {})
    except ClientError as error:
        collector.missing["rights"] = str(error)


def _is_needed(kind: str, item: Object) -> bool:
    return kind != "Pod" or bool(requested_gpus(item)) or is_called(item, _KEPT_WORDS)


def _pages(server: Cluster, path: str) -> Iterator[Object]:
    """List all objects of a collection, page by page."""
    params, tokens = {"limit": _PAGE}, set[str]()
    while len(tokens) < _MOST_PAGES:
        page = mapping_of(server.get(path, params))
        yield from objects_of(page.get("items"))
        rest = text_of(mapping_of(page.get("metadata")).get("continue"))
        if not rest:
            return
        if rest in tokens:
            break
        tokens.add(rest)
        params = {"limit": _PAGE, "continue": rest}
    raise ClientError(f"cannot list {path}: the list does not end", Failure.FAULT)


def _add_config_maps(
    collector: FactCollector, server: Cluster, pods: list[Object], own: str
) -> None:
    """Add the ConfigMaps in the namespaces of kube-scheduler, device plugin and extender."""
    namespaces = {"kube-system", own} | {
        text_of(mapping_of(pod.get("metadata")).get("namespace"))
        for pod in pods
        if is_called(pod, _CONFIG_WORDS)
    }
    refused = ""
    for namespace in sorted(namespaces - {""}):
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        try:
            collector.add_list("ConfigMap", list(_pages(server, path)))
        except ClientError as error:
            refused = str(error)
    if refused:
        collector.missing["config_maps"] = refused
    collector.missing["schedulers"] = f"{refused}; {_NO_SCHEDULER}" if refused else _NO_SCHEDULER


def _add_secrets(collector: FactCollector, server: Cluster, namespace: str) -> None:
    """Add the certificates of the extender's Secrets; each Secret is read by name, no others."""
    why = f"no Secret {' or '.join(_SECRETS)} in {namespace}"
    for name in _SECRETS:
        try:
            secret = mapping_of(server.get(f"/api/v1/namespaces/{namespace}/secrets/{name}"))
        except ClientError as error:
            if error.failure is not Failure.NOT_FOUND:
                why = str(error)
            continue
        collector.add_list("Secret", [secret])
    collector.missing["certificates"] = why


def _add_service_and_version(collector: FactCollector, server: Cluster, namespace: str) -> None:
    """Add the Services of the extender's namespace, and the API server's version."""
    try:
        services = list(_pages(server, f"/api/v1/namespaces/{namespace}/services"))
        collector.add_list("Service", services)
    except ClientError as error:
        collector.missing["services"] = str(error)
    try:
        collector.add_version(mapping_of(server.get("/version")))
    except ClientError as error:
        collector.missing["version"] = str(error)


def _add_exporters(collector: FactCollector, server: Cluster, pods: list[Object]) -> None:
    """Add the metrics of a few dcgm-exporters, read through the API server's proxy."""
    collector.missing["exporter"] = "no pod of dcgm-exporter runs"
    running = (pod for pod in pods if is_called(pod, EXPORTER_WORDS) and is_running(pod))
    for _, pod in zip(range(_MOST_EXPORTERS), running, strict=False):
        namespace = text_of(mapping_of(pod.get("metadata")).get("namespace"))
        where = f"/api/v1/namespaces/{namespace}/pods/{name_of(pod)}:{_EXPORTER_PORT}"
        try:
            collector.add_samples(parse_exposition(server.text(f"{where}/proxy/metrics")))
        except (ClientError, ValueError) as error:
            collector.missing["exporter"] = str(error)


def gather_extender(collector: FactCollector, client: Callable[[], Client], at: float) -> None:
    """Collect facts from the extender's API.

    Args:
        collector: receives the facts, and the reason for each missing one.
        client: returns the client, or raises ClientError.
        at: time of the facts, seconds since the epoch.
    """
    paths = {
        "degraded": "/readyz",
        "bypassed": "/v1/bypassed",
        "devices": "/v1/gpus",
        "sources": "/v1/nodes",
    }
    try:
        extender = client()
    except ClientError as error:
        collector.missing |= dict.fromkeys((*paths, "metrics"), str(error))
        return
    for name, path in paths.items():
        try:
            collector.add_answer(name, extender.get(path))
        except ClientError as error:
            collector.missing[name] = str(error)
    try:
        collector.add_samples(parse_exposition(extender.text("/metrics")))
    except (ClientError, ValueError) as error:
        collector.missing["metrics"] = str(error)
    try:
        answer: Any = extender.get("/v1/holders", {"limit": 1})
    except ClientError:
        return
    then = parse_time(mapping_of(answer).get("at"))
    if then is not None:
        collector.extender_at = then + at - time.time()

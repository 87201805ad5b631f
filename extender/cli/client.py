"""Typed Python client for the extender's HTTP API: one method for each route.

docs/command-line.md has an example.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from extender.answers import routes
from extender.answers.advice import Advice
from extender.answers.answer import Answer
from extender.answers.decisions import Best, Decisions, Regret
from extender.answers.fleet import Defrag, Gpus, NodeAnswer, Nodes
from extender.answers.holding import Costs, HoldersAnswer, Size, Usage
from extender.answers.pods import BypassedAnswer, Explanation, PendingAnswer, Pods
from extender.answers.routes import Route
from extender.cli.manifests import PATHS, GpuJob, only_scheduler, propose_for
from extender.cli.transports import (
    ClientError,
    Failure,
    Login,
    Transport,
    UrlTransport,
    base_of,
    cause_of,
)
from extender.core.sizing import Proposal
from extender.runtime.decoding import MalformedError, decode_with

if TYPE_CHECKING:
    from extender.cli.cluster import Cluster  # takes half a second

__all__ = ["SERVICE", "Client", "ClientError", "Failure", "GpuJob", "Proposal"]

_Kind = TypeVar("_Kind", bound=Answer)
_T = TypeVar("_T")

_ANYTHING: Final = msgspec.json.Decoder()

_CHECK: Final = "check the address, and that the extender or the port-forward to it runs"

SERVICE: Final = "idlegpu/idlegpu-extender:status"
"""Service that the manifests create for the extender's API, as `namespace/name:port`."""


class Client:
    """Client for the extender's read-only HTTP API.

    Every method that sends a request raises `ClientError` if the extender cannot be reached,
    refuses the request, or sends an answer that cannot be decoded.

    Args:
        transport: transport to the extender; `Client.at` and `Client.in_cluster_of` create one.
        cluster: API server for `submit`, None for that of the default kubeconfig.
    """

    def __init__(self, transport: Transport, cluster: "Cluster | None" = None) -> None:
        self._transport = transport
        self._cluster = cluster

    @classmethod
    def at(
        cls, url: str, *, token: str = "", ca_file: str | None = None, timeout_seconds: float = 30.0
    ) -> "Client":
        """Return a client for the extender at a URL.

        Args:
            url: base URL of the extender's API port, or a link to a view of its page.
            token: bearer token for the extender, "" for none.
            ca_file: PEM file of the CA that signed the extender's certificate, None for the
                system's CAs.
            timeout_seconds: time limit for one request.

        Raises:
            ClientError: the URL is invalid.
        """
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        login = Login(headers=headers, ca_file=ca_file, timeout_seconds=timeout_seconds)
        return cls(UrlTransport(base_of(url), login, if_unreachable=_CHECK))

    @classmethod
    def in_cluster_of(
        cls,
        kubeconfig: str | None = None,
        *,
        context: str | None = None,
        service: str = SERVICE,
        token: str = "",
        timeout_seconds: float = 30.0,
    ) -> "Client":
        """Return a client that reaches the extender through the API server's service proxy.

        Args:
            kubeconfig: path of the kubeconfig, None for the one that kubectl would use.
            context: name of the kubeconfig's context, None for the current one.
            service: the extender's Service as `namespace/name:port`.
            token: bearer token for the extender, "" for none. The kubeconfig's own token does not
                reach the extender: the API server does not forward it.
            timeout_seconds: time limit for one request.

        Raises:
            ClientError: the kubeconfig is missing or invalid.
        """
        from extender.cli.cluster import Cluster

        cluster = Cluster.from_kubeconfig(
            kubeconfig, context=context, timeout_seconds=timeout_seconds
        )
        return cls(cluster.service(service, token=token), cluster)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Client":
        """Return a client with the command line's configuration: IDLEGPU_URL, else the kubeconfig.

        Args:
            environment: environment variables. IDLEGPU_TOKEN or IDLEGPU_TOKEN_FILE,
                IDLEGPU_CA_FILE, IDLEGPU_SERVICE and KUBECONFIG are read too.

        Raises:
            ClientError: the URL or the kubeconfig is invalid, or the token file cannot be read.
        """
        file = environment.get("IDLEGPU_TOKEN_FILE", "")
        token = environment.get("IDLEGPU_TOKEN", "") or (read_token(file) if file else "")
        url = environment.get("IDLEGPU_URL", "")
        if url:
            return cls.at(url, token=token, ca_file=environment.get("IDLEGPU_CA_FILE") or None)
        service = environment.get("IDLEGPU_SERVICE", "") or SERVICE
        return cls.in_cluster_of(
            environment.get("KUBECONFIG") or None, service=service, token=token
        )

    def nodes(self) -> Nodes:
        """Return all nodes that have GPUs."""
        return self._get(routes.NODES)

    def node(self, name: str) -> NodeAnswer:
        """Return one node and its GPUs."""
        return self._get(routes.NODE, name=name)

    def gpus(self, node: str | None = None) -> Gpus:
        """Return all GPUs of the cluster, or of one node."""
        return self._get(routes.GPUS, node=node)

    def best(
        self,
        *,
        gpus: int = 1,
        memory: str | None = None,
        model: str | None = None,
        **wishes: str | int | None,
    ) -> Best:
        """Return the nodes that are suitable for a pod now, best first.

        Args:
            gpus: number of GPUs that the pod requests.
            memory: memory that it needs on each GPU, as a quantity (`20Gi`).
            model: GPU models that it prefers, separated by commas (`H100,A100`).
            **wishes: further query parameters: `resource`, `strategy`, `require_idle`,
                `max_utilization`, `max_memory`, `limit`.
        """
        return self._get(routes.BEST, gpus=gpus, memory=memory, model=model, **wishes)

    def defrag(self, *, gpus: int, resource: str | None = None, limit: int = 5) -> Defrag:
        """Return the fewest pods to move so that a node has room for a large request.

        Args:
            gpus: number of GPUs, or replicas, that must be free on one node.
            resource: name of the GPU resource; unless set, the first one of the extender's setting.
            limit: largest number of nodes.
        """
        return self._get(routes.DEFRAG, gpus=gpus, resource=resource, limit=limit)

    def decisions(
        self, *, pod: str | None = None, limit: int = 100, brief: bool = True
    ) -> Decisions:
        """Return the latest scheduling decisions, newest first."""
        return self._get(routes.DECISIONS, pod=pod, limit=limit, brief=brief)

    def pending(self, *, namespace: str | None = None, limit: int = 200) -> PendingAnswer:
        """Return the GPU pods that are not bound to a node yet."""
        return self._get(routes.PENDING, namespace=namespace, limit=limit)

    def pods(
        self,
        *,
        namespace: str | None = None,
        search: str | None = None,
        state: str | None = None,
        sort: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> Pods:
        """Return a page of the GPU pods that the caller may read.

        Args:
            namespace: only pods of this namespace.
            search: words that must occur in the pod's name, owner or node.
            state: only pods that hold GPUs (`holds`), or that wait (`waits`).
            sort: `pod`, `owner`, `node`, `gpus`, `use`, `memory`, `idle` or `wait`.
            limit: largest number of pods to return.
            offset: number of pods to skip.
        """
        where = {"namespace": namespace, "search": search, "state": state}
        return self._get(routes.PODS, **where, sort=sort, limit=limit, offset=offset)

    def holders(
        self,
        *,
        idle_for_seconds: int = 3600,
        namespace: str | None = None,
        some: bool = False,
        limit: int = 200,
    ) -> HoldersAnswer:
        """Return the pods that hold GPUs without using them.

        Args:
            idle_for_seconds: shortest time for which the pod's GPUs have been idle.
            namespace: only pods of this namespace.
            some: include pods that use some of their GPUs.
            limit: largest number of pods to return.
        """
        which = {"idle_for": idle_for_seconds, "namespace": namespace, "some": some or None}
        return self._get(routes.HOLDERS, **which, limit=limit)

    def costs(
        self,
        *,
        by: str = "owner",
        idle_for_seconds: int = 0,
        namespace: str | None = None,
        some: bool = False,
        limit: int = 200,
    ) -> Costs:
        """Return the cost of the GPUs that pods hold, split into used and idle.

        Args:
            by: grouping: `pod`, `owner` or `namespace`.
            idle_for_seconds: only pods whose GPUs have been idle this long; 0 for every pod with
                GPUs.
            namespace: only pods of this namespace.
            some: with `idle_for_seconds`, include pods that use some of their GPUs.
            limit: largest number of groups to return.
        """
        which = {"idle_for": idle_for_seconds, "namespace": namespace, "some": some or None}
        return self._get(routes.COSTS, by=by, **which, limit=limit)

    def explain(
        self,
        pod: str | None = None,
        *,
        number: int | str | None = None,
        limit: int = 100,
        node: str | None = None,
    ) -> Explanation:
        """Return the reasons for a pod's placement, or why the pod is still pending.

        Args:
            pod: `namespace/name`, a unique name, or a UID.
            number: look up a decision instead of a pod: its number, or, as a string, its id, which
                is unique across replicas.
            limit: largest number of nodes to list without full detail.
            node: name of a node to return in full detail.
        """
        name = "id" if isinstance(number, str) else "number"
        return self._get(routes.EXPLAIN, pod=pod, **{name: number}, limit=limit, node=node)

    def foresee(
        self, pod: Mapping[str, object], *, limit: int = 100, node: str | None = None
    ) -> Explanation:
        """Return the placement that the extender would choose now for a pod that does not exist.

        Args:
            pod: Pod object as in a manifest.
            limit: largest number of nodes to list without full detail.
            node: name of a node to return in full detail, also if it ranks low.
        """
        return self._get(routes.FORESEE, msgspec.json.encode(pod), limit=limit, node=node or None)

    def usage(self, *, since_seconds: int = 86_400, namespace: str | None = None) -> Usage:
        """Return GPU-hours and costs of all pods, including pods that have ended.

        Args:
            since_seconds: length of the period; it begins at a whole hour.
            namespace: only pods of this namespace.
        """
        return self._get(routes.USAGE, since=since_seconds, namespace=namespace)

    def size(
        self,
        *,
        manifest: Mapping[str, object] | Sequence[Mapping[str, object]] = (),
        text: str = "",
        command: str = "",
        image: str = "",
        owner: str = "",
        namespace: str = "default",
    ) -> Proposal:
        """Propose number, memory, share and models of GPUs for a task, as `idlegpu size` does.

        Args:
            manifest: the task's object, or several, of any kind.
            text: description, such as "fine-tune a 7 billion model".
            command: command, such as "vllm serve m --tensor-parallel-size 4".
            image: image, to find similar pods.
            owner: controller of similar pods as KIND/NAME, such as `Deployment/chat`.
            namespace: namespace of similar pods, if the manifest does not state it.
        """
        documents = [manifest] if isinstance(manifest, Mapping) else manifest
        return propose_for(
            lambda pod, of: self.measured(pod, owner=of),
            documents=documents,
            text=text,
            command=command,
            image=image,
            owner=owner,
            namespace=namespace,
        )

    def submit(self, job: GpuJob) -> dict[str, Any]:
        """Submit a Job or Pod as `idlegpu run --apply` does; return the created object.

        The object is created through the API server of the kubeconfig, in the kubeconfig's
        namespace unless `job` names one. If `job` names no scheduler, it gets the one that calls
        the extender, or else the cluster's default.
        """
        if not job.scheduler:
            with suppress(ClientError):  # optional: the default scheduler may call it
                job = replace(job, scheduler=only_scheduler(self.bypassed().schedulers))
        item = job.manifest()
        cluster = self._cluster or _default_cluster()
        path = PATHS[item["kind"]].format(job.namespace or cluster.namespace)
        made: dict[str, Any] = cluster.create(path, item)
        return made

    def measured(self, pod: Mapping[str, object], *, owner: str | None = None) -> Size:
        """Return the measured use of pods that are similar to a pod.

        Args:
            pod: Pod object as in a manifest; only its metadata and containers count.
            owner: kind and name of its controller (`Deployment chat`), if the pod does not name it.
        """
        return self._get(routes.SIZE, msgspec.json.encode(pod), owner=owner or None)

    def advice(
        self,
        *,
        node: str | None = None,
        namespace: str | None = None,
        over_seconds: int = 3600,
        all_cards: bool = False,
        limit: int = 200,
    ) -> Advice:
        """Return recommendations for sharing GPUs, and pods that request far more than they use.

        Args:
            node: only GPUs and pods of this node.
            namespace: only pods of this namespace.
            over_seconds: length of the period to evaluate, ending now.
            all_cards: include GPUs that need no change.
            limit: largest number of GPUs, and of pods, to return.
        """
        which = {"node": node, "namespace": namespace, "all": all_cards or None}
        return self._get(routes.ADVICE, **which, over=over_seconds, limit=limit)

    def regret(self, *, namespace: str | None = None, limit: int = 50) -> Regret:
        """Return the measured outcome of placements some time after the pods were bound."""
        return self._get(routes.REGRET, namespace=namespace, limit=limit)

    def bypassed(self) -> BypassedAnswer:
        """Return the pods that were bound without the extender, each with the likely reason."""
        return self._get(routes.BYPASSED)

    def get(self, path: str, params: Mapping[str, object] | None = None) -> object:
        """Return the decoded JSON of any route; parameters that are None are omitted."""
        return _decode(_ANYTHING, self._transport.request("GET", path, _params(params)), path)

    def text(self, path: str) -> str:
        """Return the body of any route as text, such as `/metrics`."""
        return self._transport.request("GET", path).decode(errors="replace")

    def _get(self, route: Route[_Kind], body: bytes | None = None, /, **params: object) -> _Kind:
        """Request a route; a parameter that its path does not name goes to the query."""
        query = {name: value for name, value in params.items() if f"{{{name}}}" not in route.path}
        path = route.path.format_map({name: quote(str(params[name]), safe="") for name in params})
        answer = self._transport.request(route.method, path, _params(query), body)
        return _decode(msgspec.json.Decoder(route.answer), answer, path)


def _default_cluster() -> "Cluster":
    from extender.cli.cluster import Cluster

    return Cluster.from_kubeconfig()


def _params(params: Mapping[str, object] | None) -> dict[str, str]:
    given = {name: value for name, value in (params or {}).items() if value is not None}
    return {
        name: str(it).lower() if isinstance(it, bool) else str(it) for name, it in given.items()
    }


def _decode(decoder: "msgspec.json.Decoder[_T]", body: bytes, path: str) -> _T:
    try:
        return decode_with(decoder.decode, body)
    except MalformedError as error:
        raise ClientError(
            f"the answer for {path} cannot be read: {error}: is that an idlegpu extender, and not "
            "an older one?",
            Failure.FAULT,
        ) from error


def read_token(file: str) -> str:
    """Return the token in a file, without surrounding whitespace.

    Raises:
        ClientError: the file cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ClientError(
            f"token file {file!r} cannot be read: {cause_of(error)}", Failure.BAD_REQUEST
        ) from error

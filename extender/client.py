"""Asks an idlegpu extender from Python: one method for each question, typed answers.

docs/command-line.md has an example.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec

from extender.decoding import MalformedError, decode_with
from extender.remote import answers
from extender.remote.advice import Advice
from extender.remote.errors import ClientError, Failure
from extender.remote.holding import Costs, Holders
from extender.remote.regret import Regret
from extender.remote.ways import Login, UrlWay, Way

__all__ = ["SERVICE", "Client", "ClientError", "Failure", "answers"]

Kind = TypeVar("Kind", bound=answers.Answer)
T = TypeVar("T")

_ANYTHING: Final = msgspec.json.Decoder()

SERVICE: Final = "idlegpu/idlegpu-extender:status"
"""Where the manifests have the extender answer: namespace/name:port."""


class Client:
    """Asks an extender; nothing that it asks changes anything.

    Args:
        way: the way to it; `Client.at` and `Client.in_cluster_of` make one.
    """

    def __init__(self, way: Way) -> None:
        self._way = way

    @classmethod
    def at(
        cls,
        url: str,
        *,
        token: str = "",
        ca_file: str | None = None,
        timeout_seconds: float = 30.0,
    ) -> "Client":
        """Return a client for the extender at a URL.

        Args:
            url: base URL of its observability address.
            token: a token that it takes, "" for none.
            ca_file: who signs its certificate, None for whom this machine trusts.
            timeout_seconds: limit for one answer.

        Raises:
            ClientError: the URL cannot be used.
        """
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        login = Login(headers=headers, ca_file=ca_file, timeout_seconds=timeout_seconds)
        return cls(UrlWay(url, login))

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
        """Return a client for the extender of a cluster, through the API server's service proxy.

        Args:
            kubeconfig: the file, None for what kubectl would take.
            context: which of its contexts, None for the current one.
            service: `namespace/name:port`.
            token: a token that the extender takes, "" for none: not that of the kubeconfig, which
                the API server keeps to itself.
            timeout_seconds: limit for one answer.

        Raises:
            ClientError: the kubeconfig cannot be used.
        """
        from extender.remote.cluster import Cluster  # noqa: PLC0415 - takes half a second

        cluster = Cluster.of(kubeconfig, context=context, timeout_seconds=timeout_seconds)
        return cls(cluster.service(service, token=token))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Client":
        """Return a client as the command line makes one: IDLEGPU_URL, else the kubeconfig.

        Args:
            environment: that of the process, or what stands for it: IDLEGPU_TOKEN or
                IDLEGPU_TOKEN_FILE, IDLEGPU_CA_FILE, IDLEGPU_SERVICE and KUBECONFIG count too.

        Raises:
            ClientError: neither can be used, or the token's file cannot be read.
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

    def nodes(self) -> answers.Nodes:
        """Return every node with GPUs."""
        return self._get(answers.Nodes, "/v1/nodes")

    def node(self, name: str) -> answers.Node:
        """Return one node, with its GPUs."""
        return self._get(answers.Node, f"/v1/nodes/{quote(name, safe='')}")

    def gpus(self, node: str | None = None) -> answers.Gpus:
        """Return every GPU, or those of one node."""
        return self._get(answers.Gpus, "/v1/gpus", {"node": node})

    def best(
        self,
        *,
        gpus: int = 1,
        memory: str | None = None,
        model: str | None = None,
        **wishes: str | int | None,
    ) -> answers.Best:
        """Return the nodes that a pod would get now, best first.

        Args:
            gpus: how many it asks for.
            memory: room on each (`20Gi`).
            model: models that it prefers (`H100,A100`).
            **wishes: `resource`, `strategy`, `require_idle`, `max_utilization`, `max_memory`,
                `limit`.
        """
        asked = {"gpus": gpus, "memory": memory, "model": model, **wishes}
        return self._get(answers.Best, "/v1/best", asked)

    def decisions(
        self, *, pod: str | None = None, limit: int = 100, brief: bool = True
    ) -> answers.Decisions:
        """Return the last decisions, the newest first."""
        asked = {"pod": pod, "limit": limit, "brief": "true" if brief else "false"}
        return self._get(answers.Decisions, "/v1/decisions", asked)

    def pending(self, *, namespace: str | None = None, limit: int = 200) -> answers.Pending:
        """Return the GPU pods that are not bound."""
        return self._get(answers.Pending, "/v1/pending", {"namespace": namespace, "limit": limit})

    def holders(
        self,
        *,
        idle_for_seconds: int = 3600,
        namespace: str | None = None,
        some: bool = False,
        limit: int = 200,
    ) -> Holders:
        """Return the pods that hold GPUs and do not use them."""
        asked = {
            "idle_for": idle_for_seconds,
            "namespace": namespace,
            "some": "true" if some else None,
            "limit": limit,
        }
        return self._get(Holders, "/v1/holders", asked)

    def costs(
        self,
        *,
        by: str = "owner",
        idle_for_seconds: int = 0,
        namespace: str | None = None,
        some: bool = False,
        limit: int = 200,
    ) -> Costs:
        """Return what the GPUs that pods hold cost, used and idle.

        Args:
            by: `pod`, `owner` or `namespace`: what is summed up together.
            idle_for_seconds: only of pods whose GPUs are idle for so long; 0 for all that hold any.
            namespace: only of its pods.
            some: also of pods that use some of their GPUs.
            limit: so many sums.
        """
        asked = {
            "by": by,
            "idle_for": idle_for_seconds,
            "namespace": namespace,
            "some": "true" if some else None,
            "limit": limit,
        }
        return self._get(Costs, "/v1/costs", asked)

    def explain(
        self,
        pod: str | None = None,
        *,
        number: int | str | None = None,
        limit: int = 100,
        node: str | None = None,
    ) -> answers.Explanation:
        """Return why a pod went where it went, or waits.

        Args:
            pod: `namespace/name`, a name that is unique, or a UID.
            number: the number of a decision, instead; or, as a string, its id, which no decision
                of another replica has.
            limit: so many of the nodes that are not kept in full.
            node: say of this one whatever is known.
        """
        name = "id" if isinstance(number, str) else "number"
        asked = {"pod": pod, name: number, "limit": limit, "node": node}
        return self._get(answers.Explanation, "/v1/explain", asked)

    def foresee(
        self, pod: Mapping[str, object], *, limit: int = 100, node: str | None = None
    ) -> answers.Explanation:
        """Return what would happen to a pod that is not there.

        Args:
            pod: a Pod object.
            limit: so many of the nodes that are not told in full.
            node: tell this one in full, whatever its place.
        """
        path, body = "/v1/explain", msgspec.json.encode(pod)
        asked = {"limit": str(limit), **({"node": node} if node else {})}
        return _read(answers.Explanation, self._way.ask("POST", path, asked, body), path)

    def advice(
        self,
        *,
        node: str | None = None,
        namespace: str | None = None,
        over_seconds: int = 3600,
        all_cards: bool = False,
        limit: int = 200,
    ) -> Advice:
        """Return how to share which cards, and which pods ask for far too much.

        Args:
            node: only its cards and pods.
            namespace: only its pods.
            over_seconds: how far back to look.
            all_cards: also those that are well as they are.
            limit: so many cards, and so many pods.
        """
        asked = {
            "node": node,
            "namespace": namespace,
            "over": over_seconds,
            "all": "true" if all_cards else None,
            "limit": limit,
        }
        return self._get(Advice, "/v1/advice", asked)

    def regret(self, *, namespace: str | None = None, limit: int = 50) -> Regret:
        """Return how placements turned out some time after the pods were bound."""
        return self._get(Regret, "/v1/regret", {"namespace": namespace, "limit": limit})

    def unasked(self) -> answers.Unasked:
        """Return the pods that were bound without the extender's answer, and why, likely."""
        return self._get(answers.Unasked, "/v1/unasked")

    def get(self, path: str, asked: Mapping[str, object] | None = None) -> object:
        """Return any answer as plain JSON; parameters that are None are left out."""
        return _decode(_ANYTHING, self._way.ask("GET", path, _params(asked)), path)

    def text(self, path: str) -> str:
        """Return any answer as text, such as the metrics."""
        return self._way.ask("GET", path).decode(errors="replace")

    def _get(self, kind: type[Kind], path: str, asked: Mapping[str, object] | None = None) -> Kind:
        return _read(kind, self._way.ask("GET", path, _params(asked)), path)


def _params(asked: Mapping[str, object] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (asked or {}).items() if value is not None}


def _read(kind: type[Kind], body: bytes, path: str) -> Kind:
    return _decode(msgspec.json.Decoder(kind), body, path)


def _decode(decoder: "msgspec.json.Decoder[T]", body: bytes, path: str) -> T:
    """Decode an answer.

    Raises:
        ClientError: it is none.
    """
    try:
        return decode_with(decoder.decode, body)
    except MalformedError as error:
        raise ClientError(
            f"the answer for {path} cannot be read: {error}: is that an idlegpu extender, and not "
            "an older one?",
            Failure.FAULT,
        ) from error


def read_token(file: str) -> str:
    """Return the token in a file.

    Raises:
        ClientError: it cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ClientError(
            f"token file {file!r} cannot be read: {error}", Failure.BAD_QUESTION
        ) from error

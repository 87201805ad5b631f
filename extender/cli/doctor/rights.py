"""List the RBAC rights that the extender's account needs, and check whether it has them.

The API server reviews each right; without a cluster, RBAC objects from files are evaluated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from extender.cli.cluster import Cluster
from extender.cli.doctor.facts import Object, Right, name_of
from extender.cli.transports import ClientError, Failure
from extender.core.untyped import items_of, mapping_of, objects_of, text_of

ACCOUNT: Final = "idlegpu/idlegpu-extender"
_SELF: Final = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
_REVIEWS: Final = "/apis/authorization.k8s.io/v1"


_Objects = Mapping[str, Sequence[Object]]
"""Objects by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NeededRight:
    """A right that the extender's account needs.

    Attributes:
        group: API group, "" for the core group.
        is_own: whether the right is limited to the account's own namespace.
        name: name of a single object, "" for any.
        when: whether the settings require the right.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    is_own: bool = False
    name: str = ""
    manifest: str = "manifests/rbac"
    when: Callable[[Object], bool] = lambda _: True


def _leads(settings: Object) -> bool:
    return mapping_of(settings.get("wake")).get("enabled") is not False


def _wakes(settings: Object) -> bool:
    return _leads(settings) and _target(settings) not in {"node", "pod"}


def _wakes_nodes(settings: Object) -> bool:
    return _leads(settings) and _target(settings) == "node"


def _wakes_pods(settings: Object) -> bool:
    return _leads(settings) and _target(settings) == "pod"


def _target(settings: Object) -> object:
    return mapping_of(settings.get("wake")).get("target")


def _writes_events(settings: Object) -> bool:
    return mapping_of(settings.get("events")).get("enabled") is not False


def _takes_tokens(settings: Object) -> bool:
    return mapping_of(settings.get("api")).get("access") != "open"


def _reads_groups(settings: Object) -> bool:
    return mapping_of(settings.get("cluster")).get("group_objects") is True


_NEEDS: Final[tuple[_NeededRight, ...]] = (
    _NeededRight(group="", resource="nodes", verbs=("list", "watch")),
    _NeededRight(group="", resource="pods", verbs=("list", "watch")),
    _NeededRight(group="resource.k8s.io", resource="resourceclaims", verbs=("list", "watch")),
    _NeededRight(group="resource.k8s.io", resource="resourceslices", verbs=("list", "watch")),
    *(
        _NeededRight(
            group=group,
            resource=resource,
            verbs=("list", "watch"),
            manifest="manifests/components/group-sizes",
            when=_reads_groups,
        )
        for group, resource in (
            ("scheduling.k8s.io", "podgroups"),
            ("scheduling.k8s.io", "workloads"),
            ("scheduling.x-k8s.io", "podgroups"),
            ("scheduling.volcano.sh", "podgroups"),
            ("jobset.x-k8s.io", "jobsets"),
        )
    ),
    _NeededRight(
        group="events.k8s.io", resource="events", verbs=("create", "patch"), when=_writes_events
    ),
    _NeededRight(
        group="authentication.k8s.io",
        resource="tokenreviews",
        verbs=("create",),
        when=_takes_tokens,
    ),
    _NeededRight(
        group="authorization.k8s.io",
        resource="subjectaccessreviews",
        verbs=("create",),
        when=_takes_tokens,
    ),
    _NeededRight(
        group="storage.k8s.io",
        resource="csistoragecapacities",
        verbs=("create",),
        is_own=True,
        when=_wakes,
    ),
    _NeededRight(
        group="storage.k8s.io",
        resource="csistoragecapacities",
        verbs=("patch",),
        is_own=True,
        name="idlegpu-state",
        when=_wakes,
    ),
    _NeededRight(
        group="coordination.k8s.io", resource="leases", verbs=("create",), is_own=True, when=_leads
    ),
    _NeededRight(
        group="coordination.k8s.io",
        resource="leases",
        verbs=("get", "patch"),
        is_own=True,
        name="idlegpu-wake",
        when=_leads,
    ),
    _NeededRight(
        group="",
        resource="nodes",
        verbs=("patch",),
        manifest="manifests/components/wake-nodes",
        when=_wakes_nodes,
    ),
    _NeededRight(
        group="",
        resource="pods",
        verbs=("patch",),
        manifest="manifests/components/wake-pods",
        when=_wakes_pods,
    ),
)


def review_rights(cluster: Cluster, account: str, settings: Object) -> tuple[Right, ...]:
    """Check each needed right of an account with the API server.

    The caller needs `create` on subjectaccessreviews, unless the caller is the account itself.

    Args:
        account: service account, `namespace/name`.
        settings: the extender's settings, as far as they are known.

    Raises:
        ClientError: the API server refuses a review.
    """
    namespace, user = account.partition("/")[0], _user_of(account)
    is_self = _own_user(cluster) == user
    found = []
    for need in _NEEDS:
        if not need.when(settings):
            continue
        where = namespace if need.is_own else ""
        for verb in need.verbs:
            attributes = _attributes(need, verb, where)
            found.append(
                Right(
                    account=account,
                    verb=verb,
                    group=need.group,
                    resource=need.resource,
                    namespace=where,
                    name=need.name,
                    is_allowed=_is_allowed(cluster, None if is_self else user, attributes),
                    manifest=need.manifest,
                )
            )
    return tuple(found)


def _own_user(cluster: Cluster) -> str:
    """Return the caller's user name according to the API server, "" if it does not answer."""
    kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    try:
        review = cluster.create(_SELF, kind)
    except ClientError as error:
        if error.failure is Failure.UNREACHABLE:
            raise
        return ""
    info = mapping_of(mapping_of(mapping_of(review).get("status")).get("userInfo"))
    return text_of(info.get("username"))


def _attributes(need: _NeededRight, verb: str, namespace: str) -> dict[str, str]:
    every = {
        "group": need.group,
        "resource": need.resource,
        "verb": verb,
        "namespace": namespace,
        "name": need.name,
    }
    return {key: value for key, value in every.items() if value}


def _is_allowed(cluster: Cluster, user: str | None, attributes: Mapping[str, str]) -> bool:
    kind = "SelfSubjectAccessReview" if user is None else "SubjectAccessReview"
    spec: dict[str, Any] = {"resourceAttributes": dict(attributes)}
    if user is not None:
        spec |= {"user": user, "groups": list(_groups_of(user))}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    result = cluster.create(f"{_REVIEWS}/{kind.lower()}s", review)
    return mapping_of(mapping_of(result).get("status")).get("allowed") is True


def read_rights(objects: _Objects, account: str, settings: Object) -> tuple[Right, ...]:
    """Return each right that an account needs, and whether RBAC objects grant it.

    Rights from other authorizers are not seen; they are rare for service accounts.

    Args:
        objects: all RBAC objects of the cluster, by kind.
        account: service account, `namespace/name`.
        settings: the extender's settings, as far as they are known.
    """
    namespace = account.partition("/")[0]
    everywhere = list(_rules(objects, "ClusterRoleBinding", account, ""))
    here = list(_rules(objects, "RoleBinding", account, namespace))
    return tuple(
        Right(
            account=account,
            verb=verb,
            group=need.group,
            resource=need.resource,
            namespace=namespace if need.is_own else "",
            name=need.name,
            is_allowed=any(
                _allows(rule, verb, need.group, need.resource, need.name)
                for rule in (*everywhere, *(here if need.is_own else ()))
            ),
            manifest=need.manifest,
        )
        for need in _NEEDS
        if need.when(settings)
        for verb in need.verbs
    )


def _rules(objects: _Objects, kind: str, account: str, namespace: str) -> Iterator[Object]:
    """Yield the rules that a namespace's bindings of a kind grant to an account."""
    for binding in objects.get(kind, ()):
        if _namespace(binding) != namespace or not _is_of(binding, account):
            continue
        role = mapping_of(binding.get("roleRef"))
        home = namespace if role.get("kind") == "Role" else ""
        for item in objects.get(text_of(role.get("kind")), ()):
            if name_of(item) == role.get("name") and _namespace(item) == home:
                yield from objects_of(item.get("rules"))


def _is_of(binding: Object, account: str) -> bool:
    """Check whether a binding's subjects include an account, directly or through a group."""
    namespace, _, name = account.partition("/")
    user = _user_of(account)
    for subject in objects_of(binding.get("subjects")):
        subject_name = text_of(subject.get("name"))
        match subject.get("kind"):
            case "ServiceAccount":
                is_it = (text_of(subject.get("namespace")), subject_name) == (namespace, name)
            case "User":
                is_it = subject_name == user
            case _:
                is_it = subject_name in _groups_of(user)
        if is_it:
            return True
    return False


def _allows(rule: Object, verb: str, group: str, resource: str, name: str) -> bool:
    names = items_of(rule.get("resourceNames"))
    return (
        _has(rule.get("verbs"), verb)
        and _has(rule.get("apiGroups"), group)
        and _has(rule.get("resources"), resource)
        and (not names or name in names)
    )


def _has(values: object, wanted: str) -> bool:
    every: Iterable[object] = items_of(values)
    return any(one in {wanted, "*"} for one in every)


def _namespace(item: Object) -> str:
    return text_of(mapping_of(item.get("metadata")).get("namespace"))


def _user_of(account: str) -> str:
    """Return the user name of a service account, `namespace/name`."""
    return f"system:serviceaccount:{account.replace('/', ':')}"


def _groups_of(user: str) -> tuple[str, ...]:
    """Return the groups of a service account's user name."""
    return (
        "system:serviceaccounts",
        f"system:serviceaccounts:{user.split(':')[2]}",
        "system:authenticated",
    )

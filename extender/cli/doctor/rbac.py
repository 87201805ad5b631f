"""Compute an account's rights from RBAC objects, for runs without an API server."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from extender.cli.doctor.facts import Object, Right
from extender.cli.doctor.objects import name_of
from extender.cli.doctor.rights import NEEDS, groups_of, user_of
from extender.core.untyped import items_of, mapping_of, objects_of, text_of

KINDS: Final = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
HOW: Final = (
    "pass the output of kubectl get clusterroles,clusterrolebindings,roles,rolebindings -A -o json"
)

_Objects = Mapping[str, Sequence[Object]]


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
        for need in NEEDS
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
    user = user_of(account)
    for subject in objects_of(binding.get("subjects")):
        subject_name = text_of(subject.get("name"))
        match subject.get("kind"):
            case "ServiceAccount":
                is_it = (text_of(subject.get("namespace")), subject_name) == (namespace, name)
            case "User":
                is_it = subject_name == user
            case _:
                is_it = subject_name in groups_of(user)
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

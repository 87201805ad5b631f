"""What an account may do by the objects of RBAC, where there is no API server to ask."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from extender.core.untyped import items_of, mapping_of, objects_of, text_of
from extender.doctor.facts import Object, Right
from extender.doctor.objects import name_of
from extender.doctor.rights import NEEDS, groups_of, user_of

KINDS: Final = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
HOW: Final = (
    "give the output of kubectl get clusterroles,clusterrolebindings,roles,rolebindings -A -o json"
)

_Objects = Mapping[str, Sequence[Object]]


def read_rights(objects: _Objects, account: str, settings: Object) -> tuple[Right, ...]:
    """Return each right that an account needs, and whether objects of RBAC grant it.

    Other authorizers may grant more; for an account of a cluster's own that is rare.

    Args:
        objects: by kind, all of a cluster.
        account: `namespace/name`.
        settings: the extender's, as far as they are known.
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
    """Yield the rules that bindings of a kind, in a namespace, give to an account."""
    for binding in objects.get(kind, ()):
        if _namespace(binding) != namespace or not _is_of(binding, account):
            continue
        role = mapping_of(binding.get("roleRef"))
        home = namespace if role.get("kind") == "Role" else ""
        for item in objects.get(text_of(role.get("kind")), ()):
            if name_of(item) == role.get("name") and _namespace(item) == home:
                yield from objects_of(item.get("rules"))


def _is_of(binding: Object, account: str) -> bool:
    """Whether a binding is for an account, by its own name or by a group that it is in."""
    namespace, _, name = account.partition("/")
    user = user_of(account)
    for subject in objects_of(binding.get("subjects")):
        told = text_of(subject.get("name"))
        match subject.get("kind"):
            case "ServiceAccount":
                is_it = (text_of(subject.get("namespace")), told) == (namespace, name)
            case "User":
                is_it = told == user
            case _:
                is_it = told in groups_of(user)
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


def _has(told: object, wanted: str) -> bool:
    every: Iterable[object] = items_of(told)
    return any(one in {wanted, "*"} for one in every)


def _namespace(item: Object) -> str:
    return text_of(mapping_of(item.get("metadata")).get("namespace"))

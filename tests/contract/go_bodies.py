"""Hypothesis strategies of unusual request bodies, which kube-scheduler never writes.

Leaves are bytes, so that they can be anything. Keys are unique within an object: see
`test_duplicate_keys_take_the_last_object`.
"""

import ast
from collections.abc import Mapping
from typing import Final

from hypothesis import strategies as st

Body = st.SearchStrategy[bytes]

LEAVES: Final = (
    *(b"null", b"true", b"7", b"-0", b"1.0", b"1.5", b"1e2", b"1e400", b"123456789012345678901"),
    *(b'""', b'"a"', b'"a"', b'"b"', b'"1"', b'"2"', b'"500m"', b'"Always"'),
    *(
        b'"\\ud800"',
        b'"\\ud83d\\ude00"',
        b'"\\ude00\\ud83d"',
        b'"\\u0000"',
        b'"\\/"',
        '"é"'.encode(),
    ),
    *(b'"\xff"', b'"\xed\xa0\x80"', b'"\x00"', b"01", b".5", b"NaN", b"nul", b"'a'"),
    *(b"{}", b"[]", b"[null]", b"[[]]", b'{"a":null}', b'{"name":7}', b"[" * 60 + b"]" * 60),
)
_UNUSUAL: Final = st.sampled_from(LEAVES)
_NAMES: Final = st.sampled_from([b'"a"', b'"b"', b'"c"', b'"a\\u0062"', b'""', b"null"])
_SPACE: Final = st.sampled_from([b"", b"", b"", b" ", b"\n\t", b"\r"])


def _key(name: str) -> Body:
    """Draw a field's name, sometimes in other case or with letters that fold to ASCII."""
    likeness = {"s": "\u017f", "S": "\u017f", "k": "\u212a", "K": "\u212a"}
    other = "".join(likeness.get(letter, letter) for letter in name)
    escaped = f"\\u{ord(name[0]):04x}{name[1:]}"
    spellings = [
        name,
        name,
        name,
        name,
        name.lower(),
        name.upper(),
        name.swapcase(),
        other,
        escaped,
    ]
    return st.sampled_from([f'"{spelling}"'.encode() for spelling in spellings])


def _mostly(usual: Body) -> Body:
    return st.integers(0, 9).flatmap(lambda node_index: _UNUSUAL if node_index == 0 else usual)


def _object(fields: Mapping[str, Body]) -> Body:
    """Draw an object with some of the fields and unknown ones, in any order."""
    pairs = st.one_of(
        *(st.tuples(_key(name), _mostly(value)).map(b":".join) for name, value in fields.items()),
        st.tuples(_key("unknown"), _UNUSUAL).map(b":".join),
    )
    return st.tuples(st.lists(pairs, max_size=len(fields) + 1, unique_by=_field), _SPACE).map(
        lambda drawn: b"{" + (b"," + drawn[1]).join(drawn[0]) + drawn[1] + b"}"
    )


def _field(pair: bytes) -> str:
    """Return the field's name in a key-value pair; the extender takes the last of equal keys."""
    return str(ast.literal_eval(pair.partition(b":")[0].decode())).casefold()


def _list(item: Body) -> Body:
    return st.lists(_mostly(item), max_size=4).map(lambda items: b"[" + b",".join(items) + b"]")


def _map(keys: tuple[str, ...], value: Body) -> Body:
    pairs = st.tuples(st.sampled_from(keys), _mostly(value))
    return st.lists(pairs, max_size=3, unique_by=lambda pair: pair[0]).map(
        lambda drawn: b"{" + b",".join(b'"%b":%b' % (k.encode(), v) for k, v in drawn) + b"}"
    )


_TEXT: Final = st.sampled_from([b'"a"', b'"b"', b'"p-1"'])
_QUANTITY: Final = st.sampled_from(
    [
        b'"1"',
        b'"2"',
        b"3",
        b'"500m"',
        b'"1.5"',
        b'"1e2"',
        b'"1Ki"',
        b'"-1"',
        b'" 1"',
        b'"0x1"',
        b"2.0",
    ]
)
_QUANTITIES: Final = _map(("nvidia.com/gpu", "nvidia.com/GPU", "cpu", "memory"), _QUANTITY)
_RESOURCES: Final = _object({"limits": _QUANTITIES, "requests": _QUANTITIES})
_CONTAINER: Final = _object({"resources": _RESOURCES, "restartPolicy": st.just(b'"Always"')})
_CLAIM: Final = _object({"name": _TEXT, "resourceClaimName": _TEXT})
_METADATA: Final = _object(
    {
        "name": _TEXT,
        "namespace": _TEXT,
        "uid": _TEXT,
        "annotations": _map(("idlegpu.io/gpu-memory", "idlegpu.io/strategy", "a"), _TEXT),
    }
)
_POD: Final = _object(
    {
        "metadata": _METADATA,
        "spec": _object(
            {
                "containers": _list(_CONTAINER),
                "initContainers": _list(_CONTAINER),
                "resourceClaims": _list(_CLAIM),
                "overhead": _QUANTITIES,
                "resources": _RESOURCES,
            }
        ),
        "status": _object({"nominatedNodeName": _TEXT, "resourceClaimStatuses": _list(_CLAIM)}),
    }
)
_NODE: Final = _object({"metadata": _METADATA})

args: Final = _object(
    {"Pod": _POD, "Nodes": _object({"items": _list(_NODE)}), "NodeNames": _list(_NAMES)}
)
"""Bodies similar to ExtenderArgs."""

_META_VICTIMS: Final = _object(
    {
        "Pods": _list(_object({"UID": _TEXT})),
        "NumPDBViolations": st.sampled_from([b"0", b"1", b"-1", b"9223372036854775808"]),
    }
)
_VICTIMS: Final = _object({"Pods": _list(_POD), "NumPDBViolations": st.sampled_from([b"0", b"2"])})
preemption: Final = _object(
    {
        "Pod": _POD,
        "NodeNameToMetaVictims": _map(("a", "B", "b"), _META_VICTIMS),
        "NodeNameToVictims": _map(("a", "B", "b"), _VICTIMS),
    }
)
"""Bodies similar to ExtenderPreemptionArgs."""

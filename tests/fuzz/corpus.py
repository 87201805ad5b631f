"""Initial bodies: real messages, and variants that once caused failures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent.report.contract import (
    PATH,
    UPGRADE,
    Farewell,
    Holders,
    Layout,
    LayoutDevice,
    Update,
    frame,
)
from extender.effects.peer_link import encode_message, encode_receipt
from extender.placement.request_log import AnsweredRequest
from extender.sources.agents.states import _ROWS
from testkit.builders import NOW
from testkit.hostile_objects import (
    CLAIM_OBJECT,
    NODE_OBJECT,
    POD_OBJECT,
    REVIEW_OBJECT,
    SLICE_OBJECT,
)
from testkit.webhook_requests import meta, names_request, objects_request, pod

GOLDEN: Final = Path(__file__).parents[1] / "contract" / "golden"
LENGTH_BYTES: Final = 4
UPDATES_END: Final = b"\n--\n"

OBJECTS: Final = {
    "nodes": NODE_OBJECT,
    "pods": POD_OBJECT,
    "resourceclaims": CLAIM_OBJECT,
    "resourceslices": SLICE_OBJECT,
}

NESTED: Final = b"[" * 3000
ODD: Final = (b"", b"null", b"[]", b"{}", b"\xff\xfe", b"\x00", NESTED, b'{"a":' * 1500, b"1e400")
"""Bodies for every target."""


def corpus() -> Mapping[str, Sequence[bytes]]:
    """Return the bodies of each target."""
    by_target = {
        **{verb: _requests(verb) for verb in ("filter", "prioritize", "preempt")},
        "admission": [_json(REVIEW_OBJECT), *_with_odd_fields(REVIEW_OBJECT)],
        "agent-updates": _updates(),
        "agent-connection": _connections(),
        "peers": _messages(),
        "settings": _settings(),
        "prometheus": _answers(),
        **{f"watch-{kind}": _events(document) for kind, document in OBJECTS.items()},
        **{f"list-{kind}": _pages(document) for kind, document in OBJECTS.items()},
    }
    return {name: [*bodies, *ODD] for name, bodies in by_target.items()}


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _requests(verb: str) -> list[bytes]:
    golden = [path.read_bytes() for path in sorted(GOLDEN.glob(f"{verb}-*.json"))]
    if verb == "preempt":
        requested: list[object] = [{"Pod": pod(), **meta("busy")}]
    else:
        nodes = ("idle", "busy", "gpu-node-0", "unknown")
        requested = [names_request(*nodes), objects_request(*nodes)]
        requested += [
            names_request(*nodes, requester=pod(gpus=2, strategy="pack", gpu_memory="20Gi"))
        ]
    made = [_json(request) for request in requested]
    odd = [body.replace(b'"main"', b"[" * 200 + b"]" * 200) for body in made]
    return [*made, *odd, *(body.swapcase() for body in made), *golden]


def _with_odd_fields(document: Mapping[str, Any]) -> list[bytes]:
    body = _json(document)
    return [
        body.replace(b'"uid":"', b'"uid":["a",{}],"u":"', 1),
        body.replace(b'"containers":[', b'"containers":[[],null,7,', 1),
        body.replace(b'"name":"', b'"name":{"a":[]},"n":"'),
    ]


def _updates() -> list[bytes]:
    parts = tuple(LayoutDevice(uuid=f"GPU-{at}", index=at, model="NVIDIA H100") for at in range(2))
    values = np.arange(2.0 * len(_ROWS)).astype("<f8")
    first = Update(
        node="node",
        at=1.0,
        sent_at=2.0,
        is_news=True,
        layout=Layout(driver_version="580", devices=parts, rows=_ROWS),
        holders=Holders(pods=((("ns", "pod", "uid"),), None)),
        values=values.tobytes(),
        shares=((0, "uid", 1 << 30),),
    )
    later = Update(node="node", at=3.0, sent_at=3.0, values=np.full_like(values, np.nan).tobytes())
    made = [frame(update)[LENGTH_BYTES:] for update in (first, later)]
    deep = b"\x82\xa7version\x01\xa5extra" + b"\x91" * 3000 + b"\xc0"
    farewell = frame(Farewell(reason="full"))[LENGTH_BYTES:]
    return [UPDATES_END.join([*made, made[1]]), made[0], deep, farewell]


def _connections() -> list[bytes]:
    """Return requests of agents, each with the updates that follow it."""
    *updates, farewell = (
        len(content).to_bytes(LENGTH_BYTES, "big") + content for content in _updates()[1:]
    )
    head = (
        f"GET {PATH} HTTP/1.1\r\nHost: it\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n"
        "Authorization: Bearer the-token\r\n\r\n"
    ).encode()
    first, deep = updates
    return [
        head,
        head + first * 3,
        head + first * 40,
        head + deep,
        head + first + farewell,
        head + b"\xff\xff\xff\xff" + first,
        head + first[:-9],
        head.replace(b"the-token", b"another") + first,
        head.replace(b"GET", b"POST"),
        head.replace(b"Upgrade: ", b"X: " + b"x" * 70_000),
        head.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n") + first,
        head.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n") + first,
        first,
        first + head,
    ]


def _messages() -> list[bytes]:
    request = AnsweredRequest(
        verb="filter",
        uid="uid",
        key="ns/pod",
        at=1.0,
        choices=3,
        is_lost=False,
        node="idle",
        resources=(("nvidia.com/gpu", 2),),
        memory_bytes=1 << 34,
    )
    sent = encode_message("a", [request] * 3, to="b", gap_at=1.0, mark=2.0, now=3.0, faults=["x"])
    return [sent, encode_receipt("a", 1.0), sent.replace(b"3.0", b"-1e308")]


def _settings() -> list[bytes]:
    return [
        b"listen: 127.0.0.1:0\ngpu_resources: [nvidia.com/gpu]\n",
        b"prometheus:\n  url: http://p:9090\n  metrics: {a: {signal: x}}\n",
        b"decision:\n  strategy: pack\n  idle: {utilization_percent: 30}\n",
        b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        b"a: &a {<<: *a}\n",
        b"? [a]\n: b\n",
        b"!!python/object:os.system {}\n",
        b"x: 2026-99-99\ny: 0x_\nz: .inf\nw: 1:99:99\n",
        b"- a\n---\n- b\n",
    ]


def _answers() -> list[bytes]:
    labels = {"__name__": "up", "UUID": "GPU-1", "Hostname": "gpu-1", "gpu": "0", "modelName": "H"}
    vector: list[dict[str, Any]] = [
        {"metric": labels | {"UUID": f"GPU-{at}"}, "value": [1.5, value]}
        for at, value in enumerate(("1", "NaN", "+Inf", "0.5"))
    ]
    data = {"resultType": "vector", "result": vector}
    names = {"status": "success", "data": ["DCGM_FI_DEV_GPU_UTIL", "up"]}
    answer = _json({"status": "success", "data": data})
    use = "DCGM_FI_DEV_GPU_UTIL"
    of_pods = {"exported_namespace": "team", "exported_pod": "pod", "DCGM_FI_DRIVER_VERSION": "5"}
    rows = [
        {"metric": row["metric"] | of_pods | {"__name__": use}, "value": [1.5, "60"]}
        for row in vector[:2]
    ]
    steps = [[NOW + 60.0 * at, str(at)] for at in range(-9, 2)]
    past = [{"metric": row["metric"], "values": steps} for row in rows]
    matrix = _json({"status": "success", "data": {"resultType": "matrix", "result": past}})
    full = _json({"status": "success", "data": {"resultType": "vector", "result": rows}})
    error = {"status": "error", "errorType": "bad_data", "error": "\x9b31m"}
    return [
        answer,
        full,
        full.replace(b'"60"', b'"-1"'),
        full.replace(b'"gpu":"0"', b'"gpu":"' + b"9" * 5000 + b'"'),
        full.replace(b"[1.5,", b"[" + b"9" * 400 + b","),
        matrix,
        matrix.replace(b"[1800000000.0,", b"[1e308,"),
        matrix.replace(b"[1800000000.0,", b"[" + b"9" * 400 + b","),
        matrix.replace(b'"values":[[', b'"values":[[[],'),
        _json(names),
        _json(error),
        answer.replace(b'"H"', b"[" * 200 + b"]" * 200),
        answer.replace(b'[1.5,"1"]', b'[1e400,{"a":1}]'),
        answer.replace(b'"metric":{', b'"metric":[{', 1),
    ]


def _events(document: Mapping[str, Any]) -> list[bytes]:
    events = [
        _json({"type": kind, "object": document}) for kind in ("ADDED", "MODIFIED", "DELETED")
    ]
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}
    odd = [_json({"type": "ADDED", "object": json.loads(body)}) for body in _with_odd(document)]
    strange = [_json({"type": {"kind": []}}), events[0].replace(b'"cpu":"1', b'"cpu":"\xd8')]
    huge = events[0].replace(b'"cpu":"', b'"cpu":"1E","x":"')
    return [b"\n".join([*events, _json(bookmark)]), *events, *odd, _json(gone), *strange, huge]


def _pages(document: Mapping[str, Any]) -> list[bytes]:
    def page(*items: Mapping[str, Any], token: str = "") -> bytes:
        metadata = {"resourceVersion": "7"} | ({"continue": token} if token else {})
        return _json({"kind": "XList", "metadata": metadata, "items": items})

    odd = [json.loads(body) for body in _with_odd(document)]
    whole = page(document)
    return [
        page(),
        whole,
        page(document, document, *odd),
        page(document, token="more") + b"\n" + page(*odd),
        page(document, token="more"),
        page(document, token="more") + b'\n{"kind":"Status","code":410}',
        whole.replace(b'"items":[', b'"items":[null,7,[],"a",'),
        whole.replace(b'"items":[', b'"items":[{"\xdb":1},'),
        whole.replace(b'"items":[', b'"items":[{"a":' + b"[" * 3000 + b"]" * 3000 + b"},"),
    ]


def _with_odd(document: Mapping[str, Any]) -> list[bytes]:
    return [
        _json({**document, "spec": {**document.get("spec", {}), "resourceClaims": [{"name": []}]}}),
        _json({**document, "metadata": {**document["metadata"], "labels": {"a": ["b"]}}}),
        _json({**document, "status": [document.get("status")]}),
    ]

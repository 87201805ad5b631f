"""Questions over HTTP as kube-scheduler asks them."""

import json
from typing import Any

from testkit.served import Client

VERBS = ("filter", "prioritize", "preempt")


async def ask(client: Client, verb: str, question: object) -> Any:
    response = await client.post(f"/{verb}", data=json.dumps(question))
    assert response.status == 200
    assert response.content_type == "application/json"
    return await response.json()


def scores_of(answer: list[dict[str, Any]]) -> dict[str, int]:
    return {entry["Host"]: entry["Score"] for entry in answer}


def meta(*nodes: str, uids: tuple[str, ...] = ("uid-holder-0",)) -> dict[str, object]:
    victims = {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": 1}
    return {"NodeNameToMetaVictims": dict.fromkeys(nodes, victims)}

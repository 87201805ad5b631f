"""Write the CA certificates to the `caBundle` of a MutatingWebhookConfiguration."""

import base64
from typing import Final

from extender.core.untyped import mapping_of, objects_of, text_of
from extender.kube.client import KubeClient
from extender.server.certificates.storing import LIMIT_BYTES, TIMEOUT_SECONDS

PATH: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
RESOURCE: Final = "mutatingwebhookconfigurations.admissionregistration.k8s.io"


async def write_ca_bundle(client: KubeClient, name: str, bundle: bytes) -> bool:
    """Set the `caBundle` of every webhook in a MutatingWebhookConfiguration; keep its other fields.

    Args:
        client: client for the API server.
        name: name of the existing object.
        bundle: CA certificates in PEM.

    Returns:
        Whether the object was changed.

    Raises:
        KubeError: the API server cannot be reached, refuses, or has no such object.
    """
    found = await client.get(
        f"{PATH}/{name}",
        {},
        action=f"get {RESOURCE}",
        timeout_seconds=TIMEOUT_SECONDS,
        limit_bytes=LIMIT_BYTES,
    )
    wanted = base64.b64encode(bundle).decode()
    webhooks = objects_of(found.get("webhooks"))
    configs = [mapping_of(webhook.get("clientConfig")) for webhook in webhooks]
    if all(config.get("caBundle") == wanted for config in configs):
        return False
    # A merge patch replaces a list, so send the whole list as read. resourceVersion makes the API
    # server reject the patch if another client changed the object since.
    version = text_of(mapping_of(found.get("metadata")).get("resourceVersion"))
    change = {
        "metadata": {"resourceVersion": version},
        "webhooks": [
            {**webhook, "clientConfig": {**config, "caBundle": wanted}}
            for webhook, config in zip(webhooks, configs, strict=True)
        ],
    }
    await client.send(
        "PATCH",
        f"{PATH}/{name}",
        change,
        action=f"patch {RESOURCE}",
        timeout_seconds=TIMEOUT_SECONDS,
    )
    return True

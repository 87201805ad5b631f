"""Tells the API server which CAs a webhook's certificate may be of: `caBundle`."""

import base64
from typing import Final

from extender.certs.storing import LIMIT_BYTES, TIMEOUT_SECONDS
from extender.core.untyped import mapping_of, objects_of, text_of
from extender.kube import KubeClient

PATH: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
RESOURCE: Final = "mutatingwebhookconfigurations.admissionregistration.k8s.io"


async def write_ca_bundle(client: KubeClient, name: str, bundle: bytes) -> bool:
    """Have every webhook of a MutatingWebhookConfiguration believe these CAs; leave the rest of it.

    Args:
        client: the API server.
        name: of the object, which is there.
        bundle: certificates in PEM.

    Returns:
        Whether that was news to it.

    Raises:
        KubeError: the API server could not be asked, refused, or has no such object.
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
    # The list as it was read, whole, for a merge patch replaces it; another's change since then is
    # a conflict.
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

"""Propose the GPUs of a task from its description, its manifest and similar pods."""

from collections.abc import Callable, Sequence

from extender.answers.holding import Size
from extender.cli.manifests import Object, nested_pods, owner_of, pods_of
from extender.cli.transports import ClientError, Failure
from extender.core.sizing import Measured, Proposal, propose, texts_in

_Measure = Callable[[Object, str | None], Size]
"""Returns the measured use of pods like a pod, or of an owner's pods (`Deployment chat`)."""


def propose_for(
    measure: _Measure,
    *,
    documents: Sequence[object] = (),
    text: str = "",
    command: str = "",
    image: str = "",
    owner: str = "",
    namespace: str = "default",
    on_unreachable: Callable[[ClientError], None] | None = None,
) -> Proposal:
    """Propose the GPUs of a task.

    Args:
        measure: queries the extender for measurements.
        documents: objects of the task's manifest.
        text: description of the task.
        command: its command, if no manifest has it.
        image: its image, to find similar pods.
        owner: controller of similar pods as KIND/NAME.
        namespace: namespace of similar pods, if no manifest states it.
        on_unreachable: receives the error if the extender cannot be reached; the proposal then uses
            the other inputs. None to raise it.

    Raises:
        ClientError: `owner` is malformed, or the extender does not answer.
    """
    found = [(pod, document) for document in documents for pod in pods_of(document)]
    found = found or [(pod, document) for document in documents for pod in nested_pods(document)]
    pod: Object = {"spec": {"containers": [{"image": image} if image else {}]}}
    if found:
        pod, document = found[0]
        owner = owner or owner_of(document)
    pod["metadata"] = {"namespace": namespace} | pod.get("metadata", {})
    measured = None
    if found or image or owner:
        try:
            measured = _measured(measure, pod, owner)
        except ClientError as error:
            if on_unreachable is None or error.failure is not Failure.UNREACHABLE:
                raise
            on_unreachable(error)
    return propose(text, " ".join((command, *texts_in(documents))), measured)


def _measured(measure: _Measure, pod: Object, owner: str) -> Measured | None:
    kind, _, name = owner.partition("/")
    if owner and not (kind and name):
        raise ClientError(
            f"owner {owner!r}: must be KIND/NAME, such as Deployment/chat", Failure.BAD_REQUEST
        )
    used = measure(pod, f"{kind} {name}" if owner else None).measured
    if used is None:
        return None
    return Measured(by=used.by, pods=used.pods, memory_bytes=used.memory_bytes)

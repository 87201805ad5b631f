"""Propose annotations for new pods that specify no memory or models, as `idlegpu size` does."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from extender.core.nodes.pod_groups import Kin, kin_of, similarity_of
from extender.core.request.annotations import PROPOSAL, Annotation
from extender.core.request.request import GpuRequest
from extender.core.sizing import USABLE, Certainty, Measured, Proposal, propose, texts_in
from extender.core.untyped import mapping_of
from extender.runtime.log_throttle import LogThrottle

logger = logging.getLogger(__name__)

_MIB: Final = 1 << 20
_MAX_TEXT: Final = 8192
"""Maximum number of characters of the containers' texts that are searched for options and words: a
few milliseconds at most, and a tenth of a millisecond for most pods."""
_MAX_REASON: Final = 500
_SIMILAR: Final = frozenset({"owner", "images"})
"""Similarity that is enough to write an annotation; equal requests alone are not."""

_MeasuredLike = Callable[[Kin], tuple[str, list[int]] | None]
"""Returns the memory of the most similar pods in bytes, and the key that they share."""


class Proposals:
    """Propose annotations for new GPU pods; a pod's own annotations always count.

    Memory is proposed only where similar pods were measured, and never more than the largest card
    can give: a guess must not keep a pod from a node. Models are only a preference, so an estimate
    from the size of the model is enough.

    Args:
        measured_like: looks up what similar pods were measured to use.
        largest_card: returns the memory of the cluster's largest card in bytes, 0 if unknown.
    """

    def __init__(self, measured_like: _MeasuredLike, largest_card: Callable[[], int]) -> None:
        self._measured_like = measured_like
        self._largest_card = largest_card
        self._throttle = LogThrottle()

    def annotations_for(
        self, pod: Mapping[str, object], namespace: str, request: GpuRequest
    ) -> dict[str, str]:
        """Return the annotations to add to a new pod; {} for none, and after any fault.

        Args:
            pod: the Pod object.
            namespace: its namespace, which the object of a new pod may lack.
            request: its GPU request.
        """
        try:
            return self._propose(pod, namespace, request)
        except Exception as error:
            unlogged = self._throttle.due("proposal", type(error).__name__)
            if unlogged is not None:
                logger.exception("no proposal", extra={"also_unlogged": unlogged})
            return {}

    def _propose(
        self, pod: Mapping[str, object], namespace: str, request: GpuRequest
    ) -> dict[str, str]:
        metadata = mapping_of(pod.get("metadata"))
        own = mapping_of(metadata.get("annotations"))
        states_memory = Annotation.GPU_MEMORY in own or bool(request.memory_source)
        states_models = bool({Annotation.PREFER_MODELS, Annotation.REQUIRE_MODELS} & own.keys())
        if states_memory and states_models:
            return {}
        measured = self._measured(kin_of({**pod, "metadata": {**metadata, "namespace": namespace}}))
        text = " ".join(texts_in(mapping_of(pod.get("spec")).get("containers")))[:_MAX_TEXT]
        found = propose("", text, measured, gpus=request.count)
        proposed: dict[str, str] = {}
        if measured is not None and not states_memory:
            proposed[Annotation.GPU_MEMORY.value] = f"{self._memory(found, measured) // _MIB}Mi"
        if found.models and found.certainty is not Certainty.GUESSED and not states_models:
            proposed[Annotation.PREFER_MODELS.value] = ",".join(found.models)
        if not proposed:
            return {}
        reason = f"{found.certainty.value}: {'; '.join(found.because)}"[:_MAX_REASON]
        return proposed | {PROPOSAL: reason}

    def _measured(self, kin: Kin) -> Measured | None:
        found = self._measured_like(tuple(key for key in kin if similarity_of(key) in _SIMILAR))
        if found is None:
            return None
        key, used = found
        return Measured(by=similarity_of(key), pods=len(used), memory_bytes=max(used))

    def _memory(self, found: Proposal, measured: Measured) -> int:
        """Return the memory to propose, in bytes: at most what the largest card can give."""
        most = max(measured.memory_bytes + _MIB, int(self._largest_card() * USABLE))
        return min(found.memory_bytes or most, most)

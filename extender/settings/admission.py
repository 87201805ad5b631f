"""Settings of the admission webhook, which assigns GPU pods to a scheduler."""

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from extender.settings.peers import ADDRESS_FORM, split_address
from extender.settings.section import Section, ValueForm
from extender.settings.tls import Tls

_NAME: Final = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
_NAMESPACE: Final = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$"


class Admission(Section):
    """Settings of the admission webhook, which assigns new GPU pods to a scheduler."""

    listen: Annotated[str, ValueForm(ADDRESS_FORM)] = Field(
        default="",
        description="host:port of the admission webhook, over TLS; in a pod 0.0.0.0:8890 or "
        "[::]:8890; empty: no webhook",
    )
    cert_file: Path | None = Field(
        default=None,
        description="certificate of admission.listen, with its intermediate certificates; empty: "
        "that of tls",
    )
    key_file: Path | None = Field(default=None, description="key of admission.cert_file")
    scheduler_name: str = Field(
        default="idlegpu-scheduler",
        pattern=_NAME,
        description="spec.schedulerName that the webhook gives to GPU pods with default-scheduler",
    )
    taint_key: str = Field(
        default="idlegpu.io/scheduler",
        max_length=317,
        description="key of the taint that keeps other pods off that scheduler's nodes, with the "
        "scheduler's name as value: GPU pods get a toleration for it; empty: no toleration",
    )
    proposals: bool = Field(
        default=False,
        description="annotate new GPU pods that state neither memory nor models: gpu-memory by the "
        "measured use of similar pods, prefer-models by the size of the model",
    )
    lease_name: str = Field(
        default="idlegpu-scheduler",
        pattern=_NAME,
        description="name of that scheduler's Lease; pods are assigned to the scheduler only "
        "while the Lease is renewed",
    )
    lease_namespace: str = Field(
        default="",
        pattern=_NAMESPACE,
        description="namespace of the Lease; empty: the pod's own, or idlegpu if a kubeconfig is "
        "set",
    )

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: str) -> str:
        if listen:
            split_address(listen)
        return listen

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("admission.cert_file and admission.key_file belong together: set both")
        if self.proposals and not self.listen:
            raise ValueError("admission.proposals needs the webhook: set admission.listen, too")
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on, or ("", 0) without a webhook."""
        return split_address(self.listen) if self.listen else ("", 0)

    def files(self, tls: Tls) -> tuple[Path, Path]:
        """Return the paths of certificate and key.

        Raises:
            ValueError: neither admission nor tls sets them; the API server requires TLS.
        """
        cert, key = (
            (self.cert_file, self.key_file) if self.cert_file else (tls.cert_file, tls.key_file)
        )
        if cert is None or key is None:
            raise ValueError(
                f"admission.listen ({self.listen}) needs a certificate, because the "
                "API server calls it over TLS only: set admission.cert_file and "
                "admission.key_file, or tls.*"
            )
        return cert, key

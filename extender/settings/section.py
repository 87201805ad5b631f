"""What the sections of the settings share: their base, and types that know their unit."""

import contextlib
import re
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from extender.core.quantity import parse_bytes

MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

NOT_A_NUMBER: Final = "not_a_number"
"""Type of the error for a number that cannot be read; the message is made from the setting."""

_PERCENT: Final = re.compile(r"(?P<number>[0-9.]+)\s*%")


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a setting whose name does not say it.

    Attributes:
        name: as people write it: `percent`, `bytes`.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Form:
    """What a value must look like, where types and bounds do not say it.

    Attributes:
        text: for people.
    """

    text: str


class Section(BaseModel):
    """One part of the settings file: unknown names are errors, values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_empty(cls, values: object) -> object:
        """A section whose settings are all commented out is null in YAML: it sets nothing."""
        return {} if values is None else values

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean_as_number(cls, value: object, info: ValidationInfo) -> object:
        """YAML reads `yes` and `on` as true, which Python would take for 1."""
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and field.annotation in (int, float):
            raise PydanticCustomError(NOT_A_NUMBER, "a boolean is no number")
        return value


def _strip_percent(value: object) -> object:
    """Take the sign off `30%`."""
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    return match["number"] if match else value


def _read_bytes(value: object) -> object:
    """Return the bytes that a Kubernetes quantity (`20Gi`) says."""
    if not isinstance(value, str | int | float):
        raise PydanticCustomError(NOT_A_NUMBER, "no quantity")
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise PydanticCustomError(NOT_A_NUMBER, "no quantity") from error


def _in_any_case(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Names of choices may be written in any case; a bad one is reported as it was written."""
    with contextlib.suppress(ValidationError):
        return check(value.lower() if isinstance(value, str) else value)
    return check(value)


Percent = Annotated[float, BeforeValidator(_strip_percent), Field(ge=1, le=100), Unit("percent")]
"""A percentage. Below 1 is refused: 0.3 is most likely meant as a ratio."""

Share = Annotated[float, Field(ge=0, le=1), Unit("ratio")]
"""A part of a whole, 0 to 1."""

Quantity = Annotated[int, BeforeValidator(_read_bytes), Unit("bytes")]
"""Bytes, written as a Kubernetes quantity: `20Gi`."""

AnyCase = WrapValidator(_in_any_case)
"""Marks a choice that may be written in any case."""

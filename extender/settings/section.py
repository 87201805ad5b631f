"""Base class of the sections of settings, and types of values with units."""

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

from extender.core.quantity import parse_whole

_NOT_A_NUMBER: Final = "not_a_number"
"""Error type for a number that cannot be parsed; the message is made from the setting."""

LABEL: Final = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
"""A label's name."""

_PERCENT: Final = re.compile(r"(?P<number>[0-9.]+)\s*%")


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit of a setting whose name does not end with the unit.

    Attributes:
        name: the unit: `percent`, `bytes`.
    """

    name: str


@dataclass(frozen=True, slots=True)
class ValueForm:
    """Format of a value that type and bounds do not describe.

    Attributes:
        text: description for messages.
    """

    text: str


class Section(BaseModel):
    """One section of the settings file; unknown names are errors, and values are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_empty(cls, values: object) -> object:
        """Accept null as an empty section: YAML reads a section of comments only as null."""
        return {} if values is None else values

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean_as_number(cls, value: object, info: ValidationInfo) -> object:
        """Reject booleans for numbers: YAML reads `yes` as true, which Python converts to 1."""
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and field.annotation in (int, float):
            raise PydanticCustomError(_NOT_A_NUMBER, "a boolean is not a number")
        return value


def _strip_percent(value: object) -> object:
    """Remove the sign from `30%`."""
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    return match["number"] if match else value


def _read_bytes(value: object) -> object:
    """Convert a Kubernetes quantity such as `20Gi` to bytes."""
    if not isinstance(value, str | int | float):
        raise PydanticCustomError(_NOT_A_NUMBER, "no quantity")
    try:
        return parse_whole(value)
    except ValueError as error:
        raise PydanticCustomError(_NOT_A_NUMBER, "no quantity") from error


def _in_any_case(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Accept a choice in any case, and report an invalid one as it was written."""
    with contextlib.suppress(ValidationError):
        return check(value.lower() if isinstance(value, str) else value)
    return check(value)


Percent = Annotated[float, BeforeValidator(_strip_percent), Field(ge=1, le=100), Unit("percent")]
"""A percentage. Values below 1 are rejected, because 0.3 is probably meant as a ratio."""

Share = Annotated[float, Field(ge=0, le=1), Unit("ratio")]
"""A ratio, 0 to 1."""

Quantity = Annotated[int, BeforeValidator(_read_bytes), Unit("bytes")]
"""A number of bytes, written as a Kubernetes quantity: `20Gi`."""

AnyCase = WrapValidator(_in_any_case)
"""Marks a choice that is accepted in any case."""


def check_label(label: str) -> str:
    """Return a label's name unchanged.

    Raises:
        ValueError: the text is not a label's name.
    """
    if not LABEL.fullmatch(label):
        raise ValueError(f"{label!r} is not allowed: must be a label's name, such as pool")
    return label

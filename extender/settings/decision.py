"""Settings that decide placements; each section converts to a frozen value of the core."""

from types import MappingProxyType
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from extender.core import policy
from extender.core.devices.readings import LARGEST_XID
from extender.core.policy import WARN_CELSIUS, HealthAction, HealthSign, Policy
from extender.core.quantity import MIB, TIB
from extender.settings.section import AnyCase, Percent, Quantity, Section, Share, Unit, ValueForm

DEFAULT: Final = Policy()
"""The core defines the default values."""

_Action = Annotated[HealthAction, AnyCase]
_Xid = Annotated[int, Field(ge=0, le=LARGEST_XID)]
_Celsius = Annotated[float, Field(ge=30, le=150)]


class ThresholdSettings(Section):
    """Limits of activity and memory below which a GPU is idle."""

    utilization: Percent = Field(
        default=DEFAULT.thresholds.utilization * 100,
        description="a GPU is idle if it is busy for less than this share of time, and uses less "
        "memory than thresholds.memory",
    )
    memory: Percent = Field(
        default=DEFAULT.thresholds.memory * 100,
        description="a GPU is idle only if it uses less than this share of its memory",
    )

    def value(self) -> policy.Thresholds:
        """Convert to the core's thresholds, as ratios."""
        return policy.Thresholds(utilization=self.utilization / 100, memory=self.memory / 100)


class FreshnessSettings(Section):
    """Age at which a reading becomes stale."""

    max_age_seconds: float = Field(
        default=DEFAULT.freshness.max_age_seconds,
        ge=1,
        le=3600,
        description="age up to which a value is fresh, counted from its measurement",
    )

    def value(self) -> policy.Freshness:
        """Convert to the core's freshness limits; a fresh device is never forgotten."""
        return policy.Freshness(
            max_age_seconds=self.max_age_seconds,
            forget_seconds=max(DEFAULT.freshness.forget_seconds, self.max_age_seconds),
        )


class ForeignSettings(Section):
    """Limits that detect foreign use: activity or memory on a GPU that no pod holds."""

    memory: Annotated[Quantity, Field(ge=MIB, le=TIB)] = Field(
        default=DEFAULT.foreign.memory_bytes,
        description="a GPU that no pod holds is in foreign use if more memory than this is in use",
    )
    utilization: Percent = Field(
        default=DEFAULT.foreign.utilization * 100,
        description="a GPU that no pod holds is in foreign use if its activity is above this and "
        "a second signal, such as power, agrees",
    )

    def value(self) -> policy.Foreign:
        """Convert to the core's limits, as ratios and bytes."""
        return policy.Foreign(memory_bytes=self.memory, utilization=self.utilization / 100)


class AssumedSettings(Section):
    """Estimated load of pods that the readings do not show yet."""

    utilization: Percent = Field(
        default=DEFAULT.assumed.utilization * 100,
        description="estimated activity that a new pod adds to a shared GPU",
    )
    tentative_seconds: float = Field(
        default=DEFAULT.assumed.tentative_seconds,
        ge=1,
        le=600,
        description="a pod that is not bound counts on its node for this long after the answer",
    )
    warm_up_seconds: float = Field(
        default=DEFAULT.assumed.warm_up_seconds,
        ge=1,  # the API server stores whole seconds: the real start may be up to a second later
        le=3600,
        description="a pod's load is estimated until readings arrive that were measured this "
        "long after its start",
    )
    loading_seconds: float = Field(
        default=DEFAULT.assumed.loading_seconds,
        ge=0,
        le=86_400,
        description="a pod on a shared GPU counts with its estimated load for this long after "
        "the last start of its containers if the GPU shows less activity, because the pod may "
        "still load data",
    )

    def value(self) -> policy.Assumed:
        """Convert to the core's estimates, as ratios and seconds."""
        return policy.Assumed(
            utilization=self.utilization / 100,
            tentative_seconds=self.tentative_seconds,
            warm_up_seconds=self.warm_up_seconds,
            loading_seconds=self.loading_seconds,
        )


class EarlyFailureSettings(Section):
    """Penalty on a node's certainty for pods that fail soon after their start."""

    weight: Share = Field(
        default=DEFAULT.early_failures.weight,
        description="share of its certainty that a node loses if pods fail there within a minute "
        "of their start. The loss halves every ten minutes. Pods of the first owner that fails "
        "count only if a device was the cause",
    )

    def value(self) -> policy.EarlyFailures:
        """Convert to the core's parameters of early failures."""
        return policy.EarlyFailures(weight=self.weight)


class HealthSettings(Section):
    """Action for each health problem of a GPU, and limits that differ between clusters."""

    actions: Annotated[dict[HealthSign, _Action], ValueForm("a map of sign to action")] = Field(
        default={},
        description="action by sign of ill health, which overrides the default action: ignore, "
        "penalty, exclude, exclude-node or exclude-multi-gpu, e.g. {dcgm_warn: ignore}; "
        "docs/settings.md lists the signs",
    )
    xid: Annotated[
        dict[_Xid, _Action], ValueForm(f"a map of XID (0 to {LARGEST_XID}) to action")
    ] = Field(
        default={},
        description="action by XID number, which overrides the built-in table, e.g. {94: "
        "exclude, 109: penalty}",
    )
    xid_seconds: float = Field(
        default=DEFAULT.health.xid_seconds,
        ge=1,
        le=604_800,
        description="time for which an XID counts after it was first seen; telemetry shows the "
        "last XID forever",
    )
    link_replays_per_minute: float = Field(
        default=DEFAULT.health.link_replays_per_minute,
        ge=0.1,
        le=1_000_000,
        description="packets resent over PCIe or NVLink above which the sign link_replays "
        "applies. 8 is DCGM's limit for PCIe 3.0 x16; set 16 if all GPUs have 4.0 x16, 31 for "
        "5.0 x16",
    )
    temperature_high_celsius: _Celsius = Field(
        default=DEFAULT.health.temperature_high_celsius,
        description="temperature at which a GPU loses the most score; the loss starts 10 degrees "
        "below. If the node agent reports the temperature at which clocks slow down, that "
        "applies instead",
    )
    memory_temperature_high_celsius: _Celsius = Field(
        default=DEFAULT.health.memory_temperature_high_celsius,
        description="temperature of the memory (HBM) at which a GPU loses the most score; the "
        "loss starts 10 degrees below",
    )

    def value(self) -> policy.Health:
        """Convert to the core's health rules."""
        actions: dict[str, HealthAction] = {str(sign): act for sign, act in self.actions.items()}
        return policy.Health(
            **actions,  # type: ignore[arg-type] # each sign is the name of an action
            xid=MappingProxyType(dict(self.xid)),
            xid_seconds=self.xid_seconds,
            link_replays_per_minute=self.link_replays_per_minute,
            temperature_warn_celsius=self.temperature_high_celsius - WARN_CELSIUS,
            temperature_high_celsius=self.temperature_high_celsius,
            memory_temperature_warn_celsius=self.memory_temperature_high_celsius - WARN_CELSIUS,
            memory_temperature_high_celsius=self.memory_temperature_high_celsius,
        )


_Weight = Annotated[float, Field(ge=0, le=1000), Unit("weight")]


class WeightSettings(Section):
    """Weights of the smaller terms of the score; only their ratios matter."""

    utilization: _Weight = Field(
        default=DEFAULT.weights.utilization,
        description="weight of low mean activity. The weights order nodes with shared GPUs, and "
        "nodes with whole GPUs of equal fit; only their ratios matter",
    )
    memory: _Weight = Field(default=DEFAULT.weights.memory, description="weight of free memory")
    sharing: _Weight = Field(
        default=DEFAULT.weights.sharing, description="weight of few pods on shared GPUs"
    )
    bursts: _Weight = Field(
        default=DEFAULT.weights.bursts,
        description="weight of low load expected in the next hour, by the last four hours",
    )
    stress: _Weight = Field(
        default=DEFAULT.weights.stress, description="weight of cool GPUs without throttling"
    )

    @model_validator(mode="after")
    def _check_sum(self) -> Self:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise ValueError("one of the weights must be more than 0")
        return self

    def value(self) -> policy.Weights:
        """Convert to the core's weights."""
        return policy.Weights(**{name: getattr(self, name) for name in type(self).model_fields})


class LoadFilterSettings(Section):
    """Settings for rejecting nodes because of load."""

    enabled: bool = Field(
        default=DEFAULT.load_filter.is_enabled,
        description="refuse nodes that are unlikely to give a pod idle GPUs while other nodes "
        "pass; false: load only orders nodes",
    )

    def value(self) -> policy.LoadFilter:
        """Convert to the core's load filter."""
        return policy.LoadFilter(is_enabled=self.enabled)

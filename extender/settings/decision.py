"""Settings that decide placements; each section converts to a frozen value of the core."""

from types import MappingProxyType
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from extender.core import policy
from extender.core.devices.readings import LARGEST_XID
from extender.core.policy import HealthAction, Policy
from extender.settings.section import (
    MIB,
    TIB,
    AnyCase,
    Percent,
    Quantity,
    Section,
    Share,
    Unit,
    ValueForm,
)

DEFAULT: Final = Policy()
"""The core defines the default values."""

Action = Annotated[HealthAction, AnyCase]
Xid = Annotated[int, Field(ge=0, le=LARGEST_XID)]
Rows = Annotated[int, Field(ge=1, le=100_000)]
Celsius = Annotated[float, Field(ge=30, le=150)]


class ThresholdSettings(Section):
    """Limits of activity and memory below which a GPU is idle."""

    utilization: Percent = Field(
        default=DEFAULT.thresholds.utilization * 100,
        description="a GPU is idle while it is busy for less than this share of time, and ...",
    )
    memory: Percent = Field(
        default=DEFAULT.thresholds.memory * 100,
        description="... uses less than this share of its memory",
    )

    def value(self) -> policy.Thresholds:
        """Convert to the core's thresholds, as ratios."""
        return policy.Thresholds(utilization=self.utilization / 100, memory=self.memory / 100)


class FreshnessSettings(Section):
    """Ages at which a reading becomes stale, neutral and forgotten."""

    max_age_seconds: float = Field(
        default=DEFAULT.freshness.max_age_seconds,
        ge=1,
        le=3600,
        description="age up to which a value is fresh, counted from its measurement",
    )
    fade_seconds: float = Field(
        default=DEFAULT.freshness.fade_seconds,
        ge=1,
        le=86_400,
        description="time after which a stale value has faded to neutral",
    )
    forget_seconds: float = Field(
        default=DEFAULT.freshness.forget_seconds,
        ge=10,
        le=604_800,
        description="time after which a device that telemetry no longer shows is dropped",
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.forget_seconds < self.max_age_seconds:
            raise ValueError(
                f"forget_seconds ({self.forget_seconds:g}) must be at least max_age_seconds "
                f"({self.max_age_seconds:g})"
            )
        return self

    def value(self) -> policy.Freshness:
        """Convert to the core's freshness limits."""
        return policy.Freshness(
            max_age_seconds=self.max_age_seconds,
            fade_seconds=self.fade_seconds,
            forget_seconds=self.forget_seconds,
        )


class ForeignSettings(Section):
    """Limits that detect foreign use: activity or memory on a GPU that no pod holds."""

    memory: Annotated[Quantity, Field(ge=MIB, le=TIB)] = Field(
        default=DEFAULT.foreign.memory_bytes,
        description="memory in use above this on a GPU that no pod holds is foreign use",
    )
    utilization: Percent = Field(
        default=DEFAULT.foreign.utilization * 100,
        description="activity above this on such a GPU is foreign use, too, if two signals "
        "agree; power is one of them",
    )
    readings: int = Field(
        default=DEFAULT.foreign.readings,
        ge=1,
        le=100,
        description="number of readings in a row that must agree, all measured after the last "
        "pod's end",
    )

    def value(self) -> policy.Foreign:
        """Convert to the core's limits, as ratios and bytes."""
        return policy.Foreign(
            memory_bytes=self.memory, utilization=self.utilization / 100, readings=self.readings
        )


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
        description="time after the answer during which a pod that is not bound counts",
    )
    warm_up_seconds: float = Field(
        default=DEFAULT.assumed.warm_up_seconds,
        ge=1,  # the API server keeps whole seconds: the real start may be so much later
        le=3600,
        description="a pod counts as assumed until readings measured this long after its start "
        "arrive",
    )
    loading_seconds: float = Field(
        default=DEFAULT.assumed.loading_seconds,
        ge=0,
        le=86_400,
        description="time after the last start of its containers during which a pod on a shared "
        "GPU counts with its estimated load if the GPU shows less activity: it may still be "
        "loading data",
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

    within_seconds: float = Field(
        default=DEFAULT.early_failures.within_seconds,
        ge=1,
        le=3600,
        description="a pod that fails within this time after its start lowers its node's certainty",
    )
    half_life_seconds: float = Field(
        default=DEFAULT.early_failures.half_life_seconds,
        ge=1,
        le=86_400,
        description="time after which such a failure counts half",
    )
    weight: Share = Field(
        default=DEFAULT.early_failures.weight,
        description="share of a node's certainty that fresh failures of one owner's pods remove; "
        "the first owner does not count unless a device was the cause",
    )

    def value(self) -> policy.EarlyFailures:
        """Convert to the core's parameters of early failures."""
        return policy.EarlyFailures(
            within_seconds=self.within_seconds,
            half_life_seconds=self.half_life_seconds,
            weight=self.weight,
        )


class HealthSettings(Section):
    """Action for each health problem of a GPU."""

    xid: Annotated[dict[Xid, Action], ValueForm(f"a map of XID (0 to {LARGEST_XID}) to action")] = (
        Field(
            default={},
            description="action by XID number, which overrides the built-in table; e.g. {94: "
            "exclude, 109: penalty}",
        )
    )
    unknown_xid: Action = Field(
        default=DEFAULT.health.unknown_xid, description="action for an XID that no table lists"
    )
    xid_seconds: float = Field(
        default=DEFAULT.health.xid_seconds,
        ge=1,
        le=604_800,
        description="time for which the last XID, which stays in telemetry forever, counts after "
        "it was first seen",
    )
    penalty: Share = Field(
        default=DEFAULT.health.penalty,
        description="share of its certainty that a GPU with the action `penalty` loses",
    )
    row_remap_failure: Action = Field(
        default=DEFAULT.health.row_remap_failure, description="remapping of a bad memory row failed"
    )
    row_remap_pending: Action = Field(
        default=DEFAULT.health.row_remap_pending,
        description="a remapped memory row waits for a reset",
    )
    double_bit_error: Action = Field(
        default=DEFAULT.health.double_bit_error,
        description="an uncorrectable memory error since the last reset",
    )
    remapped_rows_per_day: Rows = Field(
        default=DEFAULT.health.remapped_rows_per_day,
        description="number of uncorrectable memory rows remapped within a day from which a GPU "
        "gets a penalty, and half of it for fewer; earlier rows do not count ...",
    )
    remapped_rows_limit: Rows = Field(
        default=DEFAULT.health.remapped_rows_limit,
        description="... up to this total, from which the memory is worn out, as for DCGM",
    )
    retired_pages_pending: Action = Field(
        default=DEFAULT.health.retired_pages_pending,
        description="a memory page waits for a reset to be retired (before Ampere)",
    )
    retired_pages_warn: Rows = Field(
        default=DEFAULT.health.retired_pages_warn,
        description="number of retired memory pages from which a GPU gets a penalty ...",
    )
    retired_pages_limit: Rows = Field(
        default=DEFAULT.health.retired_pages_limit,
        description="... and from which its memory is worn out, as for DCGM",
    )
    worn_memory: Action = Field(
        default=DEFAULT.health.worn_memory,
        description="more memory rows remapped or pages retired than the limits above",
    )
    recovery_reset: Action = Field(
        default=DEFAULT.health.recovery_reset,
        description="the driver's recovery action is a reset of the GPU or a reboot",
    )
    recovery_drain_p2p: Action = Field(
        default=DEFAULT.health.recovery_drain_p2p,
        description="the driver's recovery action is to drain peer-to-peer traffic",
    )
    recovery_imex: Action = Field(
        default=DEFAULT.health.recovery_imex,
        description="the driver's recovery action is to recover IMEX",
    )
    dcgm_fail: Action = Field(
        default=DEFAULT.health.dcgm_fail, description="DCGM's health status is failure (20)"
    )
    dcgm_warn: Action = Field(
        default=DEFAULT.health.dcgm_warn, description="DCGM's health status is warning (10)"
    )
    fabric_manager_failed: Action = Field(
        default=DEFAULT.health.fabric_manager_failed,
        description="the fabric manager of an NVSwitch system failed, so CUDA cannot start",
    )
    fabric_manager_starting: Action = Field(
        default=DEFAULT.health.fabric_manager_starting,
        description="the fabric manager of an NVSwitch system is not ready yet",
    )
    sram_errors: Action = Field(
        default=DEFAULT.health.sram_errors,
        description="the node agent sees more uncorrectable SRAM errors than the driver tolerates",
    )
    fabric_unhealthy: Action = Field(
        default=DEFAULT.health.fabric_unhealthy,
        description="the driver reports to the node agent that the NVLink fabric is unhealthy ...",
    )
    fabric_limited: Action = Field(
        default=DEFAULT.health.fabric_limited, description="... or of limited capacity"
    )
    nvlink_down: Action = Field(
        default=DEFAULT.health.nvlink_down,
        description="an NVLink that the node agent saw up has gone down",
    )
    nvlink_errors: Action = Field(
        default=DEFAULT.health.nvlink_errors,
        description="NVLinks of a GPU had to recover in the last 5 minutes, or have checksum "
        "errors (since NVLink 5: errors of packets or symbols) ...",
    )
    nvlink_crc_per_second: float = Field(
        default=DEFAULT.health.nvlink_crc_per_second,
        ge=0.1,
        le=1_000_000,
        description="... at this rate, all links together: DCGM ignores fewer checksum errors, "
        "but no error of NVLink 5",
    )
    link_replays: Action = Field(
        default=DEFAULT.health.link_replays,
        description="a GPU resends packets over PCIe or NVLink more often ...",
    )
    link_replays_per_minute: float = Field(
        default=DEFAULT.health.link_replays_per_minute,
        ge=0.1,
        le=1_000_000,
        description="... than this: DCGM's limit for PCIe 3.0 x16. Its limit is 16 for 4.0 x16 "
        "and 31 for 5.0 x16, so raise this if all GPUs have those",
    )
    inforom_corrupted: Action = Field(
        default=DEFAULT.health.inforom_corrupted,
        description="the node agent sees that a GPU's infoROM is damaged",
    )
    shutdown_temperature: Action = Field(
        default=DEFAULT.health.shutdown_temperature,
        description="the node agent reports that a GPU has the temperature at which it switches "
        "itself off",
    )
    missing_device: Action = Field(
        default=DEFAULT.health.missing_device,
        description="telemetry lacks a GPU, although it shows others of its node",
    )
    not_offered: Action = Field(
        default=DEFAULT.health.not_offered,
        description="the kubelet offers fewer GPUs than the node has, and the broken ones are "
        "unknown: applies to each GPU of the node",
    )
    temperature_warn_celsius: Celsius = Field(
        default=DEFAULT.health.temperature_warn_celsius,
        description="temperature from which a GPU counts less; if the node agent reports the "
        "temperature at which clocks slow down, 10 degrees below that instead ...",
    )
    temperature_high_celsius: Celsius = Field(
        default=DEFAULT.health.temperature_high_celsius,
        description="... and from which, or from the reported one, it counts least; these four "
        "limits and the 10 degrees are estimates",
    )
    memory_temperature_warn_celsius: Celsius = Field(
        default=DEFAULT.health.memory_temperature_warn_celsius,
        description="temperature of the memory (HBM) from which a GPU counts less ...",
    )
    memory_temperature_high_celsius: Celsius = Field(
        default=DEFAULT.health.memory_temperature_high_celsius,
        description="... and from which it counts least",
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for low_name, high_name in (
            ("temperature_warn_celsius", "temperature_high_celsius"),
            ("memory_temperature_warn_celsius", "memory_temperature_high_celsius"),
        ):
            low, high = getattr(self, low_name), getattr(self, high_name)
            if low >= high:
                raise ValueError(f"{low_name} ({low:g}) must be below {high_name} ({high:g})")
        return self

    def value(self) -> policy.Health:
        """Convert to the core's health rules."""
        same_names = {name: getattr(self, name) for name in type(self).model_fields}
        return policy.Health(**{**same_names, "xid": MappingProxyType(dict(self.xid))})


Weight = Annotated[float, Field(ge=0, le=1000), Unit("weight")]


class WeightSettings(Section):
    """Weights of the smaller terms of the score; only their ratios matter."""

    utilization: Weight = Field(
        default=DEFAULT.weights.utilization,
        description="weight of low mean activity; these weights order nodes with shared GPUs, "
        "and nodes with whole GPUs of equal fit; only their ratios matter",
    )
    memory: Weight = Field(default=DEFAULT.weights.memory, description="weight of free memory")
    sharing: Weight = Field(
        default=DEFAULT.weights.sharing, description="weight of few pods on shared GPUs"
    )
    bursts: Weight = Field(
        default=DEFAULT.weights.bursts,
        description="weight of steadily low activity, by mean and spread",
    )
    stress: Weight = Field(
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
        "pass; by default load only orders nodes",
    )

    def value(self) -> policy.LoadFilter:
        """Convert to the core's load filter."""
        return policy.LoadFilter(is_enabled=self.enabled)

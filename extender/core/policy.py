"""The knobs of the decision, already validated: frozen values that settings are turned into."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

GIB = 1 << 30


class Strategy(StrEnum):
    """Which of the nodes is best on which the pod is as certain to get idle GPUs."""

    AUTO = "auto"
    """Whole GPUs: where the fewest usable ones stay free. Shared ones: the least loaded node."""
    SPREAD = "spread"
    """The idlest node: most idle GPUs first."""
    PACK = "pack"
    """The fullest node: fewest GPUs or replicas free by count."""


class SharedPolicy(StrEnum):
    """Which shared device the device plugin hands out (its shared-devices-allocation-policy)."""

    DISTRIBUTED = "distributed"
    """The device with the fewest replicas in use."""
    PACKED = "packed"
    """The device with the most replicas in use that still has one free."""


class HealthAction(StrEnum):
    """What a sign of ill health means for placing pods."""

    IGNORE = "ignore"
    PENALTY = "penalty"
    """The device counts less."""
    EXCLUDE = "exclude"
    """The device cannot work."""
    EXCLUDE_NODE = "exclude-node"
    """No device of the node can work."""
    EXCLUDE_MULTI_GPU = "exclude-multi-gpu"
    """The device cannot work for pods with several GPUs, and counts less for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Below both a GPU is idle.

    Attributes:
        utilization: ratio of time busy, 0 to 1.
        memory: ratio of memory used, 0 to 1.
    """

    utilization: float = 0.30
    memory: float = 0.50


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How long a value counts.

    Attributes:
        max_age_seconds: up to this age a value is fresh.
        fade_seconds: after this much longer a stale value has faded to neutral.
        forget_seconds: a device not seen for so long is dropped.
    """

    max_age_seconds: float = 120.0
    fade_seconds: float = 300.0
    forget_seconds: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What shows that somebody outside Kubernetes uses a device that no pod holds.

    Attributes:
        memory_bytes: more memory than this in use (without what the driver reserves).
        utilization: busier than this ratio, as two signals agree.
        readings: so many readings, all measured after the last tenant's end, must agree.
    """

    memory_bytes: int = GIB
    utilization: float = 0.10
    readings: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a pod that the readings do not show yet is believed to use.

    Attributes:
        utilization: ratio that a pod on a shared device adds.
        tentative_seconds: a pod that we answered for counts so long without being bound.
        warm_up_seconds: readings measured so long after a pod's start cover it.
        loading_seconds: so long after the last start of its containers a pod on a shared device
            that shows less activity than is believed of its tenants is still getting ready: it
            fetches what it works on.
    """

    utilization: float = 0.10
    tentative_seconds: float = 30.0
    warm_up_seconds: float = 120.0
    loading_seconds: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyFailures:
    """Pods that die soon after they start speak against their node.

    Attributes:
        within_seconds: a failure so soon after the start is early.
        half_life_seconds: a failure counts half after so long.
        weight: share of its certainty that a node loses for fresh failures of one owner's pods, 0
            to 1.
    """

    within_seconds: float = 60.0
    half_life_seconds: float = 600.0
    weight: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What each sign of ill health means.

    Attributes:
        xid: action by XID number.
        unknown_xid: action for an XID that is not listed.
        xid_seconds: a sticky XID counts so long after it was first seen.
        penalty: share of its certainty that a device under penalty loses, 0 to 1.
        row_remap_failure: remapping of a bad memory row failed.
        row_remap_pending: a remapped row waits for a reset.
        double_bit_error: an uncorrectable memory error since the last reset.
        remapped_rows_per_day: from so many uncorrectable rows on, remapped within a day, a device
            is under penalty, for fewer under half of it; the number is a guess of ours.
        remapped_rows_limit: from so many that were ever remapped on, its memory is worn out.
        retired_pages_pending: a memory page waits to be retired.
        retired_pages_warn: from so many retired memory pages on a device counts less ...
        retired_pages_limit: ... and from so many on its memory is worn out.
        worn_memory: the memory is worn out.
        recovery_reset: the driver asks for a reset of the device, or a reboot.
        recovery_drain_p2p: the driver asks that peer-to-peer traffic be drained.
        recovery_imex: the driver asks that IMEX be recovered.
        dcgm_fail: DCGM's own verdict is failure.
        dcgm_warn: DCGM's own verdict is warning.
        fabric_manager_failed: CUDA cannot start on an NVSwitch system.
        fabric_manager_starting: the fabric manager is not ready yet.
        sram_errors: the SRAM has more uncorrectable errors than the driver tolerates.
        fabric_unhealthy: the driver calls the NVLink fabric unhealthy ...
        fabric_limited: ... or of limited capacity.
        nvlink_down: an NVLink has gone down.
        nvlink_errors: NVLinks had to recover lately, or get so many checksums wrong ...
        nvlink_crc_per_second: ... as this: DCGM_LIMIT_MAX_NVLINK_CRC_ERROR of DCGM. Of the errors
            of NVLink 5 DCGM tolerates none; that they count from as many on is a choice of ours.
        link_replays: packets are sent again over PCIe or NVLink, more ...
        link_replays_per_minute: ... than so many a minute. For PCIe that is NVIDIA's figure, the
            maximum that DCGM names (DCGM_LIMIT_MAX_PCIREPLAY_RATE). Its health check allows one
            wrong bit in 10^12 on each lane (GetExpectedPcieReplayRate in DcgmHealthWatch.cpp), so 8
            of PCIe 3.0 x16, 16 of 4.0 x16 and 31 of 5.0 x16. That NVLink has the same limit is a
            choice of ours: DCGM minds its replays from the first.
        inforom_corrupted: the card's own memory of its configuration is damaged.
        shutdown_temperature: as hot as where the card switches itself off.
        missing_device: a device is not seen, although its siblings are.
        not_offered: the kubelet offers fewer devices than the node has, for no cause that is seen.
        temperature_warn_celsius: from here a device counts less, unless it is known from where on
            its clocks are held back ...
        temperature_high_celsius: ... and here least.
        memory_temperature_warn_celsius: the same by the temperature of its memory ...
        memory_temperature_high_celsius: ... and here least.
    """

    xid: Mapping[int, HealthAction] = field(default_factory=lambda: MappingProxyType({}))
    unknown_xid: HealthAction = HealthAction.PENALTY
    xid_seconds: float = 3600.0
    penalty: float = 0.5
    row_remap_failure: HealthAction = HealthAction.EXCLUDE
    row_remap_pending: HealthAction = HealthAction.PENALTY
    double_bit_error: HealthAction = HealthAction.EXCLUDE
    remapped_rows_per_day: int = 3
    remapped_rows_limit: int = 512
    retired_pages_pending: HealthAction = HealthAction.PENALTY
    retired_pages_warn: int = 15
    retired_pages_limit: int = 63
    worn_memory: HealthAction = HealthAction.EXCLUDE
    recovery_reset: HealthAction = HealthAction.EXCLUDE
    recovery_drain_p2p: HealthAction = HealthAction.EXCLUDE_MULTI_GPU
    recovery_imex: HealthAction = HealthAction.PENALTY
    dcgm_fail: HealthAction = HealthAction.EXCLUDE
    dcgm_warn: HealthAction = HealthAction.PENALTY
    fabric_manager_failed: HealthAction = HealthAction.EXCLUDE_NODE
    fabric_manager_starting: HealthAction = HealthAction.PENALTY
    sram_errors: HealthAction = HealthAction.EXCLUDE
    fabric_unhealthy: HealthAction = HealthAction.EXCLUDE
    fabric_limited: HealthAction = HealthAction.PENALTY
    nvlink_down: HealthAction = HealthAction.EXCLUDE_MULTI_GPU
    nvlink_errors: HealthAction = HealthAction.EXCLUDE_MULTI_GPU
    nvlink_crc_per_second: float = 100.0
    link_replays: HealthAction = HealthAction.PENALTY
    link_replays_per_minute: float = 8.0
    inforom_corrupted: HealthAction = HealthAction.PENALTY
    shutdown_temperature: HealthAction = HealthAction.EXCLUDE
    missing_device: HealthAction = HealthAction.PENALTY
    not_offered: HealthAction = HealthAction.PENALTY
    temperature_warn_celsius: float = 80.0
    temperature_high_celsius: float = 90.0
    memory_temperature_warn_celsius: float = 95.0
    memory_temperature_high_celsius: float = 105.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFilter:
    """Refusing nodes for load; off unless the administrator turns it on.

    Attributes:
        is_enabled: whether nodes without enough idle GPUs are refused while others have them.
    """

    is_enabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the smaller terms of the score weigh against each other; only their ratios count.

    They order nodes between which the number of idle devices makes no difference.

    Attributes:
        utilization: low activity on average.
        memory: free memory.
        sharing: few tenants on shared devices.
        bursts: low and even activity: mean and spread in one.
        stress: cool and unthrottled devices.
    """

    utilization: float = 0.05
    memory: float = 0.25
    sharing: float = 0.40
    bursts: float = 0.25
    stress: float = 0.05

    @property
    def shares(self) -> Mapping[str, float]:
        """Each term's share of their sum, 0 to 1, by the term's name in `core.scoring`."""
        named = {
            "utilization": self.utilization,
            "headroom": self.memory,
            "sharing": self.sharing,
            "bursts": self.bursts,
            "stress": self.stress,
        }
        total = sum(named.values())
        if abs(total - 1) < 1e-9:  # noqa: PLR2004 - they sum to 1, but for the last digit
            return named
        return {name: weight / total for name, weight in named.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything that shapes a decision besides the request and the snapshot.

    Activity over the last `recent_seconds`, and the latest, says whether a device with tenants is
    idle or busy; activity over the last `window_seconds` says which of several comes first.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    strategy: Strategy = Strategy.AUTO
    shared_policy: SharedPolicy = SharedPolicy.DISTRIBUTED
    freshness: Freshness = field(default_factory=Freshness)
    foreign: Foreign = field(default_factory=Foreign)
    assumed: Assumed = field(default_factory=Assumed)
    early_failures: EarlyFailures = field(default_factory=EarlyFailures)
    health: Health = field(default_factory=Health)
    load_filter: LoadFilter = field(default_factory=LoadFilter)
    weights: Weights = field(default_factory=Weights)
    mps_share_bytes: int | None = None
    window_seconds: float = 3600.0
    recent_seconds: float = 480.0

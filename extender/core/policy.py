"""Settings and constants of the decision, as frozen values; the meaning of each XID."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Self

from extender.core.quantity import GIB


class Strategy(StrEnum):
    """Order among nodes on which the pod is equally certain to get idle GPUs."""

    AUTO = "auto"
    """Whole GPUs: fewest usable GPUs left free. Shared GPUs: the least loaded node."""
    SPREAD = "spread"
    """Most idle GPUs first."""
    PACK = "pack"
    """Fewest free GPUs or replicas first."""


class SharedPolicy(StrEnum):
    """The device plugin's shared-devices-allocation-policy: its choice among shared devices."""

    DISTRIBUTED = "distributed"
    """The device with the fewest replicas in use."""
    PACKED = "packed"
    """The device with the most replicas in use that still has one free."""


class HealthAction(StrEnum):
    """Consequence of a sign of ill health."""

    IGNORE = "ignore"
    PENALTY = "penalty"
    """The device loses part of its certainty."""
    EXCLUDE = "exclude"
    """The device cannot work."""
    EXCLUDE_NODE = "exclude-node"
    """No device of the node can work."""
    EXCLUDE_MULTI_GPU = "exclude-multi-gpu"
    """The device cannot work for pods with several GPUs; for others it gets the penalty."""

    @property
    def severity(self) -> int:
        """Rank of the action: the cause with the most severe action is reported."""
        return _BY_SEVERITY.index(self)


_BY_SEVERITY: Final = (
    HealthAction.IGNORE,
    HealthAction.PENALTY,
    HealthAction.EXCLUDE_MULTI_GPU,
    HealthAction.EXCLUDE,
    HealthAction.EXCLUDE_NODE,
)

_XID_GROUPS: tuple[tuple[HealthAction, tuple[int, ...]], ...] = (
    # The application's fault, or information only.
    (
        HealthAction.IGNORE,
        (0, 8, 11, 13, 14, 25, 31, 32, 37, 38, 39, 40, 41, 43, 44, 45, 60, 66, 67, 68),
    ),
    (HealthAction.IGNORE, (*range(69, 73), *range(75, 78), 80, *range(82, 87), 88, 89, 93)),
    (
        HealthAction.IGNORE,
        (*range(96, 109), 121, *range(126, 136), 137, 139, 141, 152, 153, 157, 160, 161),
    ),
    # Memory rows remapped, many corrected errors, a contained error; reduced capacity.
    (HealthAction.PENALTY, (63, 92, 94, 168)),
    # Double-bit errors, GSP faults, uncontained errors: nothing works until a reset.
    (HealthAction.EXCLUDE, (46, 48, 54, 62, 64, 78, 95, 109, 110, 119, 120, 136, 140, 142, 143)),
    (HealthAction.EXCLUDE, (151, 154, 155, 156, 158, 167, 171, 172)),
    # NVLink: a single GPU still works.
    (HealthAction.EXCLUDE_MULTI_GPU, (74, *range(144, 151))),
    # Fallen off the bus: the machine needs a restart.
    (HealthAction.EXCLUDE_NODE, (79,)),
)

_DEFAULT_XID_ACTIONS: Mapping[int, HealthAction] = MappingProxyType(
    {xid: action for action, xids in _XID_GROUPS for xid in xids}
)
"""Default action by XID. Source: NVIDIA's XID catalog and the rules that device plugins share."""

RECOVERY_CHANGED: Final = 154
"""XID of a changed recovery action; it carries no other information."""


class HealthSign(StrEnum):
    """Sign of ill health whose action can be set.

    Each value is the name of an attribute of `Health`, which holds the default action.

    Attributes:
        description: when the sign applies.
    """

    description: str

    def __new__(cls, name: str, description: str) -> Self:
        """Create a member from its name and description."""
        sign = str.__new__(cls, name)
        sign._value_ = name
        sign.description = description
        return sign

    UNKNOWN_XID = "unknown_xid", "an XID that no table lists"
    ROW_REMAP_FAILURE = "row_remap_failure", "remapping of a bad memory row failed"
    ROW_REMAP_PENDING = "row_remap_pending", "a remapped memory row waits for a reset"
    DOUBLE_BIT_ERROR = "double_bit_error", "an uncorrectable memory error since the last reset"
    RETIRED_PAGES_PENDING = (
        "retired_pages_pending",
        "a memory page waits for a reset to be retired (before Ampere)",
    )
    WORN_MEMORY = ("worn_memory", "512 memory rows are remapped or 63 pages retired, as for DCGM")
    RECOVERY_RESET = (
        "recovery_reset",
        "the driver's recovery action is a reset of the GPU or a reboot",
    )
    RECOVERY_DRAIN_P2P = (
        "recovery_drain_p2p",
        "the driver's recovery action is to drain peer-to-peer traffic",
    )
    RECOVERY_IMEX = "recovery_imex", "the driver's recovery action is to recover IMEX"
    DCGM_FAIL = "dcgm_fail", "DCGM's health status is failure (20)"
    DCGM_WARN = "dcgm_warn", "DCGM's health status is warning (10)"
    FABRIC_MANAGER_FAILED = (
        "fabric_manager_failed",
        "the fabric manager of an NVSwitch system failed, so CUDA cannot start",
    )
    FABRIC_MANAGER_STARTING = (
        "fabric_manager_starting",
        "the fabric manager of an NVSwitch system is not ready yet",
    )
    SRAM_ERRORS = (
        "sram_errors",
        "the node agent sees more uncorrectable SRAM errors than the driver tolerates",
    )
    FABRIC_UNHEALTHY = (
        "fabric_unhealthy",
        "the driver reports to the node agent that the NVLink fabric is unhealthy",
    )
    FABRIC_LIMITED = (
        "fabric_limited",
        "the driver reports to the node agent that the NVLink fabric has limited capacity",
    )
    NVLINK_DOWN = "nvlink_down", "an NVLink that the node agent saw up has gone down"
    NVLINK_ERRORS = (
        "nvlink_errors",
        "NVLinks of a GPU had to recover in the last 5 minutes, or have 100 checksum errors a "
        "second, all links together (since NVLink 5: errors of packets or symbols)",
    )
    LINK_REPLAYS = (
        "link_replays",
        "a GPU resends more packets over PCIe or NVLink than health.link_replays_per_minute",
    )
    INFOROM_CORRUPTED = ("inforom_corrupted", "the node agent sees that a GPU's infoROM is damaged")
    SHUTDOWN_TEMPERATURE = (
        "shutdown_temperature",
        "the node agent reports that a GPU has the temperature at which it switches itself off",
    )
    MISSING_DEVICE = (
        "missing_device",
        "telemetry lacks a GPU, although it shows others of its node",
    )
    NOT_OFFERED = (
        "not_offered",
        "the kubelet offers fewer GPUs than the node has, and the broken ones are unknown: applies "
        "to each GPU of the node",
    )


WARN_CELSIUS: Final = 10.0
"""Range below the highest temperature in which a device loses score. Our own estimate: NVIDIA
publishes limits, but no warning temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """A GPU below both thresholds is idle.

    Attributes:
        utilization: ratio of time busy, 0 to 1.
        memory: ratio of memory used, 0 to 1.
    """

    utilization: float = 0.30
    memory: float = 0.50


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """Ages at which a value stops being fresh, fades, and is forgotten.

    Attributes:
        max_age_seconds: age up to which a value is fresh.
        fade_seconds: further time until a stale value has faded to neutral.
        forget_seconds: age at which a device without new values is dropped.
    """

    max_age_seconds: float = 120.0
    fade_seconds: float = 300.0
    forget_seconds: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Thresholds for foreign use: a process outside Kubernetes on a device that no pod holds.

    Attributes:
        memory_bytes: use above this much memory, without memory reserved by the driver.
        utilization: use above this ratio, confirmed by two signals.
        readings: readings that must agree, all measured after the last tenant ended.
    """

    memory_bytes: int = GIB
    utilization: float = 0.10
    readings: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Estimates for pods that the readings do not show yet, as the settings describe them.

    Attributes:
        utilization: ratio that each pod adds to a shared device.
        simulated_seconds: time that an unbound pod of one of Kubernetes' own groups counts after
            the last answer about the group, because kube-scheduler may revert its placement
            without a change in the API.
    """

    utilization: float = 0.10
    tentative_seconds: float = 30.0
    simulated_seconds: float = 1.0
    warm_up_seconds: float = 120.0
    loading_seconds: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyFailures:
    """Penalty for nodes on which pods die soon after they start.

    Attributes:
        within_seconds: time after the start within which a failure is early.
        half_life_seconds: time after which a failure counts half.
        weight: share of its certainty that a node loses for fresh failures of one owner's pods, 0
            to 1.
    """

    within_seconds: float = 60.0
    half_life_seconds: float = 600.0
    weight: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Action and limit for each sign of ill health.

    Each attribute that neither the settings nor this list describe is the action for the
    `HealthSign` of its name.

    Attributes:
        penalty: share of its certainty that a device under penalty loses, 0 to 1.
        remapped_rows_per_day: uncorrectable rows remapped within a day that cause the penalty;
            fewer cause half of it. Our own estimate.
        remapped_rows_limit: total of uncorrectable remapped rows from which memory is worn out.
        retired_pages_warn: number of retired memory pages that causes the penalty.
        retired_pages_limit: number of retired memory pages from which memory is worn out.
        nvlink_crc_per_second: limit of CRC errors, from DCGM_LIMIT_MAX_NVLINK_CRC_ERROR. DCGM
            tolerates no NVLink 5 error at all; applying this limit to them is our choice.
        link_replays_per_minute: limit of replays. For PCIe it is NVIDIA's own maximum
            (DCGM_LIMIT_MAX_PCIREPLAY_RATE). DCGM's health check allows one wrong bit in 10^12 per
            lane (GetExpectedPcieReplayRate in DcgmHealthWatch.cpp): 8 for PCIe 3.0 x16, 16 for 4.0
            x16, 31 for 5.0 x16. The same limit for NVLink is our choice: DCGM tolerates no NVLink
            replay.
        temperature_warn_celsius: temperature from which a device loses score, if its slowdown
            temperature is unknown.
        memory_temperature_warn_celsius: memory temperature from which a device loses score.
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

    def xid_action(self, xid: int) -> HealthAction:
        """Return the action for an XID: from the settings, the default table, or `unknown_xid`.

        Example:
            >>> Health().xid_action(79)
            <HealthAction.EXCLUDE_NODE: 'exclude-node'>
        """
        return self.xid.get(xid, _DEFAULT_XID_ACTIONS.get(xid, self.unknown_xid))

    def only_repeats_recovery(self, xid: int) -> bool:
        """Return whether an XID only repeats the recovery action and has no configured action."""
        return xid == RECOVERY_CHANGED and xid not in self.xid


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFilter:
    """Refusal of nodes for load, off by default, as the settings describe it."""

    is_enabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the terms by which `scoring` orders equal nodes; only their ratios count.

    Equal nodes are equally certain to have idle devices; the settings describe each term.
    """

    utilization: float = 0.05
    memory: float = 0.25
    sharing: float = 0.40
    bursts: float = 0.25
    stress: float = 0.05

    @property
    def shares(self) -> Mapping[str, float]:
        """Share of each weight in the sum, 0 to 1, by the name of the term."""
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


class GroupPolicy(StrEnum):
    """Effect of a pod's group on the choice of a node."""

    REQUIRE = "require"
    """Near the group; no pod of it starts while the cluster can never hold the whole group."""
    PREFER = "prefer"
    """Prefer nodes near the group."""
    IGNORE = "ignore"


GROUP_TOPOLOGY: Final = (
    "nvidia.com/gpu.clique",
    "network.topology.nvidia.com/accelerator",
    "topology.kubernetes.io/block",
    "topology.kubernetes.io/rack",
    "network.topology.nvidia.com/leaf",
    "network.topology.nvidia.com/spine",
    "topology.kubernetes.io/zone",
)
"""Labels of GPU operator and Topograph, and common names; the nearest domain first."""


class PriceMode(StrEnum):
    """Effect of prices on the choice of a node, for pods that name no model."""

    IGNORE = "ignore"
    PREFER = "prefer"
    """Among nodes equally likely to have idle GPUs, the cheaper one first."""
    STRICT = "strict"
    """Only the cheapest of the suitable nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a GPU-hour, as the settings describe them.

    Attributes:
        entries: price by model, label or node, as `core.prices.PriceList` reads them.
    """

    mode: PriceMode = PriceMode.IGNORE
    entries: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    spot_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All settings and constants of a decision.

    No setting changes `window_seconds`, the times of fading, forgetting and early failures, the
    number of readings for foreign use, and most limits of `Health`: they hold in every cluster.

    `group_topology` lists node labels that name the nodes' domains, the nearest domain first.
    Without any, the groups of pods do not count.

    Activity of the last `recent_seconds` decides whether a device with tenants is idle or busy.
    Activity of the last `window_seconds` only orders devices: the mean of its last quarter, and a
    forecast from all of it (`core.devices.forecast`).
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
    prices: Prices = field(default_factory=Prices)
    group_topology: tuple[str, ...] = GROUP_TOPOLOGY
    mps_share_bytes: int | None = None
    reads_memory_limits: bool = False
    window_seconds: float = 4 * 3600.0
    recent_seconds: float = 480.0

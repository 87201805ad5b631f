"""Define the GPU models of the simulated fleet; sizes are the vendor's, rounded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """Properties of all cards of one model.

    Attributes:
        name: name that DCGM reports.
        memory_mib: total framebuffer: used, free and reserved.
        reserved_mib: framebuffer that the driver reserves.
        idle_watts: power of an idle card.
        max_watts: power at full load.
        idle_clock_mhz: SM clock of an idle card.
        max_clock_mhz: SM clock under load.
        has_hbm: whether it reports a memory temperature.
        has_row_remap: whether it replaces bad memory rows (Ampere and later, with HBM).
        has_nvlink: whether it reports NVLink bandwidth.
        family: GFD's family.
        compute: compute capability, major and minor.
        mig_memory_mib: framebuffer of an instance by MIG profile; empty without MIG.
    """

    name: str
    memory_mib: int
    reserved_mib: int
    idle_watts: float
    max_watts: float
    idle_clock_mhz: int = 345
    max_clock_mhz: int = 1980
    memory_clock_mhz: int = 2619
    has_hbm: bool = True
    has_row_remap: bool = True
    has_nvlink: bool = True
    family: str = "hopper"
    compute: tuple[int, int] = (9, 0)
    mig_memory_mib: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


H200: Final = GpuModel(
    name="NVIDIA H200",
    memory_mib=143771,
    reserved_mib=615,
    idle_watts=80.0,
    max_watts=700.0,
    memory_clock_mhz=3201,
    mig_memory_mib=MappingProxyType(
        {"1g.18gb": 16384, "2g.35gb": 33280, "3g.71gb": 71424, "7g.141gb": 143104}
    ),
)
H100: Final = GpuModel(
    name="NVIDIA H100 80GB HBM3",
    memory_mib=81559,
    reserved_mib=491,
    idle_watts=70.0,
    max_watts=700.0,
    mig_memory_mib=MappingProxyType(
        {"1g.10gb": 9984, "2g.20gb": 20096, "3g.40gb": 40448, "7g.80gb": 81068}
    ),
)
A100_80GB: Final = GpuModel(
    name="NVIDIA A100-SXM4-80GB",
    memory_mib=81920,
    reserved_mib=634,
    idle_watts=60.0,
    max_watts=400.0,
    idle_clock_mhz=210,
    max_clock_mhz=1410,
    memory_clock_mhz=1593,
    family="ampere",
    compute=(8, 0),
    mig_memory_mib=MappingProxyType(
        {"1g.10gb": 9728, "2g.20gb": 19968, "3g.40gb": 40192, "7g.80gb": 80640}
    ),
)
A100_40GB: Final = GpuModel(
    name="NVIDIA A100-SXM4-40GB",
    memory_mib=40960,
    reserved_mib=632,
    idle_watts=55.0,
    max_watts=400.0,
    idle_clock_mhz=210,
    max_clock_mhz=1410,
    memory_clock_mhz=1215,
    family="ampere",
    compute=(8, 0),
    mig_memory_mib=MappingProxyType(
        {"1g.5gb": 4864, "2g.10gb": 9984, "3g.20gb": 20096, "7g.40gb": 40192}
    ),
)
V100: Final = GpuModel(
    name="Tesla V100-SXM2-32GB",
    memory_mib=32768,
    reserved_mib=269,
    idle_watts=42.0,
    max_watts=300.0,
    idle_clock_mhz=135,
    max_clock_mhz=1530,
    memory_clock_mhz=877,
    has_row_remap=False,
    family="volta",
    compute=(7, 0),
)
L40S: Final = GpuModel(
    name="NVIDIA L40S",
    memory_mib=46068,
    reserved_mib=579,
    idle_watts=35.0,
    max_watts=350.0,
    idle_clock_mhz=210,
    max_clock_mhz=2520,
    memory_clock_mhz=9001,
    has_hbm=False,
    has_row_remap=False,
    has_nvlink=False,
    family="ada-lovelace",
    compute=(8, 9),
)
A10: Final = GpuModel(
    name="NVIDIA A10",
    memory_mib=23028,
    reserved_mib=306,
    idle_watts=22.0,
    max_watts=150.0,
    idle_clock_mhz=210,
    max_clock_mhz=1695,
    memory_clock_mhz=6251,
    has_hbm=False,
    has_row_remap=False,
    has_nvlink=False,
    family="ampere",
    compute=(8, 6),
)
T4: Final = GpuModel(
    name="Tesla T4",
    memory_mib=15360,
    reserved_mib=427,
    idle_watts=10.0,
    max_watts=70.0,
    idle_clock_mhz=300,
    max_clock_mhz=1590,
    memory_clock_mhz=5000,
    has_hbm=False,
    has_row_remap=False,
    has_nvlink=False,
    family="turing",
    compute=(7, 5),
)

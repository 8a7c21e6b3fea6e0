"""The GPUs and TPUs that kernels are compiled for: no such device need be there."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Gpu(NamedTuple):
    """A kind of GPU. Cache and clock are the same for all: they guide XLA's own fusions, not our kernels.

    Attributes:
        name: its architecture, as the assembler says it.
        device: its product name.
        capability: major and minor compute capability.
        cores: streaming multiprocessors.
        shared_kib: shared memory that one block may ask for.
        memory_bytes: of the device, as its data sheet has it.
        bytes_per_s, flops_per_s: memory bandwidth, and bfloat16 products, that the roofline is drawn with.
    """

    name: str
    device: str
    capability: tuple[int, int]
    cores: int
    shared_kib: int
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    platform: str = "gpu"

    def description(self) -> str:
        """XLA's text form of a GPU to compile for."""
        block = self.shared_kib * 1024 - 1024
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block}
  shared_memory_per_core: {block + 1024}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: {self.cores}
  fpus_per_core: {128 if self.capability >= (9, 0) else 64}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bytes_per_s:.0f}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.7
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{self.device}"
"""


class Tpu(NamedTuple):
    """A kind of TPU.

    Attributes:
        name: its generation.
        device: its product name.
        topology: the smallest slice that libtpu knows by a name; kernels are compiled for one device of it.
        memory_bytes: as a GPU's.
        bytes_per_s, flops_per_s: as a GPU's.
    """

    name: str
    device: str
    topology: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    platform: str = "tpu"


Target: TypeAlias = Gpu | Tpu

TARGETS: tuple[Target, ...] = (
    # 4.3 TB/s and 790 TFLOP/s are what an H200 reaches, not what its sheet says.
    Gpu("sm_90a", "NVIDIA H200", (9, 0), 132, 228, 141 * 10**9, 4.3e12, 7.9e14),
    Gpu("sm_80", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 164, 80 * 10**9, 1.9e12, 2.9e14),
    # These are what their data sheets say.
    Tpu("v5e", "TPU v5e", "v5e:2x2", 16 * 10**9, 8.2e11, 1.97e14),
    Tpu("v6e", "TPU v6e", "v6e:2x2", 32 * 10**9, 1.64e12, 9.18e14),
)

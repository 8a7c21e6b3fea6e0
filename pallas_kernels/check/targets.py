"""The GPUs that kernels are compiled for: no such device need be there.

Cache, clock and memory size are the same for all: they guide XLA's own fusions, not our kernels.
"""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """A kind of GPU.

    Attributes:
        name: its architecture, as the assembler says it.
        device: its product name.
        capability: major and minor compute capability.
        cores: streaming multiprocessors.
        shared_kib: shared memory that one block may ask for.
        bytes_per_s, flops_per_s: memory bandwidth, and bfloat16 products, that the roofline is drawn with.
    """

    name: str
    device: str
    capability: tuple[int, int]
    cores: int
    shared_kib: int
    bytes_per_s: float
    flops_per_s: float

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
  device_memory_size: 85899345920
  cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{self.device}"
"""


TARGETS = (
    # 4.3 TB/s and 790 TFLOP/s are what an H200 reaches, not what its sheet says.
    Target("sm_90a", "NVIDIA H200", (9, 0), 132, 228, 4.3e12, 7.9e14),
    Target("sm_80", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 164, 1.9e12, 2.9e14),
)

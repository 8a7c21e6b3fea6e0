"""Backend "tpu": KDA as Pallas kernels that Mosaic compiles for TPUs."""

from pallas_kernels.kda.tpu.backward import backward
from pallas_kernels.kda.tpu.forward import forward
from pallas_kernels.kda.tpu.step import step

__all__ = ["backward", "forward", "step"]

"""Every kernel at every shape: what to compile, and what it does by count. A file an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pallas_kernels.check.cases.case import Case
from pallas_kernels.check.cases.kda_backward import kda_backward
from pallas_kernels.check.cases.kda_decode import kda_decode
from pallas_kernels.check.cases.kda_forward import kda_forward
from pallas_kernels.check.cases.kda_step import kda_step
from pallas_kernels.check.cases.kda_tpu import kda_tpu
from pallas_kernels.check.cases.mla_attention import mla_attention
from pallas_kernels.check.cases.mla_attention_tpu import mla_attention_tpu
from pallas_kernels.check.cases.short_conv import short_conv
from pallas_kernels.check.cases.state_compression import state_compression
from pallas_kernels.shapes import Shape

OPERATORS: tuple[Callable[[Shape], Iterator[Case]], ...] = (
    kda_forward,
    kda_backward,
    kda_step,
    kda_decode,
    kda_tpu,
    mla_attention,
    mla_attention_tpu,
    short_conv,
    state_compression,
)


def cases(shape: Shape) -> Iterator[Case]:
    """All cases of a shape, operator by operator."""
    for operator in OPERATORS:
        yield from operator(shape)

"""Programs as a device would get them: lowered for CUDA and for TPUs on a machine without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

CALL = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}


def lowered(platform: str, function: Callable[..., Any], *arguments: Any) -> str:
    """The program's text for a platform."""
    scope = contextlib.nullcontext()
    if platform == "cuda" and jax.__version_info__ >= (0, 11):  # it asks which GPU
        gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        scope = use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=gpu))
    with scope:
        known = [export.DisabledSafetyCheck.custom_call(CALL[platform])]
        program = export.export(jax.jit(function), platforms=[platform], disabled_checks=known)
        return program(*arguments).mlir_module()

"""fla's Triton kernels of KDA, called through PyTorch on the same device."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.contestant import Absent
from benchmarks.on_device.clock import Call


def unpack(wheel: Path) -> None:
    """Makes a wheel of fla-core importable, for a machine that can install nothing: it is unpacked and put in front
    of the path.

    Raises:
        Absent: it is not there, or is no wheel.
    """
    folder = tempfile.mkdtemp(
        prefix="fla-"
    )  # lives as long as the process: its kernels read their own sources
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise Absent(f"{wheel} is no wheel to read: {error}") from error
    sys.path.insert(0, folder)


class Fla:
    """fla's two operators on the arrays of a case.

    Raises:
        Absent: PyTorch, its GPU, Triton or fla is not there.
    """

    package = "fla-core"

    def __init__(self) -> None:
        for name in ("torch", "triton", "einops", "fla"):
            if importlib.util.find_spec(name) is None:
                raise Absent(
                    f"{name} is not installed" + (": give its wheel with --fla" if name == "fla" else "")
                )
        self.torch: Any = importlib.import_module("torch")
        if not self.torch.cuda.is_available():
            raise Absent("PyTorch sees no GPU")
        try:
            operators = importlib.import_module("fla.ops.kda")
        except Exception as error:  # an import of somebody else's package fails in its own ways
            raise Absent(f"fla does not import: {type(error).__name__}: {error}") from error
        self.chunk, self.recurrent = operators.chunk_kda, operators.fused_recurrent_kda

    def tensors(self, arrays: tuple[jax.Array, ...]) -> list[Any]:
        """The same numbers on the device, in PyTorch."""
        wide = (self.torch.from_numpy(np.array(x, np.float32)) for x in arrays)
        return [
            x.cuda().to(getattr(self.torch, str(array.dtype))) for x, array in zip(wide, arrays, strict=True)
        ]

    def forward(self, arrays: tuple[jax.Array, ...]) -> Call:
        """`chunk_kda` with the L2 norm inside, as training calls it, without a gradient."""
        q, k, v, g, beta, state = self.tensors(arrays)

        def enqueue() -> Any:
            with self.torch.no_grad():
                return self.chunk(
                    q,
                    k,
                    v,
                    g,
                    beta,
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )

        return self._call(enqueue)

    def both(self, arrays: tuple[jax.Array, ...], weight: jax.Array) -> Call:
        """`chunk_kda` and the gradients of sum(out * weight)."""
        leaves = [x.requires_grad_() for x in self.tensors(arrays)]
        (d_out,) = self.tensors((weight,))

        def enqueue() -> Any:
            out, _ = self.chunk(
                *leaves[:5], initial_state=leaves[5], output_final_state=True, use_qk_l2norm_in_kernel=True
            )
            return self.torch.autograd.grad(out, leaves[:5], d_out)

        return self._call(enqueue)

    def step(self, arrays: tuple[jax.Array, ...]) -> Call:
        """`fused_recurrent_kda` over one token a row."""
        q, k, v, g, beta, state = self.tensors(arrays)

        def enqueue() -> Any:
            with self.torch.no_grad():
                return self.recurrent(
                    *(x[:, None] for x in (q, k, v, g, beta)),
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )

        return self._call(enqueue)

    def restore(self, results: Any) -> list[np.ndarray]:
        """Tensors as float32 NumPy arrays."""
        return [x.detach().float().cpu().numpy() for x in results]

    def _call(self, enqueue: Callable[[], Any]) -> Call:
        return Call(enqueue, lambda _: self.torch.cuda.synchronize())

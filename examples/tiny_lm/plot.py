"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot


def save_curve(
    path: Path,
    steps: Sequence[int],
    bits: Sequence[float],
    *,
    bars: dict[str, float],
    model: float | None = None,
) -> None:
    """Draws training loss over steps, with horizontal lines for the compressors and the model's held-out figure.

    Args:
        path: a .png file.
        steps: step numbers from 1.
        bits: loss of each step, bits per token.
        bars: name -> bits per byte on the held-out files.
        model: the trained model's bits per byte on the same files.
    """
    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), dpi=110)
    axes.plot(steps, bits, color="0.8", linewidth=0.6)
    width = max(len(bits) // 100, 1)
    smooth = np.convolve(np.asarray(bits), np.ones(width) / width, mode="valid")
    axes.plot(steps[width - 1 :], smooth, color="C0", label="training loss, moving mean")
    for i, (name, value) in enumerate(bars.items()):
        axes.axhline(
            value, color=f"C{i + 1}", linestyle="--", linewidth=1.0, label=f"{name}, held-out: {value:.3f}"
        )
    if model is not None:
        axes.axhline(model, color="black", linewidth=1.2, label=f"this model, held-out: {model:.3f}")
    axes.set(
        xlabel="step", ylabel="bits per byte", ylim=(min([*bits, *bars.values(), model or 9.0]) - 0.1, 4.0)
    )
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)

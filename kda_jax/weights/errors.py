"""What is wrong with a checkpoint, all of it at once."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 8


class WeightsError(ValueError):
    """A checkpoint, or a saved state, that cannot be used.

    Attributes:
        missing: names of tensors that the model needs and the files lack.
        surplus: names of tensors in the files that the model has no place for.
        misshaped: lines "name: shape [..], expected [..]".
        nonfinite: names of tensors that hold NaN or infinity.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        surplus: Sequence[str] = (),
        misshaped: Sequence[str] = (),
        nonfinite: Sequence[str] = (),
    ) -> None:
        self.missing, self.surplus = tuple(missing), tuple(surplus)
        self.misshaped, self.nonfinite = tuple(misshaped), tuple(nonfinite)
        parts = [message]
        for label, names in (
            ("missing", self.missing),
            ("surplus", self.surplus),
            ("wrong shape", self.misshaped),
            ("NaN or infinity in", self.nonfinite),
        ):
            if names:
                more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                parts.append(f"{label} ({len(names)}): {', '.join(names[:_SHOWN])}{more}")
        super().__init__("; ".join(parts))

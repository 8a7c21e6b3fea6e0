"""What joins a model with the prefix cache, and with processes elsewhere."""

from kda_jax.engine.calls import Chosen, Cut, Row, Verified
from kda_jax.engine.checkpoint import Checkpoint, cut, join
from kda_jax.engine.memory import Layout, Memory
from kda_jax.engine.object_storage import ObjectStorage, Stored
from kda_jax.engine.programs import Programs
from kda_jax.engine.shared import Resumed, Shared

__all__ = [
    "Checkpoint",
    "Chosen",
    "Cut",
    "Layout",
    "Memory",
    "ObjectStorage",
    "Programs",
    "Resumed",
    "Row",
    "Shared",
    "Stored",
    "Verified",
    "cut",
    "join",
]

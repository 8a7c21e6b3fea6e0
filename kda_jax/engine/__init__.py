"""What serves many conversations at once, and joins a model with the prefix cache and with processes elsewhere."""

from kda_jax.engine.calls import Chosen, Cut, Lane, Verified
from kda_jax.engine.checkpoint import Checkpoint, cut, join
from kda_jax.engine.engine import Closed, Engine
from kda_jax.engine.explain import Explanation, Limit, TreeNode
from kda_jax.engine.memory import Layout, Memory
from kda_jax.engine.object_storage import ObjectStorage, Stored
from kda_jax.engine.programs import Programs
from kda_jax.engine.request import Outcome, Overloaded, Refused
from kda_jax.engine.shared import Resumed, Shared
from kda_jax.engine.statistics import Statistics
from kda_jax.engine.stream import Finished, Stream, Times, Token, Usage

__all__ = [
    "Checkpoint",
    "Chosen",
    "Closed",
    "Cut",
    "Engine",
    "Explanation",
    "Finished",
    "Lane",
    "Layout",
    "Limit",
    "Memory",
    "ObjectStorage",
    "Outcome",
    "Overloaded",
    "Programs",
    "Refused",
    "Resumed",
    "Shared",
    "Statistics",
    "Stored",
    "Stream",
    "Times",
    "Token",
    "TreeNode",
    "Usage",
    "Verified",
    "cut",
    "join",
]

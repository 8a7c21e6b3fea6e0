"""Text from a model: the loop on the device, the text on the host, and the calls that join them."""

from kda_jax.generate.api import Generation, generate, stream
from kda_jax.generate.loop import decode_tokens

__all__ = ["Generation", "decode_tokens", "generate", "stream"]

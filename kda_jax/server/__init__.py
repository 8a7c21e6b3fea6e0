"""An engine on the network: OpenAI's API, figures, and a page that tells why a prompt was no hit."""

from kda_jax.server.app import application
from kda_jax.server.keys import Keys, Tenant, read_keys
from kda_jax.server.limits import Limits
from kda_jax.server.run import bind, run
from kda_jax.server.serving import Serving

__all__ = ["Keys", "Limits", "Serving", "Tenant", "application", "bind", "read_keys", "run"]

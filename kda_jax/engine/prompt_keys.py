"""The names of one prompt's pages and checkpoints in slower tiers."""

from __future__ import annotations

from cache import KeyChain
from cache.tiers import state_name
from cache.tokens import Tokens


class PromptKeys:
    """The keys of a prompt, hashed once.

    Attributes:
        pages: of its whole pages.
    """

    def __init__(self, namespace: bytes, page: int, tokens: Tokens) -> None:
        """
        Args:
            namespace: `cache.Namespace.digest()`.
            page: latent rows a page.
            tokens: the prompt.
        """
        self._start, self._tokens, self._page = KeyChain.start(namespace, page), tokens, page
        self.pages = self._start.extend(tokens).added

    def name(self, boundary: int) -> str:
        """What the checkpoint behind the first `boundary` tokens is called."""
        whole = boundary // self._page
        chain = (
            KeyChain.resume(self.pages[whole - 1], whole * self._page, self._page) if whole else self._start
        )
        return state_name(chain.extend(self._tokens[whole * self._page : boundary]).key)

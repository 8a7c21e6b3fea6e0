"""Text from tokens that arrive one by one: never half a character, never any of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

HALF = "�"
"""What decoders write for bytes that are no character, or not yet."""


class TextStream:
    """Collects tokens and gives out their text as soon as it can no longer change.

    Attributes:
        text: what the tokens so far surely say; cut before the stop string once one was met.
        stopped: whether a stop string was met. No more tokens may come then.
        num_kept: tokens whose text lies wholly in `text`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        """Makes an empty stream.

        Args:
            decode: token ids to text. A token's text may depend on the tokens before it in the call.
            stop: texts to end before.
        """
        self.text, self.stopped, self.num_kept = "", False, 0
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        # Where tokens end that end with a character: how many they are, length of the text. Settled ones are gone.
        self._ends: deque[tuple[int, int]] = deque()
        self._settled, self._shown = 0, 0
        # Tokens from _window on are decoded together: those before _read said _before, all of it given out.
        self._window, self._read, self._before, self._taken = 0, 0, "", 0

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is ready to be shown, often empty."""
        self._tokens.append(token)
        fresh = self._decode(self._tokens[self._window :])[len(self._before) :]
        old = len(self.text)
        if fresh.endswith(HALF):
            # One replacement character at the end may be the beginning of a character; any before it is not.
            self.text += fresh[self._taken : -1]
            self._taken = max(self._taken, len(fresh) - 1)
        else:
            self.text += fresh[self._taken :]
            self._window, self._read, self._taken = self._read, len(self._tokens), 0
            self._before = self._decode(self._tokens[self._window : self._read])
            self._ends.append((len(self._tokens), len(self.text)))
        self._cut_at_stop(old)
        return self._show(0 if self.stopped else self._held_back())

    @property
    def num_safe(self) -> int:
        """Tokens that no stop string met later can reach into."""
        return self._tokens_within(len(self.text) - self._held_back())

    def finish(self) -> str:
        """Returns the rest of the text: what was held back in case it became a character or a stop string."""
        if not self.stopped:
            self.text += self._decode(self._tokens[self._window :])[len(self._before) + self._taken :]
            self._window = self._read = len(self._tokens)
            self._before, self._taken = "", 0
        return self._show(0)

    def _cut_at_stop(self, old: int) -> None:
        at = [self.text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stop]
        found = [index for index in at if index >= 0]
        if found:
            self.stopped, self.text = True, self.text[: min(found)]
        self.num_kept = len(self._tokens)
        if self.stopped:
            self.num_kept = self._tokens_within(len(self.text))

    def _tokens_within(self, length: int) -> int:
        """How many tokens say nothing beyond the first `length` characters, which never gets less: what may be the
        beginning of a stop string begins no earlier when more has come."""
        while self._ends and self._ends[0][1] <= length:
            self._settled, _ = self._ends.popleft()
        return self._settled

    def _held_back(self) -> int:
        """Length of the longest end of the text that may be the beginning of a stop string."""
        return max(
            (n for stop in self._stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])), default=0
        )

    def _show(self, hold: int) -> str:
        end = max(self._shown, len(self.text) - hold)
        piece, self._shown = self.text[self._shown : end], end
        return piece

"""The boundaries that are remembered, which of them are held, and what each held one is worth.

A request that comes to a boundary is served by the deepest held one at or before it. So a held checkpoint earns the
sum of the rates of all boundaries that it serves, times the tokens to the next held one below it, for the bytes that
dropping it would free: its state, and the latents that no other held one needs. Every change costs a walk over what it
touches, and no scan over what is held.
"""

from __future__ import annotations

from collections.abc import Iterator

from cache.retention.protocol import Boundary, Kind
from cache.retention.versions import Journal

NOWHERE = (-1, 0.0)
_ROOT = Boundary(b"", 0, None, (), Kind.MARK, 0, 0, 0)


class Remembered:
    """A boundary, held or not.

    Attributes:
        key: its name; empty for the forest's root, which stands for a cold start.
        tokens: before it.
        kind: why it was made.
        turn: prompts that its path had seen.
        step: tokens from its parent, when it was made.
        request: how many requests had come when it was made.
        ahead: tokens to the nearest prompt end behind it when it was made; 0 without one, and for prompt ends.
        state_nbytes: of its state.
        row_nbytes: of one token's latent.
        parent: the deepest remembered boundary before it; the root's is itself.
        children: those whose parent it is, by key.
        held: whether its bytes are there.
        server: the deepest held one at or before it.
        behind: its children that are held or have held ones behind them, by key.
        earned: the sum of the rates of all that it serves; not kept for the root.
        uses: how often it was the deepest on a request's path.
        left: whether a conversation that ended here went on from here.
        since: when it was used last, or made.
        row: of its class.
        stage: the bin of ages that it is in, and its rate there in uses a second; `NOWHERE` while it is not remembered.
    """

    __slots__ = (
        *(
            "ahead",
            "behind",
            "children",
            "earned",
            "held",
            "key",
            "kind",
            "left",
            "parent",
            "request",
        ),
        *("row", "row_nbytes", "server", "since", "stage", "state_nbytes", "step", "tokens", "turn", "uses"),
    )

    def __init__(self, boundary: Boundary, parent: Remembered | None, now: float) -> None:
        self.key = boundary.key
        self.tokens = boundary.tokens
        self.kind: str = boundary.kind
        self.turn = boundary.turn
        self.state_nbytes = boundary.state_nbytes
        self.row_nbytes = boundary.row_nbytes
        self.parent: Remembered = self if parent is None else parent
        self.step = self.tokens - self.parent.tokens
        self.ahead = self.request = 0
        self.children: dict[bytes, Remembered] = {}
        self.behind: dict[bytes, Remembered] = {}
        self.held = parent is None
        self.server: Remembered = self if parent is None else parent.server
        self.stage: tuple[int, float] = NOWHERE
        self.earned = 0.0
        self.uses = 0
        self.left = False
        self.since = now
        self.row = 0

    @property
    def lower(self) -> Remembered:
        """The held one that serves in its place when it is dropped."""
        return self.parent.server

    @property
    def worth(self) -> float:
        """Tokens that holding it saves, a second and a byte freed: its state, and latents that nothing else needs."""
        if self.earned <= 0:
            return 0.0
        freed = self.state_nbytes
        if not self.behind:
            freed += self.row_nbytes * (self.tokens - _shared(self).tokens)
        return self.earned * (self.tokens - self.parent.server.tokens) / (freed or 1)


class Forest:
    """All remembered boundaries. Changes go through a journal.

    Attributes:
        root: stands for a cold start.
        members: by key.
        changed: whose worth may be less, and whether what it earned was written.
        pending: what servers earn more than was written.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.root = Remembered(_ROOT, None, 0.0)
        self.members: dict[bytes, Remembered] = {}
        self.changed: dict[Remembered, bool] = {}
        self.pending: dict[Remembered, float] = {}

    def add(self, boundary: Boundary, now: float) -> Remembered:
        """Remembers a boundary between its parent and those of the parent's children that lie behind it."""
        journal = self._journal
        parent = self.root if boundary.parent is None else self.members[boundary.parent]
        new = Remembered(boundary, parent, now)
        for key in boundary.children:
            child = self.members[key]
            journal.remove(parent.children, key)
            journal.set(child, "parent", new)
            new.children[key] = child
            if parent.behind.get(key) is child:
                journal.remove(parent.behind, key)
                new.behind[key] = child
        if new.behind:
            journal.put(parent.behind, new.key, new)
        journal.put(parent.children, new.key, new)
        journal.put(self.members, new.key, new)
        return new

    def forget(self, gone: Remembered) -> None:
        """Takes away a boundary that is not held."""
        journal, parent = self._journal, gone.parent
        self.settle(gone, NOWHERE)
        journal.remove(parent.children, gone.key)
        if gone.behind:
            journal.remove(parent.behind, gone.key)
        for key, child in gone.children.items():
            journal.set(child, "parent", parent)
            journal.put(parent.children, key, child)
        for key, child in gone.behind.items():
            journal.put(parent.behind, key, child)
        journal.remove(self.members, gone.key)

    def settle(self, member: Remembered, stage: tuple[int, float]) -> None:
        """Another stage, of which its server hears."""
        was, server = member.stage, member.server
        self._journal.undo.append((member, "stage", was, True))
        member.stage = stage
        self.pending[server] = self.pending.get(server, 0.0) + (stage[1] - was[1])

    def pay(self) -> None:
        """Servers earn what was settled; called before anything else changes or is asked."""
        for server, change in self.pending.items():
            if change:
                self._earn(server, change)
        self.pending.clear()

    def hold(self, new: Remembered) -> None:
        """Its bytes are there from now on."""
        journal, old = self._journal, new.server
        journal.set(new, "held", True)
        self.changed[new] = False
        self._hand_over(new, old, new)
        member, path = new, {new.key}
        while member is not self.root and member.key not in member.parent.behind:
            journal.put(member.parent.behind, member.key, member)
            member = member.parent
            if len(member.behind) == 2:  # who was alone behind this place shares its latents now
                (other,) = (each for each in member.behind.values() if each.key not in path)
                self._alone(other)
            path.add(member.key)

    def trial(self, new: Remembered) -> Iterator[tuple[float, bytes]]:
        """What a boundary would be worth if it were held, and its key; then the same of those that would lose by that.
        Nothing changes."""
        moved, held, left = 0.0, [], [new]
        while left:
            member = left.pop()
            moved += member.stage[1]
            for child in member.children.values():
                (held if child.held else left).append(child)
        server, above = new.server, new
        while not above.held and not above.behind:
            above = above.parent
        freed = new.state_nbytes + new.row_nbytes * (new.tokens - above.tokens)
        yield _worth(new.earned + moved, new.tokens - server.tokens, freed), new.key
        if server is not self.root:  # the new one needs its latents, too
            saved = server.tokens - server.lower.tokens
            yield _worth(server.earned - moved, saved, server.state_nbytes), server.key
        for child in held:
            freed = child.state_nbytes
            if not child.behind:
                freed += child.row_nbytes * (child.tokens - _shared(child, new).tokens)
            yield _worth(child.earned, child.tokens - new.tokens, freed), child.key

    def drop(self, gone: Remembered) -> None:
        """Its bytes are gone."""
        journal = self._journal
        journal.set(gone, "held", False)
        self._hand_over(gone, gone, gone.lower)
        member = gone
        while member is not self.root and not member.held and not member.behind:
            journal.remove(member.parent.behind, member.key)
            member = member.parent
        # who is left alone behind this place now pays for latents that were shared
        self._alone(member)

    def _alone(self, member: Remembered) -> None:
        """What is held at a place or, if there is one only, behind it, may change its worth."""
        while not member.held and len(member.behind) == 1:
            (member,) = member.behind.values()
        self.changed.setdefault(member, False)

    def _earn(self, server: Remembered, change: float) -> None:
        """A server earns more or less; what starts cold is of no worth to anyone."""
        if server is not self.root:
            self._journal.undo.append((server, "earned", server.earned, True))
            server.earned += change
            if change < 0:
                self.changed[server] = True

    def _hand_over(self, start: Remembered, old: Remembered, new: Remembered) -> None:
        """All that `old` serves at and behind `start` is served by `new`."""
        journal, left, moved = self._journal, [start], 0.0
        while left:
            member = left.pop()
            journal.set(member, "server", new)
            moved += member.stage[1]
            for child in member.children.values():
                if child.held:
                    self.changed.setdefault(child, False)
                else:
                    left.append(child)
        self._earn(old, -moved)
        self._earn(new, moved)


def _worth(earned: float, tokens: int, nbytes: int) -> float:
    return earned * tokens / (nbytes or 1) if earned > 0 else 0.0


def _shared(member: Remembered, held: Remembered | None = None) -> Remembered:
    """The deepest boundary before a held one whose latents stay when that is dropped; `held` counts as held."""
    above = member.parent
    while not above.held and above is not held and len(above.behind) == 1:
        above = above.parent
    return above


def serving(member: Remembered) -> Iterator[Remembered]:
    """All that a held boundary serves, found by a walk: what `earned` sums."""
    left = [member]
    while left:
        member = left.pop()
        yield member
        left += (child for child in member.children.values() if not child.held)

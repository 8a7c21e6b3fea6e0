"""Two servers and a real Mooncake, all of them processes: they share what they compute, and outlive each other."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from instances_site import COMPILED, COUNT, NEXT, Instance, Model, Turn
from server_load import MIB, Load, until

from cache import KeyChain, Namespace
from transfer import Unavailable
from transfer.mooncake import MooncakeObjects, MooncakeSettings
from transfer.mooncake.library import load
from transfer.mooncake.local import LocalMooncake

SEEDS = itertools.count(1)


class Site(NamedTuple):
    """What runs. Servers that were killed are replaced in `servers`."""

    mooncake: LocalMooncake
    model: Model
    servers: list[Instance]
    closing: ExitStack

    def start(self) -> Instance:
        """One more server."""
        store = f"mooncake:{self.mooncake.address}"
        return self.closing.enter_context(Instance(self.model.folder, store))

    def goes_on(self) -> bool:
        """Whether a new conversation that begins at the first server goes on at the second where it ended."""
        first, second = self.model.conversation(next(SEEDS))
        one, other = self.servers
        self.model.check(first, one.ask(first.prompt, COUNT))
        end = len(second.prompt) - NEXT - 1
        if not until(lambda: other.boundary(second.prompt) == end, within=5):
            return False
        answer = other.ask(second.prompt, COUNT)
        self.model.check(second, answer)
        return answer.cached == {"remote": end}


@pytest.fixture(scope="module")
def site(byte_model: Path) -> Iterator[Site]:
    try:
        load(MooncakeSettings())
    except Unavailable as error:
        pytest.skip(str(error))
    with ExitStack() as closing:
        mooncake = closing.enter_context(
            LocalMooncake(segment_bytes=64 * MIB, lease_ms=500, client_ttl_s=2, abandoned_put_s=2)
        )
        site = Site(mooncake, Model(byte_model), [], closing)
        site.servers.append(site.start())
        assert site.servers[0].address
        compiled = set(COMPILED.iterdir())
        site.servers.append(site.start())
        assert site.servers[1].address
        assert set(COMPILED.iterdir()) == compiled, "the second one has compiled nothing"
        yield site


def test_a_conversation_goes_on_at_the_end_of_its_last_generation(site: Site) -> None:
    assert site.goes_on()

"""Two servers and a real Mooncake, all of them processes: they share what they compute, and outlive each other."""

from __future__ import annotations

import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from typing import NamedTuple

import pytest
from instances_site import COUNT, NEXT, Instance, Model, Turn
from server_load import MIB, Load, idle, process, soak, until

from cache import KeyChain, Namespace
from kda_jax.weights.digest import TOKENIZER, WEIGHTS, folder_digest
from transfer import Unavailable
from transfer.mooncake import MooncakeObjects, MooncakeSettings
from transfer.mooncake.library import load
from transfer.mooncake.local import LocalMooncake

SEEDS = itertools.count(1)
POOLED = 16
"""Threads by which a server's pools, which grow and shrink with what is asked, may differ from one time to another;
hundreds of requests lie in between."""


class Site(NamedTuple):
    """What runs. Servers that were killed are replaced in `servers`."""

    mooncake: LocalMooncake
    model: Model
    compiled: Path
    servers: list[Instance]
    closing: ExitStack

    def start(self) -> Instance:
        """One more server."""
        store = f"mooncake:{self.mooncake.address}"
        return self.closing.enter_context(Instance(self.model.folder, store, self.compiled))

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


@functools.cache
def conversations(model: Model) -> list[list[Turn]]:
    """More than a server's device memory holds."""
    return [model.conversation(seed) for seed in range(100, 112)]


def checkpoints(folder: Path, tokens: Sequence[int], boundaries: Sequence[int]) -> dict[int, str]:
    """How a store calls the checkpoints of a prompt, by boundary."""
    weights, tokenizer = folder_digest(folder, WEIGHTS), folder_digest(folder, TOKENIZER)
    namespace = Namespace(weights=weights, tokenizer=tokenizer, quantisation="float32")
    chain, names, before = KeyChain.start(namespace.digest(), 64), {}, 0
    for at in boundaries:
        chain, before = chain.extend(tokens[before:at]), at
        names[at] = f"state/{chain.key.hex()}"
    return names


def _programs(compiled: Path) -> set[str]:
    return {path.name for path in compiled.glob("*-cache")}


@pytest.fixture(scope="module")
def site(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    try:
        load(MooncakeSettings())
    except Unavailable as error:
        pytest.skip(str(error))
    with ExitStack() as closing:
        mooncake = closing.enter_context(
            LocalMooncake(segment_bytes=64 * MIB, lease_ms=500, client_ttl_s=2, abandoned_put_s=2)
        )
        compiled = tmp_path_factory.mktemp("compiled")
        site = Site(mooncake, Model(byte_model), compiled, [], closing)
        site.servers.append(site.start())
        assert site.servers[0].address
        programs, made = _programs(compiled), site.model.programs
        assert len(programs) > len(made.batches) + 2 * len(made.chunks), "quick ones are kept too"
        site.servers.append(site.start())
        assert site.servers[1].address
        assert _programs(compiled) == programs, "the second one has compiled nothing"
        yield site


def test_a_conversation_goes_on_at_the_end_of_its_last_generation(site: Site) -> None:
    assert site.goes_on()


def test_latents_alone_fill_their_boundary_once(site: Site) -> None:
    """A server finds all latents of a conversation and none of its checkpoints: it makes one, for all servers."""
    first, second = site.model.conversation(next(SEEDS))
    one, other = site.servers
    end = len(second.prompt) - NEXT - 1
    site.model.check(first, one.ask(first.prompt, COUNT))
    assert until(lambda: other.boundary(second.prompt) == end)
    last = end // 64 * 64
    names = checkpoints(site.model.folder, second.prompt, [*range(64, last + 1, 64), end])
    with MooncakeObjects(MooncakeSettings(master=site.mooncake.address)) as objects:

        def held() -> list[int]:
            return [at for at, is_there in zip(names, objects.contains([*names.values()], 5.0)) if is_there]

        there = held()
        assert end in there
        assert until(lambda: not held() or not any(objects.remove([names[at] for at in held()], 5.0)))
        assert not held() and other.boundary(second.prompt) == 0
        answer = other.ask(second.prompt, COUNT)
        site.model.check(second, answer)
        assert answer.cached == {}
        assert until(lambda: held() == [last]), held()

    def resumes_there() -> bool:
        """One who loads it; whether that is quicker than computing is for the server to say, by what both took."""
        for turns in conversations(site.model):
            one.ask(turns[-1].prompt, 1)  # what it had of its own is evicted, to some part
        sibling = site.model.conversation(next(SEEDS), 1, second.prompt[: last + 5])[0]
        answer = one.ask(sibling.prompt, COUNT)
        site.model.check(sibling, answer)
        return "remote" in answer.cached and sum(answer.cached.values()) == last

    assert until(resumes_there)


def reuse_comes_back(site: Site) -> None:
    assert until(site.goes_on, within=90), [server.said() for server in site.servers]


def kill_server(site: Site, which: int) -> None:
    server = site.servers[which]
    server.kill()
    site.servers[which] = site.start()
    assert site.servers[which].address


def kill_store(site: Site) -> None:
    assert site.mooncake.store_pid is not None
    os.kill(site.mooncake.store_pid, signal.SIGKILL)
    sleep(2)
    site.mooncake.restart_store()


def kill_master(site: Site) -> None:
    os.kill(site.mooncake.master_pid, signal.SIGKILL)
    sleep(2)
    site.mooncake.restart_master()


KILLS: dict[str, Callable[[Site], None]] = {
    "store": kill_store,
    "master": kill_master,
    "one server": lambda site: kill_server(site, 0),
    "the other server": lambda site: kill_server(site, 1),
}


@pytest.mark.parametrize("which", KILLS)
@pytest.mark.slow
def test_whoever_is_killed_under_load_no_other_request_fails(site: Site, which: str) -> None:
    """All servers are asked all the time: those that there were, and one that comes in the place of another."""
    load, before = Load(site.model, site.servers, conversations(site.model)), [*site.servers]

    def asked(servers: Sequence[Instance]) -> bool:
        return until(lambda: all(load.answers[server.pid] for server in servers))

    with load.running():
        assert asked(before), load.answers
        KILLS[which](site)
        load.answers.clear()
        assert asked(site.servers), load.answers
        reuse_comes_back(site)
    killed = sum(server.killed for server in before)
    assert killed == ("server" in which) and not load.wrong and load.happened["answers"] > 5, load.wrong


def test_an_overload_is_shed_and_leaves_nothing_behind(site: Site) -> None:
    """Bursts of ten times what fits, clients that hang up, and others who go on: the soak, for some seconds."""
    load = Load(site.model, site.servers, conversations(site.model))
    soak(load, 2.0)
    assert all(until(lambda server=server: idle(server)) for server in site.servers)
    before = [process(server.pid) for server in site.servers]
    soak(load, 4.0, seed=1)
    assert all(until(lambda server=server: idle(server)) for server in site.servers)
    assert not load.wrong, load.wrong
    assert load.happened["429"] > load.happened["answers"] > 20
    for server, was in zip(site.servers, before):
        now = process(server.pid)
        assert now.rss <= was.rss + 32 * MIB and now.files <= was.files + 4, (was, now)
        assert now.threads <= was.threads + POOLED, (was, now)

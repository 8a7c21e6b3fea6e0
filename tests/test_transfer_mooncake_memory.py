"""Memory of the Mooncake adapter: registered, used again only when nobody can see it any more."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_fake import FakeStore, Open, item, opening
from transfer import Bytes, Put, TransferError
from transfer.mooncake.memory import Memory, rounded

KIB = 1024


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def opened(store: FakeStore) -> Iterator[Open]:
    with opening(store) as opened:
        yield opened


def address(array: Bytes) -> int:
    return array.ctypes.data


def test_memory_is_lent_again_once_no_array_over_it_is_left(store: FakeStore) -> None:
    memory = Memory(store, 1 << 20)
    with memory.lent([100 * KIB, 70 * KIB, 100 * KIB]) as arrays:
        places = [address(array) for array in arrays]
        assert [array.nbytes for array in arrays] == [100 * KIB, 70 * KIB, 100 * KIB]
        assert len(set(places)) == 3 and all(place % 4096 == 0 for place in places)
        assert all(place in store.registered for place in places)
    part = arrays[0][10:20].view(np.int8)
    del arrays
    with memory.lent([100 * KIB] * 3) as again:
        assert address(again[0]) in places[1:] and places[0] not in [address(array) for array in again]
    del part, again
    with memory.lent([100 * KIB] * 4) as again:
        assert places[0] in [address(array) for array in again]
    assert len(store.registered) == 4


def test_memory_beyond_the_limit_is_used_once(store: FakeStore) -> None:
    memory = Memory(store, 256 * KIB)
    with memory.lent([128 * KIB, 128 * KIB, 128 * KIB]) as arrays:
        assert len(store.registered) == 3
    assert len(store.registered) == 2
    for i, array in enumerate(arrays):
        array[:] = i  # all stay the caller's
    assert [array.min() for array in arrays] == [0, 1, 2]
    del arrays, array
    with memory.lent([256 * KIB]) as (large,):  # in the place of the two that are idle
        assert list(store.registered) == [address(large)]
    del large
    with memory.lent([512 * KIB]):
        assert len(store.registered) == 1
    assert not store.registered


def test_memory_that_cannot_be_registered_is_not_used(store: FakeStore, opened: Open) -> None:
    store.register_buffer = lambda buffer_ptr, size: -600  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="refused to register 65536 bytes, with -600"):
        with Memory(store, 1 << 20).lent([5]):
            pass
    assert opened().put([item()], 20.0) == [Put.FAILED]


@pytest.mark.parametrize(
    ("nbytes", "size"), [(1, 64), (64, 64), (65, 128), (512, 512), (513, 576), (449 * KIB, 480 * KIB)]
)
def test_sizes_of_blocks(nbytes: int, size: int) -> None:
    """In KiB: few sizes, and no more than an eighth too large."""
    assert rounded(nbytes * KIB) == size * KIB

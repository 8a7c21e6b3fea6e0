"""Objects on disk: what is left by kills, full disks, other processes and damage."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer import About, DiskObjects, Put, Read, Unavailable, fetch, object_file, publish
from transfer_site import MIB, TIMEOUT, assert_same, content, item, random_array, read

ROOT = Path(__file__).resolve().parent.parent


def reopened(folder: Path, budget: int = 64 * MIB) -> DiskObjects:
    return DiskObjects(folder, budget, sync=False)


def files(folder: Path) -> list[Path]:
    """The files of all objects."""
    return sorted((folder / "objects").glob("*/*"))


def environment() -> dict[str, str]:
    """In which a process imports the product and the tests, and has one thread."""
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}


def python(code: str, *args: str, **kwargs: Any) -> subprocess.Popen[str]:
    """A process that can import the product and the tests."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), **kwargs)


def test_killed_at_any_instant_an_object_is_whole_or_absent(tmp_path: Path) -> None:
    """210 processes are killed at random instants, others before and after every call to the system.

    Every object that was stored before is whole, none is above the budget, and enough were killed while they wrote.
    """
    command = [
        sys.executable,
        "-W",
        "error",
        str(ROOT / "tests" / "disk_killer.py"),
        str(tmp_path),
        "210",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    notes = json.loads(done.stdout)
    assert notes["roomy"]["kills"] + notes["tight"]["kills"] == 210
    assert notes["steps"]["kills"] >= 60
    assert all(one["half_written"] >= 10 for one in notes.values()), notes
    assert all(one["lost"] == one["wrong"] == one["over"] == [] for one in notes.values()), notes


def test_objects_are_found_again_in_order_of_use(tmp_path: Path) -> None:
    with reopened(tmp_path) as objects:
        for key in "abcd":
            objects.put([item(key, content(key, 1000), {"a": "g", "c": "g"}.get(key))], TIMEOUT)
        os.utime(files(tmp_path)[0])  # whatever its time was
        for key in "bacd":
            time.sleep(0.01)
            assert read(objects, key) == content(key, 1000)
        assert read(objects, "b") == content("b", 1000)
    with reopened(tmp_path) as objects:
        assert [read(objects, key) for key in "abcd"] == [content(key, 1000) for key in "abcd"]
    for key in "acdb":
        with reopened(tmp_path) as objects:
            time.sleep(0.01)
            read(objects, key)
    with reopened(tmp_path, 2500) as objects:  # the group of a and c goes, then there is room
        assert objects.contains(list("abcd"), TIMEOUT) == [False, True, False, True]
    assert len(files(tmp_path)) == 2


def test_leftovers_and_files_that_hold_no_object_are_removed(tmp_path: Path) -> None:
    with reopened(tmp_path) as objects:
        objects.put([item(key, content(key, 500), "g") for key in "abcde"], TIMEOUT)
    one, two, three, four, five = files(tmp_path)
    one.write_bytes(one.read_bytes()[:-1])
    two.write_bytes(b"")
    three.write_bytes(bytes([one.read_bytes()[0] ^ 1]) + three.read_bytes()[1:])
    shutil.copy(four, four.with_name(five.name))  # under another object's name
    (tmp_path / "writing" / "7").write_bytes(b"half")
    mine = tmp_path / "objects" / "notes.txt"
    mine.write_text("not the store's")
    with reopened(tmp_path) as objects:
        assert sum(objects.contains(list("abcde"), TIMEOUT)) == 2
        assert files(tmp_path) == [four, five] and not os.listdir(tmp_path / "writing")
    assert mine.read_text() == "not the store's"


def test_one_process_has_a_folder_until_it_ends(tmp_path: Path) -> None:
    holder = python(
        "import sys; from transfer import DiskObjects; s = DiskObjects(sys.argv[1], 1000); print('open', flush=True);"
        "sys.stdin.read()",
        str(tmp_path),
        stdin=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdin is not None
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(Unavailable, match=f"in use by process {holder.pid}, .*another folder"):
            reopened(tmp_path)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        holder.stdin.close()
    with reopened(tmp_path):
        with pytest.raises(Unavailable, match=f"in use by process {os.getpid()}, "):
            reopened(tmp_path)
    reopened(tmp_path).close()


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(Unavailable, match=r"file.*\(.*\); give a folder that this process can write to"):
        reopened(path if kind == "a file" else path / "folder")


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with reopened(tmp_path) as objects:
            objects.put([item("a", b"1")], TIMEOUT)
            assert read(objects, "a") == b"1" and read(objects, "b") is None
            with pytest.raises(Unavailable):
                reopened(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "no sync"])
def test_bytes_are_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    steps: list[str] = []
    for name in ("writev", "fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, real=real, name=name, **k: (steps.append(name), real(*a, **k))[1]
        )
    with DiskObjects(tmp_path, MIB, sync=sync) as objects:
        objects.put([item("a", b"1")], TIMEOUT)
    assert steps == (["writev", "fsync", "rename"] if sync else ["writev", "rename"])


def arrays() -> dict[str, np.ndarray]:
    return {name: random_array(i, "bfloat16", (20, 4 + i)) for i, name in enumerate("abc")}


def file_damages(raw: bytes) -> Iterator[bytes | None]:
    """Removed; cut and grown at many places; a bit flipped in every byte of the header and in others."""
    yield None
    for nbytes in [0, 1, 23, 24, 30, 63, 64, 65, len(raw) // 2, len(raw) - 1]:
        yield raw[:nbytes]
    yield raw + b"\0"
    for byte in [*range(0, min(140, len(raw)), 3), *range(140, len(raw), 97), len(raw) - 1]:
        yield raw[:byte] + bytes([raw[byte] ^ 1 << byte % 8]) + raw[byte + 1 :]


@pytest.mark.parametrize("open_again", [True, False], ids=["found when opened", "while open"])
def test_a_damaged_file_is_a_miss_or_harmless(tmp_path: Path, open_again: bool) -> None:
    """Every object of a checkpoint, each damage in turn: never other arrays, and the next publish puts it right."""

    def whole(objects: DiskObjects) -> bool:
        got = fetch(objects, "n", "model", None, TIMEOUT)
        if got is not None:
            assert_same(got.arrays, arrays())
        return got is not None

    def store(objects: DiskObjects) -> Put:
        return publish(objects, "n", arrays(), About("model", 1), TIMEOUT, 256)

    objects = reopened(tmp_path)
    store(objects)
    misses = 0
    for path in (every := files(tmp_path)):
        raw = path.read_bytes()
        for damage in file_damages(raw):
            if damage is None:
                path.unlink()
            else:
                path.write_bytes(damage)
            if open_again:
                objects.close()
                objects = reopened(tmp_path)
            misses += not whole(objects)
            assert store(objects).there
            assert whole(objects)
    objects.close()
    assert len(every) == 4 and misses > 4 * 30


def mount(*arguments: str) -> bool:
    """Mounts if this process may."""
    command = shutil.which("mount")
    return command is not None and subprocess.run([command, *arguments], capture_output=True).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with room for 1 MiB: a file system of its own, or where none can be mounted writes that end so."""
    folder = tmp_path / "small"
    folder.mkdir()
    if mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)):
        yield folder
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    real = os.writev

    def writev(fd: int, pieces: list[memoryview]) -> int:
        held = sum(path.stat().st_size for path in folder.rglob("*"))
        if held + sum(map(len, pieces)) > MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, pieces)

    monkeypatch.setattr(os, "writev", writev)
    yield folder


def test_a_full_disk_is_an_outcome(small_disk: Path) -> None:
    with DiskObjects(small_disk, 100 * MIB) as objects:
        puts = [objects.put([item(f"k{i}", content(f"k{i}", 200_000))], TIMEOUT)[0] for i in range(8)]
        stored = puts.count(Put.STORED)
        assert 3 <= stored <= 5 and puts == [Put.STORED] * stored + [Put.FULL] * (8 - stored)
        assert not os.listdir(small_disk / "writing")
        for i in range(8):
            assert read(objects, f"k{i}") == (content(f"k{i}", 200_000) if i < stored else None)
        assert objects.remove(["k0", "k1"], TIMEOUT) == [True, True]
        assert objects.put([item("k7", content("k7", 200_000))], TIMEOUT) == [Put.STORED]
    with reopened(small_disk) as objects:
        assert read(objects, "k7") == content("k7", 200_000) and read(objects, "k2") == content("k2", 200_000)


def test_a_file_size_limit_is_an_outcome(tmp_path: Path) -> None:
    limited = python(
        "import resource, sys; from transfer import DiskObjects; from transfer_site import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "with DiskObjects(sys.argv[1], 10 * MIB) as s:\n"
        "    for n in (50_000, 150_000, 60_000):\n"
        "        print(s.put([item(f'k{n}', content('k', n))], 20)[0].value)\n"
        "    print([n for n in (50_000, 150_000, 60_000) if read(s, f'k{n}') == content('k', n)])",
        str(tmp_path),
    )
    out, _ = limited.communicate(timeout=60)
    assert out.split("\n")[:4] == ["stored", "failed", "stored", "[50000, 60000]"]


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder, and what makes it read-only: a mount that is; else modes, or for root system calls that say so."""
    folder = tmp_path / "store"
    folder.mkdir()
    mounted = mount("--bind", str(folder), str(folder))

    def freeze() -> None:
        if mounted:
            assert mount("-o", "remount,ro,bind", str(folder))
        elif os.geteuid():
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o555)
        else:
            real = os.open

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise OSError(errno.EROFS, "Read-only file system")

            def opening(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
                return refuse() if flags & (os.O_WRONLY | os.O_RDWR) else real(path, flags, *args, **kwargs)

            monkeypatch.setattr(os, "open", opening)
            for name in ("unlink", "mkdir", "rename", "utime"):
                monkeypatch.setattr(os, name, refuse)

    yield folder, freeze
    monkeypatch.undo()
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)


def test_a_folder_that_became_read_only_still_reads(read_only: tuple[Path, Callable[[], None]]) -> None:
    folder, freeze = read_only
    with DiskObjects(folder, 1000) as objects:
        assert objects.put([item("a", content("a", 500))], TIMEOUT) == [Put.STORED]
    objects = DiskObjects(folder, 1000)
    freeze()
    assert objects.put([item("b", content("b", 100))], TIMEOUT) == [Put.FAILED]
    assert objects.put([item("c", content("c", 800))], TIMEOUT) == [Put.FULL]  # a cannot be dropped
    assert read(objects, "a") == content("a", 500)
    assert objects.remove(["a", "b"], TIMEOUT) == [False, True]
    assert objects.contains(["a", "b", "c"], TIMEOUT) == [True, False, False]
    objects.close()
    with pytest.raises(Unavailable, match="give a folder that this process can write to"):
        DiskObjects(folder, 1000)


def test_a_folder_that_was_removed_is_an_outcome(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with reopened(folder) as objects:
        objects.put([item("a", content("a", 500)), item("b", content("b", 500))], TIMEOUT)
        shutil.rmtree(folder)
        assert read(objects, "a") is None
        assert objects.contains(["a"], TIMEOUT) == [False]
        assert objects.put([item("c", content("c", 500))], TIMEOUT) == [Put.FAILED]
        assert objects.remove(["b", "c"], TIMEOUT) == [True, True]
        assert not folder.exists()
        counted = objects.counters()
        assert counted.operations["get", "absent"].objects == 1 and counted.dropped == 1


def test_a_file_where_a_folder_belongs_is_an_outcome(tmp_path: Path) -> None:
    with reopened(tmp_path) as objects:
        for number in range(256):
            (tmp_path / "objects" / f"{number:02x}").write_text("")
        assert objects.put([item("a", b"1")], TIMEOUT) == [Put.FAILED]
        assert read(objects, "a") is None and not os.listdir(tmp_path / "writing")


@pytest.mark.parametrize("step", ["open", "writev", "fsync", "fstat", "rename"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_an_error_of_any_step_of_a_put_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: int
) -> None:
    with DiskObjects(tmp_path, MIB) as objects:
        objects.put([item("a", content("a", 500))], TIMEOUT)
        with monkeypatch.context() as patch:

            def fail(*args: Any, **kwargs: Any) -> Any:
                raise OSError(error, os.strerror(error))

            patch.setattr(os, step, fail)
            expected = Put.FULL if error in (errno.ENOSPC, errno.EDQUOT) else Put.FAILED
            assert objects.put([item("b", content("b", 500))], TIMEOUT) == [expected]
        assert not os.listdir(tmp_path / "writing") and len(files(tmp_path)) == 1
        assert objects.contains(["a", "b"], TIMEOUT) == [True, False]
        assert objects.put([item("b", content("b", 500))], TIMEOUT) == [Put.STORED]
        assert read(objects, "b") == content("b", 500)


def test_a_read_that_fails_is_a_miss_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with reopened(tmp_path) as objects:
        objects.put([item("a", content("a", 500))], TIMEOUT)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            assert read(objects, "a") is None
        assert objects.counters().operations["get", "failed"].objects == 1
        assert read(objects, "a") == content("a", 500)


def test_a_read_that_came_between_two_writers_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found no file, but when it looks again there is one."""
    real, failed = os.open, []

    def gone_once(*args: Any, **kwargs: Any) -> int:
        if failed:
            return real(*args, **kwargs)
        failed.append(args)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    with reopened(tmp_path) as objects:
        objects.put([item("a", content("a", 500))], TIMEOUT)
        monkeypatch.setattr(os, "open", gone_once)
        assert read(objects, "a") is None and failed
        assert read(objects, "a") == content("a", 500)


def test_another_object_in_its_place_is_a_miss(tmp_path: Path) -> None:
    with reopened(tmp_path) as objects:
        objects.put([item(key, content(key, 500)) for key in "ab"], TIMEOUT)
        one, two = files(tmp_path)
        one.write_bytes(two.read_bytes())
        assert [read(objects, key) for key in "ab"].count(None) == 1
        assert objects.counters().operations["get", "damaged"].objects == 1
        assert len(files(tmp_path)) == 1


def test_a_file_that_ends_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reopened(tmp_path) as objects:
        objects.put([item("a", content("a", 500))], TIMEOUT)
        monkeypatch.setattr(os, "preadv", lambda *args: 0)
        assert objects.get([Read("a")], 2) == [None]
        assert objects.counters().operations["get", "damaged"].objects == 1


def test_slow_calls_end_at_their_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_file, "STEP_NBYTES", 1000)
    with reopened(tmp_path) as objects:
        objects.put([item("a", content("a", 30_000))], TIMEOUT)
        for name in ("writev", "preadv"):
            real = getattr(os, name)
            slow = lambda *args, real=real: (time.sleep(0.02), real(*args))[1]  # noqa: E731
            monkeypatch.setattr(os, name, slow)
        start = time.monotonic()
        assert objects.put([item("b", content("b", 500_000)), item("c", b"1")], 0.1) == [Put.LATE, Put.LATE]
        assert objects.get([Read("a"), Read("a", 0, 10)], 0.1) == [None, None]
        assert time.monotonic() - start < 5  # all of it would have taken 10 seconds
        counted = objects.counters().operations
        assert counted["put", "late"].objects == counted["get", "late"].objects == 2
        assert objects.contains(["a", "b", "c"], TIMEOUT) == [True, False, False]
        assert not os.listdir(tmp_path / "writing")


def test_a_second_writer_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives up at its deadline; so does one that removes."""
    inside, go = threading.Event(), threading.Event()
    real = os.writev

    def writev(*args: Any) -> int:
        inside.set()
        assert go.wait(TIMEOUT)
        return real(*args)

    monkeypatch.setattr(os, "writev", writev)
    first: list[Put] = []
    with reopened(tmp_path) as objects:
        writer = threading.Thread(target=lambda: first.extend(objects.put([item("a", b"1")], TIMEOUT)))
        writer.start()
        assert inside.wait(TIMEOUT)
        assert objects.put([item("a", b"1")], 0.02) == [Put.LATE]
        assert objects.remove(["a"], 0.02) == [False]
        assert read(objects, "a") is None and objects.contains(["a"], TIMEOUT) == [False]
        threading.Timer(0.05, go.set).start()
        assert objects.put([item("a", b"1")], TIMEOUT) == [Put.HELD]
        writer.join()
        assert first == [Put.STORED]


def test_close_waits_for_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go = threading.Event(), threading.Event()
    real = os.preadv

    def preadv(*args: Any) -> int:
        inside.set()
        assert go.wait(TIMEOUT)
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    objects, got = reopened(tmp_path), []
    objects.put([item("a", content("a", 500))], TIMEOUT)
    reader = threading.Thread(target=lambda: got.append(read(objects, "a")))
    reader.start()
    assert inside.wait(TIMEOUT)
    closers = [threading.Thread(target=objects.close) for _ in range(2)]
    for closer in closers:
        closer.start()
        closer.join(0.05)
        assert closer.is_alive()
    with pytest.raises(Unavailable, match="in use"):
        reopened(tmp_path)
    go.set()
    for thread in (reader, *closers):
        thread.join(TIMEOUT)
    assert got == [content("a", 500)]
    reopened(tmp_path).close()


def test_a_store_that_was_not_closed_ends_with_its_process(tmp_path: Path) -> None:
    """Without a word, and what it stored is there."""
    child = python(
        "import sys, os; from transfer import DiskObjects; from transfer_site import *\n"
        "s = DiskObjects(sys.argv[1], MIB); print(s.put([item('a', content('a', 999))], 20)[0].value)",
        str(tmp_path),
        stderr=subprocess.PIPE,
    )
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (0, "stored\n", "")
    with reopened(tmp_path) as objects:
        assert read(objects, "a") == content("a", 999)

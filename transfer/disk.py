"""Objects as files of a folder."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import count
from pathlib import Path

from transfer import object_file
from transfer.errors import Unavailable
from transfer.local import Found, Held, LocalObjects
from transfer.objects import Item, Put, Read

NAME = re.compile("[0-9a-f]{2}/[0-9a-f]{38}")


class DiskObjects(LocalObjects):
    """An `Objects` that holds each object as a file, and finds them again when it is opened next time.

    An object is written aside and then renamed: whatever ends this process, and when, it is there as a whole or not at
    all. With `sync` that holds for the machine's end too. A file that was changed by others is a miss if its length
    did; `transfer.fetch` finds other changes.

    The budget is kept at every instant, by the lengths of all files with what is being written; names, directories and
    what is dropped while it is being read are not counted. Without room on the disk itself a put is `Put.FULL`. A call
    looks at the clock every 16 MiB: a disk that does not answer holds it up.

    One process at a time has a folder, with any number of threads. The lock ends with the process; a process forked
    from this one, that goes on without exec, holds it too.
    """

    def __init__(self, folder: str | os.PathLike[str], budget_nbytes: int, *, sync: bool = True) -> None:
        """Opens a folder, or makes one.

        Args:
            folder: where the files are. What a process has left half written there is removed.
            budget_nbytes: most bytes of all files. If the folder has more, groups go, the one used longest ago first.
            sync: whether an object must not be half there after a loss of power: its bytes are on the disk before its
                name is.

        Raises:
            Unavailable: if another process has the folder, or it cannot be written to.
            ValueError: for a budget that is not positive.
        """
        place = Folder(Path(folder), sync)
        try:
            super().__init__(place, budget_nbytes, place.held())
        except BaseException:
            place.close()
            raise


class Folder:
    """A place: `objects/` has a file for each object, `writing/` what is not whole yet, `lock` the holder's pid.

    All names are relative to the folder that was opened, so that nothing is written elsewhere after it was removed.
    """

    def __init__(self, path: Path, sync: bool) -> None:
        """Opens and locks it, and removes what is half written. Raises Unavailable."""
        self._sync = sync
        self._numbers = count()
        self._fds: list[int] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
            root = self._keep(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            self._lock(path, root)
            self._objects, self._writing = (self._subfolder(root, name) for name in ("objects", "writing"))
            for name in os.listdir(self._writing):
                os.unlink(name, dir_fd=self._writing)
        except OSError as error:
            self.close()
            raise Unavailable(
                f"no store of objects in {path} ({error.strerror}); give a folder that this process can write to"
            ) from error
        except Unavailable:
            self.close()
            raise

    def held(self) -> list[Held]:
        """All whole objects, the one used last comes last. Removes files that hold none."""
        found: list[tuple[int, Held]] = []
        for folder in os.listdir(self._objects):
            for name in self._files(folder):
                with suppress(OSError):  # what cannot be read is not held
                    with self._opened(name) as fd:
                        held, used = object_file.describe(fd), os.fstat(fd).st_mtime_ns
                    if held is not None and _name(held.key) == name:
                        found.append((used, held))
                    else:
                        os.unlink(name, dir_fd=self._objects)
        found.sort(key=lambda one: one[0])
        return [held for _, held in found]

    def cost(self, key: str, nbytes: int, group: str | None) -> int:
        """See `Place`: the length of its file."""
        return object_file.header_nbytes(key, group) + nbytes

    def write(self, item: Item, until: float) -> Put:
        """See `Place`."""
        aside = str(next(self._numbers))
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=self._writing)
        try:
            try:
                if not object_file.write(fd, item, until):
                    return Put.LATE
                if self._sync:
                    os.fsync(fd)
                if os.fstat(fd).st_size != self.cost(item.key, item.nbytes, item.group):
                    return Put.FAILED
            finally:
                os.close(fd)
            name = _name(item.key)
            with suppress(FileExistsError):
                os.mkdir(name[:2], dir_fd=self._objects)
            os.rename(aside, name, src_dir_fd=self._writing, dst_dir_fd=self._objects)
            return Put.STORED
        finally:
            with suppress(OSError):  # after the rename there is none
                os.unlink(aside, dir_fd=self._writing)

    def read(self, read: Read, nbytes: int, until: float) -> Found:
        """See `Place`. The file's time is that of its last use, for the next opening."""
        try:
            with self._opened(_name(read.key)) as fd:
                found = object_file.read(fd, read, nbytes, until)
                with suppress(OSError):
                    os.utime(fd)
                return found
        except FileNotFoundError:
            return Found("absent")

    def drop(self, key: str) -> None:
        """See `Place`."""
        with suppress(FileNotFoundError):
            os.unlink(_name(key), dir_fd=self._objects)

    def damaged(self, key: str, nbytes: int) -> bool:
        """See `Place`."""
        try:
            with self._opened(_name(key)) as fd:
                held = object_file.describe(fd)
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return held is None or held[:2] != (key, nbytes)

    def close(self) -> None:
        """Lets others have the folder."""
        while self._fds:
            os.close(self._fds.pop())

    def _lock(self, path: Path, root: int) -> None:
        # not open for writing, so that the file system can become read-only
        fd = self._keep(os.open("lock", os.O_RDONLY | os.O_CREAT, 0o666, dir_fd=root))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            raise Unavailable(
                f"{path} is in use by process {holder}, and one process at a time can have it; end that one, or give"
                " another folder"
            ) from None
        with open(os.open("lock", os.O_WRONLY | os.O_TRUNC, dir_fd=root), "w") as file:
            file.write(f"{os.getpid()}\n")

    def _subfolder(self, root: int, name: str) -> int:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=root)
        return self._keep(os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root))

    def _files(self, folder: str) -> list[str]:
        """Names of the files of objects in one folder of `objects/`."""
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._objects)
        except OSError:
            return []
        try:
            names = [f"{folder}/{name}" for name in os.listdir(fd)]
        finally:
            os.close(fd)
        return [name for name in names if NAME.fullmatch(name)]

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        fd = os.open(name, os.O_RDONLY, dir_fd=self._objects)
        try:
            yield fd
        finally:
            os.close(fd)

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd


def _name(key: str) -> str:
    """The name of an object's file: keys differ in more than file systems allow (length, case, a key below a key)."""
    digest = blake2b(key.encode(), digest_size=20).hexdigest()
    return f"{digest[:2]}/{digest[2:]}"

"""The least that moving bytes to another process can cost: a socket, and Mooncake's own calls."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.connection import Connection
from time import sleep
from typing import Any

import numpy as np

from transfer.mooncake.library import Library

LOOPBACK = "127.0.0.1"


class Socket:
    """Bytes to a process on loopback, and back."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_answer, args=(theirs, nbytes), daemon=True)
        self._process.start()
        self._socket = socket.create_connection((LOOPBACK, ours.recv()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, _: object) -> None:
        """All bytes there, and one back."""
        self._socket.sendall(b"p")
        self._socket.sendall(self._source.data)
        self._socket.recv(1)

    def get(self, _: object) -> None:
        """All bytes from there."""
        self._socket.sendall(b"g")
        _receive(self._socket, self._target)

    def close(self) -> None:
        """Ends the other process."""
        self._socket.close()
        self._process.join(10)


def _answer(pipe: Connection, nbytes: int) -> None:
    """The other process: takes bytes or gives them, as the first byte of a request says."""
    buffer = np.ones(nbytes, np.uint8)
    with socket.create_server((LOOPBACK, 0)) as server:
        pipe.send(server.getsockname()[1])
        peer, _ = server.accept()
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := peer.recv(1):
            if request == b"p":
                _receive(peer, buffer)
                peer.sendall(b"a")
            else:
                peer.sendall(buffer.data)


def _receive(peer: socket.socket, buffer: np.ndarray) -> None:
    view, done = buffer.data, 0
    while done < len(view):
        count = peer.recv_into(view[done:])
        if not count:
            raise ConnectionError("the other side closed the connection")
        done += count


class BareMooncake:
    """Mooncake's `put_from` and `get_into` of one contiguous registered buffer, with nothing around them."""

    def __init__(self, library: Library, nbytes: int) -> None:
        self._store: Any = library.store
        self._source, self._target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._count, self._key = 0, ""
        for buffer in (self._source, self._target):
            if code := self._store.register_buffer(buffer.ctypes.data, buffer.nbytes):
                raise RuntimeError(f"register_buffer gave {code}")

    def prepare(self) -> str:
        """Removes what was put before, and names the next one."""
        while self._key and self._store.remove(self._key) not in (0, -704):
            sleep(0.05)  # as long as it has a lease
        self._count += 1
        self._key = f"bare-{self._count}"
        return self._key

    def put(self, key: str) -> None:
        """Stores the buffer."""
        code = self._store.put_from(key, self._source.ctypes.data, self._source.nbytes)
        if code:
            raise RuntimeError(f"put_from gave {code}")

    def get(self, _: object) -> None:
        """Reads what was put last."""
        code = self._store.get_into(self._key, self._target.ctypes.data, self._target.nbytes)
        if code != self._target.nbytes:
            raise RuntimeError(f"get_into gave {code}")

    def close(self) -> None:
        """Removes the last one, and gives the buffers back."""
        self.prepare()
        for buffer in (self._source, self._target):
            self._store.unregister_buffer(buffer.ctypes.data)

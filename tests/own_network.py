"""A network of one's own, holding only loopback: what listens on all interfaces there is reached by nobody else."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1


def enter_own_network() -> bool:
    """Puts this thread into a network of its own, and the processes and threads that it starts from now on. For good:
    the threads that a library keeps would stay there anyway.

    Returns:
        Whether the machine allows that (Linux does to root); if not, all stay where they are.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(CLONE_NEWNET) != 0:
        return False
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    return True

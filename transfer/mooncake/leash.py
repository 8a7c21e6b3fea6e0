"""Runs a program that is killed when its parent ends: `leash.py PARENT_PID PROGRAM ARGUMENTS...`.

A file to run, not to import: it becomes the program. Linux kills a process so when the thread that started it ends.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # it ended before the leash was on
        sys.exit(f"the process that wanted {command[0]}, {parent}, has ended")
    os.execv(command[0], command)

"""The sockets of a process group, so that a thread can end what the main thread waits for."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FOLDERS = ("/proc/self/fd", "/dev/fd")

_opened: dict[int, int] = {}
"""File descriptor -> inode, of the sockets that process groups have opened."""


@contextmanager
def noting_connections() -> Iterator[None]:
    """Note the sockets that are opened inside the block, in which a process group is made."""
    before = _sockets()
    try:
        yield
    finally:
        _opened.update({number: inode for number, inode in _sockets().items() if before.get(number) != inode})


def cut_connections() -> None:
    """Shut the noted connections that are still open.

    Gloo cannot be told to give up. What waits for a message, in any thread, then fails at once as it does when the other
    process has died.
    """
    present = _sockets()
    for number, inode in list(_opened.items()):
        if present.get(number) != inode:
            continue
        # It may have been closed by now, by Gloo or by the other side.
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            # Gloo ends the process when its listening socket fails.
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
    _opened.clear()


def _sockets() -> dict[int, int]:
    """Return the open sockets of this process: file descriptor -> inode. Nothing where the system does not list them."""
    folder = next((path for path in _FOLDERS if os.path.isdir(path)), None)
    found: dict[int, int] = {}
    for name in [] if folder is None else os.listdir(folder):
        try:
            status = os.fstat(int(name))
        except OSError:  # the folder's own, closed by now
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found

"""Whoever connects to the ports of a run by mistake, or to disturb it, does no harm: the run comes to the same end."""

import random
import socket
import struct
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch

from tests.distributed import chaos

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n"


def listening(processes: list[BaseProcess]) -> set[int]:
    """Return the ports that processes listen on: those of the store and of Gloo."""
    found: set[int] = set()
    for process in processes:
        try:
            connections = psutil.Process(process.pid).net_connections(kind="tcp")
        except psutil.NoSuchProcess:
            continue
        found |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return found


def disturb(port: int, draw: random.Random) -> socket.socket | None:
    """Connect to a port and send what does not belong there; return a connection that is left hanging, if one is."""
    try:
        client = socket.create_connection(("127.0.0.1", port), timeout=2)
    except OSError:  # the run has just ended
        return None
    kind = draw.choice(["http", "bytes", "large", "nothing", "reset", "half"])
    try:
        if kind == "http":
            client.sendall(REQUEST)
        elif kind == "bytes":
            client.sendall(draw.randbytes(draw.randrange(1, 200)))
        elif kind == "large":
            # As the length of a message, in the byte order and width that a protocol might have.
            client.sendall(struct.pack("<Q", 2**40) + struct.pack(">I", 2**31 - 1) + bytes(64))
        elif kind == "half":
            client.sendall(b"\x00" * 4)
        elif kind == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass
    if kind in ("nothing", "half"):
        return client
    client.close()
    return None


def test_stray_clients_do_no_harm(tmp_path: Path) -> None:
    expected = chaos.undisturbed(tmp_path / "undisturbed", 3)
    folder = tmp_path / "disturbed"
    folder.mkdir()
    draw = random.Random(0)
    hanging: list[socket.socket] = []
    disturbed: set[int] = set()
    attempts = 0

    processes = chaos._start(folder, 3, None)
    try:
        while any(process.is_alive() for process in processes) and chaos._step(folder) < chaos.STEPS - 1:
            for port in listening(processes):
                client = disturb(port, draw)
                attempts += 1
                disturbed.add(port)
                if client is not None:
                    hanging.append(client)
            time.sleep(0.02)
        chaos._finish(processes, chaos.SECONDS_TO_FINISH)
    finally:
        for client in hanging:
            client.close()
        for process in processes:
            if process.is_alive():
                process.kill()

    print(f"{attempts} stray connections to {len(disturbed)} ports")
    said = chaos.log_of(folder)
    assert [process.exitcode for process in processes] == [0, 0, 0], said
    # The store's, and one of each process's.
    assert len(disturbed) >= 4
    reached = chaos.result(folder)
    assert reached["loss"] == expected["loss"]
    assert all(torch.equal(value, expected["trained"][name]) for name, value in reached["trained"].items())

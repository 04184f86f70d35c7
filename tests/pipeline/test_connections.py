"""Connections that were noted can be cut from a thread; others stay."""

import socket

from lightning_hybridop.pipeline.connections import cut_connections, noting_connections


def test_what_waits_for_a_noted_connection_sees_its_end_and_others_stay() -> None:
    other, its_peer = socket.socketpair()
    with noting_connections():
        noted, peer = socket.socketpair()
        listener = socket.create_server(("127.0.0.1", 0))

    cut_connections()

    assert noted.recv(1) == b""
    assert peer.recv(1) == b""
    other.sendall(b"x")
    assert its_peer.recv(1) == b"x"
    # A listening socket of Gloo's that failed would end the process.
    with socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        accepted.sendall(b"y")
        assert client.recv(1) == b"y"
        accepted.close()
    cut_connections()
    for each in (other, its_peer, noted, peer, listener):
        each.close()


def test_a_descriptor_that_is_another_socket_by_now_is_left_alone() -> None:
    with noting_connections():
        noted, peer = socket.socketpair()
    number = noted.fileno()
    noted.close()
    again, its_peer = socket.socketpair()
    assert number in (again.fileno(), its_peer.fileno())

    cut_connections()

    again.sendall(b"x")
    assert its_peer.recv(1) == b"x"
    for each in (peer, again, its_peer):
        each.close()

"""Which interface a process talks over: routes, the loopback, and names that lead to the host itself."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from lightning_hybridop.pipeline import interface
from lightning_hybridop.pipeline.interface import InterfaceError, choose_interface
from lightning_hybridop.pipeline.roll_call import AbsentError, grouped, in_words, tell_all
from tests.distributed.harness import run_ranks

# Three boards on a LAN of which `nano` is the master; each knows the others' addresses and calls itself 127.0.1.1.
ADDRESSES = {"nano": "192.168.7.1", "nx": "192.168.7.2", "atlas": "192.168.7.3"}


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets the network of this process look like that of one of the boards."""
    monkeypatch.delenv(interface.GLOO_INTERFACE, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "nano")

    def become(name: str) -> None:
        def route_to(address: str) -> str | None:
            if address == name or address.startswith("127."):
                return "127.0.1.1" if address == name else "127.0.0.1"
            known = address in ADDRESSES or address in ADDRESSES.values()
            return ADDRESSES[name] if known else None

        def entry(address: str) -> Any:
            return SimpleNamespace(family=socket.AF_INET, address=address)

        held = {"lo": [entry("127.0.0.1")], f"eth_{name}": [entry(ADDRESSES[name])], "wlan0": []}
        state = {key: SimpleNamespace(isup=key != "wlan0") for key in held}
        monkeypatch.setattr(interface, "route_to", route_to)
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: held)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: state)

    return become


def facts(*boards: str) -> list[dict[str, str | None]]:
    # The master's name leads each board but the master itself to its own address in the LAN.
    return [
        {
            "identity": name,
            "host": name,
            "address": "127.0.1.1" if name == "nano" else ADDRESSES[name],
        }
        for name in boards
    ]


@pytest.mark.parametrize("rank", range(3))
def test_several_hosts_talk_over_the_route_to_the_master_and_the_master_over_that_to_the_others(
    board: Callable[[str], None], rank: int
) -> None:
    name = list(ADDRESSES)[rank]
    board(name)

    assert interface._own_choice(facts(*ADDRESSES), rank=rank, master="nano", wanted=None) == f"eth_{name}"


def test_processes_of_one_host_talk_over_its_loopback(board: Callable[[str], None]) -> None:
    board("nx")

    assert interface._own_choice(facts("nx", "nx"), rank=1, master="nano", wanted=None) == "lo"


def test_a_master_that_only_names_each_host_itself_is_refused(board: Callable[[str], None]) -> None:
    board("nano")
    alone = [{**each, "address": "127.0.0.1"} for each in facts("nano", "nx")]

    with pytest.raises(
        InterfaceError,
        match="MASTER_ADDR=localhost leads to 127.0.0.1 and no route leads to nx; pass the master's "
        "address in your network, or the interface of this host as GLOO_SOCKET_IFNAME "
        r"\(up are lo 127.0.0.1, eth_nano 192.168.7.1\).",
    ):
        interface._own_choice(alone, rank=0, master="localhost", wanted=None)


def test_a_chosen_interface_must_exist_be_up_and_lead_out(board: Callable[[str], None]) -> None:
    board("nx")

    def chosen(wanted: str, *boards: str) -> str:
        return interface._own_choice(facts(*boards), rank=0, master="nano", wanted=wanted)

    assert chosen("eth_nx", "nx", "nano") == "eth_nx"
    assert chosen("lo", "nx", "nx") == "lo"
    assert chosen("lo,eth_nx", "nx", "nx") == "lo,eth_nx"
    with pytest.raises(InterfaceError, match="there is no interface eth9; pass one of this host's"):
        chosen("eth9", "nx", "nano")
    with pytest.raises(InterfaceError, match="the interface wlan0 is down or has no address"):
        chosen("wlan0", "nx", "nano")
    with pytest.raises(InterfaceError, match="the interface lo leads to no other host"):
        chosen("lo", "nx", "nano")


def test_without_a_loopback_processes_of_one_host_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", dict)

    with pytest.raises(InterfaceError, match=r"no interface holds 127.0.0.1.*\(up are none\)"):
        interface._own_choice(facts("nx"), rank=0, master="nano", wanted=None)


def test_routes_and_interfaces_of_this_host() -> None:
    assert interface.route_to("127.0.0.1") == "127.0.0.1"
    assert interface.route_to("::1") == "::1"
    assert interface.route_to("no such host.invalid") is None
    loopback = interface.interface_of("127.0.0.1")
    assert loopback in interface.interfaces_up()
    assert interface.lan_address(str(loopback)) == "127.0.0.1"
    assert interface.interface_of("192.0.2.1") is None


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.1.1", True), ("::1", True), ("localhost", True), ("192.0.2.1", False), ("no.invalid", False)],
)
def test_a_host_knows_which_addresses_are_its_own(address: str, here: bool) -> None:
    assert interface.leads_here(address) is here
    assert interface.lan_address("no such interface") is None


def test_a_host_may_be_given_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRIDOP_HOST", raising=False)
    assert interface.host_name() == socket.gethostname()
    monkeypatch.setenv("HYBRIDOP_HOST", "nano")
    assert interface.host_name() == "nano"
    assert interface.host_identity() == interface.host_identity() != "nano"


def _choose() -> list[Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0, timeout=timedelta(seconds=20)
    )
    found: list[Any] = [choose_interface(dist.PrefixStore("a", store), rank=rank, size=size)]
    try:
        # Wrong on one rank alone: all hear of it.
        os.environ["HYBRIDOP_HOST"] = f"board{rank}"
        choose_interface(
            dist.PrefixStore("b", store), rank=rank, size=size, wanted="eth9" if rank == 1 else None
        )
    except InterfaceError as error:
        found.append(str(error))
    return found


@pytest.mark.distributed
def test_all_ranks_choose_and_all_hear_of_one_that_cannot() -> None:
    for chosen, said in run_ranks(_choose, 3):
        assert chosen == interface.interface_of("127.0.0.1")
        assert said.startswith("Rank 1 (host board1): there is no interface eth9;")


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    store.set("topic/1", "null")

    with pytest.raises(AbsentError, match=r"^ranks 2-3 of 4 did not come within the time limit"):
        tell_all(store, None, topic="topic", rank=0, size=4)


def test_ranks_are_named_as_a_person_would() -> None:
    assert in_words([3]) == "rank 3"
    assert in_words([5, 0, 1, 2]) == "ranks 0-2, 5"
    assert in_words([0, 1], {0: "nano", 1: "nx"}) == "ranks 0-1 (hosts nano, nx)"
    hosts = {0: "a", 1: "a", 2: "b", 3: "c"}
    assert grouped({0: "1", 1: "2", 2: "1", 3: "3"}, hosts) == (
        "1 on ranks 0, 2 (hosts a, b), 2 on rank 1 (host a) and 3 on rank 3 (host c)"
    )


def test_a_plan_names_hosts_only_where_there_are_several() -> None:
    assert interface.hosts_to_name(["nano", "nano"]) == [None, None]
    assert interface.hosts_to_name(["nano", "nx", "nano"]) == ["nano", "nx", "nano"]

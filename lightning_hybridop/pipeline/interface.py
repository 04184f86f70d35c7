"""Which network interface the processes of a run talk over, and what their hosts are called."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch.distributed as dist

from lightning_hybridop.pipeline.roll_call import tell_all

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable from which Gloo takes its interface."""

ANY_PORT = 9
"""Where routes are asked for; nothing is sent there."""


class InterfaceError(RuntimeError):
    """The hosts of a run have no interface to talk over; the message says what was found and what to pass."""


def host_name() -> str:
    """Return what this host is called in plans, tables and errors: HYBRIDOP_HOST if it is set, else its own name."""
    return os.environ.get("HYBRIDOP_HOST") or socket.gethostname()


def hosts_to_name(hosts: Sequence[str]) -> list[str | None]:
    """Return the host that a plan made for ranks on `hosts` should name for each rank: none where all are on one."""
    return [host if len(set(hosts)) > 1 else None for host in hosts]


def host_identity() -> str:
    """Return a text that two processes have in common if, and only if, they reach each other over the loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # Containers of one machine may have networks of their own.
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def route_to(address: str) -> str | None:
    """Return the local address from which packets to `address`, a name or number, go out; None if none would.

    IPv4 where the address has it. Nothing is sent.
    """
    try:
        found = socket.getaddrinfo(address, ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def interface_of(address: str) -> str | None:
    """Return the interface that holds a local address, None if none does."""
    for name, held in psutil.net_if_addrs().items():
        # IPv6 addresses of one link carry its name behind a percent sign.
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in held):
            return str(name)
    return None


def leads_here(address: str) -> bool:
    """Tell whether an address, a name or number, is one of this host's own."""
    try:
        found = socket.getaddrinfo(address, ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    numbers = [str(target[0]) for *_, target in found]
    return any(is_loopback(number) or interface_of(number) is not None for number in numbers)


def lan_address(interface: str) -> str | None:
    """Return the address of an interface, IPv4 where it has one; None without any."""
    held = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in held:
            if entry.family == family:
                return str(entry.address)
    return None


def interfaces_up() -> list[str]:
    """Return the interfaces of this host that are up and have an address."""
    state = psutil.net_if_stats()
    return [name for name in state if state[name].isup and lan_address(name) is not None]


def is_loopback(address: str) -> bool:
    """Tell whether an address leads no further than its own host."""
    return address.startswith("127.") or address == "::1"


def choose_interface(store: dist.Store, *, rank: int, size: int, wanted: str | None = None) -> str:
    """Return the interface over which this process reaches all others. Collective over `store`.

    One that the user chose, as `wanted` or in GLOO_SOCKET_IFNAME, if it exists and is up; the loopback if all
    processes are on one host; else the interface of the route to MASTER_ADDR. On the host where that name means the host
    itself, as on Debian, whose own names lead to 127.0.1.1, the route to another host counts.

    Raises:
        InterfaceError: on every rank, for the first one that has no such interface.
        AbsentError: a rank did not come.
    """
    master = os.environ["MASTER_ADDR"]
    address = route_to(master)
    mine = {"identity": host_identity(), "host": host_name(), "address": address}
    facts = tell_all(store, mine, topic="interface/facts", rank=rank, size=size)
    chosen: dict[str, str] = {}
    try:
        chosen["interface"] = _own_choice(
            facts, rank=rank, master=master, wanted=wanted or os.environ.get(GLOO_INTERFACE)
        )
    except InterfaceError as error:
        chosen["error"] = f"Rank {rank} (host {host_name()}): {error}"
    everyone = tell_all(store, chosen, topic="interface/chosen", rank=rank, size=size)
    for other in everyone:
        if "error" in other:
            raise InterfaceError(other["error"])
    return chosen["interface"]


def _own_choice(facts: list[dict[str, str | None]], *, rank: int, master: str, wanted: str | None) -> str:
    one_host = len({other["identity"] for other in facts}) == 1
    if wanted:
        return _checked(wanted, one_host=one_host)
    if one_host:
        return _loopback()
    mine = facts[rank]
    elsewhere = [other for other in facts if other["identity"] != mine["identity"]]
    candidates = [mine["address"]]
    # What leads to the master leads to itself here: look at how the others come in.
    others = [str(other["address"]) for other in elsewhere if other["address"] is not None]
    candidates += [route_to(other) for other in others if not is_loopback(other)]
    for address in candidates:
        interface = None if address is None or is_loopback(address) else interface_of(address)
        if interface is not None:
            return interface
    hosts = ", ".join(sorted({str(other["host"]) for other in elsewhere}))
    raise InterfaceError(
        f"MASTER_ADDR={master} leads to {mine['address'] or 'no address'} and no route leads to {hosts}; pass the master's "
        f"address in your network, or the interface of this host as {GLOO_INTERFACE} ({_known()})."
    )


def _checked(wanted: str, *, one_host: bool) -> str:
    """Return the interfaces of a list such as Gloo takes, having checked that each of them can be used."""
    for name in wanted.split(","):
        if name not in psutil.net_if_stats():
            raise InterfaceError(f"there is no interface {name}; pass one of this host's ({_known()}).")
        if name not in interfaces_up():
            raise InterfaceError(
                f"the interface {name} is down or has no address; bring it up or pass another one ({_known()})."
            )
        address = lan_address(name)
        if not one_host and address is not None and is_loopback(address):
            raise InterfaceError(
                f"the interface {name} leads to no other host, but the processes are on several; leave it (and "
                f"{GLOO_INTERFACE}) out, or pass one that does ({_known()})."
            )
    return wanted


def _loopback() -> str:
    interface = interface_of("127.0.0.1") or interface_of("::1")
    if interface is None:
        raise InterfaceError(
            f"no interface holds 127.0.0.1, so that processes of this host cannot reach each other; bring the loopback up "
            f"(ip link set lo up) or pass another one as {GLOO_INTERFACE} ({_known()})."
        )
    return interface


def _known() -> str:
    return "up are " + (", ".join(f"{name} {lan_address(name)}" for name in interfaces_up()) or "none")

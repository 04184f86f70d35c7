"""The hosts of a run: their names, addresses and devices, as a hosts file has them."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_hybridop.planning.cluster import Cluster, ClusterError, DeviceProfile, Link, cluster_from_dict
from lightning_hybridop.planning.fields import check_name, check_whole, checked_fields
from lightning_hybridop.planning.plan import Plan

MOST_HOSTS = 64
INSIDE = {"bandwidth_mbit_s": 10_000.0, "latency_ms": 0.05}
"""Between two devices of one host: an assumption, which `links` can replace by naming the devices."""

_DEVICE = re.compile(r"(cpu|cuda|npu)(:\d+)?")
# What stands in commands: nothing that a shell or ssh would take for something else.
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*")
_LOGIN = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.:%-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevice:
    """One device of a host, on which one process runs one stage.

    `profile` is that of a device of the library or a file that `hybridop profile` wrote; `figures` replace some of it.
    """

    device: str = "cpu"
    profile: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host: the name that plans call it, the address that others reach it at (None: its name), and its devices.

    `ssh` is whom to log in as and where (None: the address), `python` its interpreter, `folder` where commands run,
    `interface` what its processes talk over (None: what leads to the others).
    """

    name: str
    devices: tuple[HostDevice, ...]
    address: str | None = None
    ssh: str | None = None
    interface: str | None = None
    python: str = "python"
    folder: str | None = None

    @property
    def reached_at(self) -> str:
        """The address, or the name where there is none."""
        return self.address or self.name

    def names(self) -> tuple[str, ...]:
        """Return what the cluster calls its devices: `<host>/<device>`, numbered where several processes share one."""
        found: list[str] = []
        for device in self.devices:
            name = f"{self.name}/{device.device}"
            same = sum(other == name or other.startswith(f"{name}-") for other in found)
            found.append(name if same == 0 else f"{name}-{same + 1}")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, and where they meet: at `port` of the host `master` (None: the first one).

    `link` lies between two hosts that `links` does not name. `efficiency` and `usable_memory` are those of a cluster.
    """

    hosts: tuple[Host, ...]
    name: str = "lan"
    master: str | None = None
    port: int = 29500
    link: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[Mapping[str, Any], ...] = ()
    efficiency: float | None = None
    usable_memory: float = 1.0

    def only(self, names: Sequence[str]) -> "Hosts":
        """Return these hosts alone, and the links between them.

        Raises:
            ClusterError: there is no host of that name.
        """
        known = [host.name for host in self.hosts]
        for name in names:
            if name not in known:
                raise ClusterError(
                    f"A process says that it runs on {name}, but the hosts are {', '.join(known)}; correct HYBRIDOP_HOST there."
                )
        absent = set(known) - set(names)
        return dataclasses.replace(
            self,
            hosts=tuple(host for host in self.hosts if host.name not in absent),
            master=None if self.master in absent else self.master,
            links=tuple(
                link
                for link in self.links
                if not any(str(end).partition("/")[0] in absent for end in link.get("between", ()))
            ),
        )

    def device_of(self, host: str, local_rank: int) -> str:
        """Return the device of a host's process: processes of a host take its devices in their order.

        Raises:
            ClusterError: there is no host of that name, or no device for the process.
        """
        (found,) = self.only([host]).hosts
        if local_rank >= len(found.devices):
            raise ClusterError(
                f"{host} has {len(found.devices)} device{'s' if len(found.devices) > 1 else ''} in the hosts file, but at least "
                f"{local_rank + 1} processes run there; start one for each device."
            )
        return found.devices[local_rank].device

    @property
    def meeting_place(self) -> Host:
        """The host that the others come to first."""
        return next((host for host in self.hosts if host.name == self.master), self.hosts[0])


def hosts_from_dict(values: Any) -> Hosts:
    """Return the hosts that plain containers describe.

    Raises:
        ClusterError: naming the field.
    """
    fields = checked_fields("hosts file", values, Hosts, error=ClusterError)
    entries = fields["hosts"]
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ClusterError(
            "hosts: found none, expected a list with one entry per host, such as {name: nano, address: 192.168.1.11, "
            "devices: [{device: 'cuda:0', profile: jetson-orin-nano-8gb}]}."
        )
    if len(entries) > MOST_HOSTS:
        raise ClusterError(f"hosts: found {len(entries)}, expected at most {MOST_HOSTS}.")
    hosts = tuple(_host(f"hosts[{index}]", entry) for index, entry in enumerate(entries))
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ClusterError(f"hosts: two are called {name}; put their devices into one entry.")
    master = fields.get("master")
    if master is not None and master not in names:
        raise ClusterError(f"master: there is no host {master}; the hosts are {', '.join(names)}.")
    check_whole("port", fields.get("port", 1), 1, 65535, error=ClusterError)
    given = {name: value for name, value in fields.items() if value is not None}
    links = given.get("links", ())
    if not isinstance(links, (list, tuple)):
        raise ClusterError(f"links: found {type(links).__name__}, expected a list with one entry per link.")
    return Hosts(**{**given, "hosts": hosts, "links": tuple(links)})


def _host(where: str, values: Any) -> Host:
    fields = checked_fields(where, values, Host, error=ClusterError)
    for name in ("name", "address", "interface"):
        _check_word(f"{where}.{name}", fields.get(name), _WORD)
    check_name(f"{where}.name", fields["name"], error=ClusterError)
    _check_word(f"{where}.ssh", fields.get("ssh"), _LOGIN)
    for name in ("python", "folder"):
        if fields.get(name) is not None:
            check_name(f"{where}.{name}", fields[name], error=ClusterError)
            if fields[name].startswith("-") or "\n" in fields[name]:
                raise ClusterError(f"{where}.{name}: found {fields[name]!r}, expected a path.")
            if fields[name].startswith("~") and fields[name].partition("/")[0] != "~":
                raise ClusterError(
                    f"{where}.{name}: found {fields[name]!r}, expected the whole path, or one below ~/, the home folder of whom ssh "
                    "logs in as."
                )
    entries = fields["devices"]
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ClusterError(
            f"{where}.devices: found none, expected a list with one entry per process, such as {{device: cpu}}."
        )
    devices = tuple(_device(f"{where}.devices[{index}]", entry) for index, entry in enumerate(entries))
    given = {name: value for name, value in fields.items() if value is not None}
    return Host(**{**given, "devices": devices})


def _device(where: str, values: Any) -> HostDevice:
    figures = tuple(
        field.name for field in dataclasses.fields(DeviceProfile) if field.name not in ("name", "sources")
    )
    fields = checked_fields(where, values, HostDevice, error=ClusterError, also=figures)
    nested = fields.pop("figures", None)
    if nested is not None:
        raise ClusterError(f"{where}.figures: write the figures themselves, such as memory_gb: 7.")
    own = {name: fields.pop(name) for name in figures if name in fields}
    device = fields.get("device", "cpu")
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise ClusterError(f"{where}.device: found {device!r}, expected cpu, cuda:<number> or npu:<number>.")
    if fields.get("profile") is not None:
        check_name(f"{where}.profile", fields["profile"], error=ClusterError)
    return HostDevice(**fields, figures=own)


def _check_word(where: str, value: Any, form: re.Pattern[str]) -> None:
    if value is not None and (not isinstance(value, str) or not form.fullmatch(value)):
        raise ClusterError(
            f"{where}: found {value!r}, expected letters, digits and . _ - : % alone, and no - at the start."
        )


def cluster_of_hosts(hosts: Hosts, profiles: Mapping[str, DeviceProfile]) -> Cluster:
    """Return the devices of all hosts as a cluster to plan for, called `<host>/<device>`.

    Links are between hosts; two devices of one host are as near as `INSIDE` says.

    Raises:
        ClusterError: a device has no profile, or a field is wrong.
    """
    devices = []
    for host in hosts.hosts:
        for name, device in zip(host.names(), host.devices, strict=True):
            if device.profile is None:
                raise ClusterError(
                    f"The device {name} has no profile, so nothing can be planned for it; give it one of the library's, or the "
                    "file that `hybridop profile` writes there, or plan with plan=auto."
                )
            devices.append({"profile": device.profile, "name": name, **device.figures})
    values: dict[str, Any] = {
        "name": hosts.name,
        "devices": devices,
        "link": hosts.link,
        "links": _device_links(hosts),
        "usable_memory": hosts.usable_memory,
    }
    if hosts.efficiency is not None:
        values["efficiency"] = hosts.efficiency
    return cluster_from_dict(values, profiles)


def _device_links(hosts: Hosts) -> list[dict[str, Any]]:
    """Return the links between devices: those inside of hosts, and for each link between two hosts all of their devices'."""
    named = {host.name: host.names() for host in hosts.hosts}
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for names in named.values():
        for index, first in enumerate(names):
            for second in names[index + 1 :]:
                found[tuple(sorted((first, second)))] = {"between": [first, second], **INSIDE}
    for index, entry in enumerate(hosts.links):
        given = checked_fields(f"links[{index}]", entry, Link, error=ClusterError, also=("between",))
        pair = given.pop("between", None)
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(name in named for name in pair):
            raise ClusterError(
                f"links[{index}].between: found {pair!r}, expected the names of two hosts ({', '.join(named)})."
            )
        if pair[0] == pair[1]:
            raise ClusterError(f"links[{index}].between: found {pair[0]} twice, expected two hosts.")
        for first in named[pair[0]]:
            for second in named[pair[1]]:
                found[tuple(sorted((first, second)))] = {"between": [first, second], **given}
    return list(found.values())


def on_hosts(plan: Plan, hosts: Hosts) -> Plan:
    """Return a plan for the cluster of these hosts with the host and the device of each stage."""
    known = {
        name: (host.name, device.device)
        for host in hosts.hosts
        for name, device in zip(host.names(), host.devices, strict=True)
    }
    stages = []
    for stage in plan.stages:
        host, device = known[str(stage.name)]
        stages.append(dataclasses.replace(stage, host=host, device=device))
    return dataclasses.replace(plan, stages=tuple(stages))

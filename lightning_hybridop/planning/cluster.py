"""The cluster: which devices there are, how fast and how large, and the links between them."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_hybridop.planning.fields import check_name, check_number, check_whole, checked_fields

BYTES_PER_GB = 1e9
DTYPES = ("float32", "bfloat16", "float16", "int8")
MOST_DEVICES = 64


class ClusterError(ValueError):
    """A cluster or device profile that cannot be planned for; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What is known of one kind of device, in one power mode; None where a figure is unknown.

    Rates are dense TFLOP/s by dtype, memory in GB (1e9 bytes), its bandwidth in GB/s, power in W. `efficiency` is the
    share of a rate that a model reaches: 1 for measured rates, an assumption for a vendor's peak; None leaves it to the
    cluster. The head has
    rates of its own where they were measured. A device without backward rates cannot back-propagate; one that is
    `forward_only` could, but so slowly that HybridOP gives it the role zo. `sources` says where each figure is from.

    Raises:
        ClusterError: a figure is not a positive number.
    """

    name: str
    title: str = ""
    forward_only: bool = False
    forward_tflops: Mapping[str, float] = field(default_factory=dict)
    backward_tflops: Mapping[str, float] = field(default_factory=dict)
    head_forward_tflops: Mapping[str, float] = field(default_factory=dict)
    head_backward_tflops: Mapping[str, float] = field(default_factory=dict)
    efficiency: float | None = None
    memory_gb: float | None = None
    memory_bandwidth_gb_s: float | None = None
    busy_w: float | None = None
    idle_w: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("profile.name", self.name, error=ClusterError)
        for name in ("forward_tflops", "backward_tflops", "head_forward_tflops", "head_backward_tflops"):
            rates = getattr(self, name)
            if not isinstance(rates, Mapping):
                raise ClusterError(
                    f"{self.name}.{name}: found {rates!r}, expected a rate for each dtype, such as {{float16: 4}}."
                )
            for dtype, rate in rates.items():
                if dtype not in DTYPES:
                    raise ClusterError(
                        f"{self.name}.{name}: found {dtype!r}, expected one of {', '.join(DTYPES)}."
                    )
                check_number(f"{self.name}.{name}.{dtype}", rate, error=ClusterError)
        if not isinstance(self.forward_only, bool):
            raise ClusterError(
                f"{self.name}.forward_only: found {self.forward_only!r}, expected true or false."
            )
        if self.efficiency is not None:
            _check_share(f"{self.name}.efficiency", self.efficiency)
        for name in ("memory_gb", "memory_bandwidth_gb_s", "busy_w", "idle_w"):
            value = getattr(self, name)
            if value is not None:
                above = name != "idle_w"
                check_number(f"{self.name}.{name}", value, error=ClusterError, above=above)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a cluster: a name of its own and the profile of its kind."""

    name: str
    profile: DeviceProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What lies between two devices, in each direction.

    Raises:
        ClusterError: the bandwidth is not positive, or the latency negative.
    """

    bandwidth_mbit_s: float = 1000.0
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        check_number("link.bandwidth_mbit_s", self.bandwidth_mbit_s, error=ClusterError)
        check_number("link.latency_ms", self.latency_ms, error=ClusterError, above=False)

    def seconds(self, size: float) -> float:
        """Return how long `size` bytes keep the link busy, latency not included."""
        return size * 8 / (self.bandwidth_mbit_s * 1e6)

    @property
    def latency(self) -> float:
        """Latency in seconds."""
        return self.latency_ms / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices and links.

    `link` lies between any two devices that `links` (keyed by both names in alphabetical order) does not name.
    `usable_memory` is the share of a device's memory that a process can have. An emulated cluster runs on other
    machines, which sleep until an action has taken `time_scale` times as long as its profile says.

    Raises:
        ClusterError: no device, a name twice, a link to no device, or a figure out of range.
    """

    name: str
    devices: tuple[Device, ...]
    link: Link = field(default_factory=Link)
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    usable_memory: float = 1.0
    emulate: bool = False
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError("devices: found none, expected at least one; add a line with a profile.")
        if len(self.devices) > MOST_DEVICES:
            raise ClusterError(f"devices: found {len(self.devices)}, expected at most {MOST_DEVICES}.")
        check_name("cluster.name", self.name, error=ClusterError)
        names = [device.name for device in self.devices]
        for name in names:
            check_name("devices.name", name, error=ClusterError)
            if names.count(name) > 1:
                raise ClusterError(
                    f"devices: two are called {name}; give one entry a `name`, or put both into one entry with a `count`."
                )
        for pair in self.links:
            for name in pair:
                if name not in names:
                    raise ClusterError(
                        f"links: there is no device {name}; the devices are {', '.join(names)}."
                    )
        _check_share("usable_memory", self.usable_memory)
        check_number("time_scale", self.time_scale, error=ClusterError)
        if not isinstance(self.emulate, bool):
            raise ClusterError(f"emulate: found {self.emulate!r}, expected true or false.")

    def link_between(self, first: str, second: str) -> Link:
        """Return the link between two devices, given by name in either order."""
        return self.links.get((min(first, second), max(first, second)), self.link)

    def only(self, names: Sequence[str]) -> "Cluster":
        """Return this cluster with the named devices alone; ClusterError if it has no device of a name."""
        known = {device.name for device in self.devices}
        for name in names:
            if name not in known:
                raise ClusterError(
                    f"The cluster {self.name} has no device {name}; it has {', '.join(sorted(known))}."
                )
        return dataclasses.replace(
            self,
            devices=tuple(device for device in self.devices if device.name in names),
            links={pair: link for pair, link in self.links.items() if set(pair) <= set(names)},
        )


def _check_share(where: str, value: Any) -> None:
    check_number(where, value, error=ClusterError)
    if value > 1:
        raise ClusterError(f"{where}: found {value}, expected a share of at most 1.")


def _or_empty(value: Any) -> Any:
    return {} if value is None else value


def profile_from_dict(values: Any, *, where: str = "profile") -> DeviceProfile:
    """Return the profile that plain containers describe; a `null` leaves a figure unknown.

    Raises:
        ClusterError: an unknown or missing field, or a figure out of range.
    """
    fields = checked_fields(where, values, DeviceProfile, error=ClusterError)
    defaults = {f.name for f in dataclasses.fields(DeviceProfile) if f.default is None}
    return DeviceProfile(
        **{name: value for name, value in fields.items() if value is not None or name in defaults}
    )


def cluster_from_dict(values: Any, profiles: Mapping[str, DeviceProfile]) -> Cluster:
    """Return the cluster that plain containers describe.

    Each entry of `devices` names a profile of `profiles`, and may have a `count`, a `name` and figures of the profile
    that it replaces. `efficiency` is that of all devices whose profiles do not say otherwise. Each entry of `links` has
    `between` (two names), `bandwidth_mbit_s` and `latency_ms`.

    Raises:
        ClusterError: naming the field.
    """
    fields = checked_fields("cluster", values, Cluster, error=ClusterError, also=("efficiency",))
    efficiency = fields.pop("efficiency", None)
    if efficiency is not None:
        _check_share("efficiency", efficiency)
    entries = fields.pop("devices")
    entries = () if entries is None else entries
    if not isinstance(entries, (list, tuple)):
        raise ClusterError(f"devices: found {type(entries).__name__}, expected a list of profiles.")
    devices: list[Device] = []
    for index, entry in enumerate(entries):
        devices += _devices(f"devices[{index}]", entry, profiles, efficiency)
    link = Link(**checked_fields("link", _or_empty(fields.pop("link", None)), Link, error=ClusterError))
    links = {}
    given_links = fields.pop("links", None) or ()
    if not isinstance(given_links, (list, tuple)):
        raise ClusterError(
            f"links: found {type(given_links).__name__}, expected a list with one entry per link."
        )
    for index, entry in enumerate(given_links):
        where = f"links[{index}]"
        given = checked_fields(where, entry, Link, error=ClusterError, also=("between",))
        pair = given.pop("between", None)
        names = isinstance(pair, (list, tuple)) and all(isinstance(name, str) for name in pair)
        if not names or len(set(pair)) != 2 or len(pair) != 2:
            raise ClusterError(f"{where}.between: found {pair!r}, expected the names of two devices.")
        if (min(pair), max(pair)) in links:
            raise ClusterError(f"{where}.between: the link between {pair[0]} and {pair[1]} is given twice.")
        links[min(pair), max(pair)] = Link(**given)
    return Cluster(devices=tuple(devices), link=link, links=links, **fields)


def _devices(
    where: str, entry: Any, profiles: Mapping[str, DeviceProfile], efficiency: float | None
) -> list[Device]:
    if not isinstance(entry, Mapping):
        raise ClusterError(
            f"{where}: found {entry!r}, expected fields with values, such as {{profile: jetson-orin-nx-16gb}}."
        )
    given = dict(entry)
    name, count, label = given.pop("profile", None), given.pop("count", 1), given.pop("name", None)
    if not isinstance(name, str) or name not in profiles:
        near = difflib.get_close_matches(str(name), profiles, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(sorted(profiles))}."
        raise ClusterError(f"{where}.profile: there is no profile {name!r}; {hint}")
    check_whole(f"{where}.count", count, 1, MOST_DEVICES, error=ClusterError)
    if label is not None:
        check_name(f"{where}.name", label, error=ClusterError)
    known = {f.name: getattr(profiles[name], f.name) for f in dataclasses.fields(DeviceProfile)}
    if known["efficiency"] is None:
        known["efficiency"] = efficiency
    profile = profile_from_dict({**known, **given, "name": known["name"]}, where=where)
    label = label or profile.name
    names = (
        [label] if count == 1 and entry.get("name") is not None else [f"{label}-{i}" for i in range(count)]
    )
    return [Device(name=each, profile=profile) for each in names]

"""Network namespaces as hosts on one switch: each with its own address, name, loopback and rate."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

NETWORK = "10.77.0"
FOLDER = Path("/etc/netns")


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


def why_not() -> str | None:
    """Return why there can be no namespaces here, None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"network namespaces need the program {program} (package iproute2 or util-linux)"
    name = f"hyprobe{os.getpid()}"
    try:
        _command("ip", "netns", "add", name)
        try:
            inside = ("ip", "netns", "exec", name)
            _command(*inside, "ip", "link", "add", "one", "type", "veth", "peer", "name", "two")
            _command(*inside, "ip", "link", "add", "three", "type", "bridge")
            _command(*inside, "tc", "qdisc", "add", "dev", "one", "root", *_rate(100))
            _command("unshare", "--uts", "true")
        finally:
            _command("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return None


def _rate(mbit_s: int) -> tuple[str, ...]:
    # A burst of a hundredth of a second, and of two packets at least.
    burst = max(3000, mbit_s * 10_000 // 8)
    return ("tbf", "rate", f"{mbit_s}mbit", "burst", str(burst), "latency", "400ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lan:
    """Hosts with names and addresses that programs can be run on."""

    prefix: str
    addresses: dict[str, str]

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a host, under its name."""
        named = 'hostname "$0" && exec "$@"'
        inside = ("unshare", "--uts", "bash", "-c", named, host, *command)
        return ["ip", "netns", "exec", f"{self.prefix}{host}", *inside]

    def limit(self, mbit_s: int) -> None:
        """Give every host's cable this rate, in both directions."""
        for number, host in enumerate(self.addresses, start=1):
            for namespace, device in ((host, "eth0"), ("switch", f"port{number}")):
                inside = ("ip", "netns", "exec", f"{self.prefix}{namespace}")
                _command(*inside, "tc", "qdisc", "replace", "dev", device, "root", *_rate(mbit_s))

    def unplug(self, host: str) -> None:
        """Pull a host's cable."""
        number = list(self.addresses).index(host) + 1
        _command("ip", "netns", "exec", f"{self.prefix}switch", "ip", "link", "set", f"port{number}", "down")


@contextmanager
def lan(*hosts: str) -> Iterator[Lan]:
    """Make hosts of these names; each calls itself 127.0.1.1, as Debian does, and knows the others' addresses."""
    made = Lan(
        prefix=f"hy{os.getpid()}",
        addresses={host: f"{NETWORK}.{number}" for number, host in enumerate(hosts, start=1)},
    )
    switch = f"{made.prefix}switch"
    in_switch = ("ip", "netns", "exec", switch, "ip", "link")
    try:
        _command("ip", "netns", "add", switch)
        _command(*in_switch, "add", "bridge", "type", "bridge")
        _command(*in_switch, "set", "bridge", "up")
        for number, (host, address) in enumerate(made.addresses.items(), start=1):
            own, port = f"{made.prefix}{host}", f"port{number}"
            folder = FOLDER / own
            folder.mkdir(parents=True)
            others = [f"{others} {name}" for name, others in made.addresses.items() if name != host]
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {host}", *others]
            (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
            _command("ip", "netns", "add", own)
            _command(*in_switch, "add", port, "type", "veth", "peer", "name", "eth0", "netns", own)
            _command(*in_switch, "set", port, "master", "bridge")
            _command(*in_switch, "set", port, "up")
            inside = ("ip", "netns", "exec", own, "ip")
            _command(*inside, "link", "set", "lo", "up")
            _command(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
            _command(*inside, "link", "set", "eth0", "up")
        yield made
    finally:
        for name in (*hosts, "switch"):
            with suppress(subprocess.CalledProcessError):
                _command("ip", "netns", "del", f"{made.prefix}{name}")
            shutil.rmtree(FOLDER / f"{made.prefix}{name}", ignore_errors=True)


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End processes that lead sessions of their own, and all that they started."""
    for process in processes:
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait(timeout=20)

"""Whether the processes of a run agree: on what they run, on the model, on the configuration."""

import hashlib
import math
import platform
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import torch.distributed as dist
from torch import nn

from lightning_hybridop.pipeline.exchange import gather_json, gather_numbers
from lightning_hybridop.pipeline.interface import host_name
from lightning_hybridop.pipeline.roll_call import grouped, tell_all
from lightning_hybridop.pipeline.weights import AwaitedParameter, read_some

ITSELF = "lightning-hybridop"
PACKAGES = ("torch", "lightning", "transformers", "peft")

SAMPLED = 16
"""How many values of each parameter are compared."""

SAME_DTYPE = 1e-3
"""Values of one dtype may differ by this much: processors round a drawn number differently in its last bits."""

OTHER_DTYPES = 2e-2
"""Values of different dtypes may differ by what bfloat16 rounds, with room."""


class AgreementError(RuntimeError):
    """The processes of a run do not have the same; the message says what, who has which, and what to do."""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that must fit together on all hosts; imports none of them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        found[name] = _version(name)
    found[ITSELF] = f"{_version(ITSELF)}, sources {_sources()}"
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@cache
def _sources() -> str:
    """Return a checksum of this package's own code: checkouts of one version may differ."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        # Those stand beside the package in a checkout.
        if relative.parts[0] not in ("conf", "recipes"):
            digest.update(relative.as_posix().encode())
            digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:8]


def check_versions(store: dist.Store, *, rank: int, size: int) -> None:
    """Compare what all ranks run. Collective over `store`, before the ranks are connected.

    Minor versions must be equal, patch levels and builds may differ, with a notice on rank 0; this package must be the
    same.

    Raises:
        AgreementError: on every rank, with the same sentence.
        AbsentError: a rank did not come.
    """
    told = tell_all(store, [host_name(), versions()], topic="versions", rank=rank, size=size)
    refused, noticed = compared_versions([host for host, _ in told], [found for _, found in told])
    if refused:
        raise AgreementError(
            f"The hosts do not run the same: {'; '.join(refused)}. Install the same versions on every host."
        )
    if noticed and rank == 0:
        warnings.warn(
            f"The hosts run slightly different versions, which is allowed: {'; '.join(noticed)}.",
            stacklevel=2,
        )


def compared_versions(
    hosts: Sequence[str], found: Sequence[Mapping[str, str]]
) -> tuple[list[str], list[str]]:
    """Return what is wrong with the versions of the ranks, and what is merely worth a notice."""
    refused: list[str] = []
    noticed: list[str] = []
    for name in dict.fromkeys(name for one in found for name in one):
        values = {rank: one.get(name, "not installed") for rank, one in enumerate(found)}
        if len(set(values.values())) == 1:
            continue
        text = f"{name} is {grouped(values, dict(enumerate(hosts)))}"
        compared = {_what_must_agree(name, value) for value in values.values()}
        (refused if len(compared) > 1 else noticed).append(text)
    return refused, noticed


def _what_must_agree(package: str, version: str) -> str:
    if package == ITSELF:
        return version.rpartition(" ")[2]
    minor = re.match(r"(\d+)\.(\d+)", version)
    return minor.group() if minor else version


def check_facts(facts: Mapping[str, str], what: str) -> None:
    """Compare named facts about `what` over all ranks. Collective.

    A fact that only some ranks have is compared among those.

    Raises:
        AgreementError: on every rank, naming the first fact that differs, and who has which value.
    """
    checksum = hashlib.sha256(repr(list(facts.items())).encode()).hexdigest()
    if len(set(gather_json(checksum))) == 1:
        return
    told = gather_json([host_name(), dict(facts)])
    hosts = {rank: host for rank, (host, _) in enumerate(told)}
    for name in dict.fromkeys(name for _, those in told for name in those):
        values = {rank: those[name] for rank, (_, those) in enumerate(told) if name in those}
        if len(set(values.values())) > 1:
            raise AgreementError(
                f"The ranks do not have the same {what}: {name} is {grouped(values, hosts)}; start every host with the same "
                "options and files."
            )


def model_facts(module: nn.Module) -> dict[str, str]:
    """Return what is known of a module without its parameters' values: classes, names and shapes."""
    named = list(module.named_parameters())
    classes = [f"{name}:{type(child).__name__}" for name, child in module.named_modules()]
    trained = [name for name, parameter in named if parameter.requires_grad]
    facts = {
        "the module's class": type(module).__name__,
        "the number of parameters": str(len(named)),
        "the number of trainable parameters": str(len(trained)),
    }
    facts |= {
        f"the shape of {name}": str(list(parameter.shape)).replace(" ", "") for name, parameter in named
    }
    return {
        **facts,
        "the checksum of all parameters' names": _checksum([name for name, _ in named]),
        "the checksum of the trainable parameters' names": _checksum(trained),
        "the checksum of all classes": _checksum(classes),
    }


def check_values(module: nn.Module) -> None:
    """Compare a few values of each parameter over all ranks, which have the same names and shapes. Collective.

    Weights that are still to be read are looked up in their file.

    Raises:
        AgreementError: on every rank, naming the first parameter whose values differ, and the ranks.
    """
    named = list(module.named_parameters())
    samples = [_sample(parameter) for _, parameter in named]
    widths = [min(SAMPLED, parameter.numel()) for _, parameter in named]
    mine: list[float] = []
    for values, width in zip(samples, widths, strict=True):
        mine += values if values is not None else [math.nan] * width
    dtypes = gather_json([host_name(), [str(parameter.dtype) for _, parameter in named]])
    gathered = gather_numbers(mine, range(dist.get_world_size()))
    start = 0
    for index, (name, _) in enumerate(named):
        end = start + widths[index]
        first = gathered[0][start:end]
        odd = [
            rank
            for rank, numbers in enumerate(gathered)
            if not _near(
                first,
                numbers[start:end],
                SAME_DTYPE if dtypes[rank][1][index] == dtypes[0][1][index] else OTHER_DTYPES,
            )
        ]
        if odd:
            hosts = {rank: host for rank, (host, _) in enumerate(dtypes)}
            who = {rank: "other values" if rank in odd else "some values" for rank in hosts}
            raise AgreementError(
                f"The ranks do not have the same model: {name} has {grouped(who, hosts)}; give every host the same model "
                "files, and call seed_everything before the module is made."
            )
        start = end


def _sample(parameter: nn.Parameter) -> list[float] | None:
    """Return values from the middle of a parameter, None where it has none that can be compared."""
    count = min(SAMPLED, parameter.numel())
    start = (parameter.numel() - count) // 2
    if not parameter.is_floating_point():
        return None
    if isinstance(parameter, AwaitedParameter):
        return read_some(parameter.stored, start, count)
    if parameter.is_meta:
        return None
    flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach().flatten()
    return [float(value) for value in flat[start : start + count].double().cpu()]


def _near(first: Sequence[float], second: Sequence[float], tolerance: float) -> bool:
    """Tell whether two samples agree, up to a share of their largest value; what is not a number is not compared."""
    pairs = [
        (one, other)
        for one, other in zip(first, second, strict=True)
        if not (math.isnan(one) or math.isnan(other))
    ]
    largest = max((abs(one) for one, _ in pairs), default=0.0)
    return all(one == other or abs(one - other) <= tolerance * largest for one, other in pairs)


def _checksum(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]

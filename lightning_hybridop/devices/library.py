"""The library of device profiles: one YAML file each in `library/`, with the source of every figure."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

import yaml

from lightning_hybridop.planning.cluster import ClusterError, DeviceProfile, profile_from_dict
from lightning_hybridop.planning.fields import read_yaml


@cache
def load_profiles() -> Mapping[str, DeviceProfile]:
    """Return all profiles by name, in alphabetical order. The mapping is shared: it cannot be changed."""
    folder = files("lightning_hybridop.devices") / "library"
    entries = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda e: e.name
    )
    profiles = (
        profile_from_dict(yaml.safe_load(entry.read_text(encoding="utf-8")), where=entry.name)
        for entry in entries
    )
    return MappingProxyType({profile.name: profile for profile in profiles})


def read_profile(path: Path) -> DeviceProfile:
    """Return the profile in a YAML file.

    Raises:
        ClusterError: the file cannot be read, is not YAML, or holds no profile.
    """
    values = read_yaml(path, what="profile", error=ClusterError)
    return profile_from_dict(values, where=str(path))

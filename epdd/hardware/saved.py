"""A Topology as a JSON file, to plan on one machine for another."""

from __future__ import annotations

from pathlib import Path

import msgspec

from epdd.errors import HardwareError
from epdd.hardware.topology import Topology

VERSION = 1


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    epdd_topology: int                  # VERSION
    topology: Topology


class _Head(msgspec.Struct):
    epdd_topology: int


def save(topology: Topology, path: Path) -> None:
    """Raises HardwareError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.encode(_Saved(VERSION, topology), order="deterministic") + b"\n")
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}") from None


def load(path: Path) -> Topology:
    """Raises HardwareError if it is not a topology of this version."""
    try:
        content = path.read_bytes()
        # Check the version first: unknown fields of another version would be reported as damage.
        version = msgspec.json.decode(content, type=_Head).epdd_topology
        if version != VERSION:
            raise HardwareError(f"{path}: topology of version {version}; this epdd reads version {VERSION}")
        return msgspec.json.decode(content, type=_Saved).topology
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise HardwareError(f"{path} is not a saved topology: {error}") from None

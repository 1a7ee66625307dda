"""Emulated devices: workers that keep to given time models, so that any machine's fleet runs on any other.

Owns the profile files (`profiles/`) and what is made of them for the daemon: the model's sizes, each worker's times,
and the label that says everywhere that this is no real fleet.  Processes, sockets, arena and leases are the real
ones.  What the workers do is in `worker/emulated/`, how time passes in `emulated_time.py`, who exists in
`placement/emulated.py`.
"""

from epdd.emulation.emulation import Emulation, load
from epdd.emulation.profile import Profile, names, read

__all__ = ["Emulation", "Profile", "load", "names", "read"]

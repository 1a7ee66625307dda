"""Emulated devices: workers whose times come from a profile, so that the fleet of any machine runs on any other.

Owns the profile files (`profiles/`) and what the daemon needs of them: sizes of the model, times of each worker, and
the label that marks an emulated fleet everywhere.  Processes, sockets, arena and leases are real.  The workers are in
`worker/emulated/`, the time models in `emulated_time.py`, the choice of workers in `placement/emulated.py`.
"""

from epdd.emulation.emulation import Emulation, load
from epdd.emulation.profile import Profile, names, read

__all__ = ["Emulation", "Profile", "load", "names", "read"]

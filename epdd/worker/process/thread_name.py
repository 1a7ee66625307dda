"""The name of a thread, as ps and top show it."""

import ctypes

PR_SET_NAME = 15


def name_thread(name: str) -> None:
    """What ps and top show for this thread and those it will start, at most 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)

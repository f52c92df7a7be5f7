"""Capture and replay: graph backends, the register of known storages, the capture transaction."""

from qeffect_lm.graphs.host_replay import HostReplay
from qeffect_lm.graphs.register import HiddenStateRegister

__all__ = ["HiddenStateRegister", "HostReplay"]

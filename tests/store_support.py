"""Whole stores for tests: simulated by a seed, in one thread. They live in ``tierkv.testing.sim_life``."""

from __future__ import annotations

from tierkv.testing.sim_life import FAULTS, Told, check_content, check_restart, live, simulate

__all__ = ["FAULTS", "Told", "check_content", "check_restart", "live", "simulate"]

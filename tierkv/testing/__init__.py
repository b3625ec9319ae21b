"""Contracts that every tier, policy, codec, copier and key scheme passes, and the pieces they are made of.

A third party subclasses a contract class in its own tests; see ``docs/testing.md``. The contract modules import
pytest, the rest (``payloads``, ``memory``) does not.
"""

from tierkv.testing.manual import ManualCopier, ManualDevice
from tierkv.testing.sim import SimExecutor

__all__ = ["ManualCopier", "ManualDevice", "SimExecutor"]

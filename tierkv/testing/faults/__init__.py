"""Faults on demand: whatever a store stands on made to fail at its n-th call, and the proof that nothing is left over.

    from tierkv.testing import faults

    for strike in faults.each_call("get_into"):               # n = 1, 2, 3 ... until the scenario passes untouched
        tier = faults.FaultyTier(MyTier(), strike, faults.Way.FLIPPED)
        with faults.nothing_left():
            my_scenario(tier)

``strike`` says when (``Strike``, ``each_call``), ``tier`` makes a blob tier fail (``FaultyTier``, ``Way``), ``slots``
host RAM and the copier, ``disk`` the NVMe tier's system calls (``ShimDisk``), ``proxy`` the network before a server;
``process`` stops and kills real processes, ``certificates`` makes bad ones, ``leftovers`` looks for what was left.
Making the n-th call fail for every n is SQLite's manner of testing.
"""

from tierkv.testing.faults.disk import Gate, ShimDisk, at, blocked, failing, short, slow
from tierkv.testing.faults.leftovers import assert_nothing_left, nothing_left
from tierkv.testing.faults.process import hung, kill
from tierkv.testing.faults.proxy import TcpProxy, proxy_before
from tierkv.testing.faults.slots import FaultyCopier, FaultyHost
from tierkv.testing.faults.strike import NEVER, Strike, each_call
from tierkv.testing.faults.tier import WAYS, FaultyTier, InjectedError, Way

__all__ = [
    "NEVER",
    "WAYS",
    "FaultyCopier",
    "FaultyHost",
    "FaultyTier",
    "Gate",
    "InjectedError",
    "ShimDisk",
    "Strike",
    "TcpProxy",
    "Way",
    "assert_nothing_left",
    "at",
    "blocked",
    "each_call",
    "failing",
    "hung",
    "kill",
    "nothing_left",
    "proxy_before",
    "short",
    "slow",
]

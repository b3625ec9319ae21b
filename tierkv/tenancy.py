"""What each tenant holds, in numbers that are kept where blocks come and go, so that they cost nothing to look at.

A tenant is what a salt digests to: the first bytes of all its keys. Those without a salt are one tenant together.
"""

from __future__ import annotations

import hashlib

from tierkv.ids import TENANT_TAG_BYTES

MOST_TIERS = 8
"""Of one store: its bitmaps have a byte."""


class TenantBooks:
    """The numbers of one tenant, shared by its namespaces. Changed under the catalog's lock, but for ``coming``."""

    __slots__ = (
        "clean_bytes",
        "coming",
        "held",
        "made_way_blocks",
        "own_limits",
        "refused_blocks",
        "tag",
    )

    def __init__(self, tag: int) -> None:
        self.tag = tag
        """The first bytes of its keys, as a number."""
        self.held = [0] * MOST_TIERS
        """Bytes by tier that its blocks take there, whole slots and headers counted; of a tier that evicts on its own,
        as far as is known."""
        self.clean_bytes = 0
        """Of what it holds in host RAM, that which the colder tiers have too, or do not want."""
        self.coming = [0] * MOST_TIERS
        """Bytes by tier that were granted and are not held yet. Under the lock of the quotas."""
        self.own_limits: dict[int, int] = {}
        """Bytes by tier that its sessions want to be kept to; the strictest of them."""
        self.refused_blocks = 0
        """Blocks that were not taken for its quota's sake."""
        self.made_way_blocks = 0
        """Blocks that left a tier since their own tenant was, or would have been, over its quota there."""

    @property
    def name(self) -> str:
        """For people. Neither the salt nor the tag: who knows the tag could tell which keys are whose."""
        return hashlib.sha256(b"tierkv tenant name" + self.tag.to_bytes(TENANT_TAG_BYTES, "big")).hexdigest()[
            :16
        ]

"""How far a block lies from the end of the last request that used it, in three zones.

The end of a prompt is the part that the next one most often does not share: an answer that was generated, a question.
"""

from __future__ import annotations

from tierkv.policies.segments import Segment, Segments

NEAR, MIDDLE, FAR = 0, 1, 2
NEAR_BLOCKS, MIDDLE_BLOCKS = 2, 8
ZONES = 3


def zone_at(gap: int) -> tuple[int, int]:
    """The zone of a block with so many behind it, and how many are too many for this zone."""
    if gap < NEAR_BLOCKS:
        return NEAR, NEAR_BLOCKS
    if gap < MIDDLE_BLOCKS:
        return MIDDLE, MIDDLE_BLOCKS
    return FAR, 1 << 60


def end_in_one_zone(segments: Segments, segment: Segment, gap: int) -> tuple[Segment, Segment | None, int]:
    """As much of a segment's end as lies in one zone, when so many blocks are behind it; what is before that; and the
    zone."""
    zone, stop = zone_at(gap)
    if len(segment.ids) <= stop - gap:
        return segment, None, zone
    front, end = segments.cut(segment, len(segment.ids) - (stop - gap))
    return end, front, zone


def in_zones(ids: list[int]) -> list[tuple[int, list[int]]]:
    """A request's blocks by zone, from its head on; only the zones that it has."""
    if len(ids) <= NEAR_BLOCKS:
        return [(NEAR, ids[:])]
    parts = (
        (FAR, ids[:-MIDDLE_BLOCKS]),
        (MIDDLE, ids[-MIDDLE_BLOCKS:-NEAR_BLOCKS]),
        (NEAR, ids[-NEAR_BLOCKS:]),
    )
    return [part for part in parts if part[1]]


def is_near(segment: Segment) -> bool:
    """To the end of the request that used it last: each of its blocks has fewer than eight behind it."""
    return segment.kind % ZONES != FAR

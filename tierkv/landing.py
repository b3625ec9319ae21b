"""What a blob tier gives comes into host RAM: the only way in. A block that does not prove itself does not land.

Several blocks of one call land together: each turn of the catalog's lock, and each word to the policy, costs about as
much as the block itself. Whoever waits no longer has those land that have come.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tierkv import frame
from tierkv.bounded_lock import within
from tierkv.catalog import Catalog
from tierkv.clock import Clock
from tierkv.codec import codec_with_code
from tierkv.edges import Edge
from tierkv.errors import CodecAbsent, CodecError, FrameError
from tierkv.flights import Flight
from tierkv.frame import FrameHeader, checksum
from tierkv.ids import BlockKey, Slot
from tierkv.intake import Intake, Loaded
from tierkv.metrics import Counters
from tierkv.tier import Outcome, Want

TOGETHER: Final = 16
TOGETHER_S: Final = 0.003
"""So many blocks land together, or those of so long: nobody else finds them until then."""


@dataclass(eq=False, slots=True)
class Read:
    """One part on its way."""

    flight: Flight
    part: int
    slot: Slot
    key: BlockKey
    payload_bytes: int
    landed: bool = False
    outcome: Outcome = Outcome.CANCELLED
    expired: bool = False
    decode_s: float = 0.0

    @property
    def reason(self) -> str:
        """Why it did not come."""
        return "expired" if self.expired else self.outcome.value


class Landing:
    """Thread-safe."""

    def __init__(
        self, catalog: Catalog, intake: Intake, edges: Mapping[int, Edge], clock: Clock, counters: Counters
    ) -> None:
        self._catalog = catalog
        self._intake = intake
        self._edges = edges
        self._clock = clock
        self._counters = counters

    def approach(self, tier: int, *, serve: bool) -> Approach:
        """For one call to that tier. ``serve``: for one request only, see ``Intake.land``."""
        return Approach(self, self._intake, self._clock, tier, serve)

    def prove(self, read: Read, want: Want) -> Loaded | Outcome:
        """Verifies and decodes one part; what it is when it may land, else why not."""
        try:
            header = frame.unpack(want.header)
            payload_sum = self._prove(header, read, want)
        except (FrameError, CodecError) as error:
            reason = error.reason if isinstance(error, FrameError) else "codec"
            name = self._edges[read.flight.tier].name
            self._counters.add(1, "corrupt_blocks_total", name, reason)
            # On a shared server it stays for those that can decode it.
            return Outcome.MISS if isinstance(error, CodecAbsent) else Outcome.CORRUPT
        if header.expires_ms and header.expires_ms <= self._clock.unix_s() * 1000:
            read.expired = True
            return Outcome.MISS
        flight = read.flight
        if flight.unwanted:
            return Outcome.CANCELLED
        return Loaded(flight.family, flight.generation, read.part, read.slot, payload_sum, header)

    def _prove(self, header: FrameHeader, read: Read, want: Want) -> int:
        """Raises unless the bytes are the block; leaves them decoded in the slot and returns their checksum."""
        if want.stored_bytes > len(want.payload):
            raise FrameError("length", f"{want.stored_bytes} bytes do not fit into the slot")
        stored = want.payload[: want.stored_bytes]
        frame.verify(header, read.key, stored)
        if header.decoded_bytes != read.payload_bytes or header.part != read.part:
            raise FrameError(
                "length", f"{header.decoded_bytes} decoded bytes for a part of {read.payload_bytes}"
            )
        codec = codec_with_code(header.codec)
        if codec.identity:
            if want.stored_bytes != read.payload_bytes:
                raise FrameError("length", "a raw frame of another length than its part")
            return header.stored_checksum
        decoded = want.payload[: read.payload_bytes]
        started_s = self._clock.now_s()
        codec.decode_into(memoryview(bytes(stored)), decoded)
        read.decode_s = self._clock.now_s() - started_s
        self._edges[read.flight.tier].codec_speed.decoded(read.payload_bytes, read.decode_s)
        payload_sum = checksum(decoded)
        if codec.lossless and payload_sum != header.decoded_checksum:
            raise FrameError("checksum", "the decoded bytes are not those that were stored")
        return payload_sum


class Approach:
    """The blocks of one call to a tier. ``take`` and ``land`` are for the thread that makes the call, which lands once
    more when the call is over; ``land_unless_landing`` is for any."""

    def __init__(self, landing: Landing, intake: Intake, clock: Clock, tier: int, serve: bool) -> None:
        self._landing = landing
        self._intake = intake
        self._clock = clock
        self._tier = tier
        self._serve = serve
        self._lock = threading.Lock()
        """Held while blocks land: who calls ``land`` last finds ``landed`` of each read as it stays."""
        self._come: list[tuple[Read, Loaded]] = []
        self._since_s = 0.0

    def take(self, read: Read, want: Want) -> None:
        """A part has come, with or without what was asked for: ``outcome`` of the read says so. It lands now or soon,
        if it is wanted yet."""
        proven = self._landing.prove(read, want)
        if isinstance(proven, Outcome):
            read.outcome = proven
            return
        read.outcome = Outcome.DONE
        now_s = self._clock.now_s()
        with self._lock:
            if not self._come:
                self._since_s = now_s
            self._come.append((read, proven))
            due = len(self._come) >= TOGETHER or now_s - self._since_s >= TOGETHER_S
        if due:
            self.land()

    def land(self) -> None:
        """All that have come so far. Not under the catalog's lock."""
        with self._lock:
            self._land()

    def land_unless_landing(self) -> None:
        """The same for who leaves at his deadline. What lands just now lands without him: he would wait for a thread
        that waits for its turn."""
        within(self._lock, 0.0, self._land)

    def _land(self) -> None:
        """Under the lock."""
        come, self._come = self._wanted(), []
        if come:
            landed = self._intake.land([loaded for _, loaded in come], self._tier, serve=self._serve)
            for (read, _), its in zip(come, landed, strict=True):
                read.landed = its

    def _wanted(self) -> list[tuple[Read, Loaded]]:
        """Those that lie behind a hole which was met meanwhile would be of no use."""
        wanted = []
        for read, loaded in self._come:
            if read.flight.unwanted:
                read.outcome = Outcome.CANCELLED
            else:
                wanted.append((read, loaded))
        return wanted

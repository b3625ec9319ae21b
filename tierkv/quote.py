"""How fast each edge is, measured on the work it does, and what a load would therefore cost.

An edge's time for a job is taken as latency + bytes / bandwidth. Both are tracked as exponentially weighted means,
the way TCP tracks its round-trip time (RFC 6298), so a quote follows a link that becomes slow within some ten jobs.
"""

from __future__ import annotations

import threading

from tierkv.units import KIB

_WEIGHT = 0.2
_SMALL_BYTES = 64 * KIB
"""Jobs up to this size tell about latency, larger ones about bandwidth."""


class EdgeSpeed:
    """Measured speed of one edge. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.latency_s: float | None = None
        self.bytes_per_s: float | None = None

    def observe(self, moved_bytes: int, seconds: float) -> None:
        """One job that succeeded, from its start on a worker to its end."""
        if seconds <= 0:
            return
        with self._lock:
            if moved_bytes <= _SMALL_BYTES:
                self.latency_s = _mix(self.latency_s, seconds)
            else:
                self.bytes_per_s = _mix(self.bytes_per_s, moved_bytes / seconds)

    def expect_s(self, moved_bytes: int, ahead_bytes: int = 0, lanes: int = 1) -> float | None:
        """Expected time to move that much behind ``ahead_bytes`` with ``lanes`` workers; ``None`` until measured."""
        with self._lock:
            if self.bytes_per_s is None:
                if self.latency_s is None or moved_bytes > _SMALL_BYTES:
                    return None
                return self.latency_s
            return (self.latency_s or 0.0) + (moved_bytes + ahead_bytes) / (self.bytes_per_s * lanes)


class PrefillSpeed:
    """The engine's measured prefill speed, in seconds a token. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.s_per_token: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """One prefill of ``tokens`` that were really computed."""
        if tokens <= 0 or seconds <= 0:
            return
        with self._lock:
            self.s_per_token = _mix(self.s_per_token, seconds / tokens)

    def expect_s(self, tokens: int) -> float | None:
        return None if self.s_per_token is None else tokens * self.s_per_token


_ENCODE_EVERY = 32
"""Of so many blocks in a row that a codec passed over the last is encoded all the same: so a link that became slow,
or a processor that became free, is noticed."""


class CodecSpeed:
    """What a codec takes and gives on one edge, and whether that pays beside the link as it is. Thread-safe.

    A block is written once and, where it is worth keeping, read once: encoding pays when both together are quicker
    so. All speeds are those of one worker beside the others, so that what they share counts alike on both sides.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.encode_bytes_per_s: float | None = None
        self.decode_bytes_per_s: float | None = None
        self.stored_share: float | None = None
        """Stored bytes for each decoded byte."""
        self.link_write_bytes_per_s: float | None = None
        self.link_read_bytes_per_s: float | None = None
        self._passed_over = 0

    def encoded(self, decoded_bytes: int, stored_bytes: int, seconds: float) -> None:
        with self._lock:
            self.stored_share = _mix(self.stored_share, stored_bytes / decoded_bytes)
            if seconds > 0:
                self.encode_bytes_per_s = _mix(self.encode_bytes_per_s, decoded_bytes / seconds)

    def decoded(self, decoded_bytes: int, seconds: float) -> None:
        with self._lock:
            if seconds > 0:
                self.decode_bytes_per_s = _mix(self.decode_bytes_per_s, decoded_bytes / seconds)

    def wrote(self, stored_bytes: int, seconds: float) -> None:
        """What the link alone took for them."""
        with self._lock:
            if seconds > 0:
                self.link_write_bytes_per_s = _mix(self.link_write_bytes_per_s, stored_bytes / seconds)

    def read(self, stored_bytes: int, seconds: float) -> None:
        """As ``wrote``."""
        with self._lock:
            if seconds > 0:
                self.link_read_bytes_per_s = _mix(self.link_read_bytes_per_s, stored_bytes / seconds)

    def pays(self) -> bool:
        """True while it is not known that it does not. Each call is a block that is to be written."""
        with self._lock:
            encode, write, share = self.encode_bytes_per_s, self.link_write_bytes_per_s, self.stored_share
            if encode is None or write is None or share is None:
                return True
            codec_s = 1 / encode + 1 / (self.decode_bytes_per_s or encode)
            link_s = 1 / write + 1 / (self.link_read_bytes_per_s or write)
            if codec_s < (1 - share) * link_s:
                self._passed_over = 0
                return True
            self._passed_over = (self._passed_over + 1) % _ENCODE_EVERY
            return self._passed_over == 0


def _mix(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)

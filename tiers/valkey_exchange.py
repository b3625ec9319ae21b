"""The pipelined exchanges of the tier, each on one borrowed connection: read, write, ask, remove.

Every exchange works off ``todo``, the positions of a batch that are not reported yet, from the front: what it has
reported it has taken away, so that after a lost connection the rest can be done on another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from tierkv.frame import HEADER_BYTES
from tierkv.ids import KEY_BYTES, NAMESPACE_PREFIX_BYTES, BlockKey, KeyPrefix
from tierkv.tier import Item, Outcome, Want
from tierkv.tiers.valkey_pool import Loan
from tierkv.tiers.valkey_resp import CRLF, Misfit, Reply, ServerError, command
from tierkv.tiers.valkey_stream import LinkGarbled, Patience

Report = Callable[[int, Outcome], None]

_PREFIX = b"tkv:"
_NAME_BYTES = len(_PREFIX) + 2 * KEY_BYTES + 1
_BLOCK_WINDOW = 64
"""Blocks under way at once: their commands and short replies fit into any socket's buffers, so nobody can wait for us
while we wait for them."""
_ASK_WINDOW = 512
_SCAN_COUNT = b"1000"

_GET_HEAD = b"*2\r\n$3\r\nGET\r\n$%d\r\n" % _NAME_BYTES
_SET_HEAD = b"*5\r\n$3\r\nSET\r\n$%d\r\n" % _NAME_BYTES


# ---- keys


def name_of(key: BlockKey) -> bytes:
    """The server's name for a block: ``tkv:``, tenant and namespace in hex, ``:``, the rest in hex."""
    digits = key.hex().encode()
    return _PREFIX + digits[: 2 * NAMESPACE_PREFIX_BYTES] + b":" + digits[2 * NAMESPACE_PREFIX_BYTES :]


def _pattern_of(prefix: KeyPrefix) -> bytes:
    return _PREFIX + prefix.hex().encode() + b"*"


def _is_ours(name: bytes) -> bool:
    """A shared server may hold other keys that happen to begin like ours."""
    return len(name) == _NAME_BYTES and name.startswith(_PREFIX)


# ---- blocks


def fetch(loan: Loan, wants: Sequence[Want], todo: deque[int], patience: Patience, report: Report) -> None:
    """GET for each block, straight into its buffers."""
    connection = loan.connection
    while todo:
        window = list(islice(todo, _BLOCK_WINDOW))
        commands = b"".join([_GET_HEAD + name_of(wants[i].key) + CRLF for i in window])
        connection.stream.send_all([commands], patience)
        for i in window:
            if patience.deadline.cancelled:
                patience.left_s()
            want = wants[i]
            reply = connection.block(want.header, want.payload, patience)
            if isinstance(reply, int):
                want.stored_bytes = reply
                outcome = Outcome.DONE
            elif reply is None:
                outcome = Outcome.MISS
            elif isinstance(reply, Misfit):
                outcome = Outcome.CORRUPT
            else:
                outcome = _of_error(loan, reply)
            todo.popleft()
            report(i, outcome)


def store(
    loan: Loan, items: Sequence[Item], todo: deque[int], ttl_s: float, patience: Patience, report: Report
) -> None:
    """SET with a TTL for each block, straight from its buffers. Too long for the server: ``FULL``, unsent."""
    limit_bytes = loan.greeting.limit_bytes
    for i in [i for i in todo if HEADER_BYTES + items[i].stored_bytes > limit_bytes]:
        todo.remove(i)
        report(i, Outcome.FULL)
    connection, default_tail = loan.connection, _ttl_tail(ttl_s)
    while todo:
        window = list(islice(todo, _BLOCK_WINDOW))
        for i in window:
            item = items[i]
            value_bytes = HEADER_BYTES + item.stored_bytes
            head = b"%b%b\r\n$%d\r\n" % (_SET_HEAD, name_of(item.key), value_bytes)
            tail = default_tail if item.ttl_s is None else _ttl_tail(item.ttl_s)
            connection.stream.send_all(
                [head, item.header[:HEADER_BYTES], item.payload[: item.stored_bytes], tail], patience
            )
        for i in window:
            error = connection.ok(patience)
            todo.popleft()
            report(i, Outcome.DONE if error is None else _of_error(loan, error))


def _ttl_tail(ttl_s: float) -> bytes:
    millis = b"%d" % min(max(1, int(ttl_s * 1000)), 2**53)
    return b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(millis), millis)


# ---- keys in bulk


def exists(
    loan: Loan,
    keys: Sequence[BlockKey],
    todo: deque[int],
    patience: Patience,
    found: Callable[[int, bool], None],
) -> None:
    """EXISTS for each key: a command each, since keys of one command would have to share a node."""
    _for_each(loan, b"EXISTS", keys, todo, patience, lambda i, count: found(i, count > 0))


def unlink(
    loan: Loan, keys: Sequence[BlockKey], todo: deque[int], patience: Patience, gone: Callable[[int], None]
) -> None:
    """UNLINK for each key."""
    _for_each(loan, b"UNLINK", keys, todo, patience, lambda i, _: gone(i))


def unlink_prefix(loan: Loan, prefix: KeyPrefix, patience: Patience, removed: Callable[[int], None]) -> str:
    """SCAN and UNLINK until the scan is through; ``removed`` is told how many, page by page.

    Gives what the server complained of; an empty string means that all is gone.
    """
    connection, cursor = loan.connection, b"0"
    while True:
        page = connection.ask(patience, b"SCAN", cursor, b"MATCH", _pattern_of(prefix), b"COUNT", _SCAN_COUNT)
        if isinstance(page, ServerError):
            _of_error(loan, page)
            return str(page)
        cursor, found = _page(page)
        names = [name for name in found if _is_ours(name)]
        if names:
            connection.stream.send_all([b"".join([command(b"UNLINK", name) for name in names])], patience)
        replies = [connection.reply(patience) for _ in names]
        removed(sum(reply for reply in replies if isinstance(reply, int)))
        for reply in replies:
            if isinstance(reply, ServerError):
                _of_error(loan, reply)
                return str(reply)
            if not isinstance(reply, int):
                raise LinkGarbled("UNLINK was not answered with a number")
        if cursor == b"0":
            return ""


def _page(reply: Reply) -> tuple[bytes, list[bytes]]:
    """The cursor and the names of one reply to SCAN."""
    match reply:
        case [bytes(cursor), list(names)]:
            found = [name for name in names if isinstance(name, bytes)]
            if len(found) == len(names):
                return cursor, found
    raise LinkGarbled("SCAN was not answered with a page")


def _for_each(
    loan: Loan,
    verb: bytes,
    keys: Sequence[BlockKey],
    todo: deque[int],
    patience: Patience,
    answered: Callable[[int, int], None],
) -> None:
    """One command a key whose answer is a number. A key that the server answers with an error stays unanswered."""
    connection = loan.connection
    head = b"*2\r\n$%d\r\n%b\r\n$%d\r\n" % (len(verb), verb, _NAME_BYTES)
    while todo:
        window = list(islice(todo, _ASK_WINDOW))
        commands = b"".join([head + name_of(keys[i]) + CRLF for i in window])
        connection.stream.send_all([commands], patience)
        for i in window:
            reply = connection.reply(patience)
            if not isinstance(reply, int | ServerError):
                raise LinkGarbled(f"{verb.decode()} was not answered with a number")
            todo.popleft()
            if isinstance(reply, int):
                answered(i, reply)
            else:
                _of_error(loan, reply)


# ---- errors that the server answers with


def _of_error(loan: Loan, error: ServerError) -> Outcome:
    """What an error reply means for its block. All but two say that this server is of no use now."""
    if error.code == "OOM":
        return Outcome.FULL
    if error.code == "WRONGTYPE":
        return Outcome.CORRUPT  # something else was put under our key
    # Another connection may reach a server that is better off (a new primary behind the same name).
    loan.worn = True
    loan.complaint = str(error)
    return Outcome.UNAVAILABLE

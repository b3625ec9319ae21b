"""The settings of the daemon: its socket, who may use it, and its HTTP face."""

from __future__ import annotations

import grp
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierkv.config_kinds import Kind
from tierkv.errors import ConfigError

DEFAULT_SOCKET = "/run/tierkv/tierkv.sock"
TOKEN_ENV = "TIERKV_SIDECAR_TOKEN"
"""The environment variable with the token of the HTTP face, where no file has it."""
SOCKET_PATH_BYTES = 107
"""Linux takes no longer name of a unix socket."""
LEAST_TOKEN = 16
UNIX = "unix://"

_OWNER_MAY = 0o600


@dataclass(frozen=True, kw_only=True)
class SidecarConfig:
    """Of interest to ``tierkv serve`` and to the commands that ask a daemon."""

    socket: Path
    mode: int
    group: int | None
    http: str | None
    """``unix:///path`` or ``host:port``; ``None``: no HTTP face."""
    token_file: Path | None


def _mode(raw: object) -> int:
    hint = 'it must be the digits of chmod as text, such as "0600" or "0660"'
    if not isinstance(raw, str) or not re.fullmatch("(0o|0)?[0-7]{3}", raw.strip()):
        raise ValueError(hint)  # of a number it could not be told whether it was meant as octal
    mode = int(raw.strip().removeprefix("0o"), 8)
    if mode & _OWNER_MAY != _OWNER_MAY:
        raise ValueError(f"{hint}: the daemon's own user must be able to read and write")
    return mode


def _group(raw: object) -> int:
    text = str(raw).strip() if isinstance(raw, int | str) and not isinstance(raw, bool) else ""
    if text.isascii() and text.isdecimal() and int(text) < 2**32 - 1:
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        raise ValueError("no group of this machine is called so; give its name or its number") from None


def _http(raw: object) -> str:
    hint = "it must be 'unix:///path' or 'host:port', such as '127.0.0.1:9400' or '[::1]:9400'"
    if not isinstance(raw, str):
        raise ValueError(hint)
    text = raw.strip()
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        if not path.startswith("/"):
            raise ValueError(f"{hint}: the path must be absolute")
        fits(path)
        return text
    if re.fullmatch(r"(\[[0-9a-fA-F:.%\w]+\]|[^:/\s\[\]]+):\d{1,5}", text) is None:
        raise ValueError(hint)
    if int(text.rpartition(":")[2]) > 65535:
        raise ValueError(f"{hint}: ports end at 65535")
    return text


def fits(path: str) -> None:
    """Raises ``ValueError`` for a path that no unix socket can have."""
    size = len(path.encode(errors="surrogateescape"))
    if size > SOCKET_PATH_BYTES:
        raise ValueError(f"the path of a socket has at most {SOCKET_PATH_BYTES} bytes, and this has {size}")


MODE = Kind("mode", _mode, lambda value: f"{value:04o}")
GROUP = Kind("name or number", _group)
LISTEN = Kind("`unix:///path` or `host:port`", _http)


def http_address(http: str) -> Path | tuple[str, int]:
    """Where the HTTP face listens: a path, or a host and a port."""
    if http.startswith(UNIX):
        return Path(http.removeprefix(UNIX))
    host, _, port = http.rpartition(":")
    return host.strip("[]"), int(port)


def read_token(token_file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The token from the file, else from the environment; ``None`` when there is none. Raises ``ConfigError``."""
    if token_file is None:
        token, key = environ.get(TOKEN_ENV), f"environment {TOKEN_ENV}"
        if not token:
            return None
    else:
        key = "sidecar.token_file"
        try:
            token = token_file.read_text(encoding="ascii").strip()
        except OSError as error:
            raise ConfigError(
                key, str(token_file), f"{error.strerror}; name a file that this user may read"
            ) from None
        except UnicodeDecodeError:
            raise ConfigError(key, str(token_file), "a token is plain ASCII text") from None
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            key,
            "***" if token_file is None else str(token_file),
            f"a token has at least {LEAST_TOKEN} printable characters and no blank; make one with "
            "`openssl rand -hex 32`",
        )
    return token

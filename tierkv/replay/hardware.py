"""GPUs by name: what their makers' data sheets say, and how much of it is reckoned with."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from tierkv.errors import ConfigError

OPTION = "--gpu"
UTILISATION: Final = 0.4
"""Of the data sheet's operations. "The Llama 3 Herd of Models" (Grattafiori and others, 2024) reports 38 to 43 %."""
LINK_SHARE: Final = 0.8
"""Of the link's rate, for large copies from pinned memory."""


class Gpu(NamedTuple):
    """One GPU."""

    dense_flops_per_s: float
    """bf16 without sparsity, by the data sheet."""
    link_bytes_per_s: float
    """To the host, one way: PCIe 4 x16 or PCIe 5 x16."""


_PCIE4, _PCIE5 = 32e9, 64e9
GPUS: Final[dict[str, Gpu]] = {
    "l4": Gpu(121e12, _PCIE4),
    "l40s": Gpu(362e12, _PCIE4),
    "a100": Gpu(312e12, _PCIE4),
    "h100": Gpu(989e12, _PCIE5),
    "h200": Gpu(989e12, _PCIE5),
    "b200": Gpu(2250e12, _PCIE5),
    "mi300x": Gpu(1307e12, _PCIE5),
}
_WORD = re.compile(r"(?:(\d{1,3})x)?([a-z]\w*)")


def gpus_of(word: str) -> tuple[int, str, Gpu]:
    """Of ``h100`` or ``8xh100``: how many serve one model together, its name, one of them. Raises ``ConfigError``."""
    found = _WORD.fullmatch(word.lower())
    if found is None or found[2] not in GPUS or found[1] == "0":
        raise ConfigError(
            OPTION,
            word,
            f"there are {', '.join(GPUS)}, and 8xh100 for eight that serve one model together; for another give "
            "the nearest, and --prefill-tokens-per-s as it was measured",
        )
    return int(found[1] or 1), found[2], GPUS[found[2]]

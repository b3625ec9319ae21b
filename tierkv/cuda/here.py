"""Whether this process can use a GPU, and if not, why: in one line. ``python -m tierkv.cuda.here`` prints it."""

from __future__ import annotations

import importlib.util
import sys

from tierkv.errors import not_installed


def why_not() -> str | None:
    """Why nothing can be copied to or from a GPU here; ``None`` when it can. Loads torch only when it is
    installed."""
    for package in ("torch", "cupy"):
        if importlib.util.find_spec(package) is None:
            return not_installed(package, "torch,cuda")
    import torch

    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    return None


if __name__ == "__main__":
    print(why_not() or "")
    sys.exit(0)

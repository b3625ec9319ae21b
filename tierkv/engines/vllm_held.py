"""What the scheduler's half knows of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.engines.vllm_adapters import AdapterUse
from tierkv.engines.vllm_asking import Question
from tierkv.engines.vllm_options import Wishes
from tierkv.handles import Lease
from tierkv.keys import Extras

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Held:
    """What is known of one request. ``settled``: it had its answer, and computes what that did not bring."""

    def __init__(self, request: Request, wishes: Wishes, use: AdapterUse | None) -> None:
        self.request = request
        self.wishes = wishes
        self.use = use
        self.extras: Extras | None = Extras() if use is None else None
        """What the engine's hashes leave out, once it is known."""
        self.question: Question | None = None
        self.settled = False
        self.preemptions = request.num_preemptions
        self.local_tokens = 0
        """That the engine had itself when it was last told what it need not compute."""
        self.loading: Lease | None = None
        self.loaded_blocks = 0
        self.offered = 0
        """Leading blocks that were offered to the store, or came from it."""
        self.tainted = False
        """The engine's own cache gave blocks that may be of other weights than the names say."""
        self.over = False


def use_of(request: Request) -> AdapterUse | None:
    """The adapter that it computes under."""
    adapter = request.lora_request
    if adapter is None:
        return None
    return AdapterUse(adapter.lora_name, adapter.lora_path, adapter.lora_int_id, adapter.load_inplace)

"""The names of an engine's blocks: nothing has one until the weights have theirs, and all get others when those
change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tierkv.daemon.remote import RemoteClient
from tierkv.engines.vllm_adapters import Adapters
from tierkv.engines.vllm_asking import Question
from tierkv.errors import TierKVError
from tierkv.keys import Chain, Extras, NamespaceSpec, Weights
from tierkv.namespaces import OpenNamespace
from tierkv.supervision import Caught

log = logging.getLogger("tierkv")


class Names:
    """Of one engine, in the scheduler's process. Any thread."""

    def __init__(
        self,
        client: RemoteClient,
        weights: Callable[[], Weights],
        spec: Callable[[Weights, int], NamespaceSpec],
        renew: Callable[[Weights], Weights],
    ) -> None:
        """``weights`` may take minutes (it reads all files once); ``renew`` names weights that were changed in
        place."""
        self._client = client
        self._find_weights = weights
        self._make_spec = spec
        self._renew = renew
        self._adapters = Adapters()
        self._lock = threading.Lock()
        self._weights: Weights | None = None
        self._epoch = 0
        self.space: OpenNamespace | None = None
        """``None`` while nothing can be named."""
        self.why: str | None = "the weights have no name yet"

        self._told = False
        """That nothing can be named yet."""

    def find(self, wait_s: float) -> None:
        """Starts a thread that finds the weights' name, and waits so long for it: where it was found before, it is
        there before the first request."""
        thread = threading.Thread(target=self._find, name="tierkv-vllm-weights", daemon=True)
        thread.start()
        thread.join(wait_s)
        self._told = thread.is_alive()
        if self._told:
            log.info("vLLM: the weights are being digested; until that is done nothing is stored or loaded")

    def _find(self) -> None:
        caught = Caught()
        with caught:
            weights = self._find_weights()
            with self._lock:
                self._weights = weights if self._epoch == 0 else self._renew(weights)
                self._open()
            if self._told:
                log.info("vLLM: the weights are digested; blocks are stored and loaded from now on")
            return
        self.why = str(caught.error)
        level = logging.WARNING if isinstance(caught.error, TierKVError) else logging.ERROR
        log.log(level, "vLLM: nothing is stored or loaded: %s", caught.error)

    def _open(self) -> None:
        """Under the lock."""
        assert self._weights is not None
        self.space = self._client.open_namespace(self._make_spec(self._weights, self._epoch))
        self.why = None

    def renew(self) -> None:
        """The weights have changed in place (or are taken to have): all blocks get other names from now on."""
        with self._lock:
            self._epoch += 1
            self.space = None
            known = self._weights is not None
        if known:
            threading.Thread(target=self._reopen, name="tierkv-vllm-weights", daemon=True).start()

    def _reopen(self) -> None:
        with self._lock:
            assert self._weights is not None
            self._weights = self._renew(self._weights)
            self._open()

    def __call__(self, question: Question) -> Chain | None:
        """For a thread that may wait. ``question.extras`` stays ``None`` when nothing may be stored."""
        space = self.space
        if space is None:
            return None
        extras = Extras()
        if question.use is not None:
            adapter, question.tainted = self._adapters.of(question.use)
            if adapter.revision is None:
                return None
            extras = Extras(adapter=adapter)
        question.extras = extras
        question.spec = space.namespace.spec
        return space.chain(engine_hashes=question.hashes, num_tokens=question.num_tokens, extras=extras)

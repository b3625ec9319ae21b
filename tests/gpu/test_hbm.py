"""On a machine with an NVIDIA GPU: slots in its memory, copied to and from within the device."""

from __future__ import annotations

import pytest

from tierkv.cuda.here import why_not

WHY = why_not()
if WHY is not None:
    pytest.skip(WHY, allow_module_level=True)

import torch  # noqa: E402

from tierkv.any_copier import AnyCopier  # noqa: E402
from tierkv.clock import SystemClock  # noqa: E402
from tierkv.copier import CopyPart, LayerPages, PagedKV  # noqa: E402
from tierkv.engines.hot_blocks import hot_blocks  # noqa: E402
from tierkv.executor import ThreadExecutor  # noqa: E402
from tierkv.testing.copier import Done  # noqa: E402
from tierkv.units import KIB, MIB  # noqa: E402

PATIENCE_S = 30.0
BLOCKS, PAGES = 6, 32


@pytest.mark.parametrize("page_bytes", [4 * KIB, 64 * KIB, 512 * KIB, 2 * MIB])
def test_blocks_go_there_and_back_within_the_device(page_bytes: int) -> None:
    """Short pages by kernels, long ones by the copy engines; layer by layer, and all at once."""
    executor = ThreadExecutor(SystemClock())
    copier = AnyCopier(executor)
    hot = hot_blocks(64 * MIB, torch.device("cuda", 0), copier)
    slots = hot.tier.reserve(BLOCKS, 4 * page_bytes)
    assert slots is not None
    pages = [torch.randint(0, 256, (PAGES, page_bytes), dtype=torch.uint8, device="cuda") for _ in range(2)]
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    parts = [
        CopyPart(0, hot.tier.tensor(slot), tuple(order[2 * i : 2 * i + 2])) for i, slot in enumerate(slots)
    ]
    chosen = order[: 2 * BLOCKS]
    kv = PagedKV((tuple(LayerPages((each,)) for each in pages),))
    torch.cuda.synchronize()
    down = Done()
    copier.offload(kv, parts, None, down)
    assert down.wait(PATIENCE_S) is None
    try:
        for on_layer in (None, lambda group, layer: None):
            other = [torch.zeros_like(each) for each in pages]
            torch.cuda.synchronize()
            up = Done()
            copier.onboard(PagedKV((tuple(LayerPages((each,)) for each in other),)), parts, up, on_layer)
            assert up.wait(PATIENCE_S) is None
            for ours, theirs in zip(pages, other, strict=True):
                assert torch.equal(ours[chosen], theirs[chosen])
                assert not theirs[order[2 * BLOCKS :]].any()
    finally:
        copier.close(10.0)
        assert executor.close(10.0) == []

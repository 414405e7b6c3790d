# SPDX-License-Identifier: Apache-2.0
"""Selection against a straightforward loop of the same method, with crops, and against a tower."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel

from anchorprune_vllm.budget import max_anchor, min_anchor, unit_budgets
from anchorprune_vllm.commands.bench.support import resident_peak_bytes, side_by_side
from anchorprune_vllm.selection import AnchorParams, Candidates, select_batch
from anchorprune_vllm.signals.attention import cls_attention

PARAMS = AnchorParams()


@dataclass(frozen=True)
class Shape:
    """The candidates of one image or video of a model."""

    model: str
    tokens: int
    anchor_size: int
    context_size: int
    budget: int
    units: int = 1


SHAPES = (
    Shape("LLaVA-1.5", 576, 768, 1024, 32),
    Shape("LLaVA-1.5", 576, 768, 1024, 64),
    Shape("LLaVA-NeXT", 2880, 768, 1024, 640, units=5),
    Shape("Qwen2.5-VL", 1296, 3584, 3584, 256),
    Shape("LLaVA-Video", 2704, 1152, 1152, 512, units=16),
    Shape("LLaVA-Video, 64 frames", 10368, 1152, 1152, 512, units=64),
)


Selector = Callable[[Candidates], Tensor]
"""Returns the indices of the tokens to keep, ascending."""


def measure_forms(
    shape: Shape, repeats: int, device: torch.device, *others: Selector
) -> list[float]:
    """Return the milliseconds of ours, of the straightforward loop, and of other selectors."""
    item = random_candidates(shape, device)
    kept = select_batch([item], PARAMS)[0].indices
    selectors = [straightforward, *others]
    for selector in selectors:
        if len(set(kept.tolist()) ^ set(selector(item).tolist())) > shape.budget // 50:
            raise RuntimeError(f"{selector.__name__} and ours disagree on {shape}")
    runs = [partial(selector, item) for selector in selectors]
    return side_by_side([partial(select_batch, [item], PARAMS), *runs], repeats)


def authors_selector(repository: Path) -> Selector:
    """Return the selector of the paper's authors, from a clone of MULTI-cau/AnchorPrune.

    It knows no units: for an item of several, its callers cut the item up.
    """
    path = repository / "anchorprune" / "selection.py"
    spec = spec_from_file_location("anchorprune_of_the_authors", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise ValueError(f"{path} is not there; give a clone of github.com/MULTI-cau/AnchorPrune")
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)

    def of_the_authors(item: Candidates) -> Tensor:
        config = module.AnchorPruneConfig(item.budget, min_anchor(item.budget))
        kept: Tensor = module.anchorprune_select(
            item.relevance, item.features, item.importance, config, item.context_features
        )[0]
        return kept

    return of_the_authors


def measure_shapes(shapes: Sequence[Shape], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of selection in each shape."""
    items = [random_candidates(shape, device) for shape in shapes]
    return side_by_side([partial(select_batch, [item], PARAMS) for item in items], repeats)


@dataclass(frozen=True)
class SelectionGrowth:
    """One token in nine kept, of one item."""

    tokens: int
    budget: int
    milliseconds: float
    mebibytes: float


def measure_growth(
    lengths: Sequence[int], repeats: int, device: torch.device
) -> list[SelectionGrowth]:
    """With LLaVA-1.5's widths."""
    return [_measure_growth(tokens, repeats, device) for tokens in lengths]


def _measure_growth(tokens: int, repeats: int, device: torch.device) -> SelectionGrowth:
    budget = tokens // 9
    item = random_candidates(Shape("", tokens, 768, 1024, budget), device)
    call = partial(select_batch, [item], PARAMS)
    (spent,) = side_by_side([call], repeats)
    return SelectionGrowth(tokens, budget, spent, resident_peak_bytes(call) / 2**20)


def measure_steps(repeats: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a call of LLaVA-1.5's vision tower, and of what pruning adds."""
    config = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=23,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    item = random_candidates(Shape("LLaVA-1.5", 576, 768, 1024, 64), device)
    with torch.device(device), torch.inference_mode():
        tower = CLIPVisionModel(config).to(dtype).eval()
        pixels = torch.randn(1, 3, 336, 336, dtype=dtype)
        query, key = torch.randn(2, 1, 577, 1024, dtype=dtype)
        runs = {
            "vision tower (ViT-L/14 at 336 px, 23 layers)": lambda: tower(pixels),
            "[CLS] attention": lambda: cls_attention(query, key, 16, 0.125),
            "selection, K=64": lambda: select_batch([item], PARAMS),
        }
        return dict(zip(runs, side_by_side(list(runs.values()), repeats), strict=True))


def straightforward(item: Candidates) -> Tensor:
    """The method as one would write it down: one product and one argmax per step, float32."""
    assert item.relevance is not None
    assert item.context_features is not None
    features = F.normalize(item.features.float(), dim=-1)
    context = F.normalize(item.context_features.float(), dim=-1)
    units = item.units if item.units is not None else torch.zeros(len(features), dtype=torch.long)
    sizes = torch.unique_consecutive(units, return_counts=True)[1].tolist()
    kept: list[int] = []
    start = 0
    for size, share in zip(sizes, unit_budgets(item.budget, sizes), strict=True):
        order = (start + item.relevance[start : start + size].argsort(descending=True)).tolist()
        smallest = min_anchor(share)
        largest = max_anchor(share, smallest, PARAMS.max_anchor_ratio)
        novel, end = 0, smallest
        while end < largest and novel < PARAMS.patience:
            distance = (1 - features[order[:smallest]] @ features[order[end]]).min()
            novel += int(distance > PARAMS.tau)
            end += 1
        kept += order[:end]
        start += size
    taken = torch.zeros_like(item.importance, dtype=torch.bool)
    taken[kept] = True
    novelty = (1 - context @ context[kept].T).amin(1)
    while len(kept) < item.budget:
        score = (item.importance * novelty).masked_fill(taken, -torch.inf)
        kept.append(int(score.argmax()))
        taken[kept[-1]] = True
        novelty = novelty.minimum(1 - context @ context[kept[-1]])
    return torch.tensor(sorted(kept))


def random_candidates(shape: Shape, device: torch.device) -> Candidates:
    """Correlated features, as neighbouring patches have."""

    def smooth(size: int) -> Tensor:
        base = torch.randn(shape.tokens // 8, size, device=device).repeat_interleave(8, 0)
        return base + 0.5 * torch.randn(shape.tokens, size, device=device)

    units = torch.arange(shape.units).repeat_interleave(shape.tokens // shape.units)
    return Candidates(
        relevance=torch.randn(shape.tokens, device=device),
        features=smooth(shape.anchor_size),
        importance=torch.rand(shape.tokens, device=device),
        budget=shape.budget,
        context_features=smooth(shape.context_size),
        units=units if shape.units > 1 else None,
    )

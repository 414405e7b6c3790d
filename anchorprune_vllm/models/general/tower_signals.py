# SPDX-License-Identifier: Apache-2.0
"""Signals of candidates that methods need from the attention of a vision tower.

Importance and keys come from the last attention, and HiPrune's object attention from one in the
middle, unless the family names other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import MMEncoderAttention

from anchorprune_vllm.methods.registry import Signal
from anchorprune_vllm.models.general.tower_order import TowerOrder, possible_orders, probe
from anchorprune_vllm.plan import MediaTokens
from anchorprune_vllm.selection.device import to_device
from anchorprune_vllm.worker.tower_taps import (
    SIGNALS,
    RecordedCalls,
    Taken,
    Where,
    measured,
    tapped,
)

if TYPE_CHECKING:
    from anchorprune_vllm.models.general.adapter import GeneralModel

Parts = Mapping[str, Tensor]
"""Signals of some candidates, by field name of `MediaFeatures`."""


class TowerSignals:
    """Reads signals from a tower's attention, once it is known how its tokens become rows."""

    def __init__(self, model: GeneralModel) -> None:
        parent: Any = model
        self._model = parent
        self._all = [m for m in parent.modules() if isinstance(m, MMEncoderAttention)]
        self._last: Any = model.tower_attention()
        self._middle: Any = model.object_attention()
        if self._last is not None:
            self._all = [self._last]
        self.order: TowerOrder | None = None
        """How the attention's tokens become rows; None if signals cannot be read from it."""
        self.is_stated = False
        """Whether the family states the order, so that it need not be found out."""
        self._sizes: set[int] = set()
        """The sizes of the units with which the order was found out."""

    @property
    def _ranks(self) -> int:
        """Return the number of ranks over which the heads of an image may be split."""
        is_whole = self._model.has_data_parallel_tower
        return 1 if is_whole else get_tensor_model_parallel_world_size()

    @property
    def needed(self) -> frozenset[Signal]:
        """Return the signals of the tower that the method needs."""
        return self._model.needs & SIGNALS.keys()

    @property
    def visual(self) -> Any:
        """Return the tower of a model whose family allows it to be data-parallel."""
        return self._model.visual

    @property
    def key_shape(self) -> tuple[int, int]:
        """Return the number of heads of the attention on all ranks, and the size of a head."""
        return self._last.num_heads * self._ranks, self._last.head_size

    def learn(self, media: Sequence[MediaTokens], run: Callable[[], Tensor]) -> None:
        """Learn the attention and its order, from the model's family or by running the tower.

        `media` are the tokens of the items whose candidates `run` embeds as [candidates, H].
        """
        if self._model.has_data_parallel_tower:  # this rank may not see any of the items
            self.order = self._model.tower_order(self.visual.spatial_merge_size**2)
            self.is_stated = True
            return
        called: list[tuple[Any, list[int]]] = []

        def note(module: Any, args: Any, kwargs: Any) -> None:
            called.append((module, _segments(module, args, kwargs)))

        with ExitStack() as hooks:
            for module in self._all:
                handle = module.register_forward_pre_hook(note, with_kwargs=True)
                hooks.callback(handle.remove)
            run()
        if not called:
            return
        segments: dict[Any, list[int]] = {}
        for module, lengths in called:
            segments.setdefault(module, []).extend(lengths)
        if self._last is None:
            self._last = called[-1][0]
        if self._middle is None:
            self._middle = _nearest_to_the_middle(segments, self._last)
        self.order = self._stated_order(media, segments[self._last])
        self.is_stated = self.order is not None
        if self.order is None:
            orders = possible_orders(media, segments[self._last])
            self.order = probe(orders, media, self._last, run)
            self._sizes = {size for tokens in media for size in tokens.unit_sizes}

    def _has_grids(self, media: Sequence[MediaTokens]) -> bool:
        """Return whether the order can be applied to these items.

        If no family states the order, the grid of a unit may be a guess. It is reliable for units
        of the sizes with which the order was found: tiles, or images that all have one size.
        """
        if self.is_stated or self.order is None or not self.order.needs_grids:
            return True
        return all(size in self._sizes for tokens in media for size in tokens.unit_sizes if size)

    def _stated_order(
        self, media: Sequence[MediaTokens], segments: Sequence[int]
    ) -> TowerOrder | None:
        """Return the order that the family states, or None if none is stated that fits."""
        candidates = sum(tokens.candidates for tokens in media)
        stated = self._model.tower_order(sum(segments) // candidates)
        if stated is None:
            return None
        real = stated.segments(media)
        chosen = self._model.unpadded(real)
        if chosen is not None:
            return stated if int(chosen[-1]) < sum(segments) else None
        is_whole = len(segments) == 1 and sum(real) == sum(segments)
        return stated if is_whole or real == segments else None

    @contextmanager
    def tapped(self) -> Iterator[Callable[[Sequence[MediaTokens]], Parts | None]]:
        """Record the attention while in this context, and yield a function that returns signals.

        Call the function with the items that the tower has seen since the last call. It returns the
        signals of all their candidates, item by item, or None if they cannot be read.
        """
        needed = self.needed if self.order is not None else frozenset()
        attentions = {self._attentions[SIGNALS[name].where] for name in needed}
        calls = RecordedCalls(attentions)

        def take(media: Sequence[MediaTokens]) -> Parts | None:
            taken = calls.take()
            return None if taken is None else self._signals(taken, media)

        with tapped(attentions, calls.add):
            yield take

    def _signals(self, taken: Taken, media: Sequence[MediaTokens]) -> Parts | None:
        """Return the signals of the candidates of items, or None if they cannot be read."""
        if self.order is None or not self._has_grids(media):
            return None
        segments = self.order.segments(media)
        chosen = self._model.unpadded(segments)
        if chosen is not None:
            taken = {
                module: (query[to_device(chosen, query.device)], key[to_device(chosen, key.device)])
                for module, (query, key) in taken.items()
            }
        if any(len(query) != sum(segments) for query, _ in taken.values()):
            return None
        query, _ = next(iter(taken.values()))
        groups = to_device(self.order.groups(media), query.device)
        signals = measured(
            self.needed, self._attentions, taken, segments, self._ranks, self._model.importance
        )
        return {name: signal[groups].mean(1) for name, signal in signals.items()}

    @property
    def _attentions(self) -> Mapping[Where, Any]:
        return {"last": self._last, "middle": self._middle}


def _nearest_to_the_middle(segments: Mapping[Any, Sequence[int]], last: Any) -> Any:
    """Return the attention nearest to the middle of a tower, the shallower one of two.

    Only attentions with the same segments as the last one are considered; others have windows.
    `segments` has the numbers of tokens that attend to each other, for each attention in order.
    """
    layers = list(segments)
    whole = [place for place, layer in enumerate(layers) if segments[layer] == segments[last]]
    return layers[min(whole, key=lambda place: abs(place - len(layers) // 2))]


def _segments(module: Any, args: Any, kwargs: Any) -> list[int]:
    """Return the numbers of tokens that attend to each other.

    All tokens count as one segment if vLLM's backend has bounds of another kind (FlashInfer). This
    waits for the device, but is called only at load.
    """
    query = args[0] if args else kwargs["query"]
    tokens = query.numel() // (module.num_heads * module.head_size)
    bounds = args[3] if len(args) > 3 else kwargs.get("cu_seqlens")
    if bounds is not None:
        lengths = bounds.diff().tolist()
        return lengths if sum(lengths) == tokens and min(lengths) >= 0 else [tokens]
    batch = query.shape[0] if query.ndim > 2 else 1
    return [tokens // batch] * batch

# SPDX-License-Identifier: Apache-2.0
"""`PruningProcessor`, a mixin over vLLM's multimodal processors.

For every media item it finds the question, counts K and shortens the placeholders to K. It also
folds the question and the budget into the item's identity, so that no cache of vLLM answers one
question from the tokens kept for another. Threads share a processor, so it stores nothing that
belongs to one request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.parse import DictEmbeddingItems, EmbeddingItems, MultiModalDataItems
from vllm.multimodal.processing import (
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
)
from vllm.renderers.hf import resolve_chat_template
from vllm.transformers_utils.processor import get_processor_kwargs_keys, get_processor_kwargs_type

from anchorprune_vllm.api.pixel_cache import PixelCache, joined
from anchorprune_vllm.api.placeholders import (
    PlannedDetails,
    cut_prompt,
    layout_of,
    planned,
    planned_as,
)
from anchorprune_vllm.api.query import QueryReader
from anchorprune_vllm.api.requests import (
    REQUESTS_KEY,
    ItemRequest,
    Requests,
    check_request_keys,
    read_override,
    requests_in,
    without_ours,
)
from anchorprune_vllm.api.size_limits import SizeLimits
from anchorprune_vllm.config import CONFIG_KEY, SCOPES, Positions, PruneConfig
from anchorprune_vllm.item_fields import slices_of, to_elems
from anchorprune_vllm.log import active_line, logger
from anchorprune_vllm.media_tokens import EMBEDDED, MODALITIES, media_token_ids
from anchorprune_vllm.methods.registry import method_of
from anchorprune_vllm.metrics.families import FALLBACKS
from anchorprune_vllm.metrics.requests import request_metrics
from anchorprune_vllm.plan import (
    DUMMY_MEDIA,
    ItemPlan,
    MediaTokens,
    PlanFields,
    media_key,
)
from anchorprune_vllm.prompt_layout import PromptLayout

QueryTokenizer = Callable[[str], Tensor]
"""A function from the words of a question to token ids [segments, length]."""

WORD_EMBEDDINGS = "the model's own word embeddings"
"""Stands for a text encoder where questions are matched with the language model's embeddings."""

# vLLM profiles memory with dummy inputs, and a request for all tokens needs the most memory. The
# warm-up prunes the same inputs, and needs a question for that.
_DUMMY = {"budget": "100%", "query": "What is shown here?"}


class _DummyInputs(ProcessorInputs):
    """Inputs that vLLM makes up for profiling and warm-up; they are not counted as requests."""


class PruningProcessor(BaseMultiModalProcessor):
    """A mixin that prunes; list it before the vLLM processor that it extends."""

    default_positions: Positions = "compact"

    def __init__(self, info: BaseProcessingInfo, dummy_inputs: Any) -> None:
        super().__init__(info, dummy_inputs)
        config = PruneConfig.of_model(info.ctx.model_config.hf_config)
        assert config is not None, "built only for models with a budget"
        self.prune_config = config
        self._uses_query = method_of(config).uses_query
        self._pixel_cache = PixelCache(config.pixel_cache_mb * 2**20)

    # These are made when first needed: vLLM builds a processor for every chat only to read limits.

    @cached_property
    def _query_reader(self) -> QueryReader:
        tokenizer, model_config = self.info.get_tokenizer(), self.info.ctx.model_config
        if getattr(tokenizer, "IS_MISTRAL_TOKENIZER", False):  # renders chats without a template
            template = ""
        else:
            template = resolve_chat_template(tokenizer, None, None, model_config=model_config)
        return QueryReader(tokenizer, template, self._targets())

    @cached_property
    def _tokenize_query(self) -> QueryTokenizer:
        text_encoder = self._text_encoder()
        logger.info_once(active_line(self.prune_config, text_encoder))
        return self._make_query_tokenizer(text_encoder)

    @cached_property
    def _size_limits(self) -> SizeLimits:
        return SizeLimits.of(self, self.prune_config)

    def _targets(self) -> dict[str, list[int]]:
        """Return the tokens that stand for an item of each modality in an unprocessed prompt."""
        nothing = MultiModalDataItems({})
        targets: dict[str, list[int]] = {}
        for update in self._get_prompt_updates(nothing, {}, MultiModalKwargsItems({})):
            target: Any = update.target
            if isinstance(target, str):
                target = self.info.get_tokenizer().encode(target, add_special_tokens=False)
            elif not isinstance(target, Sequence):  # a position before all text (BLIP-2)
                target = ()
            targets[update.modality] = list(target)
        # Some processors (Gemma 4's) report a modality only if there are items of it.
        for modality, token in media_token_ids(self.info.get_hf_config()).items():
            if modality in self.info.supported_mm_limits and [token] not in targets.values():
                targets.setdefault(modality, [token])
        return targets

    def _text_encoder(self) -> str | None:
        """Return what encodes the words of questions, or None if nothing does."""
        return WORD_EMBEDDINGS

    def _make_query_tokenizer(self, text_encoder: str | None) -> QueryTokenizer:
        """Return the function that tokenizes questions for the given encoder."""
        tokenizer = self.info.get_tokenizer()

        def tokenize(query: str) -> Tensor:
            ids = tokenizer.encode(query, add_special_tokens=False)
            return torch.tensor(ids, dtype=torch.int64).reshape(min(1, len(ids)), len(ids))

        return tokenize

    def _count_tokens(
        self, modality: str, item: MultiModalKwargsItem, layout: PromptLayout
    ) -> MediaTokens:
        """Return the token counts of an item, from its fields and its unpruned prompt."""
        raise NotImplementedError

    @property
    def video_margin(self) -> int | None:
        """Return `PromptLayout.margin` for videos with text between their frames."""
        return None

    # -- reading the request, once ---------------------------------------------------------------

    def apply(self, inputs: ProcessorInputs, timing_ctx: Any) -> Any:
        with timing_ctx.record("anchorprune_read_request"):
            requests = self._read_requests(inputs)
        kwargs = {**inputs.hf_processor_mm_kwargs, REQUESTS_KEY: requests}
        result = super().apply(replace(inputs, hf_processor_mm_kwargs=kwargs), timing_ctx)
        if self.prune_config.has_native_positions(self.default_positions):
            self._refuse_stray_placeholders(result)
        return result

    def _refuse_stray_placeholders(self, result: Any) -> None:
        """Raise ValueError for placeholders in the prompt that belong to no item.

        The worker fills the n-th placeholder with the n-th embedding, so a stray one shifts all.
        """
        ids = list(media_token_ids(self.info.get_hf_config(), EMBEDDED).values())
        found = sum(token in ids for token in result["prompt_token_ids"])
        placed = sum(
            place.get_num_embeds()
            for places in result["mm_placeholders"].values()
            for place in places
        )
        if found != placed:
            raise ValueError(
                f"anchorprune: the prompt's text contains {found - placed} media placeholders that "
                "stand for no image or video; remove them from the text"
            )

    def _read_requests(self, inputs: ProcessorInputs) -> Requests:
        check_request_keys(inputs.hf_processor_mm_kwargs, self._keys_of_hf_processor)
        budget, query = read_override(inputs.hf_processor_mm_kwargs.get(CONFIG_KEY, {}))
        scope = query if query in SCOPES else self.prune_config.query
        words = self._query_reader.read(inputs.prompt, scope)
        plain = replace(inputs, hf_processor_mm_kwargs=without_ours(inputs.hf_processor_mm_kwargs))
        hashes = super()._get_mm_hashes(plain)

        requests: dict[str, list[ItemRequest]] = {}
        for modality, items in inputs.mm_data_items.items():
            if modality not in MODALITIES or isinstance(
                items, (EmbeddingItems, DictEmbeddingItems)
            ):
                continue  # audio and the client's own embeddings are passed on as given
            found = words.get(modality, [])
            if modality in self._query_reader.at_start:
                found = found * len(items)
            if query is not None and query not in SCOPES:
                found = [query] * len(items)
            if not self._uses_query:
                found = []
            # If there are fewer placeholders than items, vLLM itself reports the error later.
            found = [*found, *[""] * len(items)][: len(items)]
            requests[modality] = [
                ItemRequest(
                    item_hash,
                    budget or self.prune_config.budget_for(modality),
                    item_words,
                    lacks_query=self._uses_query and scope != "none" and not item_words.strip(),
                )
                for item_hash, item_words in zip(hashes[modality], found, strict=True)
            ]
        return requests

    def _keys_of_hf_processor(self) -> set[str]:
        """Return the keys of `mm_processor_kwargs` that the model's own processor declares."""
        return get_processor_kwargs_keys(get_processor_kwargs_type(self.info.get_hf_processor()))

    # -- metrics ---------------------------------------------------------------------------------

    def get_dummy_inputs(self, *args: Any, **kwargs: Any) -> ProcessorInputs:
        inputs = vars(super().get_dummy_inputs(*args, **kwargs))
        given = inputs["hf_processor_mm_kwargs"]
        return _DummyInputs(**{**inputs, "hf_processor_mm_kwargs": {**given, CONFIG_KEY: _DUMMY}})

    def _cached_apply_hf_processor(self, inputs: ProcessorInputs, timing_ctx: Any) -> Any:
        result = super()._cached_apply_hf_processor(inputs, timing_ctx)
        if not isinstance(inputs, _DummyInputs):
            for modality, items in requests_in(inputs.hf_processor_mm_kwargs).items():
                self._count(modality, items, result.prompt_updates.get(modality, ()))
        return result

    def _count(
        self, modality: str, items: Sequence[ItemRequest], updates: Sequence[Sequence[Any]]
    ) -> None:
        """Count items in the metrics; `updates` are the prompt updates of each item."""
        metrics = request_metrics(self.info.ctx.model_config, modality)
        for item, (update, *_) in zip(items, updates, strict=True):
            unpruned, kept = update.content.unpruned, update.content.kept
            if item.lacks_query and kept < unpruned:
                logger.warning_once(
                    "AnchorPrune: no question was found for an item (%s), which is pruned without "
                    'one: send words with it. Later ones are counted only: %s{reason="no_query"}',
                    modality,
                    *FALLBACKS.samples,
                )
            if metrics is not None:
                metrics.count(unpruned, kept, lacks_query=item.lacks_query)

    # -- identity --------------------------------------------------------------------------------

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> dict[str, list[str]]:
        requests = requests_in(inputs.hf_processor_mm_kwargs)
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        fingerprint = self.prune_config.fingerprint()
        others = {m for m in inputs.mm_data_items if m not in requests}
        hashes: dict[str, list[str]] = {
            modality: [
                MultiModalHasher.hash_kwargs(
                    algorithm, media=item.media_hash, **item.identity(fingerprint)
                )
                for item in items
            ]
            for modality, items in requests.items()
        }
        if others:
            plain = replace(
                inputs, hf_processor_mm_kwargs=without_ours(inputs.hf_processor_mm_kwargs)
            )
            base = super()._get_mm_hashes(plain)
            hashes.update({modality: base[modality] for modality in others})
        return hashes

    def _get_cache_missing_processor_kwargs(
        self, inputs: ProcessorInputs, mm_is_cached: Mapping[str, Sequence[bool]]
    ) -> Mapping[str, object]:
        kwargs = super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached)
        missing = {
            modality: [
                item
                for item, is_cached in zip(items, mm_is_cached[modality], strict=True)
                if not is_cached
            ]
            for modality, items in requests_in(kwargs).items()
        }
        return {**kwargs, REQUESTS_KEY: missing}

    # -- making plans: they are made once, and both the prompt and the model follow them ----------

    def _get_mm_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Any:
        found: Any = super()._get_mm_prompt_updates(
            mm_items, without_ours(hf_processor_mm_kwargs), out_mm_kwargs
        )
        for modality, requests in requests_in(hf_processor_mm_kwargs).items():
            for number, request in enumerate(requests):
                item, updates = out_mm_kwargs[modality][number], found[modality][number]
                layout = layout_of(updates[0].content)
                if modality == "video" and len(layout.unit_sizes) > 1:
                    layout = replace(layout, margin=self.video_margin)
                plan = self._plan(modality, request, item, layout)
                item.update(to_elems(modality, plan))
                found[modality][number] = [
                    update.with_content(planned(update.content, plan)) for update in updates
                ]
        return found

    def _recompute_cached_prompt_update(self, cached_update: Any, new_item_idx: int) -> Any:
        """Keep the plan of an item whose text is written again, with its new number in it."""
        update = super()._recompute_cached_prompt_update(cached_update, new_item_idx)
        before = cached_update.content
        if update.content is before or not isinstance(before, PlannedDetails):
            return update
        return update.with_content(planned_as(update.content, before))

    def _plan(
        self,
        modality: str,
        request: ItemRequest,
        item: MultiModalKwargsItem,
        layout: PromptLayout,
    ) -> ItemPlan:
        tokens = self._count_tokens(modality, item, layout)
        if layout.embeddings != tokens.unpruned:
            # Placeholders and embeddings that differ in number would end the engine later.
            raise ValueError(
                f"anchorprune: vLLM expects {layout.embeddings} tokens for this {modality}, but "
                f"its processor produced {tokens.unpruned}; give it as a PIL image, or as an array "
                "[height, width, 3]"
            )
        plan = ItemPlan(
            kept=request.budget.tokens(tokens.candidates),
            tokens=tokens,
            media_key=media_key(modality, tokens, request.media_hash),
            query_ids=self._tokenize_query(request.query),
            layout=layout,
            slices=slices_of(item),
        )
        if not plan.keeps_all:  # unpruned items are under vLLM's own limits
            self._size_limits.check(modality, plan)
        return plan

    def _maybe_apply_prompt_updates(
        self, mm_items: MultiModalDataItems, mm_res: Any
    ) -> tuple[list[int], Any]:
        prompt, placeholders = super()._maybe_apply_prompt_updates(mm_items, mm_res)
        return cut_prompt(prompt, placeholders, mm_res.prompt_updates)

    # -- calling the model's own code, without our arguments -------------------------------------

    def _apply_hf_processor_main(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        """Return the HF processor's outputs, made now or for an earlier question.

        Each item is prepared alone: together with a larger image, an image would get empty tiles.
        """
        requests, plain = requests_in(hf_kwargs), without_ours(hf_kwargs)
        process = super()._apply_hf_processor_main
        # What is not pruned, such as the client's own embeddings, is processed as vLLM does it.
        others = {modality for modality in mm_items if not requests.get(modality)}
        outputs = [process(mm_items.select(others), plain)] if others or not mm_items else []
        for modality, items in mm_items.items():
            for number, request in enumerate(requests.get(modality, ())):
                item = items.get(number)
                alone = self.info.parse_mm_data({modality: [item]}, validate=False)
                # The key holds the shape too: a client may reuse a uuid for another image.
                key = modality, request.media_hash, _shape(item)
                outputs.append(self._pixel_cache.get(key, partial(process, alone, plain)))
        return joined(outputs)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return super()._get_mm_fields_config(hf_inputs, without_ours(hf_processor_mm_kwargs))

    def get_dummy_mm_inputs(self, *args: Any, **kwargs: Any) -> Any:
        mm_inputs = super().get_dummy_mm_inputs(*args, **kwargs)
        for modality, items in mm_inputs["mm_kwargs"].items():
            field = PlanFields.of(modality).media
            for item in items:
                if item is not None and field in item:
                    item[field].data.copy_(torch.tensor(DUMMY_MEDIA))
        return mm_inputs


def _shape(item: Any) -> object:
    """Return the shape of an image, or of a video's frames."""
    if isinstance(item, tuple):
        item, _ = item  # a video's frames and their metadata
    if isinstance(item, list):
        return len(item), _shape(item[0])
    return tuple(item.shape) if hasattr(item, "shape") else item.size

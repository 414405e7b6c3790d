# SPDX-License-Identifier: Apache-2.0
"""Prompts, plans and identities as the API process makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.parse import parse_mm_uuids

import anchorprune_vllm
from anchorprune_vllm.api.processor import PruningProcessor
from anchorprune_vllm.api.size_limits import SizeLimits
from anchorprune_vllm.log import logger
from anchorprune_vllm.metrics.families import FALLBACKS, ITEMS_PRUNED, TOKENS_AFTER, TOKENS_BEFORE
from anchorprune_vllm.plan import pop_plans
from anchorprune_vllm.testing.demo_models.make import find_text_encoder
from anchorprune_vllm.testing.local_model import plans_of
from tests.support.dialects import in_dialect, prompt_of
from tests.support.pictures import QUESTIONS, clip, picture
from tests.support.reference import Reference
from tests.support.scrapes import Scrape


def make(model: Path, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    anchorprune_vllm.register()
    text_encoder = find_text_encoder(model)
    paired = {"text_encoder": str(text_encoder)} if text_encoder else {}
    prune = {"budget": 16, **paired, **settings}
    args = EngineArgs(
        model=str(model), hf_overrides={"anchorprune": prune}, dtype="float32", **options or {}
    )
    model_config = args.create_model_config()
    processor = MULTIMODAL_REGISTRY.create_processor(model_config)
    assert isinstance(processor, PruningProcessor)
    processor.test_cache = MultiModalProcessorOnlyCache(model_config)
    return processor


@pytest.fixture(scope="module")
def processor(demo_model: Path) -> Any:
    """A processor for the rules that are the same for all models."""
    return make(demo_model)


@pytest.fixture(scope="module")
def each_processor(any_model: Path) -> Any:
    """The processor of each demo model in turn, for what depends on its prompts."""
    return make(any_model)


def process(
    processor: Any,
    prompt: str,
    *images: Image.Image | None,
    override: Any = None,
    uuids: list[str] | None = None,
    cached: bool = False,
) -> Any:
    return processor(
        in_dialect(prompt, processor.info.get_tokenizer()),
        processor.info.parse_mm_data({"image": list(images)}),
        parse_mm_uuids(uuids and {"image": uuids}),
        {} if override is None else {"anchorprune": override},
        cache=processor.test_cache if cached else None,
    )


def hashes(*args: Any, **kwargs: Any) -> list[str]:
    return process(*args, **kwargs)["mm_hashes"]["image"]


def ask(question: str) -> str:
    return f"USER: <image>\n{question} ASSISTANT:"


def test_placeholders_equal_the_plan(
    each_processor: Any, reference: Reference, subtests: pytest.Subtests
) -> None:
    for size in ((168, 168), (336, 336), (70, 400), (1700, 9)):
        with subtests.test(size=size):
            check_placeholders(each_processor, reference, picture(1, size))


def check_placeholders(processor: Any, reference: Reference, image: Image.Image) -> None:
    sizes, unpruned = reference.unit_sizes(image), reference.unpruned(image)
    total = sum(sizes)
    for budget, kept in ((1, 1), (7, 7), ("50%", (total + 1) // 2), (total - 1, total - 1)):
        out = process(processor, ask("Why?"), image, override={"budget": budget})
        (plan,) = plans_of(out)
        assert (placeholders(out), plan.kept) == (kept, kept)
        assert [unit for unit in plan.tokens.unit_sizes if unit] == sizes
        assert plan.tokens.unpruned == unpruned
    for budget in (total, 5000, "100%"):
        out = process(processor, ask("Why?"), image, override={"budget": budget})
        (plan,) = plans_of(out)
        assert plan.keeps_all
        assert placeholders(out) == unpruned


def placeholders(out: Any) -> int:
    (place,) = out["mm_placeholders"]["image"]
    ids = out["prompt_token_ids"]
    assert ids.count(ids[place.offset]) == place.length
    return place.length


class TestIdentity:
    def test_question_budget_and_settings_are_in_it(self, processor: Any, demo_model: Path) -> None:
        image = picture(2)
        other_settings = make(demo_model, tau=0.3)
        seen = [
            hashes(processor, ask(QUESTIONS[0]), image),
            hashes(processor, ask(QUESTIONS[1]), image),
            hashes(processor, ask(QUESTIONS[0]), image, override={"budget": 17}),
            hashes(processor, ask(QUESTIONS[0]), image, override={"query": "none"}),
            hashes(processor, ask(QUESTIONS[0]), picture(3)),
            hashes(other_settings, ask(QUESTIONS[0]), image),
        ]
        assert len({key for (key,) in seen}) == len(seen)
        assert hashes(processor, ask(QUESTIONS[0]), image) == seen[0]

    def test_same_for_client_uuids(self, processor: Any) -> None:
        image, named = picture(2), {"uuids": ["mine"]}
        first, again, other = (
            hashes(processor, ask(question), image, **named)
            for question in (QUESTIONS[0], QUESTIONS[0], QUESTIONS[1])
        )
        assert first == again != other
        assert hashes(processor, ask(QUESTIONS[0]), image, uuids=["theirs"]) != first

    def test_unpruned_items_share_it_whatever_is_asked(self, processor: Any) -> None:
        all_kept = {"override": {"budget": "100%"}}
        keys = {
            hashes(processor, ask(question), picture(2), **all_kept)[0] for question in QUESTIONS
        }
        assert len(keys) == 1

    def test_later_turns_and_images_leave_an_item_alone(self, each_processor: Any) -> None:
        first, second = picture(4), picture(5)
        alone = hashes(each_processor, ask(QUESTIONS[0]), first)
        later = f"{ask(QUESTIONS[0])} A dog. USER: <image>\n{QUESTIONS[1]} ASSISTANT:"
        both = hashes(each_processor, later, first, second)
        assert both[0] == alone[0]
        assert both[1] == hashes(each_processor, ask(QUESTIONS[1]), second)[0]


def test_plan_carries_media_and_question(each_processor: Any) -> None:
    def plan_of(question: str, image: Image.Image, **options: Any) -> Any:
        (plan,) = plans_of(process(each_processor, ask(question), image, **options))
        return plan

    one, other_question, other_image = (
        plan_of(QUESTIONS[0], picture(6)),
        plan_of(QUESTIONS[1], picture(6)),
        plan_of(QUESTIONS[0], picture(7)),
    )
    assert one.media_key == other_question.media_key != other_image.media_key
    assert one.query_ids.tolist() == other_image.query_ids.tolist()
    assert one.query_ids.tolist() != other_question.query_ids.tolist()
    # A request may give other words, or the name of a scope, which is no words.
    for query, question in ((QUESTIONS[1], QUESTIONS[1]), ("last", QUESTIONS[0]), ("none", "")):
        given = plan_of(QUESTIONS[0], picture(6), override={"query": query})
        assert given.query_ids.tolist() == plan_of(question, picture(6)).query_ids.tolist()


def test_processor_cache_holds_each_question(each_processor: Any) -> None:
    images = [picture(8), picture(9)]
    prompt = f"{ask(QUESTIONS[0])} A dog. USER: <image>\n{QUESTIONS[1]} ASSISTANT:"
    process(each_processor, ask(QUESTIONS[0]), images[0], cached=True)
    mixed = process(each_processor, prompt, *images, cached=True)  # the first item is cached
    fresh = process(each_processor, prompt, *images)
    assert mixed["mm_hashes"] == fresh["mm_hashes"]
    for got, wanted in zip(mixed["mm_kwargs"]["image"], fresh["mm_kwargs"]["image"], strict=True):
        assert got.keys() == wanted.keys()
        for name in wanted:
            assert got[name].data.tolist() == wanted[name].data.tolist()


def test_the_clients_own_embeddings_are_passed_on(any_model: Path) -> None:
    processor = make(any_model, {"enable_mm_embeds": True})
    embeddings: Any = torch.zeros(1, 30, 128)
    if processor.info.get_hf_config().model_type == "qwen2_5_vl":
        embeddings = {
            "image_embeds": embeddings[0],
            "image_grid_thw": torch.tensor([[1, 10, 12]]),
        }
    out = processor(
        in_dialect(ask(QUESTIONS[0]), processor.info.get_tokenizer()),
        processor.info.parse_mm_data({"image": embeddings}),
    )
    assert out["mm_placeholders"]["image"][0].length == 30
    assert pop_plans("image", dict(out["mm_kwargs"].get_data())) is None


def test_a_uuid_that_names_another_picture_later(each_processor: Any) -> None:
    """The worker must not take the rows of the first for the second's, if they are not as many."""
    plans = []
    for size, question in (((600, 500), "Why?"), ((336, 336), "Who?")):
        image = picture(1, size)
        out = process(each_processor, ask(question), image, uuids=["mine"], cached=True)
        plans += plans_of(out)
    keys, tokens = ({getattr(plan, name) for plan in plans} for name in ("media_key", "tokens"))
    assert len(keys) == len(tokens)


def test_videos_may_have_a_budget_of_their_own(demo_models: Any) -> None:
    processor = make(demo_models("qwen2.5-vl"), budget=20, video_budget="10%")
    out = processor(
        in_dialect(prompt_of("Why?", images=1, videos=1), processor.info.get_tokenizer()),
        processor.info.parse_mm_data({"image": [picture(1)], "video": [clip(2, frames=6)]}),
    )
    (image,), (video,) = (plans_of(out, modality) for modality in ("image", "video"))
    assert image.kept == 20
    assert video.tokens.unit_sizes == (144, 144, 144)
    assert video.kept == 43
    kept = {name: places[0].length for name, places in out["mm_placeholders"].items()}
    assert kept == {"image": 20, "video": 43}


def test_stray_placeholders(any_model: Path) -> None:
    """Under native positions they would be taken for visual tokens."""
    processor = make(any_model, positions="native")
    token = processor.info.get_tokenizer().decode(processor._targets()["image"])
    process(processor, ask("Why?"), picture(1))
    with pytest.raises(ValueError, match="contains 1 media placeholders that stand for no image"):
        process(processor, ask(f"Why {token}?"), picture(1))


def test_large_items_are_refused_only_if_pruned(demo_model: Path) -> None:
    processor = make(demo_model)
    processor._size_limits = SizeLimits(largest=1, method="anchorprune", of_method=None)
    process(processor, ask("Why?"), picture(1), override={"budget": "100%"})
    with pytest.raises(ValueError, match="visual tokens before pruning; at most 4 are allowed"):
        process(processor, ask("Why?"), picture(1))


def test_dummies_need_as_much_as_any_request(each_processor: Any) -> None:
    out = each_processor.get_dummy_mm_inputs({"image": 2})
    assert [plan.keeps_all for plan in plans_of(out)] == [True, True]


def test_queries_that_are_refused(processor: Any) -> None:
    for query, words in (
        ("\ud800", "not valid Unicode"),
        ("a" * 20_001, "has 20001 characters; at most 20000"),
    ):
        with pytest.raises(ValueError, match=words):
            process(processor, ask("Why?"), picture(1), override={"query": query})


class TestKeysOfRequests:
    """`mm_processor_kwargs` holds keys of ours and of the model's own HF processor."""

    @staticmethod
    def send(processor: Any, **kwargs: Any) -> Any:
        return processor(
            in_dialect(ask("Why?"), processor.info.get_tokenizer()),
            processor.info.parse_mm_data({"image": [picture(1)]}),
            hf_processor_mm_kwargs=kwargs,
        )

    def test_ours_in_the_wrong_place(self, processor: Any, subtests: pytest.Subtests) -> None:
        for key in ("anchor_prune", "budget", "query", "tau"):
            with subtests.test(key=key):
                words = f"unknown key '{key}' in mm_processor_kwargs; a requ"
                with pytest.raises(ValueError, match=words):
                    self.send(processor, **{key: 3})
                with pytest.raises(ValueError, match=f"unknown key '{key}'"):
                    self.send(processor, anchorprune={"budget": 3}, **{key: 3})

    def test_those_of_the_hf_processor(
        self, each_processor: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.send(each_processor, do_rescale=True)
        declared = each_processor._keys_of_hf_processor()
        assert {"size", "do_rescale", "images_kwargs"} <= declared
        monkeypatch.setattr(each_processor, "_keys_of_hf_processor", lambda: {*declared, "budget"})
        (plan,) = plans_of(self.send(each_processor, budget=3))
        assert plan.kept == 16

    def test_pruning_that_is_off(self, any_model: Path) -> None:
        anchorprune_vllm.register()
        config = EngineArgs(model=str(any_model), dtype="float32").create_model_config()
        off = MULTIMODAL_REGISTRY.create_processor(config)
        self.send(off, do_rescale=True)
        for key in ("anchorprune", "anchor_prune"):
            with pytest.raises(ValueError, match="pruning is off for this model, so a request can"):
                self.send(off, **{key: {"budget": 3}})


def test_the_encoder_is_planned_for_unpruned_images(
    each_processor: Any, reference: Reference
) -> None:
    sizes = [(1008, 1008), (372, 834)]  # the first is the largest for all but LLaVA-OneVision
    largest = max(reference.unpruned(picture(1, size)) for size in sizes)
    assert each_processor.info.get_mm_max_tokens_per_item(4096, {"image": 1})["image"] == largest


def test_a_processor_that_answers_nothing_reads_nothing(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes one for every chat, to ask it for its limits alone."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("not needed yet")

    monkeypatch.setattr("anchorprune_vllm.api.processor.QueryReader", fail)
    monkeypatch.setattr(type(processor), "_text_encoder", fail)
    made = MULTIMODAL_REGISTRY.create_processor(processor.info.ctx.model_config)
    made.info.validate_num_items("image", 1)
    with pytest.raises(AssertionError, match="not needed yet"):
        process(made, prompt_of(QUESTIONS[0]), picture(1))


class TestMetrics:
    """What is counted of requests, read where vLLM's /metrics reads it."""

    @staticmethod
    def scraped(processor: Any) -> dict[str, float]:
        scrape = Scrape.of(REGISTRY)
        labels = {
            "model_name": processor.info.ctx.model_config.served_model_name,
            "modality": "image",
        }
        return {
            "before": scrape.value(TOKENS_BEFORE, **labels),
            "after": scrape.value(TOKENS_AFTER, **labels),
            "pruned": scrape.value(ITEMS_PRUNED, **labels),
            "all_kept": scrape.value(FALLBACKS, reason="all_kept", **labels),
            "no_query": scrape.value(FALLBACKS, reason="no_query", **labels),
        }

    def grown(self, processor: Any, *requests: tuple[Any, ...], **options: Any) -> dict[str, float]:
        earlier = self.scraped(processor)
        for request in requests:
            process(processor, *request, **options)
        return {what: now - earlier[what] for what, now in self.scraped(processor).items()}

    def test_every_request_counts(self, each_processor: Any, reference: Reference) -> None:
        """One that vLLM's cache of processed items knows has its tokens too."""
        image, other = picture(70), picture(71, (70, 400))
        unpruned = reference.unpruned(image) * 2 + reference.unpruned(other)
        both = "USER: <image><image>\nWhy? ASSISTANT:"
        requests = [(ask("Why?"), image), (both, image, other)]
        for cached in (False, False, True, True):
            assert self.grown(each_processor, *requests, cached=cached) == {
                "before": unpruned,
                "after": 3 * 16,
                "pruned": 3,
                "all_kept": 0,
                "no_query": 0,
            }

    def test_all_kept(self, processor: Any) -> None:
        for budget in (5000, "100%"):
            grown = self.grown(processor, (ask("Why?"), picture(72)), override={"budget": budget})
            kept = {"before": 144, "after": 144, "all_kept": 1}
            assert grown == {"pruned": 0, "no_query": 0, **kept}

    def test_no_query(self, processor: Any, subtests: pytest.Subtests) -> None:
        for question, override, no_query in (
            ("", None, 1),
            ("", {"query": ""}, 1),
            ("Why?", None, 0),
            ("", {"query": "the bus"}, 0),
            ("", {"query": "none"}, 0),  # none was wanted
        ):
            with subtests.test(question=question, override=override):
                grown = self.grown(processor, (ask(question), picture(73)), override=override)
                assert (grown["pruned"], grown["no_query"]) == (1, no_query)

    def test_no_query_is_said_once(self, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """And with metrics off, too; vLLM's logger drops lines that it has seen."""
        lines: list[str] = []
        monkeypatch.setattr(logger, "warning_once", lambda text, *args: lines.append(text % args))
        for options in ({}, {"disable_log_stats": True}):
            quiet = make(demo_model, options)
            quiet.get_dummy_mm_inputs({"image": 1})
            process(quiet, ask("Why?"), picture(76))
            process(quiet, ask(""), picture(76), override={"query": "none"})
            process(quiet, ask(""), picture(76), override={"budget": "100%"})
            assert lines == []
            process(quiet, ask(""), picture(76))
            (line,) = lines
            assert "no question was found for an item (image), which is pruned without" in line
            assert 'vllm:anchorprune_fallbacks_total{reason="no_query"}' in line
            lines.clear()

    def test_methods_that_do_not_ask_lack_nothing(self, demo_model: Path) -> None:
        processor = make(demo_model, method="divprune")
        grown = self.grown(processor, (ask(""), picture(74)))
        assert (grown["pruned"], grown["no_query"]) == (1, 0)

    def test_vllms_own_dummies_are_no_requests(self, processor: Any) -> None:
        earlier = self.scraped(processor)
        processor.get_dummy_mm_inputs({"image": 1})
        assert self.scraped(processor) == earlier

    def test_off_with_vllms_own(self, demo_model: Path) -> None:
        off = make(demo_model, {"disable_log_stats": True, "served_model_name": "quiet"})
        process(off, ask("Why?"), picture(75))
        labels = {value for _, given in Scrape.of(REGISTRY).ours for _, value in given}
        assert "quiet" not in labels
        on = make(demo_model, {"served_model_name": "loud"})
        assert self.scraped(on)["before"] == 0  # there before the first request

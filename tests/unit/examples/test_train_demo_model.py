# SPDX-License-Identifier: Apache-2.0
"""The training of the demo's model: what it learns from, and that nothing is lost on the way."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, CLIPModel, LlavaForConditionalGeneration

from anchorprune_vllm.tools.eval_data import load_data
from anchorprune_vllm.tools.scenes import scene
from anchorprune_vllm.tools.trained_files import read_trained, tokenizer, write_trained
from anchorprune_vllm.tools.vqa_data import Picture, easy_vqa
from tests.support.examples import load_example


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return load_example("train_demo_model.py")


@pytest.fixture(scope="module")
def model(training: ModuleType) -> Any:
    torch.manual_seed(0)
    return training.Model().eval()


@pytest.fixture(scope="module")
def written(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "model"
    write_trained(out, model, {})
    read_trained(out, model)  # rounded to bfloat16
    return out


@torch.inference_mode()
def test_questions_of_one_picture_do_not_see_each_other(training: ModuleType, model: Any) -> None:
    shown = scene(3)
    tokens, _ = model.see(training.pixels_of([shown], None))
    packed = training.answer_logits(model, tokens, training.pack([shown], None))
    alone = [
        training.answer_logits(
            model, tokens, training.pack([training.Picture(shown.load, (question,))], None)
        )
        for question in shown.questions
    ]
    assert len(packed) == 2 * len(shown.questions) > 8
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_checkpoint_is_what_was_trained(training: ModuleType, model: Any, written: Path) -> None:
    """transformers' LLaVA and CLIP, on what their own processors make of a chat, see the same."""
    shown = scene(4)
    question = shown.questions[0]
    processor = AutoProcessor.from_pretrained(written)
    content = [{"type": "image"}, {"type": "text", "text": question.text}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = processor(
        text=prompt, images=shown.load(), return_tensors="pt", add_special_tokens=False
    )
    batch = training.pack([training.Picture(shown.load, (question,))], None)
    asked = inputs.input_ids.shape[1]
    assert inputs.input_ids[0].tolist() == batch.ids[0, :asked].tolist()
    pixels = training.pixels_of([shown], None)
    torch.testing.assert_close(inputs.pixel_values, pixels, atol=0.02, rtol=0)

    tokens, seen = model.see(pixels)
    expected = training.answer_logits(model, tokens, batch)[0]
    llava = LlavaForConditionalGeneration.from_pretrained(written, dtype=torch.float32).eval()
    logits = llava(**{**inputs, "pixel_values": pixels}).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    clip = CLIPModel.from_pretrained(written / "clip", dtype=torch.float32).eval()
    pooled = clip.vision_model(pixels).pooler_output
    torch.testing.assert_close(clip.visual_projection(pooled), seen, atol=1e-4, rtol=1e-4)


def test_every_word_is_one_token(training: ModuleType) -> None:
    """Questions and answers, so that an answer is one word and the end behind it."""
    for seed in range(30):
        for question in scene(seed).questions:
            for word in [*question.text.rstrip("?").split(), question.answers[0]]:
                assert len(tokenizer().encode(word, add_special_tokens=False).ids) == 1, word


def test_wrong_captions(training: ModuleType) -> None:
    assert training.wrong_captions("a red circle") == ["a red rectangle", "a red triangle"]
    assert training.wrong_captions("a red circle and a blue letter A") == [
        "a red rectangle and a blue letter A",
        "a red triangle and a blue letter A",
        "a blue circle and a red letter A",
    ]


def test_captions_are_told_apart(training: ModuleType, model: Any) -> None:
    """Pictures that lie on their captions have a lower loss than on each other's."""
    captions = ["a red circle", "a blue circle", None, "a red triangle"]
    with torch.inference_mode():
        words = training.clip_tokenizer()
        ids = torch.tensor([words.encode(caption or "a gray circle").ids for caption in captions])
        right = model.clip.text_projection(model.clip.text_model(input_ids=ids).pooler_output)
        loss = training.caption_loss(model, right, captions)
        wrong = training.caption_loss(model, right[[1, 3, 2, 0]], captions)
    assert loss < wrong


def test_goes_on_as_if_never_stopped(
    training: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [scene(number) for number in range(12)]
    for name, value in {"SCENES_PER_PASS": 4, "BATCH": 4, "VALIDATION": 4}.items():
        monkeypatch.setattr(training, name, value)
    monkeypatch.setattr(training, "easy_vqa", lambda split: list(shown))
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    training.train(whole, 2, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "save", stop_after_one(training.Training.save))
        with pytest.raises(KeyboardInterrupt):
            training.train(halves, 2, seed=1)
    training.train(halves, 2, seed=1)
    training.train(tmp_path / "half", 2, seed=1, stop_after=1)
    half = torch.load(tmp_path / "half.training.pt", weights_only=False)
    assert half["progress"][0] == 1
    states = [torch.load(f"{out}.training.pt", weights_only=False) for out in (whole, halves)]
    for name, weight in states[0]["model"].items():
        assert torch.equal(weight, states[1]["model"][name]), name
    assert states[0]["progress"] == states[1]["progress"]


def test_another_seed_does_not_go_on_with_this_ones_state(
    training: ModuleType, tmp_path: Path
) -> None:
    training.Training(tmp_path / "new" / "model", seed=1, passes=2).save()
    training.Training(tmp_path / "new" / "model", seed=1, passes=2)
    for settings in ({"seed": 2, "passes": 2}, {"seed": 1, "passes": 3}):
        with pytest.raises(SystemExit, match="same to go on"):
            training.Training(tmp_path / "new" / "model", **settings)


def test_no_picture_is_both_trained_on_and_judged_by(
    training: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures are told apart by their pixels."""
    monkeypatch.setattr(training, "SCENES_PER_PASS", 40)
    monkeypatch.setattr(training, "VALIDATION", 20)
    seen: list[Picture] = []
    monkeypatch.setattr(training.Training, "step", lambda self, part, **_: seen.extend(part) or 0.0)
    monkeypatch.setattr(training, "evaluate", lambda *_: {"all": 0.0})
    easy = easy_vqa("train")[:200]
    monkeypatch.setattr(training, "easy_vqa", lambda split: easy)
    training.train(tmp_path / "model", 3, seed=5)
    trained = {picture.load().tobytes() for picture in seen}
    assert len(trained) == len({id(picture) for picture in seen}) > 200
    judged = [picture for held_out in training.validation().values() for picture in held_out]
    judged += [
        picture for data in load_data(["easy-vqa", "scenes"], 400) for picture in data.pictures
    ]
    assert len(judged) > 80
    assert not trained & {picture.load().tobytes() for picture in judged}


def stop_after_one(save: Any) -> Any:
    def stop(training: Any) -> None:
        save(training)
        raise KeyboardInterrupt

    return stop


def test_half_of_the_pictures_without_a_letter_are_mirrored(training: ModuleType) -> None:
    shown = [scene(seed) for seed in range(100)]
    plain = training.pixels_of(shown, None)
    given = training.pixels_of(shown, random.Random(0))
    mirrored = [
        bool((one == other.flip(-1)).all()) for one, other in zip(given, plain, strict=True)
    ]
    same = [bool((one == other).all()) for one, other in zip(given, plain, strict=True)]
    has_letter = ["letter" in (picture.caption or "") for picture in shown]
    assert all(is_same for is_same, letter in zip(same, has_letter, strict=True) if letter)
    assert all(one != other for one, other in zip(mirrored, same, strict=True))
    assert 0.25 < sum(mirrored) / has_letter.count(False) < 0.75

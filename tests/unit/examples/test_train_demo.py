# SPDX-License-Identifier: Apache-2.0
"""The training of the demo's models: what they learn from, and that nothing is lost on the way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPModel,
    LlamaConfig,
    LlamaModel,
)

from anchorprune_vllm.commands.eval.asked_thing import tokens_on
from anchorprune_vllm.commands.eval.clutter import LETTERS, cluttered_scene
from anchorprune_vllm.commands.eval.data import load_data
from anchorprune_vllm.commands.eval.scenes import scene
from anchorprune_vllm.commands.eval.vqa_data import Picture, Shown
from examples.train_demo import pictures, training
from examples.train_demo.llava import Llava, phrases_of
from examples.train_demo.looking import HEADS, Looking
from examples.train_demo.pictures import batch_of, pixels_of, validation
from examples.train_demo.places import PlaceLoss, labels_of_patches, left_of_patches
from examples.train_demo.qwen import Qwen, patches_of
from examples.train_demo.sequences import pack
from examples.train_demo.student import Student
from examples.train_demo.terms import GroundingLoss, Term, all_terms, labels_of
from examples.train_demo.training import Rounds, Training, evaluate

STUDENTS = {"llava": Llava, "qwen": Qwen}


@pytest.fixture(scope="module", params=STUDENTS)
def model(request: pytest.FixtureRequest) -> Student:
    torch.manual_seed(0)
    return STUDENTS[request.param]().eval()


def asked_once(picture: Picture, number: int) -> Picture:
    return Picture(picture.load, (picture.questions[number],))


@torch.inference_mode()
def test_questions_of_one_picture_do_not_see_each_other(model: Student) -> None:
    shown = cluttered_scene(3)
    features = model.see(pixels_of([shown])).features
    packed = model.answer_logits(features, pack(model.chat, [shown], None))
    alone = [
        model.answer_logits(features, pack(model.chat, [asked_once(shown, number)], None))
        for number in range(len(shown.questions))
    ]
    assert len(alone) == 10
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_checkpoint_is_what_was_trained(model: Student, tmp_path: Path) -> None:
    """transformers' models, on what their own processors make of a chat, see the same."""
    out = Training.__new__(Training)
    out.model, out.out = model, tmp_path
    out.write()
    rounded = {name: weight.bfloat16().float() for name, weight in model.state_dict().items()}
    model.load_state_dict(rounded)
    shown = cluttered_scene(4)
    processor = AutoProcessor.from_pretrained(tmp_path)
    content = [{"type": "image"}, {"type": "text", "text": shown.questions[0].text}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = processor(
        text=prompt, images=shown.load(), return_tensors="pt", add_special_tokens=False
    )
    batch = pack(model.chat, [asked_once(shown, 0)], None)
    asked = inputs.input_ids.shape[1]
    assert inputs.input_ids[0].tolist() == batch.ids[0, :asked].tolist()
    pixels = pixels_of([shown])
    given = patches_of(pixels) if isinstance(model, Qwen) else pixels
    torch.testing.assert_close(inputs.pixel_values, given, atol=0.02, rtol=0)

    seen = model.see(pixels)
    expected = model.answer_logits(seen.features, batch)[0]
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    logits = loaded(**{**inputs, "pixel_values": given}).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    if isinstance(model, Llava):
        clip = CLIPModel.from_pretrained(tmp_path / "clip", dtype=torch.float32).eval()
        pooled = clip.vision_model(pixels).pooler_output
        torch.testing.assert_close(clip.visual_projection(pooled), seen.whole, atol=1e-4, rtol=1e-4)


def test_every_word_is_one_token(model: Student) -> None:
    """Of questions and of answers, but for the question mark."""
    for seed in range(30):
        for question in (*scene(seed).questions, *cluttered_scene(seed).questions):
            words = question.text.removesuffix("?").split()
            ids = model.chat.words.encode(" ".join(words), add_special_tokens=False).ids
            assert len(ids) == len(words), question.text
            answer = question.answers[0].split()
            assert len(model.chat.answer_ids(question.answers[0])) == len(answer) + 1


def test_labels_say_what_is_in_a_picture() -> None:
    shown = Picture(Any, (), None, (Shown("red", "star"), Shown("blue", "sign", "EH")))
    terms = tuple(all_terms())
    (labels,) = labels_of([shown], terms)
    true = {term for term, label in zip(terms, labels.tolist(), strict=True) if label}
    assert true == {
        *(Term("red", "star"), Term("red", None), Term(None, "star")),
        *(Term("blue", "sign"), Term("blue", None), Term(None, "sign")),
        *(Term(letter="E"), Term(letter="H")),
    }


def test_questions_about_cluttered_scenes_are_phrases() -> None:
    """Every question about a cluttered scene is one that patches learn from."""
    known = {phrase for term in all_terms() for phrase in phrases_of(term)}
    asked = {question.text for seed in range(100) for question in cluttered_scene(seed).questions}
    assert asked <= known


def test_the_best_patch_decides() -> None:
    """One patch that fits is enough, and where it is does not matter."""
    loss, labels = GroundingLoss(), torch.tensor([[1.0, 0.0]])
    cosines = torch.full((1, 2, 256), -0.2)
    nothing = loss(cosines, labels)
    for place in (0, 100, 255):
        right, wrong = cosines.clone(), cosines.clone()
        right[0, 0, place] = wrong[0, 1, place] = 0.9
        assert loss(right, labels) < nothing < loss(wrong, labels)


@torch.inference_mode()
def test_seeing_loss_is_lower_for_what_is_there(model: Student) -> None:
    """Patches that are put on the words of their picture have a lower loss than on another's."""
    shown = [Picture(Any, (), "a red star", (Shown("red", "star"),))]
    other = [Picture(Any, (), "a blue moon", (Shown("blue", "moon"),))]
    if isinstance(model, Llava):
        texts = model.embed_texts(
            [p for t in all_terms() if t.is_true_of(Shown("red", "star")) for p in phrases_of(t)]
        )
        seen = model.see(pixels_of([scene(0)]))._replace(patches=texts[None])
    else:
        words = model.chat.words
        ids = torch.tensor([words.encode("a red").ids[-1], words.encode("a star").ids[-1]])
        rows = F.normalize(model.qwen.get_input_embeddings()(ids), dim=-1)
        tokens = torch.stack([rows[0], rows[1], rows.sum(0)])[None]
        seen = model.see(pixels_of([scene(0)]))._replace(patches=tokens)
    assert model.seeing_loss(seen, shown) < model.seeing_loss(seen, other)


def test_labels_say_what_each_patch_shows() -> None:
    """Of a sign, both letters; of what stands beside another thing, its shape."""
    placed = (
        Shown("red", "star", "", (0.125, 0.25, 0.25, 0.375)),
        Shown("blue", "sign", "EH", (0.25, 0.25, 0.375, 0.375)),
        Shown("pink", "moon", "", (0.5, 0.5, 0.625, 0.625)),
    )
    labels = labels_of_patches(Picture(Any, (), None, placed)).view(5, 16, 16)
    colour, shape, first, second, left = labels
    assert len(colour[4:6, 2:4].unique()) == 1
    assert [int((colour == value).sum()) for value in colour.unique()] == [256 - 12, 4, 4, 4]
    assert torch.equal(colour > 0, shape > 0)
    on_sign = torch.zeros(16, 16, dtype=torch.bool)
    on_sign[4:6, 4:6] = True
    for letters, letter in ((first, "E"), (second, "H")):
        assert letters[on_sign].tolist() == [LETTERS.index(letter)] * 4
    for known in (first, second, left):
        assert torch.equal(known >= 0, on_sign)
    assert (left[on_sign] == shape[4, 2]).all()
    looks = left_of_patches(Picture(Any, (), None, placed)).view(16, 16, 16, 16)
    assert torch.equal(looks.any(-1).any(-1), on_sign)
    star = torch.zeros(16, 16, dtype=torch.bool)
    star[4:6, 2:4] = True
    assert all(torch.equal(where, star) for where in looks[on_sign])


def test_nothing_is_held_to_places_that_are_not_known() -> None:
    loss = PlaceLoss(8)
    unknown = Picture(Any, (), None, (Shown("red", "star"),))
    assert loss(torch.randn(1, 256, 8), [unknown]) == 0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of two steps with two pictures each."""
    monkeypatch.setattr(training, "STEPS_PER_ROUND", 2)
    monkeypatch.setattr(training, "BATCH", {"seeing": 2, "answering": 2})
    monkeypatch.setattr(pictures, "VALIDATION", 2)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("saves", [1, 2])
def test_goes_on_as_if_never_stopped(
    saves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the tower has learned to see, and while the language model learns to answer."""
    rounds = Rounds(seeing=1, answering=2)
    whole = Training(tmp_path / "whole", Llava, seed=1, rounds=rounds)
    whole.run()
    with monkeypatch.context() as patch:
        patch.setattr(Training, "save", stopping_after(saves, Training.save))
        with pytest.raises(KeyboardInterrupt):
            Training(tmp_path / "halves", Llava, seed=1, rounds=rounds).run()
    halves = Training(tmp_path / "halves", Llava, seed=1, rounds=rounds)
    assert halves.rounds_done == saves
    halves.run()
    assert (tmp_path / "halves" / "clip" / "model.safetensors").exists()
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(weight, halves.model.state_dict()[name], msg=name)


def stopping_after(saves: int, save: Any) -> Any:
    def stop(self: Training) -> None:
        save(self)
        if self.rounds_done == saves:
            raise KeyboardInterrupt

    return stop


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", STUDENTS)
def test_each_phase_trains_its_own_part(name: str, tmp_path: Path) -> None:
    """What sees, and the words that it is held to, stay as they are while answers are learned."""
    kept: list[dict[str, torch.Tensor]] = []
    rounds = Rounds(seeing=1, answering=1)
    learning = Training(tmp_path / "model", STUDENTS[name], seed=1, rounds=rounds)

    def weights() -> dict[str, torch.Tensor]:
        return {key: weight.clone() for key, weight in learning.model.state_dict().items()}

    kept.append(weights())
    for phase in ("seeing", "answering"):
        learning._step(phase, 0)
        kept.append(weights())
    before, seen, answered = kept
    moved = [
        {key for key in before if not torch.equal(old[key], new[key])}
        for old, new in ((before, seen), (seen, answered))
    ]
    assert all(not learning.model.answers_with(key) for key in moved[0])
    assert all(learning.model.answers_with(key) for key in moved[1])
    tower = "clip.vision_model." if name == "llava" else "qwen.model.visual."
    assert any(key.startswith(tower) for key in moved[0])
    assert any("lm_head" in key for key in moved[1])


def test_other_settings_do_not_go_on_with_a_state(tmp_path: Path) -> None:
    out = tmp_path / "new" / "model"
    one, other = Rounds(1, 1), Rounds(1, 2)
    Training(out, Llava, seed=1, rounds=one).save()
    Training(out, Llava, seed=1, rounds=one)
    for student, seed, rounds in ((Qwen, 1, one), (Llava, 2, one), (Llava, 1, other)):
        with pytest.raises(SystemExit, match="give the same to go on"):
            Training(out, student, seed, rounds)


def test_no_picture_is_both_trained_on_and_judged_by() -> None:
    """Pictures are told apart by their pixels."""
    trained = {p.load().tobytes() for step in range(10) for p in batch_of(random.Random(step), 32)}
    assert len(trained) > 200
    judged = [picture for found in validation().values() for picture in found[:40]]
    judged += [p for data in load_data([*pictures.SHARES], 400) for p in data.pictures]
    assert len(judged) > 180
    assert not trained & {picture.load().tobytes() for picture in judged}


def test_evaluate_counts_whole_answers(model: Student, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong token, be it the end, makes an answer wrong."""
    shown = [cluttered_scene(5)]
    batch = pack(model.chat, shown, None)
    size = model.chat.words.get_vocab_size()

    def logits(wanted: torch.Tensor) -> float:
        monkeypatch.setattr(model, "answer_logits", lambda *_: F.one_hot(wanted, size).float())
        return evaluate(model, shown)["all"]

    assert logits(batch.wanted) == 1
    for place in (0, len(batch.wanted) - 1):
        wrong = batch.wanted.clone()
        wrong[place] += 1
        assert logits(wrong) == pytest.approx(0.9)


def test_looking_counts_the_attention_on_what_is_wanted() -> None:
    """The loss is that of the attention's own weights."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=8)
    model = LlamaModel._from_config(config, attn_implementation="eager")
    looking = Looking(model.layers[0].self_attn)
    found = model(inputs_embeds=torch.randn(2, 9, 64), output_attentions=True).attentions[0]
    rows = torch.tensor([0, 1, 1]), torch.tensor([8, 4, 6])
    wanted = torch.zeros(3, 9, dtype=torch.bool)
    wanted[0, 2:5] = wanted[1, 1] = wanted[2, 6] = True
    seen = torch.arange(9) <= rows[1][:, None]
    expected = [
        -found[batch, head, token, wanted[number]].sum().log()
        for number, (batch, token) in enumerate(zip(*rows, strict=True))
        for head in range(HEADS)
    ]
    torch.testing.assert_close(looking.loss(rows, wanted, seen), torch.stack(expected).mean())


def test_answers_look_at_what_their_question_names(model: Student) -> None:
    shown = cluttered_scene(6)
    batch = pack(model.chat, [shown], None)
    (images, tokens), wanted, seen = batch.looking(model.chat.placeholder_id)
    placed = [question for question in shown.questions if question.about]
    # Every token of an answer, but not its end.
    assert len(tokens) == sum(len(question.answers[0].split()) for question in placed)
    assert not images.any()
    first = int((batch.ids[0] == model.chat.placeholder_id).nonzero()[0])
    on = tokens_on(placed[0].about[:1], (16, 16))
    assert wanted[0].nonzero().flatten().tolist() == (on.nonzero().flatten() + first).tolist()
    assert torch.equal(seen, batch.mask[0, 0, tokens])

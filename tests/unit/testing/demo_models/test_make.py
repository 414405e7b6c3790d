# SPDX-License-Identifier: Apache-2.0
"""Demo models load like the hub's, and are lively enough to test pruning with."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPModel,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

from anchorprune_vllm import PruneConfig
from anchorprune_vllm.testing.demo_models import make
from anchorprune_vllm.testing.demo_models.make import (
    TRAINED,
    describe,
    make_demo_model,
    make_trained_model,
    pruning_flags,
)
from anchorprune_vllm.testing.demo_models.tokenizers import WORDS
from tests.support.cli_args import make_arg_parser

QUESTIONS = ["What is in this picture?", "How many people are there?", "Where is the dog?"]
TEXTS = [
    "What color is the car?",
    "  two  spaces, a tab\tand\n\nlines ",
    "Où est le chien? 犬はどこ 🐕‍🦺",
    "\x00 \u200b <0x41> [INST]",
    "",
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo") / "model"
    make_demo_model(directory)
    return directory


@pytest.fixture(scope="module")
def processor(demo):
    return AutoProcessor.from_pretrained(demo)


@pytest.fixture(scope="module")
def clip(demo):
    return CLIPModel.from_pretrained(demo / "clip", attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def pictures():
    """Coloured clouds, wider than high: neighbouring patches are alike, distant ones are not."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 7, 9, 3), dtype=np.uint8)
    return [Image.fromarray(array).resize((260, 200)) for array in pixels]


def user(text):
    return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]}


def read_all(directory):
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# --- the checkpoint -----------------------------------------------------------------------------


# Hub's name → transformers' own, one of each part.
LLAVA_NAMES = {
    "language_model.lm_head": "lm_head",
    "language_model.model.embed_tokens": "model.language_model.embed_tokens",
    "language_model.model.layers.1.mlp.up_proj": "model.language_model.layers.1.mlp.up_proj",
    "multi_modal_projector.linear_1": "model.multi_modal_projector.linear_1",
    "vision_tower.vision_model.embeddings.patch_embedding": (
        "model.vision_tower.embeddings.patch_embedding"
    ),
    "vision_tower.vision_model.encoder.layers.3.mlp.fc2": (
        "model.vision_tower.encoder.layers.3.mlp.fc2"
    ),
    "vision_tower.vision_model.post_layernorm": "model.vision_tower.post_layernorm",
}
QWEN_NAMES = {
    "lm_head": "lm_head",
    "model.embed_tokens": "model.language_model.embed_tokens",
    "model.layers.1.self_attn.k_proj": "model.language_model.layers.1.self_attn.k_proj",
    "model.norm": "model.language_model.norm",
    "visual.patch_embed.proj": "model.visual.patch_embed.proj",
    "visual.blocks.3.attn.qkv": "model.visual.blocks.3.attn.qkv",
    "visual.merger.mlp.2": "model.visual.merger.mlp.2",
}
CLIP_NAMES = {
    name: name
    for name in (
        "text_projection",
        "visual_projection",
        "text_model.embeddings.token_embedding",
        "text_model.final_layer_norm",
        "vision_model.post_layernorm",
    )
}


@pytest.mark.parametrize(
    ("model_class", "arch", "folder", "names"),
    [
        (LlavaForConditionalGeneration, "llava-1.5", ".", LLAVA_NAMES),
        (LlavaNextForConditionalGeneration, "llava-next", ".", LLAVA_NAMES),
        (Qwen2_5_VLForConditionalGeneration, "qwen2.5-vl", ".", QWEN_NAMES),
        (CLIPModel, "llava-next", "clip", CLIP_NAMES),
    ],
)
def test_transformers_loads_every_weight(demo_models, model_class, arch, folder, names):
    demo = demo_models(arch)
    model, info = model_class.from_pretrained(demo / folder, output_loading_info=True)
    assert not any(info.values()), info
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float32}
    written, loaded = load_file(demo / folder / "model.safetensors"), model.state_dict()
    assert len(written) == len(loaded)
    for hub, here in names.items():
        assert torch.equal(loaded[f"{here}.weight"], written[f"{hub}.weight"]), hub


def test_llava_next_is_the_same_model_with_crops(demo, demo_models):
    crops = demo_models("llava-next")
    one, other = read_all(demo), read_all(crops)
    assert one.keys() == other.keys()
    assert {name for name in one if name.startswith("clip/") and one[name] != other[name]} == set()
    weights, more = (
        load_file(at / "model.safetensors") for at in (demo, demo_models("llava-next"))
    )
    assert more.pop("image_newline").shape == (128,)
    assert weights.keys() == more.keys()
    assert all(torch.equal(weights[name], more[name]) for name in weights)


def test_clip_has_the_tower_of_llava(demo):
    llava, clip = (load_file(at / "model.safetensors") for at in (demo, demo / "clip"))
    prefix = "vision_tower."
    tower = {name.removeprefix(prefix) for name in llava if name.startswith(prefix)}
    assert tower == {name for name in clip if name.startswith("vision_model.")}
    assert "vision_model.post_layernorm.weight" in tower
    assert {name.split(".")[3] for name in tower if ".layers." in name} == set("0123")
    for name in tower:
        assert torch.equal(llava[prefix + name], clip[name]), name


@pytest.mark.parametrize("arch", ["llava-1.5", "qwen2.5-vl"])
def test_same_seed_same_bytes_in_another_process(demo_models, arch, tmp_path):
    code = "import sys; from anchorprune_vllm.testing.demo_models import make; "
    code += "make.make_demo_model(sys.argv[1], arch=sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, tmp_path / "again", arch], check=True)
    assert read_all(tmp_path / "again") == read_all(demo_models(arch))


@pytest.mark.parametrize(
    ("arch", "more"), [("llava-1.5", {"clip/model.safetensors"}), ("qwen2.5-vl", set())]
)
def test_another_seed_changes_weights_only(demo_models, arch, more, tmp_path):
    make_demo_model(tmp_path / "other", arch=arch, seed=1)
    one, other = read_all(demo_models(arch)), read_all(tmp_path / "other")
    changed = {name for name in one if one[name] != other[name]}
    assert changed == {"model.safetensors", "demo_model.json"} | more


def test_describe(demo, demo_models):
    line = describe(demo)
    assert line.startswith("LlavaForConditionalGeneration: 144 visual tokens per image, 0.8")
    assert line.endswith("MB on disk")
    assert "144 visual tokens per tile, a base view and up to 4 crops, " in describe(
        demo_models("llava-next")
    )


# --- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(demo, text):
    tokenizer = AutoTokenizer.from_pretrained(demo)
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", TEXTS)
def test_clip_text_round_trips_up_to_case_and_spaces(demo, text):
    tokenizer = AutoTokenizer.from_pretrained(demo / "clip")
    start, *ids, end = tokenizer(text).input_ids
    assert (start, end) == tuple(
        tokenizer.convert_tokens_to_ids(["<|startoftext|>", "<|endoftext|>"])
    )
    assert end not in ids  # it is CLIP's unknown token, too
    bare = str.maketrans("", "", " \t\n")
    assert tokenizer.decode(ids).translate(bare) == text.lower().translate(bare)


def test_clip_pools_at_the_end_token(demo, clip):
    tokenizer = AutoTokenizer.from_pretrained(demo / "clip")
    batch = tokenizer([*QUESTIONS, "dog"], padding=True, return_tensors="pt")
    with torch.no_grad():
        output = clip.text_model(**batch)
    ends = (batch.input_ids == tokenizer.eos_token_id).int().argmax(dim=1)  # padding is eos as well
    assert len(set(ends.tolist())) > 1
    expected = output.last_hidden_state[torch.arange(len(ends)), ends]
    torch.testing.assert_close(output.pooler_output, expected)


def test_chat_template_renders_as_the_hub_s(processor):
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        user("What is it?"),
        {"role": "assistant", "content": [{"type": "text", "text": "A dog."}]},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    rendered = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert rendered == (
        "Be brief. USER: <image>\nWhat is it? ASSISTANT: A dog. USER: Sure? ASSISTANT:"
    )


def test_processor_makes_one_placeholder_per_patch(demo, processor, pictures):
    inputs = processor(text="USER: <image>\nq ASSISTANT:", images=pictures[0], return_tensors="pt")
    assert inputs.pixel_values.shape == (1, 3, 168, 168)
    placeholder = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert (inputs.input_ids == placeholder).sum() == 144


# --- liveliness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llava-1.5", "qwen2.5-vl"])
def test_answers_depend_on_picture_and_question(demo_models, arch, pictures):
    model = AutoModelForImageTextToText.from_pretrained(demo_models(arch)).eval()
    processor = AutoProcessor.from_pretrained(demo_models(arch))
    pairs = list(itertools.product(range(len(pictures)), range(len(QUESTIONS))))
    prompts = [
        processor.apply_chat_template([user(question)], add_generation_prompt=True)
        for question in QUESTIONS
    ]
    inputs = processor(
        text=[prompts[question] for _, question in pairs],
        images=[pictures[picture] for picture, _ in pairs],
        padding=True,
        return_tensors="pt",
    )
    output = model.generate(
        **inputs,
        max_new_tokens=16,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    answers = output.sequences[:, inputs.input_ids.shape[1] :]
    by_pair = dict(zip(pairs, answers, strict=True))
    for (picture, question), (other_picture, other_question) in itertools.combinations(pairs, 2):
        if picture == other_picture or question == other_question:
            same = by_pair[picture, question] == by_pair[other_picture, other_question]
            assert same.float().mean() < 0.9
    assert min(len(answer.unique()) for answer in answers) >= 4
    # Far above what another order of float32 sums can change.
    best, second = torch.stack(output.logits).topk(2).values.unbind(-1)
    assert (best - second).median() > 0.3
    words = " ".join(processor.batch_decode(answers, skip_special_tokens=True)).split()
    assert set(words) <= set(WORDS.split())


@pytest.fixture(scope="module")
def signals(demo, clip, processor, pictures):
    """[CLS] attention [P, N] and patches in CLIP space [P, N, D], of the layer LLaVA takes."""
    pixels = processor.image_processor(pictures, return_tensors="pt").pixel_values
    with torch.no_grad():
        seen = clip.vision_model(pixels, output_hidden_states=True, output_attentions=True)
        patches = clip.vision_model.post_layernorm(seen.hidden_states[-2][:, 1:])
        features = torch.nn.functional.normalize(clip.visual_projection(patches), dim=-1)
    return seen.attentions[-2].mean(1)[:, 0, 1:], features


def test_attention_is_far_from_uniform(signals):
    attention, _ = signals
    tenth = attention.shape[1] // 10
    share = attention.topk(tenth).values.sum(1) / attention.sum(1)
    assert share.min() > 0.25  # a uniform one has 0.1


def test_patch_distances_lie_on_both_sides_of_tau(signals):
    _, features = signals
    distances = 1 - features @ features.mT
    upper = torch.ones_like(distances[0], dtype=torch.bool).triu(1)
    near = (distances[:, upper] < 0.2).float().mean(1)
    assert near.min() > 0.05
    assert near.max() < 0.9


def test_questions_rank_patches_differently(demo, clip, signals):
    tokenizer = AutoTokenizer.from_pretrained(demo / "clip")
    with torch.no_grad():
        pooled = clip.text_model(**tokenizer(QUESTIONS, padding=True, return_tensors="pt"))
        texts = torch.nn.functional.normalize(clip.text_projection(pooled.pooler_output), dim=-1)
    assert (texts @ texts.T).triu(1).max() < 0.9
    for features in signals[1]:
        first = (-features @ texts.T).topk(16, dim=0).indices.T.tolist()
        for one, other in itertools.combinations(first, 2):
            assert len(set(one) & set(other)) <= 12


# --- the directory ------------------------------------------------------------------------------


def test_a_complete_model_is_left_alone(tmp_path):
    make_demo_model(tmp_path / "model", image_size=28)
    before = {path: path.stat() for path in (tmp_path / "model").rglob("*")}
    make_demo_model(tmp_path / "model", image_size=28)
    after = {path: path.stat() for path in (tmp_path / "model").rglob("*")}
    assert {p: s.st_ino for p, s in after.items()} == {p: s.st_ino for p, s in before.items()}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_empty_directory_is_filled(tmp_path):
    make_demo_model(tmp_path, image_size=28)
    assert describe(tmp_path).split(": ")[1].startswith("4 visual tokens")


def test_another_process_may_finish_first(tmp_path, monkeypatch):
    directory, writers = tmp_path / "model", make.DEMO_MODELS
    write = writers["llava-1.5"]

    def overtaken(path: Path, *arguments):
        write(path, *arguments)
        monkeypatch.setitem(writers, "llava-1.5", write)
        make_demo_model(directory, image_size=28)

    monkeypatch.setitem(writers, "llava-1.5", overtaken)
    make_demo_model(directory, image_size=28)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(make, "_file_sizes", interrupt)  # when all but the record is written
    with pytest.raises(KeyboardInterrupt):
        make_demo_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_anything_else_is_refused_and_kept(tmp_path):
    (tmp_path / "thesis.tex").write_text("work")
    with pytest.raises(ValueError, match=r"not a demo model, it holds thesis\.tex: remove it, or"):
        make_demo_model(tmp_path)
    with pytest.raises(ValueError, match=r"thesis\.tex is a file: remove it, or choose another"):
        make_demo_model(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "work"


def test_another_or_a_damaged_demo_model_is_refused(tmp_path):
    make_demo_model(tmp_path, image_size=28)
    with pytest.raises(ValueError, match=r"'seed': 0.* not of .*'seed': 3.*: remove it, or choose"):
        make_demo_model(tmp_path, image_size=28, seed=3)
    with pytest.raises(ValueError, match=r"'arch': 'llava-1.5'.* not of .*'llava-next'"):
        make_demo_model(tmp_path, arch="llava-next", image_size=28)
    (tmp_path / "clip" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"clip/model\.safetensors missing or changed: remove it"):
        make_demo_model(tmp_path, image_size=28)


def test_arch_must_be_known(tmp_path):
    with pytest.raises(ValueError, match=r"arch is 'blip': give one of llava-1\.5, llava-next"):
        make_demo_model(tmp_path / "model", arch="blip")


def test_only_some_are_trained(tmp_path):
    with pytest.raises(ValueError, match=r"arch is 'llava-next': give one .*, llava-1\.5 or qwen2"):
        make_trained_model(tmp_path / "model", "llava-next")


@pytest.mark.parametrize("arch", TRAINED)
def test_settings_of_trained_models_are_the_server_s(arch, demo_models):
    """`vllm serve` reads them from the flags as `PruneConfig` does from the dictionary."""
    model = demo_models(arch)
    flags = pruning_flags(model, TRAINED[arch])
    serve = make_arg_parser(FlexibleArgumentParser())
    args = serve.parse_args([str(model), "--anchorprune-budget", "16", *flags])
    settings = {"budget": "16", **TRAINED[arch]}
    if arch == "llava-1.5":
        settings["text_encoder"] = str(model / "clip")
    assert args.hf_overrides["anchorprune"] == settings
    assert PruneConfig.from_dict(settings).method == "anchorprune"


@pytest.mark.parametrize("size", [0, -14, 100])
def test_image_size_must_be_whole_patches(tmp_path, size):
    with pytest.raises(ValueError, match=f"image_size is {size}: give a positive multiple of 14"):
        make_demo_model(tmp_path / "model", image_size=size)

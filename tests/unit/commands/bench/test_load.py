# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm.benchmarks.datasets import datasets
from vllm.benchmarks.serve import add_cli_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from anchorprune_vllm.commands.bench.load import ClientResult, Load, read_result
from anchorprune_vllm.commands.bench.shapes import MediaSize


def load_of(
    data: Path | None = None,
    requests: int = 3,
    concurrencies: tuple[int, ...] = (1, 4),
    frames: int = 1,
) -> Load:
    return Load(MediaSize(56, 28, frames), data, 6, 4, requests, concurrencies)


def test_more_requests_than_are_at_once() -> None:
    assert [load_of(requests=12).requests_at(n) for n in (1, 6, 8, 32)] == [12, 12, 16, 64]


def requests_of(load: Load, seed: int, part: Path | None, model: Path, count: int):
    """What vLLM makes of the flags."""
    from transformers import AutoTokenizer

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    flags = ["--backend", "openai-chat", "--num-prompts", str(count), *load.flags(seed, part)]
    return datasets.get_samples(parser.parse_args(flags), AutoTokenizer.from_pretrained(model))


def test_every_request_has_another_picture(demo_model: Path) -> None:
    load = load_of()
    asked = [r for seed in (1, 2) for r in requests_of(load, seed, None, demo_model, 4)]
    assert len({json.dumps(request.multi_modal_data) for request in asked}) == 8
    assert all(len(request.multi_modal_data) == 1 for request in asked)
    assert all(request.multi_modal_data[0]["type"] == "image_url" for request in asked)
    assert all(len(request.prompt.split()) > 0 for request in asked)
    assert {request.expected_output_len for request in asked} == {4}


def test_clips(demo_model: Path) -> None:
    (request,) = requests_of(load_of(frames=3), 1, None, demo_model, 1)
    assert request.multi_modal_data[0]["type"] == "video_url"


def test_lines_of_a_file(demo_model: Path, tmp_path: Path) -> None:
    from PIL import Image

    lines = []
    for number in range(2):
        picture = tmp_path / f"{number}.png"
        Image.new("RGB", (8, 8), (number, 0, 0)).save(picture)
        lines.append(json.dumps({"prompt": "What is it?", "image_files": [str(picture)]}))
    data = tmp_path / "data.jsonl"
    data.write_text("\n\n".join(lines))
    (request,) = requests_of(load_of(data), 1, data, demo_model, 1)
    assert request.prompt == "What is it?"
    assert request.multi_modal_data["image_url"]["url"].startswith("data:image/")
    load_of(data, requests=1, concurrencies=(1,)).check()


def test_each_concurrency_has_lines_of_its_own() -> None:
    assert [load_of(requests=5).lines_at(n) for n in (1, 4)] == [(0, 5), (5, 13)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"there is no file .*data\.jsonl"),
        ("", r"data\.jsonl is empty: give lines such as"),
        ('\n{"content": []}\n\n{', r"data\.jsonl, line 4 is not JSON \(Expecting property name"),
        ('\n{"prompt": "x"}', "line 2 has neither content nor prompt and image_files"),
        ("[]", r"line 1 is not a JSON object: '\[\]'; give lines such as"),
        ('{"prompt": "x", "image_files": ["no.png"]}', r"line 1: there is no image no\.png"),
        ('{"content": [{"type": "image", "image": "no.png"}]}', r"there is no image no\.png"),
        ('{"prompt": "x", "image_files": ["https://a/no.png"]}', "has 1 lines, and the run needs"),
        ('{"content": []}\n' * 12, "has 12 lines, and the run needs 13, each with an image of"),
    ],
)
def test_files_that_do_not_do(tmp_path: Path, text: str | None, words: str) -> None:
    data = tmp_path / "data.jsonl"
    if text is not None:
        data.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_of(data, requests=5).check()


@pytest.mark.parametrize(
    ("again", "words"),
    [
        ('"image_files": ["IN/a.png"]', r"line 4: the image .*/a\.png is that of line 1"),
        (
            '"image_files": ["IN/c.png", "IN/copy.png"]',
            r"the image .*/copy\.png is that of line 1",
        ),
        ('"image_files": ["http://x/b"]', "line 4: the image http://x/b is that of line 2"),
        ('"content": [{"image": "IN/a.png"}]', r"a\.png is that of line 1"),
        ('"content": [{"image_url": "IN/a.png"}]', r"a\.png is that of line 1"),
        ('"content": [{"image_url": {"url": "IN/a.png"}}]', r"a\.png is that of line 1"),
    ],
)
def test_pictures_that_caches_would_know(tmp_path: Path, again: str, words: str) -> None:
    for name, content in (("a", b"1"), ("copy", b"1"), ("c", b"2")):
        (tmp_path / f"{name}.png").write_bytes(content)
    rows = [
        '"image_files": ["IN/a.png", "IN/a.png"]',  # of one request: all servers have it twice
        '"image_files": ["http://x/b"]',
        '"image_files": ["http://x/c"]',
        again,
    ]
    text = "\n".join(f'{{"prompt": "x", {row}}}' for row in rows)
    data = tmp_path / "data.jsonl"
    data.write_text(text.replace("IN", str(tmp_path)))
    load_of(data, requests=3, concurrencies=(1,)).check()  # the fourth line is not used
    with pytest.raises(ValueError, match=words):
        load_of(data, requests=4, concurrencies=(1,)).check()


def test_results_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    written = dict.fromkeys(ClientResult.model_fields, 3)
    path.write_text(json.dumps(written | {"ttfts": [1, 2, 3]}))
    assert read_result(path, 3).model_dump() == written


def test_failed_requests_are_no_result(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"completed": 1, "errors": ["", "Trace\nValueError: too long\n"]}))
    with pytest.raises(RuntimeError, match=r"1 of 2 requests failed.*The first: ValueError: too"):
        read_result(path, 2)


def test_names_are_vllms() -> None:
    """What is kept is what vLLM writes."""
    import inspect

    from vllm.benchmarks import serve

    source = inspect.getsource(serve)
    plain = [name for name in ClientResult.model_fields if not name.endswith("_ms")]
    assert [name for name in plain if f'"{name}"' not in source] == []

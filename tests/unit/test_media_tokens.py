# SPDX-License-Identifier: Apache-2.0
"""The tokens that stand for images and videos."""

from __future__ import annotations

from types import SimpleNamespace

from anchorprune_vllm.media_tokens import EMBEDDED, find_targets, media_token_ids


def test_ids_by_either_name() -> None:
    assert media_token_ids(SimpleNamespace(image_token_index=5)) == {"image": 5}
    config = SimpleNamespace(image_token_id=5, video_token_index=6, video_token_id=None)
    assert media_token_ids(config) == {"image": 5}
    assert media_token_ids(SimpleNamespace()) == {}


def test_ids_of_the_model_inside_one_that_speaks() -> None:
    inside = SimpleNamespace(image_token_id=5, audio_token_id=7)
    whole = SimpleNamespace(thinker_config=inside)
    assert media_token_ids(whole) == {"image": 5}
    assert media_token_ids(whole, EMBEDDED) == {"image": 5, "audio": 7}


def test_places_of_one_token_and_of_several() -> None:
    targets = {"image": [5], "video": [1, 6, 2]}
    prompt = [9, 5, 1, 6, 2, 1, 6, 5, 5]
    assert find_targets(prompt, targets) == [
        ("image", 1, 2),
        ("video", 2, 5),
        ("image", 7, 8),
        ("image", 8, 9),
    ]


def test_the_longer_target_wins_and_places_do_not_overlap() -> None:
    targets = {"image": [5], "video": [5, 5, 6]}
    assert find_targets([5, 5, 6, 5], targets) == [("video", 0, 3), ("image", 3, 4)]
    assert find_targets([5, 5, 5, 5], {"image": [5, 5]}) == [("image", 0, 2), ("image", 2, 4)]


def test_what_never_matches() -> None:
    assert find_targets([5, 5], {"image": []}) == []

# SPDX-License-Identifier: Apache-2.0
"""The query of every image and video of a prompt, over chat templates in the format of real models.

`test_chat_markers.py` tells how turns are told apart.
"""

import importlib.util
import inspect
import subprocess
import sys
from dataclasses import dataclass
from itertools import cycle, islice, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorprune_vllm.api.chat_markers import ChatMarkers
from anchorprune_vllm.api.query import QueryReader
from anchorprune_vllm.config import SCOPES
from tests.support.chat_templates import (
    ANY_ROLES,
    IMG,
    LLAMA3,
    LLAVA,
    MEDIA,
    MISTRAL,
    QWEN,
    TEMPLATES,
    TOKENIZERS,
    VICUNA,
    VID,
    WITH_SYSTEM,
    Bare,
    Slow,
    byte_level,
    encode,
    make_reader,
    read,
    reader_for,
    render,
    tokenizer_named,
)


def by_modality(conversation, queries):
    """Sorts the queries of a conversation's media, given in order, by modality."""
    items = [part for _, *parts in conversation for part in parts if part in MEDIA]
    found = {"image": [], "video": []}
    for item, query in zip(items, queries, strict=True):
        found[MEDIA[item]].append(query)
    return found


# --- Conversations, and what has to be read in them ----------------------------------------------


@dataclass
class Case:
    conversation: list[tuple[str, ...]]
    turn: list[str]
    last: str
    all: str
    came_late: bool = False
    """The words of `turn` came after an answer, for which a system prompt was asked with."""

    def expected(self, scope, system=""):
        """`system`: the prompt that is asked with where the user has no words in time."""
        same = {"last": self.last or system, "all": self.all or system, "none": ""}
        queries = [(self.came_late and system) or words or system for words in self.turn]
        queries = queries if scope == "turn" else [same[scope]] * len(queries)
        return by_modality(self.conversation, queries)


def dialogue(*turns):
    """The user's turns as lists of parts, the assistant's as text."""
    return [("assistant", turn) if isinstance(turn, str) else ("user", *turn) for turn in turns]


def one_turn(words, *parts):
    return Case([("user", *parts)], [words] * sum(part in MEDIA for part in parts), words, words)


UNICODE = "Was zeigt „das“ Bild?\n\n1. 漢字 (é)\n\t2. 👩‍🚀  مرحبا"
ALIKE = "Does the user see SUPERUSER: or USERS: or xASSISTANT: as system in [INSTALL] <user>?"
SPACED = "Is it here , or there ? I 'm sure , it is n't ."
CASES = {
    "media-first": one_turn("What is it?", IMG, "\nWhat is it?"),
    "media-last": one_turn("What is it?", "What is it? ", IMG),
    "media-inside": one_turn("What does the sign in say?", "What does the sign in", IMG, "say?"),
    "several": one_turn("Which is older?", IMG, IMG, "Which is older?", IMG),
    "two-modalities": one_turn(
        "in this and that one ?", IMG, "in this", VID, "and that", IMG, "one ?"
    ),
    "no-words": one_turn("", IMG, VID),
    "blank-words": one_turn("", IMG, " \n\t "),
    "unicode": one_turn(UNICODE, IMG, UNICODE),
    "like-markers": one_turn(ALIKE, IMG, ALIKE),
    "odd-spaces": one_turn(SPACED, SPACED, VID),
    "media-in-first-of-three": Case(
        dialogue([IMG, "One?"], "1", ["Two?"], "2", ["Three?"]),
        ["One?"],
        "Three?",
        "One?\nTwo?\nThree?",
    ),
    "media-in-each-turn": Case(
        dialogue([IMG, "One?"], "1", ["Two?", VID], "2", [IMG, "Three?", VID]),
        ["One?", "Two?", "Three?", "Three?"],
        "Three?",
        "One?\nTwo?\nThree?",
    ),
    "words-come-later": Case(
        dialogue([IMG], "Nice.", [VID], "Oh.", ["Same place?"], "Yes.", ["Sure?"]),
        ["Same place?", "Same place?"],
        "Sure?",
        "Same place?\nSure?",
        came_late=True,
    ),
    "words-came-before": Case(
        dialogue(["What is it?"], "Show me.", [IMG]), ["What is it?"], "What is it?", "What is it?"
    ),
    "words-on-both-sides": Case(
        dialogue(["One?"], "1", [IMG], "Hm", [VID], "Two?", ["Three?"]),
        ["One?", "One?"],
        "Three?",
        "One?\nThree?",
    ),
    "no-media": Case(dialogue(["Hello"], "Hi", ["Bye"]), [], "Bye", "Hello\nBye"),
}


def tokenizers_in_turn(first):
    return islice(cycle(TOKENIZERS), first, None)


def test_reads_the_users_words(subtests):
    """Each case in every template; tokenizers take turns."""
    for number, (name, case) in enumerate(CASES.items()):
        for template, tokenizer in zip(TEMPLATES, tokenizers_in_turn(number), strict=False):
            with subtests.test(case=name, template=template, tokenizer=tokenizer):
                for scope in SCOPES:
                    found = read(template, case.conversation, scope, tokenizer)
                    assert found == case.expected(scope)


def test_the_system_prompt_is_asked_with_where_no_user_has_words_in_time(subtests):
    system = "You help the user.\nAnswer in French!"
    templates = sorted(WITH_SYSTEM)
    for number, (name, case) in enumerate(CASES.items()):
        conversation = [("system", system), *case.conversation]
        for template, tokenizer in zip(templates, tokenizers_in_turn(number), strict=False):
            with subtests.test(case=name, template=template, tokenizer=tokenizer):
                for scope in SCOPES:
                    found = read(template, conversation, scope, tokenizer)
                    assert found == case.expected(scope, system)


# --- Random conversations ------------------------------------------------------------------------

# Brackets and the letters of no marker.
words = st.text("aZ9é漢😀ß <>|[]/:.,'?#_\n", min_size=1, max_size=30).map(str.strip).filter(bool)
user_parts = st.lists(words | st.sampled_from(sorted(MEDIA)), max_size=6).map(
    # Two texts with nothing between them would run together.
    lambda parts: [
        p for p, before in zip(parts, [IMG, *parts], strict=False) if {p, before} & {*MEDIA}
    ]
)


@st.composite
def conversations(draw, system, in_a_row):
    """`in_a_row`: a user may send several messages before the assistant answers."""
    turns = [("system", draw(words))] if system and draw(st.booleans()) else []
    for last in [False] * draw(st.integers(0, 3)) + [True]:
        messages = draw(st.lists(user_parts, min_size=1, max_size=3 if in_a_row else 1))
        turns += [("user", *parts) for parts in messages]
        turns += [] if last else [("assistant", draw(words))]
    return turns


def oracle(conversation, scope):
    """What `read` promises, said in another way."""
    roles = [role for role, *_ in conversation]
    said = [" ".join(p for p in parts if p not in MEDIA) for _, *parts in conversation]
    by_user = [text if role == "user" else "" for role, text in zip(roles, said, strict=True)]
    system = said[0] if roles[0] == "system" else ""
    asked = [text for text in by_user if text] or [system]
    queries = []
    for place, (_, *parts) in enumerate(conversation):
        answer = [*roles, "assistant"].index("assistant", place)
        in_order = by_user[place:answer] + by_user[:place][::-1] + [system] + by_user[answer:]
        query = {
            "turn": next((text for text in in_order if text), ""),
            "last": asked[-1],
            "all": "\n".join(asked),
            "none": "",
        }
        queries += [query[scope] for part in parts if part in MEDIA]
    return by_modality(conversation, queries)


@settings(max_examples=600, deadline=None)
@given(
    data=st.data(),
    template=st.sampled_from(sorted(TEMPLATES)),
    tokenizer=st.sampled_from(sorted(TOKENIZERS)),
    scope=st.sampled_from(SCOPES),
    ask=st.booleans(),
)
def test_reads_what_was_put_in(data, template, tokenizer, scope, ask):
    conversation = data.draw(
        conversations(system=template in WITH_SYSTEM, in_a_row=template in ANY_ROLES)
    )
    assert read(template, conversation, scope, tokenizer, ask) == oracle(conversation, scope)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), template=st.sampled_from(sorted(TEMPLATES)))
def test_later_turns_leave_earlier_answers_alone(data, template):
    """Only what had no question at all gets one later."""
    conversation = data.draw(
        conversations(system=template in WITH_SYSTEM, in_a_row=template in ANY_ROLES)
    )
    reader, tokenizer = reader_for("byte-level", TEMPLATES[template]), tokenizer_named("byte-level")
    final = reader.read(render(tokenizer, TEMPLATES[template], conversation), "turn")
    for length, (role, *_) in enumerate(conversation):
        if role != "assistant":
            continue
        ids = render(tokenizer, TEMPLATES[template], conversation[:length])
        for modality, queries in reader.read(ids, "turn").items():
            for early, late in zip(queries, final[modality], strict=False):
                assert early in ("", late)


# --- Roles ---------------------------------------------------------------------------------------


def test_messages_of_one_user_in_a_row_are_turns_of_their_own(subtests):
    conversation = [("user", IMG), ("user", "One?"), ("user", VID, "Two?")]
    for template in ANY_ROLES:
        with subtests.test(template=template):
            assert read(template, conversation) == {"image": ["One?"], "video": ["Two?"]}
            both = ["One?\nTwo?"]
            assert read(template, conversation, "all") == {"image": both, "video": both}


def test_leaves_tool_results_out(subtests):
    during = [("user", IMG, "One?"), ("assistant", "look up"), ("tool", "found: 7", VID)]
    later = [("assistant", "It is 7."), ("user", "Two?"), ("assistant", "2"), ("user", "Three?")]
    first, all_of_them = ["One?"], ["One?\nTwo?\nThree?"]
    for template, tokenizer in product(ANY_ROLES, TOKENIZERS):
        with subtests.test(template=template, tokenizer=tokenizer):
            for conversation, said in ((during, first), ([*during, *later], all_of_them)):
                found = read(template, conversation, "all", tokenizer)
                assert found == {"image": said, "video": said}
                # The video has the last question before it, whatever is said later.
                found = read(template, conversation, "turn", tokenizer)
                assert found == {"image": first, "video": first}


def test_media_of_the_system_and_the_assistant(subtests):
    early = [("system", IMG, "Be brief."), ("user", "One?"), ("assistant", "See", VID)]
    late = [*early, ("user", IMG), ("assistant", "Hm"), ("user", "Two?")]
    drawn = [("user", "Draw it."), ("assistant", IMG), ("user", "Which colour?")]
    for template in ANY_ROLES:
        with subtests.test(template=template):
            assert read(template, early, ask=False) == {"image": ["One?"], "video": ["One?"]}
            assert read(template, late) == {"image": ["One?", "One?"], "video": ["One?"]}
            assert read(template, drawn)["image"] == ["Which colour?"]


def test_a_question_that_stands_before_its_image(subtests):
    for conversation, query in (
        ([("user", "What is it?"), ("user", IMG)], "What is it?"),
        ([("user", "What is it?"), ("assistant", "Show me."), ("user", IMG)], "What is it?"),
        ([("system", "Name the colour."), ("user", IMG)], "Name the colour."),
        # A tool that returns an image, as vLLM writes it for /v1/messages.
        (
            [("user", "Is it raining?"), ("assistant", "look"), ("tool", "1 file"), ("user", IMG)],
            "Is it raining?",
        ),
        ([("user", "One?"), ("user", IMG), ("user", "Two?")], "Two?"),
    ):
        later = [*conversation, ("assistant", "It is."), ("user", "Sure?")]
        for template in ANY_ROLES:
            with subtests.test(conversation=conversation, template=template):
                assert read(template, conversation)["image"] == [query]
                assert read(template, later)["image"] == [query]


def test_a_system_prompt_of_the_template_is_no_question():
    for template in ("qwen", "vicuna"):
        ids = render(tokenizer_named("byte-level"), TEMPLATES[template], [("user", IMG)])
        assert "assistant." in tokenizer_named("byte-level").decode(ids)
        for scope in SCOPES:
            assert read(template, [("user", IMG)], scope)["image"] == [""]


def test_system_alone():
    assert read("qwen", [("system", "Be brief.", IMG)], "all")["image"] == ["Be brief."]


# --- Prompts that no template made ---------------------------------------------------------------


def test_prompts_written_by_hand(subtests):
    for template, text, query in (
        (QWEN, "USER: <image>\nWhat? ASSISTANT:", "USER: What? ASSISTANT:"),
        (QWEN, "<image>Describe it.<|im_end|>\n<|im_start|>assistant\nIt", "Describe it."),
        (QWEN, "Describe <image> it.<|im_start|>assistant\nIt", "Describe it."),
        (LLAVA, "<image>\nWhat is it?", "What is it?"),
        (LLAVA, "<image>\nWhat is it? ASSISTANT: It is", "What is it?"),
        (LLAVA, "<image>\nUSER: What is it? ASSISTANT:", "What is it?"),
        (LLAVA, "Be brief.<image> USER: What is it?\nASSISTANT:", "What is it?"),
        (LLAVA, "USER:<image>What is it?\n\nASSISTANT:", "What is it?"),
        (MISTRAL, "[INST]<image>What is it?[/INST]It", "What is it?"),
        (VICUNA, "USER: <image>\nWhat is it? ASSISTANT:", "What is it?"),
        (LLAMA3, "<image>", ""),
    ):
        for tokenizer in TOKENIZERS:
            with subtests.test(text=text, tokenizer=tokenizer):
                ids = encode(tokenizer_named(tokenizer), text)
                assert reader_for(tokenizer, template).read(ids, "turn")["image"] == [query]


def test_prompts_cut_anywhere(subtests):
    """Every placeholder that is left has a query, in each template; tokenizers take turns."""
    for template, name in zip(TEMPLATES, tokenizers_in_turn(0), strict=False):
        reader, tokenizer = reader_for(name, TEMPLATES[template]), tokenizer_named(name)
        ids = render(tokenizer, TEMPLATES[template], CASES["media-in-each-turn"].conversation)
        image = tokenizer.convert_tokens_to_ids(IMG)
        with subtests.test(template=template, tokenizer=name):
            for cut in range(len(ids) + 1):
                for part in (ids[:cut], ids[cut:]):
                    for scope in SCOPES:
                        assert len(reader.read(part, scope)["image"]) == part.count(image)


def test_prompt_that_ends_in_the_question(subtests):
    tokenizer = tokenizer_named("byte-level")
    for name, template in TEMPLATES.items():
        with subtests.test(template=name):
            full = tokenizer.decode(render(tokenizer, template, [("user", IMG, "What is it?")]))
            ids = encode(tokenizer, full[: full.index("it?")])
            assert reader_for("byte-level", template).read(ids, "turn")["image"] == ["What is"]


def test_prompt_that_starts_in_the_middle():
    reader, tokenizer = reader_for("byte-level", QWEN), tokenizer_named("byte-level")
    tail = "<|im_start|>user\n<image>What?<|im_end|>\n<|im_start|>assistant\n"
    for head in ("", "ssistant.<|im_end|>\n", "|im_end|>\n", "\n"):
        assert reader.read(encode(tokenizer, head + tail), "all")["image"] == ["What?"]


def test_spaces_before_punctuation_survive_a_tokenizer_that_tidies():
    tokenizer = Slow()
    tokenizer.clean_up_tokenization_spaces = True
    ids = render(tokenizer, QWEN, [("user", IMG, SPACED)])
    assert SPACED not in tokenizer.decode(ids)
    assert make_reader(tokenizer, QWEN).read(ids, "turn")["image"] == [SPACED]


# --- Cost ----------------------------------------------------------------------------------------


def test_decodes_nothing_that_is_not_asked_for():
    tokenizer = Bare(byte_level())
    reader = make_reader(tokenizer, QWEN)
    with_media = render(tokenizer, QWEN, [("user", IMG, "What?", VID)])
    without = render(tokenizer, QWEN, [("user", "What?")])
    tokenizer.decoded = 0
    assert reader.read(with_media, "none") == {"image": [""], "video": [""]}
    assert reader.read(without, "turn") == {"image": [], "video": []}
    assert tokenizer.decoded == 0
    reader.read(with_media, "turn")
    assert tokenizer.decoded == len(with_media) - 2


def lines_run(reader, ids):
    """How many lines of our own one reading takes."""
    count = 0
    files = {inspect.getfile(QueryReader), inspect.getfile(ChatMarkers)}

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        reader.read(ids, "turn")
    finally:
        sys.settrace(before)
    return count


def test_work_is_linear(subtests):
    tokenizer = tokenizer_named("byte-level")
    for template, filler in product(
        (QWEN, LLAVA), ("a b ", "<|im_start|>user\n", "USER: ", f"USER: a {IMG} b ")
    ):
        with subtests.test(template=template, filler=filler):
            reader = reader_for("byte-level", template)
            texts = [IMG + filler * times for times in (100, 800)]
            short, long = (lines_run(reader, encode(tokenizer, text)) for text in texts)
            assert 0 < long <= 8 * short


# --- The interface -------------------------------------------------------------------------------


def test_scopes():
    assert SCOPES == ("turn", "last", "all", "none")


def test_unknown_scope():
    with pytest.raises(ValueError, match="'first' is unknown; choose one of turn, last, all, none"):
        reader_for("byte-level", QWEN).read([1], "first")


def test_modalities_with_one_token():
    with pytest.raises(ValueError, match="two modalities share a placeholder, so"):
        QueryReader(tokenizer_named("byte-level"), QWEN, {"image": [5], "video": [5]})


def test_tuples_and_no_ids_at_all():
    ids = render(tokenizer_named("byte-level"), QWEN, [("user", IMG, "What?")])
    reader = reader_for("byte-level", QWEN)
    assert reader.read(tuple(ids), "turn") == {"image": ["What?"], "video": []}
    assert reader.read([], "turn") == {"image": [], "video": []}


def test_import_is_light():
    path = importlib.util.find_spec("anchorprune_vllm.api.query").origin
    code = (
        f"import runpy, sys; runpy.run_path({path!r});"
        "print(sorted({'torch', 'vllm', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

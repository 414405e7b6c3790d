# SPDX-License-Identifier: Apache-2.0
"""The query words of prompts, over chat templates in the format of real models."""

import importlib.util
import inspect
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from itertools import product
from re import _constants, _parser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from anchorprune_vllm.api.chat_markers import ChatMarkers
from anchorprune_vllm.api.query import QueryReader
from anchorprune_vllm.config import SCOPES

IMG, VID = "<image>", "<video>"
MEDIA = {IMG: "image", VID: "video"}

# --- Chat templates ------------------------------------------------------------------------------

# Takes content as a list only, media before text; the system prompt has no marker.
LLAVA = """
{%- for m in messages -%}
{%- if m['role'] != 'system' %}{{ m['role'] | upper + ': ' }}{% endif -%}
{%- for c in m['content'] | selectattr('type', 'ne', 'text') %}{{ '<' + c['type'] + '>\n' }}{% endfor -%}
{%- for c in m['content'] | selectattr('type', 'eq', 'text') %}{{ c['text'] + ' ' }}{% endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif -%}
"""  # noqa: E501
VICUNA = """
{%- if messages[0]['role'] == 'system' -%}
{%- set system, rest = messages[0]['content'], messages[1:] -%}
{%- else -%}
{%- set system, rest = 'A chat between a user and an assistant. It is polite.', messages -%}
{%- endif -%}
{{- bos_token + system -}}
{%- for m in rest -%}
{%- if m['role'] == 'user' %}{{ ' USER: ' + m['content'] | trim }}
{%- elif m['role'] == 'assistant' %}{{ ' ASSISTANT: ' + m['content'] | trim + eos_token }}
{%- else %}{{ raise_exception('what role is that?') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif -%}
"""
# No system role, and strict alternation.
MISTRAL = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate user/assistant') -}}
{%- endif -%}
{%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}
{%- else %}{{ raise_exception('only user and assistant roles') }}
{%- endif -%}
{%- endfor -%}
"""
# The system prompt is inside the first user turn.
LLAMA2 = """
{%- set ns = namespace(system='', rest=messages) -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set ns.system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' -%}
{%- set ns.rest = messages[1:] -%}
{%- endif -%}
{%- for m in ns.rest -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif -%}
{%- if m['role'] == 'user' -%}
{{- bos_token + '[INST] ' + (ns.system if loop.first else '') + m['content'] + ' [/INST]' -}}
{%- else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif -%}
{%- endfor -%}
"""  # noqa: E501
LLAMA3 = """
{{- bos_token -}}
{%- for m in messages -%}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' -}}
{%- if m['content'] is string %}{{ m['content'] | trim }}{% else -%}
{%- for c in m['content'] %}{{ c['text'] if c['type'] == 'text' else '<' + c['type'] + '>' }}{% endfor -%}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
"""  # noqa: E501
# A default system prompt, vision tokens around media, tool results in turns called user.
QWEN = """
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- set tool = m['role'] == 'tool' -%}
{{- '<|im_start|>' + ('user\n<tool_response>' if tool else m['role']) + '\n' -}}
{%- if m['content'] is string %}{{ m['content'] }}{% else -%}
{%- for c in m['content'] -%}
{{- c['text'] if c['type'] == 'text' else '<|vision_start|><' + c['type'] + '><|vision_end|>' -}}
{%- endfor -%}
{%- endif -%}
{{- ('\n</tool_response>' if tool else '') + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
STRICT_QWEN = QWEN.replace(
    "{%- set tool",
    "{%- if m['role'] == 'tool' and messages[loop.index0 - 1]['role'] == 'user' -%}"
    "{{ raise_exception('nobody called a tool') }}{%- endif -%}{%- set tool",
)
# The first turn opens unlike the later ones, and no space follows the role before media.
IDEFICS = """
{{- '<s>' -}}
{%- for m in messages -%}
{{- m['role'] | capitalize + (':' if m['content'][0]['type'] != 'text' else ': ') -}}
{%- for c in m['content'] %}{{ c['text'] if c['type'] == 'text' else '<' + c['type'] + '>' }}{% endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif -%}
"""  # noqa: E501

TEMPLATES = {
    "llava": LLAVA,
    "vicuna": VICUNA,
    "mistral": MISTRAL,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "qwen": QWEN,
    "strict-qwen": STRICT_QWEN,
    "idefics": IDEFICS,
}
LIST_CONTENT = {LLAVA, LLAMA3, QWEN, STRICT_QWEN, IDEFICS}
WITH_SYSTEM = TEMPLATES.keys() - {"mistral"}
ANY_ROLES = (
    "llava",
    "llama3",
    "qwen",
    "strict-qwen",
    "idefics",
)  # tools, and two user messages in a row

# --- Tokenizers ----------------------------------------------------------------------------------

CONTROL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|eot_id|>"]
CONTROL += ["<|start_header_id|>", "<|end_header_id|>", "<unk>"]


def wrap(backend):
    # Most control tokens are special without being in `all_special_tokens`, as in Llama 3.
    backend.add_special_tokens([*CONTROL, "[INST]", "[/INST]", "<s>", "</s>"])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MEDIA])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def byte_level():
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("U", "S"), ("E", "R"), ("US", "ER"), ("Ġ", "USER"), ("Ċ", "Ċ")]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrap(backend)


def sentencepiece_model():
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    tokens += ["US", "ER", "USER", "▁USER"]
    merges = [("U", "S"), ("E", "R"), ("US", "ER"), ("▁", "USER")]
    vocab = {token: i for i, token in enumerate(tokens)}
    return models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def metaspace(prepend_scheme):
    backend = Tokenizer(sentencepiece_model())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return wrap(backend)


def llama_legacy():
    backend = Tokenizer(sentencepiece_model())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return wrap(backend)


class Slow(PreTrainedTokenizer):
    """Characters as tokens, in Python: puts spaces around special tokens when it decodes."""

    vocab_size = 0
    first = 1000  # below it: the added tokens

    def __init__(self):
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        self.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
        self.add_tokens([AddedToken(token, special=False, normalized=False) for token in MEDIA])

    def get_vocab(self):
        return dict(self.added_tokens_encoder)

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token) + self.first

    def _convert_id_to_token(self, index):
        return chr(index - self.first)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


class Bare:
    """No more than what is asked of a tokenizer."""

    def __init__(self, inner):
        self._inner = inner
        self.encode, self.convert_tokens_to_ids = inner.encode, inner.convert_tokens_to_ids
        self.apply_chat_template = inner.apply_chat_template
        added = inner.added_tokens_decoder.values()
        self.all_special_tokens = [token.content for token in added if token.special]
        self.decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += len(ids)
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)


TOKENIZERS = {
    "byte-level": byte_level,
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-always": lambda: metaspace("always"),
    "llama-legacy": llama_legacy,
    "slow": Slow,
    "bare": lambda: Bare(byte_level()),
}


@cache
def tokenizer_named(name):
    return TOKENIZERS[name]()


@cache
def reader_for(tokenizer_name, template):
    return make_reader(tokenizer_named(tokenizer_name), template)


def make_reader(tokenizer, template):
    ids = {modality: tokenizer.convert_tokens_to_ids(token) for token, modality in MEDIA.items()}
    return QueryReader(tokenizer, template, {name: [token] for name, token in ids.items()})


def render(tokenizer, template, conversation, ask=True):
    """The prompt ids of a conversation of (role, part, part, ...)."""
    messages = []
    for role, *parts in conversation:
        content = "".join(parts)
        if template in LIST_CONTENT:
            content = [
                {"type": MEDIA[part]} if part in MEDIA else {"type": "text", "text": part}
                for part in parts or [""]
            ]
        messages.append({"role": role, "content": content})
    text = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=ask
    )
    return encode(tokenizer, text)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reads_the_users_words(case):
    for template, tokenizer, ask in product(TEMPLATES, TOKENIZERS, (True, False)):
        reader = reader_for(tokenizer, TEMPLATES[template])
        ids = render(tokenizer_named(tokenizer), TEMPLATES[template], case.conversation, ask)
        for scope in SCOPES:
            found = reader.read(ids, scope)
            assert found == case.expected(scope), (template, tokenizer, scope, ask)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_system_prompt_is_asked_with_where_no_user_has_words_in_time(case):
    system = "You help the user.\nAnswer in French!"
    conversation = [("system", system), *case.conversation]
    for template, tokenizer in product(WITH_SYSTEM, TOKENIZERS):
        reader = reader_for(tokenizer, TEMPLATES[template])
        ids = render(tokenizer_named(tokenizer), TEMPLATES[template], conversation)
        for scope in SCOPES:
            found = reader.read(ids, scope)
            assert found == case.expected(scope, system), (template, tokenizer, scope)


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
    ids = render(tokenizer_named(tokenizer), TEMPLATES[template], conversation, ask)
    found = reader_for(tokenizer, TEMPLATES[template]).read(ids, scope)
    assert found == oracle(conversation, scope)


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


@pytest.mark.parametrize("template", ANY_ROLES)
def test_messages_of_one_user_in_a_row_are_turns_of_their_own(template):
    conversation = [("user", IMG), ("user", "One?"), ("user", VID, "Two?")]
    ids = render(tokenizer_named("byte-level"), TEMPLATES[template], conversation)
    reader = reader_for("byte-level", TEMPLATES[template])
    assert reader.read(ids, "turn") == {"image": ["One?"], "video": ["Two?"]}
    assert reader.read(ids, "all") == {"image": ["One?\nTwo?"], "video": ["One?\nTwo?"]}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", ANY_ROLES)
def test_leaves_tool_results_out(template, tokenizer):
    conversation = [("user", IMG, "One?"), ("assistant", "look up"), ("tool", "found: 7", VID)]
    reader, tokenizer = reader_for(tokenizer, TEMPLATES[template]), tokenizer_named(tokenizer)
    ids = render(tokenizer, TEMPLATES[template], conversation)
    assert reader.read(ids, "all") == {"image": ["One?"], "video": ["One?"]}
    assert reader.read(ids, "turn") == {"image": ["One?"], "video": ["One?"]}  # the last before
    conversation += [("assistant", "It is 7."), ("user", "Two?"), ("assistant", "2")]
    conversation += [("user", "Three?")]
    ids = render(tokenizer, TEMPLATES[template], conversation)
    assert reader.read(ids, "all") == {
        "image": ["One?\nTwo?\nThree?"],
        "video": ["One?\nTwo?\nThree?"],
    }
    assert reader.read(ids, "turn") == {"image": ["One?"], "video": ["One?"]}  # as before


@pytest.mark.parametrize("template", ANY_ROLES)
def test_media_of_the_system_and_the_assistant(template):
    conversation = [("system", IMG, "Be brief."), ("user", "One?"), ("assistant", "See", VID)]
    reader, tokenizer = reader_for("byte-level", TEMPLATES[template]), tokenizer_named("byte-level")
    ids = render(tokenizer, TEMPLATES[template], conversation, ask=False)
    assert reader.read(ids, "turn") == {"image": ["One?"], "video": ["One?"]}
    conversation += [("user", IMG), ("assistant", "Hm"), ("user", "Two?")]
    ids = render(tokenizer, TEMPLATES[template], conversation)
    assert reader.read(ids, "turn") == {"image": ["One?", "One?"], "video": ["One?"]}


@pytest.mark.parametrize("template", ANY_ROLES)
def test_words_after_media_of_the_assistant(template):
    conversation = [("user", "Draw it."), ("assistant", IMG), ("user", "Which colour?")]
    ids = render(tokenizer_named("byte-level"), TEMPLATES[template], conversation)
    assert reader_for("byte-level", TEMPLATES[template]).read(ids, "turn")["image"] == [
        "Which colour?"
    ]


@pytest.mark.parametrize("template", ANY_ROLES)
@pytest.mark.parametrize(
    ("conversation", "query"),
    [
        ([("user", "What is it?"), ("user", IMG)], "What is it?"),
        ([("user", "What is it?"), ("assistant", "Show me."), ("user", IMG)], "What is it?"),
        ([("system", "Name the colour."), ("user", IMG)], "Name the colour."),
        # A tool that returns an image, as vLLM writes it for /v1/messages.
        (
            [("user", "Is it raining?"), ("assistant", "look"), ("tool", "1 file"), ("user", IMG)],
            "Is it raining?",
        ),
        ([("user", "One?"), ("user", IMG), ("user", "Two?")], "Two?"),
    ],
)
def test_a_question_that_stands_before_its_image(template, conversation, query):
    reader, tokenizer = reader_for("byte-level", TEMPLATES[template]), tokenizer_named("byte-level")
    ids = render(tokenizer, TEMPLATES[template], conversation)
    assert reader.read(ids, "turn")["image"] == [query]
    conversation = [*conversation, ("assistant", "It is."), ("user", "Sure?")]
    ids = render(tokenizer, TEMPLATES[template], conversation)
    assert reader.read(ids, "turn")["image"] == [query]


@pytest.mark.parametrize("template", [QWEN, VICUNA], ids=["qwen", "vicuna"])
def test_a_system_prompt_of_the_template_is_no_question(template):
    reader, tokenizer = reader_for("byte-level", template), tokenizer_named("byte-level")
    ids = render(tokenizer, template, [("user", IMG)])
    assert "assistant." in tokenizer.decode(ids)
    for scope in SCOPES:
        assert reader.read(ids, scope)["image"] == [""]


def test_system_alone():
    ids = render(tokenizer_named("byte-level"), QWEN, [("system", "Be brief.", IMG)])
    assert reader_for("byte-level", QWEN).read(ids, "all")["image"] == ["Be brief."]


def test_system_prompt_without_a_marker_inside_the_users_turn_counts_as_the_users():
    template = """
    {%- set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' -%}
    {%- for m in messages if m['role'] != 'system' -%}
    {{- bos_token if loop.first -}}
    {{- '<|im_start|>' + m['role'] + '\n' + (system if loop.first else '') + m['content'] -}}
    {{- '<|im_end|>\n' -}}
    {%- endfor -%}
    """
    tokenizer, reader = tokenizer_named("byte-level"), reader_for("byte-level", template)
    conversation = [("system", "Be brief."), ("user", "What?", IMG), ("assistant", "It")]
    ids = render(tokenizer, template, [*conversation, ("user", "Why?")])
    assert reader.read(ids, "all")["image"] == ["Be brief.\n\nWhat?\nWhy?"]


def test_tool_results_written_as_user_turns_hide_no_user_turn():
    template = """
    {%- for m in messages -%}
    {{- '<|im_start|>' + ('user' if m['role'] == 'tool' else m['role']) + '\n' + m['content'] -}}
    {%- if add_generation_prompt or not loop.last -%}
    {{- '<|eot_id|>\n' if m['role'] == 'user' else '<|im_end|>\n' -}}
    {%- endif -%}
    {%- endfor -%}
    {{- '<|im_start|>assistant\n' if add_generation_prompt -}}
    """
    ids = render(tokenizer_named("byte-level"), template, [("user", IMG), ("user", "What?")])
    assert reader_for("byte-level", template).read(ids, "turn")["image"] == ["What?"]


def test_template_for_a_single_question():
    template = """
    {%- if messages | length > 1 or messages[0]['role'] != 'user' -%}
    {{- raise_exception('one question at a time') -}}
    {%- endif -%}
    {{- 'Question: ' + messages[0]['content'] + (' Answer:' if add_generation_prompt else '') -}}
    """
    ids = render(tokenizer_named("byte-level"), template, [("user", IMG, "What?")])
    assert reader_for("byte-level", template).read(ids, "turn")["image"] == ["What?"]


# --- Prompts that no template made ---------------------------------------------------------------


def each(message):
    return "{% for m in messages %}" + message + "{% endfor %}"


UNLEARNABLE = {
    "none": None,
    "empty": "",
    "syntax-error": "{% for m in messages %}",
    "refuses": "{{ raise_exception('no') }}",
    "python-error": "{{ messages[0] + 1 }}",
    "no-markers": each("{{ m.content }}"),
    "repeats": each("USER: {{ m.content + m.content }} BOT:"),
    "numbered": each("[{{ loop.index }}] {{ m.role }}={{ m.content }}\n"),
    "one-for-all": each("<|im_start|>{{ m.content }}<|im_end|>"),
    "too-common": each("{{ '> ' if m.role == 'user' else '- ' }}{{ m.content }}\n"),
    "opens-only": each("{{ 'USER: ' if m.role == 'user' }}{{ m.content }} "),
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", UNLEARNABLE)
def test_without_markers_all_text_is_the_query(template, tokenizer):
    reader = reader_for(tokenizer, UNLEARNABLE[template])
    text = "<s>USER: Look - at > <image>\nWhat is it? [2]<|im_end|> BOT: <video>Well"
    ids = encode(tokenizer_named(tokenizer), text)
    query = "USER: Look - at > What is it? [2] BOT: Well"
    for scope in ("turn", "last", "all"):
        assert reader.read(ids, scope) == {"image": [query], "video": [query]}
    assert reader.read(ids, "none") == {"image": [""], "video": [""]}


@pytest.mark.parametrize(
    ("template", "text", "query"),
    [
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
    ],
)
def test_prompts_written_by_hand(template, text, query):
    for tokenizer in TOKENIZERS:
        ids = encode(tokenizer_named(tokenizer), text)
        assert reader_for(tokenizer, template).read(ids, "turn")["image"] == [query], tokenizer


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_cut_anywhere(template, tokenizer):
    case = CASES["media-in-each-turn"]
    reader, tokenizer = reader_for(tokenizer, TEMPLATES[template]), tokenizer_named(tokenizer)
    ids = render(tokenizer, TEMPLATES[template], case.conversation)
    image = tokenizer.convert_tokens_to_ids(IMG)
    for cut in range(len(ids) + 1):
        for part in (ids[:cut], ids[cut:]):
            for scope in SCOPES:
                assert len(reader.read(part, scope)["image"]) == part.count(image)


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompt_that_ends_in_the_question(template):
    reader, tokenizer = reader_for("byte-level", TEMPLATES[template]), tokenizer_named("byte-level")
    ids = render(tokenizer, TEMPLATES[template], [("user", IMG, "What is it?")])
    full = tokenizer.decode(ids)
    ids = encode(tokenizer, full[: full.index("it?")])
    assert reader.read(ids, "turn")["image"] == ["What is"]


def test_prompt_that_starts_in_the_middle():
    reader, tokenizer = reader_for("byte-level", QWEN), tokenizer_named("byte-level")
    tail = "<|im_start|>user\n<image>What?<|im_end|>\n<|im_start|>assistant\n"
    for head in ("", "ssistant.<|im_end|>\n", "|im_end|>\n", "\n"):
        assert reader.read(encode(tokenizer, head + tail), "all")["image"] == ["What?"]


# --- Markers in what the user writes -------------------------------------------------------------


def test_marker_words_are_plain_words_where_the_markers_are_tokens():
    question = "Who is the USER: or ASSISTANT: in [the] ### user\nlist?"
    for template in (QWEN, LLAMA3, MISTRAL):
        ids = render(tokenizer_named("byte-level"), template, [("user", IMG, question)])
        assert reader_for("byte-level", template).read(ids, "turn")["image"] == [question]


@pytest.mark.parametrize(
    ("question", "turn", "last"),
    [
        ("Read the ASSISTANT: field", "Read the", "Read the"),
        ("Read the USER: field", "Read the", "field"),
        ("USER: is what?", "is what?", "is what?"),
        ("ASSISTANT: USER:", "", ""),
    ],
)
def test_marker_words_end_the_turn_where_the_markers_are_words(question, turn, last):
    ids = render(tokenizer_named("metaspace-first"), LLAVA, [("user", IMG, question)])
    reader = reader_for("metaspace-first", LLAVA)
    assert reader.read(ids, "turn")["image"] == [turn]
    assert reader.read(ids, "last")["image"] == [last]


@pytest.mark.parametrize("tokenizer", [name for name in TOKENIZERS if name != "bare"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_special_tokens_in_the_question_are_dropped(template, tokenizer):
    conversation = [("user", IMG, "The <s>old</s> price <|vision_start|>?")]
    ids = render(tokenizer_named(tokenizer), TEMPLATES[template], conversation)
    reader = reader_for(tokenizer, TEMPLATES[template])
    assert reader.read(ids, "turn")["image"] == ["The old price ?"]


def test_tokens_that_are_added_but_not_special_are_words():
    tokenizer = byte_level()
    tokenizer.add_tokens(["<think>", "iPhone"])
    question = "Does <think> mean that the iPhone thinks?"
    ids = render(tokenizer, QWEN, [("user", IMG, question)])
    assert make_reader(tokenizer, QWEN).read(ids, "turn")["image"] == [question]


def test_special_tokens_that_begin_with_another_are_dropped_whole():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(t, special=True) for t in ("<|box|>", "<|box|>s", "<|bo")])
    ids = render(tokenizer, QWEN, [("user", IMG, "One <|box|>s two <|box|> three <|bo four")])
    assert make_reader(tokenizer, QWEN).read(ids, "turn")["image"] == ["One two three four"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_roles_that_begin_like_the_user(tokenizer):
    text = "<|im_start|>username\nno<|im_end|>\n<|im_start|>user\n<image>yes<|im_end|>\n"
    ids = encode(tokenizer_named(tokenizer), text)
    assert reader_for(tokenizer, QWEN).read(ids, "all")["image"] == ["yes"]


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


@pytest.mark.parametrize("filler", ["a b ", "<|im_start|>user\n", "USER: ", f"USER: a {IMG} b "])
@pytest.mark.parametrize("template", [QWEN, LLAVA], ids=["qwen", "llava"])
def test_work_is_linear(template, filler):
    reader, tokenizer = reader_for("byte-level", template), tokenizer_named("byte-level")
    short, long = (lines_run(reader, encode(tokenizer, IMG + filler * n)) for n in (100, 800))
    assert 0 < long <= 8 * short


def parsed(reader):
    """The alternatives of the pattern that cuts a prompt into turns."""
    ((operator, (_, alternatives)),) = _parser.parse(reader._markers._cut.pattern)
    assert operator is _constants.BRANCH
    return alternatives


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_pattern_never_reads_text_twice(template):
    """Each alternative begins with a letter, and behind blanks, the only repeats, comes another.

    So a run of blanks is read once for the letters before it, and never again from inside it.
    """

    def check(pattern):
        for (operator, value), behind in zip(pattern, [*pattern[1:], (None, None)], strict=True):
            if operator is _constants.MAX_REPEAT and value[1] is _constants.MAXREPEAT:
                assert str(value[2]) == str(_parser.parse(r"\s"))
                assert behind[0] is _constants.LITERAL
                assert not chr(behind[1]).isspace()

    for alternative in parsed(reader_for("byte-level", TEMPLATES[template])):
        assert alternative[0][0] is _constants.LITERAL
        check(alternative)


def test_thousands_of_special_tokens_cost_nothing():
    tokenizer = byte_level()
    few = make_reader(tokenizer, QWEN)
    reserved = [AddedToken(f"<|reserved_{i}|>", special=True) for i in range(3000)]
    tokenizer.add_tokens(reserved)
    many = make_reader(tokenizer, QWEN)
    assert len(parsed(many)) == len(parsed(few)) < 20
    ids = encode(tokenizer, IMG + "One <|reserved_12|> and <|reserved_1234|>two")
    assert many.read(ids, "turn")["image"] == ["One and two"]


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

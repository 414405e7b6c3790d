# SPDX-License-Identifier: Apache-2.0
"""Where turns begin and end: the markers that are learnt from a chat template."""

from itertools import product
from re import _constants, _parser

from tokenizers import AddedToken

from anchorprune_vllm.config import SCOPES
from tests.support.chat_templates import (
    IMG,
    QWEN,
    TEMPLATES,
    TOKENIZERS,
    byte_level,
    encode,
    make_reader,
    read,
    reader_for,
    render,
    tokenizer_named,
)

# --- Templates -----------------------------------------------------------------------------------


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


def test_without_markers_all_text_is_the_query(subtests):
    text = "<s>USER: Look - at > <image>\nWhat is it? [2]<|im_end|> BOT: <video>Well"
    query = "USER: Look - at > What is it? [2] BOT: Well"
    for (name, template), tokenizer in product(UNLEARNABLE.items(), TOKENIZERS):
        with subtests.test(template=name, tokenizer=tokenizer):
            reader, ids = reader_for(tokenizer, template), encode(tokenizer_named(tokenizer), text)
            for scope in SCOPES:
                words = [""] if scope == "none" else [query]
                assert reader.read(ids, scope) == {"image": words, "video": words}


# --- Markers in what the user writes -------------------------------------------------------------


def test_marker_words_are_plain_words_where_the_markers_are_tokens():
    question = "Who is the USER: or ASSISTANT: in [the] ### user\nlist?"
    for template in ("qwen", "llama3", "mistral"):
        assert read(template, [("user", IMG, question)])["image"] == [question]


def test_marker_words_end_the_turn_where_the_markers_are_words(subtests):
    for question, turn, last in (
        ("Read the ASSISTANT: field", "Read the", "Read the"),
        ("Read the USER: field", "Read the", "field"),
        ("USER: is what?", "is what?", "is what?"),
        ("ASSISTANT: USER:", "", ""),
    ):
        with subtests.test(question=question):
            for scope, query in (("turn", turn), ("last", last)):
                found = read("llava", [("user", IMG, question)], scope, "metaspace-first")
                assert found["image"] == [query]


def test_special_tokens_in_the_question_are_dropped(subtests):
    """With every tokenizer that tells its `bos_token`, which the bare one does not."""
    conversation = [("user", IMG, "The <s>old</s> price <|vision_start|>?")]
    for template, tokenizer in product(TEMPLATES, sorted(TOKENIZERS.keys() - {"bare"})):
        with subtests.test(template=template, tokenizer=tokenizer):
            found = read(template, conversation, "turn", tokenizer)
            assert found["image"] == ["The old price ?"]


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


def test_roles_that_begin_like_the_user(subtests):
    text = "<|im_start|>username\nno<|im_end|>\n<|im_start|>user\n<image>yes<|im_end|>\n"
    for tokenizer in TOKENIZERS:
        with subtests.test(tokenizer=tokenizer):
            ids = encode(tokenizer_named(tokenizer), text)
            assert reader_for(tokenizer, QWEN).read(ids, "all")["image"] == ["yes"]


# --- Cost ----------------------------------------------------------------------------------------


def parsed(reader):
    """The alternatives of the pattern that cuts a prompt into turns."""
    ((operator, (_, alternatives)),) = _parser.parse(reader._markers._cut.pattern)
    assert operator is _constants.BRANCH
    return alternatives


def check_reads_text_once(pattern):
    for (operator, value), behind in zip(pattern, [*pattern[1:], (None, None)], strict=True):
        if operator is _constants.MAX_REPEAT and value[1] is _constants.MAXREPEAT:
            assert str(value[2]) == str(_parser.parse(r"\s"))
            assert behind[0] is _constants.LITERAL
            assert not chr(behind[1]).isspace()


def test_the_pattern_never_reads_text_twice(subtests):
    """Each alternative begins with a letter, and behind blanks, the only repeats, comes another.

    So a run of blanks is read once for the letters before it, and never again from inside it.
    """
    for name, template in TEMPLATES.items():
        with subtests.test(template=name):
            for alternative in parsed(reader_for("byte-level", template)):
                assert alternative[0][0] is _constants.LITERAL
                check_reads_text_once(alternative)


def test_thousands_of_special_tokens_cost_nothing():
    tokenizer = byte_level()
    few = make_reader(tokenizer, QWEN)
    reserved = [AddedToken(f"<|reserved_{i}|>", special=True) for i in range(3000)]
    tokenizer.add_tokens(reserved)
    many = make_reader(tokenizer, QWEN)
    assert len(parsed(many)) == len(parsed(few)) < 20
    ids = encode(tokenizer, IMG + "One <|reserved_12|> and <|reserved_1234|>two")
    assert many.read(ids, "turn")["image"] == ["One and two"]

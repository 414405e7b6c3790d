# SPDX-License-Identifier: Apache-2.0
"""Chat templates and tokenizers in the formats of real models, small enough to be made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from anchorprune_vllm.api.query import QueryReader
from anchorprune_vllm.config import Scope

Conversation = Sequence[tuple[str, ...]]
"""Messages as (role, part, part, ...); a part is text or one of `MEDIA`."""

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


def wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    # Most control tokens are special without being in `all_special_tokens`, as in Llama 3.
    backend.add_special_tokens([*CONTROL, "[INST]", "[/INST]", "<s>", "</s>"])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MEDIA])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def byte_level() -> PreTrainedTokenizerFast:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("U", "S"), ("E", "R"), ("US", "ER"), ("Ġ", "USER"), ("Ċ", "Ċ")]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrap(backend)


def sentencepiece_model() -> models.BPE:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    tokens += ["US", "ER", "USER", "▁USER"]
    merges = [("U", "S"), ("E", "R"), ("US", "ER"), ("▁", "USER")]
    vocab = {token: i for i, token in enumerate(tokens)}
    return models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def metaspace(prepend_scheme: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(sentencepiece_model())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return wrap(backend)


def llama_legacy() -> PreTrainedTokenizerFast:
    backend = Tokenizer(sentencepiece_model())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return wrap(backend)


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python, of single characters, that puts spaces around special tokens."""

    vocab_size = 0
    first = 1000  # below it: the added tokens

    def __init__(self) -> None:
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        self.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
        self.add_tokens([AddedToken(token, special=False, normalized=False) for token in MEDIA])

    def get_vocab(self) -> dict[str, int]:
        return dict(self.added_tokens_encoder)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token) + self.first

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index - self.first)

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)


class Bare:
    """A tokenizer with only what `QueryReader` uses of one; it counts the ids that it decodes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.encode, self.convert_tokens_to_ids = inner.encode, inner.convert_tokens_to_ids
        self.apply_chat_template = inner.apply_chat_template
        added = inner.added_tokens_decoder.values()
        self.all_special_tokens = [token.content for token in added if token.special]
        self.decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-always": lambda: metaspace("always"),
    "llama-legacy": llama_legacy,
    "slow": Slow,
    "bare": lambda: Bare(byte_level()),
}


@cache
def tokenizer_named(name: str) -> Any:
    return TOKENIZERS[name]()


@cache
def reader_for(tokenizer_name: str, template: str | None) -> QueryReader:
    return make_reader(tokenizer_named(tokenizer_name), template)


def make_reader(tokenizer: Any, template: str | None) -> QueryReader:
    ids = {modality: tokenizer.convert_tokens_to_ids(token) for token, modality in MEDIA.items()}
    return QueryReader(tokenizer, template, {name: [token] for name, token in ids.items()})


def render(
    tokenizer: Any, template: str, conversation: Conversation, ask: bool = True
) -> list[int]:
    """Return the prompt ids of a conversation; `ask` adds the generation prompt."""
    messages = []
    for role, *parts in conversation:
        content: Any = "".join(parts)
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


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def read(
    template: str,
    conversation: Conversation,
    scope: Scope = "turn",
    tokenizer: str = "byte-level",
    ask: bool = True,
) -> dict[str, list[str]]:
    """Return the queries that are read back from a conversation in one of the `TEMPLATES`."""
    ids = render(tokenizer_named(tokenizer), TEMPLATES[template], conversation, ask)
    return reader_for(tokenizer, TEMPLATES[template]).read(ids, scope)

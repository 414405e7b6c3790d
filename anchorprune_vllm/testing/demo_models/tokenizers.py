# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and chat templates: the pipelines of the real ones, with a small vocabulary."""

import io
import json
import math
import re
from collections.abc import Iterable, Sequence

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as splitters
from tokenizers import processors as wrappers
from transformers import CLIPTokenizer

# The vocabulary of answers. Each is one token, as are the words that often begin a prompt.
WORDS = """
a an the is are was it this that there here what which who where when why how many much not no yes
and or of in on at by to from with under over near behind between left right top bottom middle
one two three four five six seven eight nine ten zero some all none more less both other same
red green blue yellow black white orange purple brown gray pink color colour bright dark light
circle square triangle rectangle shape line dot corner edge picture image photo scene background
big small large tiny tall short long wide thin round old young new hot cold wet dry fast slow
dog cat bird horse cow sheep fish bear lion tree flower grass leaf river lake sea sky cloud sun moon
star mountain road street car bus train truck bike boat plane bridge house door window roof wall
table chair bed lamp book cup plate bottle phone clock hat shirt shoe coat bag ball box key sign
man woman boy girl child person people hand head face eye hair standing sitting walking running
holding looking eating playing wearing riding sleeping see show tell describe count read name say
"""
_PROMPT_WORDS = "USER ASSISTANT What Which Who Where When Why How Is Are Does Describe Read"
_CHAT_WORDS = "system user assistant You helpful"
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Images, videos and text in the order of the message, in ChatML.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
DEFAULT_SYSTEM{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{ IMAGE }}
{%- elif part['type'] == 'video' -%}{{ VIDEO }}
{%- elif part['type'] == 'text' -%}{{ part['text'] }}
{%- endif -%}{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
_DEFAULT_SYSTEM = """\
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\\nSYSTEM<|im_end|>\\n' }}
{%- endif -%}
"""


def chat_template(image: str, video: str = "", system: str = "") -> str:
    """Return a ChatML template with these texts for an image, a video and the default system."""
    default = _DEFAULT_SYSTEM.replace("SYSTEM", system) if system else ""
    texts = {"DEFAULT_SYSTEM": default, "IMAGE": json.dumps(image), "VIDEO": json.dumps(video)}
    return re.sub("|".join(texts), lambda found: texts[found[0]], _CHAT_TEMPLATE)


def padded_vocabulary(size: int) -> int:
    """Return the rows of an embedding table, of which there are more than tokens, as on the hub."""
    return math.ceil(size / 64) * 64


def _learn_merges(words: list[str], suffix: str = "") -> list[tuple[str, str]]:
    """Learn byte-pair merges until every word is one token."""
    learner = Tokenizer(models.BPE(end_of_word_suffix=suffix))
    learner.pre_tokenizer = splitters.WhitespaceSplit()
    # Ties go by id, and the ids of suffixed letters by the order of a hash map, unless given.
    endings = sorted({word[-1] + suffix for word in words})
    trainer = trainers.BpeTrainer(
        vocab_size=10**5, end_of_word_suffix=suffix, special_tokens=endings, show_progress=False
    )
    learner.train_from_iterator(words, trainer)
    return [(a, b) for a, b in json.loads(learner.to_str())["model"]["merges"]]


def _number(*groups: Iterable[str]) -> dict[str, int]:
    """Number tokens in order of first appearance."""
    tokens = dict.fromkeys(token for group in groups for token in group)
    return {token: i for i, token in enumerate(tokens)}


def make_llama_tokenizer(extra_specials: Sequence[str], more_words: str = "") -> Tokenizer:
    """Make Llama's pipeline: `▁` for a space, bytes for unknown characters, `<s>` put before."""
    first_words = (_PROMPT_WORDS + " " + more_words).split()
    words = ["▁" + word for word in WORDS.split() + first_words]
    merges = _learn_merges(words + first_words)
    specials = ["<unk>", "<s>", "</s>"]
    characters = ["▁", *map(chr, range(33, 127))]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = _number(specials, bytes_, (a + b for a, b in merges), characters)
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    to_pieces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(to_pieces)
    to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = wrappers.TemplateProcessing("<s> $A", None, [("<s>", ids["<s>"])])
    specials += [*extra_specials]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return tokenizer


def make_clip_tokenizer(more_words: str = "") -> Tokenizer:
    """Make CLIP's pipeline: lower case, bytes, `</w>` after a word, a start and an end token."""
    merges = _learn_merges(WORDS.split() + more_words.split(), suffix="</w>")
    letters = sorted(splitters.ByteLevel.alphabet())
    last_letters = [letter + "</w>" for letter in letters]
    specials = ["<|startoftext|>", "<|endoftext|>"]  # CLIP pools at the highest id.
    ids = _number(letters, last_letters, (a + b for a, b in merges), specials)
    tokenizer: Tokenizer = CLIPTokenizer(vocab=ids, merges=merges).backend_tokenizer
    return tokenizer


def make_qwen_tokenizer(specials: Sequence[str], more_words: str = "") -> Tokenizer:
    """Make Qwen2's pipeline: bytes, `Ġ` for a space before a word, nothing put before or after."""
    first_words = f"{_PROMPT_WORDS} {_CHAT_WORDS} {more_words}".split()
    merges = _learn_merges(["Ġ" + word for word in WORDS.split() + first_words] + first_words)
    ids = _number(sorted(splitters.ByteLevel.alphabet()), (a + b for a, b in merges))
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.normalizer = normalizers.NFC()
    word = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = splitters.Split(word, behavior="isolated")
    to_bytes = splitters.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = splitters.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    return tokenizer


def make_siglip_tokenizer() -> bytes:
    """Make SigLIP's: a sentencepiece file, with an end token and none to start with."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS.split()),
        model_writer=written,
        vocab_size=600,  # at most: WORDS give fewer
        hard_vocab_limit=False,
        required_chars="abcdefghijklmnopqrstuvwxyz0123456789",
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,  # the same bytes each time
        minloglevel=2,
    )
    return written.getvalue()

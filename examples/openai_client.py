# SPDX-License-Identifier: Apache-2.0
"""Any OpenAI client talks to a pruning server unchanged: plain, streaming, a second turn.

    examples/serve.sh &                                 # wait until it answers
    python examples/openai_client.py
    python examples/openai_client.py --image bus.jpg --question "What number is the bus?" \\
        --budget 128 --query "the number on the bus"

With --image it needs the `openai` package alone.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from openai import APIConnectionError, APIStatusError, BadRequestError, DefaultHttpxClient, OpenAI


def main() -> None:
    args = read_arguments()
    # A proxy of the environment is for other machines: it knows nothing of this one.
    is_here = urlsplit(args.base_url).hostname in ("localhost", "127.0.0.1", "::1")
    client = OpenAI(
        base_url=args.base_url,
        api_key=args.api_key,
        max_retries=0,
        http_client=DefaultHttpxClient(trust_env=not is_here),
    )
    try:
        talk(client, args)
    except APIConnectionError:
        sys.exit(
            f"openai_client.py: no server answers at {args.base_url}: start one (examples/serve.sh;"
            " it takes half a minute), or name yours with --base-url"
        )
    except APIStatusError as error:  # a wrong key, model or path, or a server in trouble
        sys.exit(
            f"openai_client.py: the server at {args.base_url} answers {error.status_code}:"
            f" {error.message}; see --base-url, --api-key and --model"
        )


def talk(client: OpenAI, args: argparse.Namespace) -> None:
    model = args.model or client.models.list().data[0].id
    url, question, again = picture_and_questions(args)
    first: dict[str, Any] = {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": question},
        ],
    }

    def ask(messages: list[dict[str, Any]], **options: Any) -> Any:
        return client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=args.max_tokens, **options
        )

    # The server prunes by its own budget: nothing about it is in the request.
    plain = ask([first])
    answer = plain.choices[0].message.content
    report("plain", question, answer, plain.usage)

    # Streaming; the last chunk brings the usage.
    words, usage = "", None
    for chunk in ask([first], stream=True, stream_options={"include_usage": True}):
        words += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    report("streaming", question, words, usage)

    # A second turn. The picture is pruned for the question of its own turn, so it stays as it was,
    # and vLLM's prefix cache has it.
    turns = [
        first,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [{"type": "text", "text": again}]},
    ]
    second = ask(turns)
    report("second turn", again, second.choices[0].message.content, second.usage)

    # A budget, and words to prune for, of one request.
    override: dict[str, Any] = {"budget": args.budget}
    if args.query is not None:
        override["query"] = args.query
    try:
        own = ask([first], extra_body={"mm_processor_kwargs": {"anchorprune": override}})
    except BadRequestError as error:  # a wrong budget, or a server that lets no request choose
        sys.exit(f"openai_client.py: the server refuses {override}: {error.message}")
    report(f"{override}", question, own.choices[0].message.content, own.usage)


def report(how: str, question: str, answer: str | None, usage: Any) -> None:
    details = usage.prompt_tokens_details
    # Extra fields of vLLM, from a server with --enable-prompt-tokens-details.
    kept = getattr(details, "multimodal_tokens", None)
    cached = getattr(details, "cached_tokens", None)
    print(f"{how}: {question}\n  {(answer or '').strip()}")
    more = f", visual {kept}" if kept else ""
    more += f", of the prefix cache {cached}" if cached else ""
    print(f"  {usage.prompt_tokens} prompt tokens{more}")


def picture_and_questions(args: argparse.Namespace) -> tuple[str, str, str]:
    """A picture as a data URL, a question about it and another."""
    if args.image is not None:
        kind = mimetypes.guess_type(args.image.name)[0] or "image/png"
        encoded = base64.b64encode(args.image.read_bytes()).decode()
        return f"data:{kind};base64,{encoded}", args.question, args.again
    from anchorprune_vllm.commands.eval.scenes import FIRST_TEST_SCENE, scene
    from anchorprune_vllm.testing.media import as_data_url

    drawn = scene(FIRST_TEST_SCENE)
    one, two = [each.text for each in drawn.questions if each.kind != "yes/no"][:2]
    return as_data_url(drawn.load()), one, two


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Ask a pruning server through the openai package: plainly, streaming, in a "
        "second turn, and with a budget and query of the request's own (for which the server "
        "needs --trust-request-mm-kwargs). Without arguments: a drawn picture, and the server that "
        "examples/serve.sh starts.",
    )
    parser.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000/v1",
        metavar="URL",
        help="of the server (default: http://127.0.0.1:8000/v1)",
    )
    parser.add_argument("--api-key", default="none", help="if the server wants one")
    parser.add_argument("--model", help="as the server names it (default: its first)")
    parser.add_argument("--image", type=Path, help="a picture file (default: a drawn one)")
    parser.add_argument(
        "--question", default="What is to be seen?", help="about --image (default: %(default)s)"
    )
    parser.add_argument(
        "--again", default="What else?", help="in the second turn (default: %(default)s)"
    )
    parser.add_argument(
        "--budget",
        default="32",
        metavar="K",
        help="visual tokens for the request that chooses for itself: a number, or a share such as "
        "10%% (default: 32)",
    )
    parser.add_argument(
        "--query",
        help="words that it prunes for, or turn, last, all or none (default: as the server)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=32, help="of an answer (default: 32)", metavar="N"
    )
    args = parser.parse_args()
    if args.image is not None and not args.image.is_file():
        parser.error(f"there is no file {args.image}: give a picture")
    return args


if __name__ == "__main__":
    main()

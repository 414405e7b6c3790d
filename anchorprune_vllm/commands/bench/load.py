# SPDX-License-Identifier: Apache-2.0
"""The load: vLLM's own `vllm bench serve`, one process for each measurement."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorprune_vllm.commands.bench.shapes import Media
from anchorprune_vllm.commands.eval.json_lines import JsonLine, read_json_lines
from anchorprune_vllm.testing.server import VllmServer, tail

SERVED_NAME = "bench"
EXAMPLE = '{"prompt": "...", "image_files": ["a.png"]}'
_ADDRESS = re.compile(r"(https?|file)://|data:image/")

KEPT = (
    *("completed", "failed", "duration", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "output_throughput", "total_token_throughput"),
    *("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"),
    *("median_itl_ms", "median_e2el_ms", "p99_e2el_ms"),
)
"""Of vLLM's result, what is kept in results.json."""


@dataclass(frozen=True)
class Load:
    """What requests are like; all of them carry other media, so no cache can help."""

    media: Media
    data: Path | None
    """A JSONL file in vLLM's format custom_image; None: random pictures and words."""
    question_tokens: int
    output_tokens: int
    requests: int

    def requests_at(self, concurrency: int) -> int:
        """Enough that as many are under way most of the time."""
        return max(self.requests, 2 * concurrency)

    def flags(self, seed: int, part: Path | None) -> list[str]:
        """Of `vllm bench serve`. part: the lines of the file that this measurement is to use."""
        if part is not None:
            return [
                *("--dataset-name", "custom_image", "--dataset-path", str(part)),
                *("--disable-shuffle", "--ignore-eos", "--custom-ensure-client-side-data"),
                *("--custom-output-len", str(self.output_tokens)),
            ]
        size = (self.media.height, self.media.width, self.media.frames)
        return [
            *("--dataset-name", "random-mm", "--seed", str(seed)),
            *("--random-input-len", str(self.question_tokens)),
            *("--random-output-len", str(self.output_tokens)),
            *("--random-mm-base-items-per-request", "1"),
            *("--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 1}'),
            *("--random-mm-bucket-config", f"{{{size}: 1.0}}"),
        ]

    def lines(self, concurrencies: Sequence[int]) -> list[tuple[int, int]]:
        """Of the file, those that each concurrency uses: first, and one behind the last."""
        counts = [self.requests_at(concurrency) for concurrency in concurrencies]
        return [(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]

    def check(self, concurrencies: Sequence[int]) -> None:
        """Raise ValueError for a file that is unreadable, too short, or repeats a picture."""
        if self.data is None:
            return
        lines = read_json_lines(self.data, EXAMPLE)
        for line in lines:
            if "content" not in line.row and not {"prompt", "image_files"} <= line.row.keys():
                raise ValueError(
                    f"{self.data}, line {line.number} has neither content nor prompt and "
                    f"image_files; give lines such as {EXAMPLE}"
                )
            for image in _images_of(line.row):
                if not _ADDRESS.match(image) and not Path(image).is_file():
                    raise ValueError(
                        f"{self.data}, line {line.number}: there is no picture {image}"
                    )
        _, needed = self.lines(concurrencies)[-1]
        if len(lines) < needed:
            raise ValueError(
                f"{self.data} has {len(lines)} lines, and the run needs {needed}, each with a "
                "picture of its own: give more, or lower --requests or --concurrency"
            )
        self._check_repeated(lines[:needed])

    def _check_repeated(self, lines: Sequence[JsonLine]) -> None:
        """Raise ValueError if two of the lines that are used share a picture.

        Caches keep it: unpruned, vLLM's prefix cache saves all of it, which no pruned server has.
        """
        seen: dict[str, int] = {}
        for line in lines:
            for image in _images_of(line.row):
                first = seen.setdefault(_identity(image), line.number)
                if first != line.number:
                    raise ValueError(
                        f"{self.data}, line {line.number}: the picture {image:.200} is that of "
                        f"line {first}, and caches would answer for it; give each line one of "
                        "its own"
                    )


def _images_of(row: Mapping[str, Any]) -> list[str]:
    """The pictures that a line names: files and addresses; what is wrong is vLLM's to say."""
    content, named = row.get("content"), row.get("image_files")
    if isinstance(content, list):
        named = [_image_of(part) for part in content if isinstance(part, dict)]
    images = named if isinstance(named, list) else []
    return [image for image in images if isinstance(image, str)]


def _image_of(part: Mapping[str, Any]) -> Any:
    address = part.get("image_url")
    if isinstance(address, dict):
        address = address.get("url")
    return part.get("image", address)


def _identity(image: str) -> str:
    """The same for two names of one file, and for two files of the same content."""
    if _ADDRESS.match(image):
        return image
    return hashlib.sha256(Path(image).read_bytes()).hexdigest()


def put_load(
    server: VllmServer,
    model: str,
    load: Load,
    concurrency: int,
    concurrencies: Sequence[int],
    round_: int,
    out: Path,
) -> dict[str, Any]:
    """Run the client, leave its own result and log in `out`, and give what is `KEPT` of it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    number, requests = concurrencies.index(concurrency), load.requests_at(concurrency)
    part = None
    if load.data is not None:
        first, behind = load.lines(concurrencies)[number]
        part = Path(f"{out}.data.jsonl")
        lines = [line.text for line in read_json_lines(load.data, EXAMPLE)]
        part.write_text("\n".join(lines[first:behind]) + "\n", encoding="utf-8")
    result, log = Path(f"{out}.json"), Path(f"{out}.log")  # budgets have points
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *("--backend", "openai-chat", "--base-url", server.url),
        *("--endpoint", "/v1/chat/completions"),
        *("--model", model, "--served-model-name", SERVED_NAME),
        *load.flags(1 + 1000 * round_ + number, part),
        *("--num-prompts", str(requests), "--max-concurrency", str(concurrency)),
        *("--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el"),
        *("--save-result", "--save-detailed", "--disable-tqdm"),
        *("--result-dir", str(out.parent), "--result-filename", result.name),
    ]
    env = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    with log.open("wb") as output:
        # A group of its own, so that Ctrl-C reaches us alone and we end it.
        client = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            code = client.wait()
        finally:
            client.kill()
            client.wait()
    if code:
        raise RuntimeError(f"vllm bench serve ended with code {code}; {log}:\n{tail(log)}")
    return read_result(result, requests)


def read_result(path: Path, requests: int) -> dict[str, Any]:
    """What is `KEPT` of a result of `vllm bench serve`; RuntimeError if requests failed."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["completed"] != requests:
        errors = [error for error in found.get("errors", []) if error]
        raise RuntimeError(
            f"{requests - found['completed']} of {requests} requests failed; see {path}"
            + (f". The first: {errors[0].strip().splitlines()[-1]}" if errors else "")
        )
    return {name: found[name] for name in KEPT if name in found}

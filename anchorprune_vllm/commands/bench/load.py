# SPDX-License-Identifier: Apache-2.0
"""The load on a server: vLLM's own `vllm bench serve`, one process for each measurement."""

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

from pydantic import BaseModel

from anchorprune_vllm.commands.bench.shapes import MediaSize
from anchorprune_vllm.commands.eval.json_lines import read_json_lines
from anchorprune_vllm.testing.server import VllmServer, tail

SERVED_NAME = "bench"
_EXAMPLE = '{"prompt": "...", "image_files": ["a.png"]}'
_ADDRESS = re.compile(r"(https?|file)://|data:image/")


class ClientResult(BaseModel, extra="allow"):
    """The figures of `vllm bench serve`, under vLLM's names; the report uses those named here."""

    completed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    median_ttft_ms: float
    p99_ttft_ms: float
    median_tpot_ms: float


@dataclass(frozen=True)
class Load:
    """The requests of all measurements; each carries other media, so that no cache can help."""

    media: MediaSize
    data: Path | None  # a JSONL file in vLLM's format custom_image; None: random images and words
    question_tokens: int
    output_tokens: int
    requests: int
    concurrencies: Sequence[int]

    def requests_at(self, concurrency: int) -> int:
        """Return how many requests to send, so that most of the time as many are under way."""
        return max(self.requests, 2 * concurrency)

    def lines_at(self, concurrency: int) -> tuple[int, int]:
        """Return which lines of the file a concurrency uses: the first, and the one after."""
        before = self.concurrencies[: self.concurrencies.index(concurrency)]
        first = sum(map(self.requests_at, before))
        return first, first + self.requests_at(concurrency)

    def flags(self, seed: int, part: Path | None) -> list[str]:
        """Return flags of `vllm bench serve`. part: the lines of the file to use."""
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

    def check(self) -> None:
        """Raise ValueError for a file that is unreadable, too short, or repeats an image.

        Caches would answer for a repeated image: vLLM's prefix cache saves all of its work on an
        unpruned server, but not on a pruned one.
        """
        if self.data is None:
            return
        lines = read_json_lines(self.data, _EXAMPLE)
        for line in lines:
            if "content" not in line.row and not {"prompt", "image_files"} <= line.row.keys():
                raise ValueError(
                    f"{self.data}, line {line.number} has neither content nor prompt and "
                    f"image_files; give lines such as {_EXAMPLE}"
                )
            for image in _images_of(line.row):
                if not _ADDRESS.match(image) and not Path(image).is_file():
                    raise ValueError(f"{self.data}, line {line.number}: there is no image {image}")
        _, needed = self.lines_at(self.concurrencies[-1])
        if len(lines) < needed:
            raise ValueError(
                f"{self.data} has {len(lines)} lines, and the run needs {needed}, each with an "
                "image of its own: give more, or lower --requests or --concurrency"
            )
        seen: dict[str, int] = {}
        for line in lines[:needed]:
            for image in _images_of(line.row):
                first = seen.setdefault(_identity(image), line.number)
                if first != line.number:
                    raise ValueError(
                        f"{self.data}, line {line.number}: the image {image:.200} is that of line "
                        f"{first}, and caches would answer for it; give each line one of its own"
                    )

    def put_on(
        self, server: VllmServer, model: str, concurrency: int, round_: int, out: Path
    ) -> ClientResult:
        """Run the client on a server, which serves `model`.

        The client leaves its full result in `out`.json and its log in `out`.log.
        """
        out.parent.mkdir(parents=True, exist_ok=True)
        # Not with_suffix(): the names of budgets have points.
        result, log, part = (Path(f"{out}{end}") for end in (".json", ".log", ".data.jsonl"))
        if self.data is not None:
            lines = [line.text for line in read_json_lines(self.data, _EXAMPLE)]
            used = slice(*self.lines_at(concurrency))
            part.write_text("\n".join(lines[used]) + "\n", encoding="utf-8")
        requests = self.requests_at(concurrency)
        seed = 1 + 1000 * round_ + self.concurrencies.index(concurrency)
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            *("--backend", "openai-chat", "--base-url", server.url),
            *("--endpoint", "/v1/chat/completions"),
            *("--model", model, "--served-model-name", SERVED_NAME),
            *self.flags(seed, None if self.data is None else part),
            *("--num-prompts", str(requests), "--max-concurrency", str(concurrency)),
            *("--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el"),
            *("--save-result", "--save-detailed", "--disable-tqdm"),
            *("--result-dir", str(out.parent), "--result-filename", result.name),
        ]
        env = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        with log.open("wb") as output:
            # In a session of its own, so that Ctrl-C reaches only us; run() then kills the client.
            ended = subprocess.run(
                command, stdout=output, stderr=output, env=env, start_new_session=True, check=False
            )
        if ended.returncode:
            raise RuntimeError(
                f"vllm bench serve ended with code {ended.returncode}; {log}:\n{tail(log)}"
            )
        return read_result(result, requests)


def read_result(path: Path, requests: int) -> ClientResult:
    """Read a result of `vllm bench serve`; raise RuntimeError if requests failed."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["completed"] != requests:
        errors = [error for error in found.get("errors", []) if error]
        raise RuntimeError(
            f"{requests - found['completed']} of {requests} requests failed; see {path}"
            + (f". The first: {errors[0].strip().splitlines()[-1]}" if errors else "")
        )
    figures = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return ClientResult.model_validate(figures)


def _images_of(row: Mapping[str, Any]) -> list[str]:
    """Return the files and addresses of a line's images; other mistakes are left to vLLM."""
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
    """Return the same text for two names of one file, and for two files of the same content."""
    return image if _ADDRESS.match(image) else hashlib.sha256(Path(image).read_bytes()).hexdigest()

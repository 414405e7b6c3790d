# SPDX-License-Identifier: Apache-2.0
"""Train a small model of the demo from scratch, on a CPU.

    pip install '.[eval]'
    python -m examples.train_demo llava OUT
    python -m examples.train_demo qwen OUT

They learn from cluttered scenes, from simple ones and from easy-vqa, with plain transformers, all
visual tokens and ordinary positions: nothing is ever pruned here. First the vision tower learns to
see, then the language model behind it to answer. The state is saved every 100 steps, and the same
command goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from anchorprune_vllm.commands.options import positive
from examples.train_demo.llava import Llava
from examples.train_demo.qwen import Qwen
from examples.train_demo.training import Rounds, Training

MODELS = {"llava": Llava, "qwen": Qwen}
ROUNDS = Rounds(seeing=8, answering=16)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_demo",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("model", choices=MODELS, help="which of the two")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the model")
    for phase, rounds in ROUNDS._asdict().items():
        parser.add_argument(
            f"--{phase}",
            type=positive,
            default=rounds,
            help=f"rounds of {phase}, 100 steps each (default: {rounds})",
        )
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: 0)")
    args = parser.parse_args()
    try:
        rounds = Rounds(args.seeing, args.answering)
        Training(args.out, MODELS[args.model], args.seed, rounds).run()
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

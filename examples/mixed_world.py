"""Generate a search world and a math world, with one model for both.

    python -m examples.mixed_world --out=data/mixed --seed=0

The folders `search` and `math` have the files of examples/quickstart_world.py and
examples/math_world.py. The tokenizer of the model in `model` is trained on both demonstrations.
"""

import argparse
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from examples import math_world, quickstart_world


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_people", type=int, default=1200, help="people to ask about")
    parser.add_argument("--num_train", type=int, default=4000, help="problems to train on")
    parser.add_argument("--num_held_out", type=int, default=200, help="held-out people; problems")
    parser.add_argument("--num_demonstrations", type=int, default=20_000, help="in each world")
    args = parser.parse_args(argv)
    names = ("seed", "num_held_out", "num_demonstrations")
    common = [f"--{name}={getattr(args, name)}" for name in names]
    quickstart_world.main([f"--out={args.out}/search", f"--num_people={args.num_people}", *common])
    math_world.main([f"--out={args.out}/math", f"--num_train={args.num_train}", *common])
    texts = []
    for world in ("search", "math"):
        shutil.rmtree(args.out / world / "model")  # its tokenizer knows only one world
        lines = (args.out / world / "demonstrations.jsonl").read_text(encoding="utf-8")
        texts.append(quickstart_world.iter_training_texts(map(json.loads, lines.splitlines())))
    tokenizer = quickstart_world.train_tokenizer(itertools.chain(*texts))
    quickstart_world.write_model(args.out / "model", tokenizer, seed=args.seed)
    print(f"\nwrote {args.out}: search, math, model")


if __name__ == "__main__":
    main()

"""Makes the bundled pair again from nothing: tokenizer, verifier, draft model, GGUFs. Resumes where it was interrupted.

python -m models.make                      # about 105 minutes for the verifier and 4 for the draft model on two cores
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from models import tokenizer
from models.export import export
from models.recipe import RECIPES
from models.train import HERE, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE / "checkpoints", help="checkpoints (not in git)")
    parser.add_argument("--into", type=Path, default=HERE, help="folder of the GGUFs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("names", nargs="*", help="models to make; both by default")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    words = HERE / "tokenizer.json"
    if not words.exists():
        tokenizer.train(words)
    for name in arguments.names or RECIPES:
        recipe = RECIPES[name]
        net = train(recipe, arguments.folder, arguments.device)
        export(net.state_dict(), recipe.shape, name, words, arguments.into / f"{name}.gguf")


if __name__ == "__main__":
    main()

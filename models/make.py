"""Makes the bundled pair in two stages: tokenizer, verifier, draft model, GGUFs. Resumes where it was interrupted.

python -m models.make                          # from nothing: two hours for the verifier, 5 minutes for the draft model
python -m models.make --continue-from FOLDER   # the second stage alone, from the GGUFs in FOLDER: 20 minutes and 1

The times are those of two cores.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import distributed, multiprocessing

from models import tokenizer
from models.export import export, weights_of
from models.recipe import AGAIN, RECIPES
from models.train import HERE, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE / "checkpoints", help="checkpoints (not in git)")
    parser.add_argument("--into", type=Path, default=HERE, help="folder of the GGUFs")
    parser.add_argument("--continue-from", type=Path, metavar="FOLDER", help="folder of the first stage's GGUFs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1, help="that share the rows of each batch")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each process")
    parser.add_argument("names", nargs="*", help="models to make; both by default")
    arguments = parser.parse_args()
    if not (HERE / "tokenizer.json").exists():
        tokenizer.train(HERE / "tokenizer.json")
    if arguments.processes == 1:
        make(0, arguments)
    else:
        multiprocessing.spawn(make, (arguments,), arguments.processes)


def make(rank: int, arguments: argparse.Namespace) -> None:
    """Train and export the models, as one of `arguments.processes` processes."""
    torch.set_num_threads(arguments.threads)
    words = HERE / "tokenizer.json"
    if arguments.processes > 1:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        meeting = f"file://{arguments.folder.resolve()}/processes-{os.getppid()}"
        distributed.init_process_group("gloo", meeting, rank=rank, world_size=arguments.processes)
    for name in arguments.names or RECIPES:
        recipe = RECIPES[name]
        if arguments.continue_from:
            weights = weights_of(arguments.continue_from / f"{name}.gguf", recipe.shape)
        else:
            weights = train(recipe, arguments.folder, arguments.device).state_dict()
        net = train(AGAIN[name], arguments.folder, arguments.device, weights=weights)
        if rank == 0:
            export(net.state_dict(), recipe.shape, name, words, arguments.into / f"{name}.gguf")


if __name__ == "__main__":
    main()

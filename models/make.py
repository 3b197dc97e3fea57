"""Makes a pair: tokenizer, verifier, draft model, GGUFs. Resumes where it was interrupted.

python -m models.make                         # the home pair: two hours for the verifier, 5 minutes for the draft model
python -m models.make --continue-from FOLDER  # its second stage alone, from the GGUFs in FOLDER
python -m models.make --pair code             # the code pair

The times are those of two cores.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import distributed, multiprocessing

from models.export import export, learned_tokenizer, weights_of
from models.pairs import PAIRS
from models.train import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, default="home")
    parser.add_argument("--folder", type=Path, help="checkpoints (not in git); beside the pair by default")
    parser.add_argument("--into", type=Path, help="folder of the GGUFs; the pair's by default")
    parser.add_argument("--continue-from", type=Path, metavar="FOLDER", help="folder of the first stage's GGUFs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1, help="that share the rows of each batch")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each process")
    parser.add_argument("names", nargs="*", help="models to make; both by default")
    arguments = parser.parse_args()
    PAIRS[arguments.pair].tokenizer()
    if arguments.processes == 1:
        make(0, arguments)
    else:
        multiprocessing.spawn(make, (arguments,), arguments.processes)


def make(rank: int, arguments: argparse.Namespace) -> None:
    """Train and export the models, as one of `arguments.processes` processes."""
    torch.set_num_threads(arguments.threads)
    pair = PAIRS[arguments.pair]
    folder, into = arguments.folder or pair.folder / "checkpoints", arguments.into or pair.folder
    if arguments.processes > 1:
        folder.mkdir(parents=True, exist_ok=True)
        meeting = f"file://{folder.resolve()}/processes-{os.getppid()}"
        distributed.init_process_group("gloo", meeting, rank=rank, world_size=arguments.processes)
    for name in arguments.names or pair.recipes:
        recipe = pair.recipes[name]
        if arguments.continue_from:
            weights = weights_of(arguments.continue_from / f"{name}.gguf", recipe.shape)
        else:
            weights = train(pair, recipe, folder, arguments.device).state_dict()
        if again := pair.again.get(name):
            weights = train(pair, again, folder, arguments.device, weights=weights).state_dict()
        if rank == 0:
            tokenizer = learned_tokenizer(pair.folder / "tokenizer.json")
            export(weights, recipe.shape, f"edgellm {name}", tokenizer, into / f"{name}.gguf")


if __name__ == "__main__":
    main()

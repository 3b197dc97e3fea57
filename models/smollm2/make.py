"""Makes SmolLM2's draft model from SmolLM2 alone: it writes, the draft model learns from that, and is exported.

    python -m models.smollm2.make VERIFIER.gguf FOLDER

FOLDER gets the shards and the checkpoint, from which an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch

from edgellm.engine.gguf.writer import requantise
from models.export import export, tokenizer_of
from models.smollm2.distil import distil
from models.smollm2.recipe import DRAFT
from models.smollm2.synthesis import synthesise

TYPES = ("Q5_0", {"token_embd|^output.weight": "Q4_K"})
"""The types of the weights, of the blocks and of the tables: the file has less than 20 MB with them, 34 MB as Q8_0."""
CONTEXT = 8_192
"""SmolLM2's own context, in tokens: the pair has the smaller one of its two models."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verifier", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path, default=Path(__file__).with_name("draft.gguf"))
    parser.add_argument("--tokens", type=int, default=1_000_000, help="that SmolLM2 writes")
    parser.add_argument("--stop", type=int, metavar="STEP", help="export what has been learned by then")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    synthesise(arguments.verifier, arguments.folder, arguments.tokens, arguments.threads)
    net = distil(arguments.verifier, arguments.folder, arguments.stop)
    tokenizer = tokenizer_of(arguments.verifier)
    whole = arguments.folder / "draft.gguf"
    shape = replace(DRAFT.shape, context=CONTEXT)
    export(net.state_dict(), shape, "SmolLM2 draft", tokenizer, whole)
    requantise(whole, arguments.into, *TYPES)


if __name__ == "__main__":
    main()

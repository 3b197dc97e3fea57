"""A head that was trained to draft for a verifier (EAGLE-3, Li and others, 2025), in a file of its own.

It reads the rows that enter three of the verifier's layers. An encoder makes one row of the three, and a single layer
with attention reads that row beside the next token's embedding. Embeddings and LM head are its own or the verifier's;
its own LM head may know fewer tokens than the verifier, and then says which (`d2t`).
"""

from functools import partial

import numpy as np

from edgellm.engine import native
from edgellm.engine.gguf.header import TENSOR_TYPES, GgufHeader
from edgellm.engine.gguf.reader import ModelFile
from edgellm.engine.gguf.writer import PADDING, token_count, token_texts
from edgellm.engine.hardware import Hardware
from edgellm.engine.llama_api import NativeContext, NativeSpec, load_model, open_context
from edgellm.engine.speculators.speculator import (
    WINDOW,
    Speculator,
    SpeculatorModel,
    rows_at,
    spec_beside,
    state_functions,
)
from edgellm.engine.trial.probe import EAGLE3
from edgellm.errors import ModelUnsupported

VERIFIERS = frozenset((
    "gemma4", "gpt-oss", "hunyuan-dense", "lfm2", "lfm2moe", "llama", "mimo2", "minimax-01", "minimax-m2", "qwen3",
    "qwen35", "qwen35moe", "qwen3moe", "qwen3next",
))  # fmt: skip
"""Architectures whose graphs hand over the rows that enter a layer, as our tests compare. For most others llama.cpp
ends the process; not tried are bailingmoe3, deepseek4, hunyuan_vl, muse-glimmer, nanbeige, nemotron_h,
nemotron_h_moe and qwen4exp."""
LAST_OUTPUT = frozenset(("gpt-oss",))
"""Architectures of `VERIFIERS` that also hand over the last layer's output, as the input of a further layer."""
_LAYERS = 3
_D2T = "d2t"


def target_layers(header: GgufHeader) -> tuple[int, ...]:
    """Return the verifier's layers whose inputs a head reads; none where its header does not say."""
    found = header.metadata.get(f"{header.architecture}.target_layers")
    return found if isinstance(found, tuple) and all(isinstance(layer, int) for layer in found) else ()


def window_bytes(header: GgufHeader) -> int:
    """Return the most bytes of states that a head keeps of a sequence: 4 for a number, in 1.25 windows."""
    return 5 * WINDOW * len(target_layers(header)) * header.number("target_hidden_size")


def misfit(head: GgufHeader, verifier: GgufHeader) -> str:
    """Return why a head cannot draft for a verifier, by their headers; "" if it can."""
    if verifier.architecture not in VERIFIERS:
        return f"llama.cpp hands over no states of {verifier.architecture or 'this architecture'} inside the model"
    count, layers = verifier.text_layers, target_layers(head)
    if len(layers) != _LAYERS or head.text_layers != 1:
        return f"it reads {len(layers)} layers with {head.text_layers} of its own; llama.cpp knows {_LAYERS} with one"
    last = count if verifier.architecture in LAST_OUTPUT else count - 1
    if wrong := [layer for layer in layers if not 0 <= layer <= last]:
        return f"it reads layer {wrong[0]}, and of the {count} layers of the verifier those up to {last} can be read"
    width, read = verifier.number("embedding_length"), head.number("target_hidden_size")
    if read != width:
        return f"it reads states of {read} numbers, and the verifier's have {width}"
    tokens, known = token_count(verifier), token_count(head)
    if known != tokens:
        return f"its vocabulary has {known} tokens, and the verifier's {tokens}"
    own, heads = head.number("embedding_length"), max(1, head.number("attention.head_count"))
    keys, values = (head.number(f"attention.{part}_length", own // heads) for part in ("key", "value"))
    if keys != values:
        return f"its attention has keys of {keys} numbers and values of {values}, which must be as many"
    return _misfit_of_tensors(head, own=own, width=width, tokens=tokens)


def _misfit_of_tensors(head: GgufHeader, *, own: int, width: int, tokens: int) -> str:
    """Return what is wrong with embeddings and LM head of a head of the width `own`."""
    embedding, output, map_ = (head.tensor(name) for name in ("token_embd.weight", "output.weight", _D2T))
    drafted = tokens if map_ is None else map_.n_elements
    if own != width and (embedding is None or output is None):
        part = "embeddings" if embedding is None else "LM head"
        return f"it uses the verifier's {part}, whose rows have {width} numbers, and its own {own}"
    if embedding is not None and embedding.shape[-1] != tokens:
        return f"it has embeddings of {embedding.shape[-1]} tokens, and a vocabulary of {tokens}"
    if output is None and drafted != tokens:
        return f"it drafts {drafted} tokens, and uses the verifier's LM head of {tokens}"
    if map_ is not None and TENSOR_TYPES[map_.kind][0] != "I64":
        return f"its tokens are named in {TENSOR_TYPES[map_.kind][0]} numbers, and llama.cpp reads I64"
    return ""


class Eagle3Head(Speculator):
    """An EAGLE-3 head beside one context of its verifier."""

    def __init__(
        self, model: native.Owned, header: GgufHeader, n_layer: int, trunk: NativeContext, spec: NativeSpec
    ) -> None:
        """Open a head, whose file has this `header`. Layer `n_layer` stands for the last layer's output. Raises
        EngineFailed: llama.cpp cannot reserve the memory."""
        self._layers, self._n_layer = target_layers(header), n_layer
        owned = open_context(model, spec_beside(spec), beside=trunk.owned)
        # llama.cpp computes logits of all rows but returns the first rows' results: the last row is computed alone.
        states = len(self._layers) * header.number("target_hidden_size")
        super().__init__(trunk, spec, owned, states=states, inputs=header.number("embedding_length"), every=False)
        for layer in self._layers:
            if layer < self._n_layer:
                self._functions.keep_inputs(trunk.owned.pointer, layer, True)
            else:
                self._functions.keep(trunk.owned.pointer, True, False)

    def _addresses(self) -> list[int | None]:
        known, pointer = self._functions, self._trunk.owned.pointer
        return [
            known.inputs(pointer, layer) if layer < self._n_layer else known.states(pointer) for layer in self._layers
        ]

    def _fill(self, seq: int, start: int, n: int) -> None:
        """Fill the inputs with the encoded states; the encoder only checks positions."""
        self._batch.put(0, seq, start, self._ids[seq, :n], n)
        states = self._windows[seq].of(start - 1, start - 1 + n)
        self._context.encode(self._batch.embeddings(states), n)
        encoded = self._functions.states(self._context.owned.pointer)
        self._inputs[:n] = rows_at(encoded, n, self._inputs.shape[1])


def loaded(file: ModelFile, verifier: ModelFile, hardware: Hardware, *, dry: bool = False) -> SpeculatorModel:
    """Load a head that fits `verifier`; `dry` as for `Model.load`. Raises ModelUnsupported: llama.cpp cannot use it."""
    owned = load_model(file.path, hardware, dry=dry)
    opened = partial(Eagle3Head, owned, file.header, verifier.header.text_layers)
    return SpeculatorModel(EAGLE3, f"the EAGLE-3 head {file.path.name}", opened)


def check_eagle3(file: ModelFile, verifier: ModelFile) -> None:
    """Raise ModelUnsupported where a head cannot draft for a verifier."""
    why = misfit(file.header, verifier.header)
    if not why and state_functions() is None:
        why = "this build of llama.cpp does not export the functions for it"
    if why := why or _other_tokens(file, verifier) or _wild_map(file):
        raise ModelUnsupported(
            f"The EAGLE-3 head {file.path.name} does not fit the verifier {verifier.path.name}: {why}.",
            "Name the verifier that it was trained for, or leave the head out.",
        )


def _other_tokens(file: ModelFile, verifier: ModelFile) -> str:
    """Return how the two vocabularies differ; "" where they are equal up to padding."""
    pairs = zip(token_texts(file), token_texts(verifier), strict=True)
    different = [number for number, (one, two) in enumerate(pairs) if one != two]
    return (
        f"{len(different)} of its tokens are others, from token {different[0]} on" if len(different) > PADDING else ""
    )


def _wild_map(file: ModelFile) -> str:
    """Return what is wrong with the ids of the tokens that a head drafts: llama.cpp ends the process over them."""
    tensor = file.header.tensor(_D2T)
    if tensor is None:
        return ""
    ids = np.fromfile(file.paths[tensor.part], dtype="<i8", count=tensor.n_elements, offset=tensor.offset)
    wild = ids[(ids < 0) | (ids >= token_count(file.header))]
    return f"it drafts token {wild[0]}, which does not exist" if len(wild) else ""

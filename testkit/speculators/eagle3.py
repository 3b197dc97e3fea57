"""Write a small EAGLE-3 head for a model.

The head has the structure of real ones: an encoder of the inputs of three layers, and a layer that attends to the
encoded row beside the next token's embedding. A useful one is right as often as its verifier predicts by the last token
alone: its attention looks at its own position, and passes the embedding on to the verifier's LM head. With `own` it has
embeddings and an LM head of its own, which knows three quarters of the tokens (`d2t`); without, it uses the verifier's.
"""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from testkit.gguf.architectures import finish, tokenizer_of
from testkit.gguf.reader import read_gguf

Floats = npt.NDArray[np.float32]
HEADS = 4
SHARPNESS = 3.0  # of attention: a row's own position has most of it
KNOWN = 0.75  # of the tokens, that a head with an LM head of its own drafts
EPSILON = 1e-5


def write(
    path: Path, verifier: Path, *, useful: bool = True, own: bool = False, norms: bool = False,
    layers: Sequence[int] = (), width: int = 0, seed: int = 0,
) -> None:  # fmt: skip
    """Write a head for the model at `verifier`. `norms`: with the two norms that some heads have more than others.

    `layers` are those whose inputs it reads: the second, the middle one and the last by default. `width` is its own, as
    the verifier's by default.
    """
    model = read_gguf(verifier)
    weights = {tensor.name: tensor for tensor in model.tensors}
    arch = str(model.fields["general.architecture"].contents())
    embeddings = np.array(weights["token_embd.weight"].data, dtype=np.float32)
    states, count = embeddings.shape[1], int(model.fields[f"{arch}.block_count"].contents())
    width = width or states
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_file_type(0)
    numbers = {
        "block_count": 1, "context_length": 1024, "embedding_length": width, "feed_forward_length": 2 * width,
        "attention.head_count": HEADS, "attention.head_count_kv": HEADS, "target_hidden_size": states,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"eagle3.{key}", value)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", EPSILON)
    writer.add_array("eagle3.target_layers", list(layers) or [1, count // 2, count - 1])
    writer.add_bool("eagle3.norm_before_residual", norms)
    writer.add_bool("eagle3.norm_before_fc", norms)
    for entry in tokenizer_of(verifier):
        writer.add_key_value(entry.name, entry.value, entry.kind, entry.of)
    for name, tensor in _layer(rng, width, states, useful=useful, norms=norms).items():
        writer.add_tensor(name, tensor)
    norm = weights.get("output_norm.weight")
    same = norm is not None and width == states
    writer.add_tensor("output_norm.weight", np.array(norm.data) if same and norm is not None else _norm(rng, width))
    if own:
        known = np.sort(rng.permutation(len(embeddings))[: int(KNOWN * len(embeddings))])
        output = np.array(weights.get("output.weight", weights["token_embd.weight"]).data, dtype=np.float32)
        if width != states:
            embeddings, output = (_matrix(rng, len(rows), width) for rows in (embeddings, output))
        writer.add_tensor("token_embd.weight", embeddings)
        writer.add_tensor("output.weight", output[known])
        writer.add_tensor("d2t", known.astype(np.int64))
    finish(writer)


def _layer(rng: np.random.Generator, width: int, states: int, *, useful: bool, norms: bool) -> dict[str, Floats]:
    """Return the tensors of the encoder and the layer."""
    found = {
        "fc.weight": _matrix(rng, width, 3 * states, 0.1 if useful else 1.0),
        "blk.0.attn_norm.weight": np.ones(width, dtype=np.float32),
        "blk.0.attn_norm_2.weight": _norm(rng, width),
        "blk.0.attn_q.weight": _matrix(rng, width, 2 * width),
        "blk.0.attn_k.weight": _matrix(rng, width, 2 * width),
        "blk.0.attn_v.weight": _matrix(rng, width, 2 * width),
        "blk.0.attn_output.weight": _matrix(rng, width, width),
        "blk.0.ffn_norm.weight": _norm(rng, width),
        "blk.0.ffn_gate.weight": _matrix(rng, 2 * width, width),
        "blk.0.ffn_up.weight": _matrix(rng, 2 * width, width),
        "blk.0.ffn_down.weight": _matrix(rng, width, 2 * width, 0.1),
    }
    if norms:
        found["enc.output_norm.weight"] = _norm(rng, 3 * states)
    if useful:
        identity = np.eye(width, 2 * width, dtype=np.float32)  # of the embedding
        for part in ("q", "k"):
            found[f"blk.0.attn_{part}.weight"] = SHARPNESS * identity
        found["blk.0.attn_v.weight"] = identity
        found["blk.0.attn_output.weight"] = 4.0 * np.eye(width, dtype=np.float32)
    return found


def _matrix(rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> Floats:
    return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain * columns**-0.5)


def _norm(rng: np.random.Generator, width: int) -> Floats:
    return np.float32(1.0) + np.float32(0.1) * rng.standard_normal(width, dtype=np.float32)

"""The abilities of a model in edgellm, from its header alone: before anything is loaded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from edgellm.engine import ModelFile, check_cuttable, mtp_obstacle
from edgellm.engine.gguf.cuttable import cut_points
from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.gguf.writer import PADDING, TOKENS, token_texts
from edgellm.engine.graph_hooks import attention_bytes
from edgellm.engine.hardware import N_BATCH
from edgellm.engine.memory_fit import default_context, free_memory, trained_positions
from edgellm.engine.model import SPECULATORS, drafter_kind, is_eagle3, speculator_module
from edgellm.engine.trial.probe import EAGLE3
from edgellm.errors import EdgeError, MemoryShort, ModelUnsupported
from edgellm.layer_range import ranges
from edgellm.spec.ngram.sources import BYTES_A_TOKEN
from edgellm.spec.params import mechanism
from edgellm.storage.model_files import list_models

MOST_OF_VERIFIER = 0.5
"""The largest useful draft model, as a share of the verifier's bytes."""
ALONE = "no model here has its tokenizer and at most half of its size"
"""Why a verifier writes alone."""


@dataclass(frozen=True, slots=True)
class Ability:
    """A feature that works with a model, or not, and why or how."""

    name: str
    able: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ContextMemory:
    """Bytes of a context of `tokens` beside the weights: at most `cache` of keys and values in 16 bits; about `index`
    for copies; `attention` while an importance gate or a profile captures it."""

    tokens: int
    cache: int
    index: int
    attention: int


def context_memory(header: GgufHeader) -> list[ContextMemory]:
    """Return the memory of the default context, and of the longest that fits. Nothing without a length in the header,
    or room for the weights, and for a model that only drafts for another."""
    trained = trained_positions(header)
    if drafter_kind(header) or trained is None or (longest := _longest(header, trained)) < 1:
        return []
    heads = bool(header.attention_layers)
    return [
        ContextMemory(
            tokens, tokens * header.cache_bytes_per_token, tokens * BYTES_A_TOKEN,
            attention_bytes(header, tokens, N_BATCH) if heads else 0,
        )
        for tokens in sorted({min(longest, default_context(header, trained)[0]), longest})
    ]  # fmt: skip


def _longest(header: GgufHeader, trained: int) -> int:
    """Return how many tokens of a context fit into the free memory beside the weights, up to `trained`."""
    free = free_memory() - header.weight_bytes
    return max(0, min(trained, free // (header.cache_bytes_per_token + BYTES_A_TOKEN)))


def abilities(file: ModelFile, others: Mapping[str, ModelFile] = MappingProxyType({})) -> list[Ability]:
    """Return the abilities of a model; `others` are the models that it might be paired with, by name."""
    header = file.header
    if is_eagle3(header):
        return [_chat(header), _head(file, others)]
    why = mtp_obstacle(header)
    how = "its last layer predicts further tokens (MTP): it drafts where that is faster"
    return [
        _chat(header), _pair(file, others), Ability("MTP drafts", not why, why or how),
        _importance(header), *_layers(header), _context(header),
    ]  # fmt: skip


def _chat(header: GgufHeader) -> Ability:
    if kind := drafter_kind(header):
        used = "" if is_eagle3(header) else ", and edgellm does not use it"
        return Ability("chat", False, f"it is {kind}{used}: it drafts from another model's states")
    if header.metadata.get(TOKENS) is None:
        return Ability("chat", False, "the file carries no tokenizer: it is a part of a model")
    if not header.metadata.get("tokenizer.chat_template"):
        return Ability("chat", False, "the file has no chat template: it continues texts only")
    return Ability("chat", True, "it has a tokenizer and a chat template")


def other_models(path: Path) -> dict[str, ModelFile]:
    """Return the models of `edgellm ls` that can be read, except that at `path`, by name."""
    found = {}
    for model in list_models():
        with suppress(EdgeError):
            if model.path.resolve() != path.resolve():
                found[model.name] = ModelFile.open(model.path)
    return found


def choose_draft(path: Path, check_fits: Callable[[str], object]) -> tuple[str | None, str]:
    """Return the name of the model, or EAGLE-3 head, here that drafts for the one at `path`, and why; else None, and
    why there is none. `check_fits` raises MemoryShort where both do not fit."""
    reason = ALONE
    for name, why in _drafts_for(ModelFile.open(path), other_models(path)):
        try:
            check_fits(name)
            return name, why
        except MemoryShort as error:
            reason = error.what.rstrip(".")
    return None, reason


def _drafts_for(file: ModelFile, others: Mapping[str, ModelFile]) -> Iterator[tuple[str, str]]:
    """Yield the names of `others` that can draft for a model, each with the reason: EAGLE-3 heads, then the smallest
    with the same tokenizer and at most half of its bytes."""
    yield from ((head, "it is an EAGLE-3 head for it") for head in heads_for(file, others))
    shares = {name: one.header.file_size / file.header.file_size for name, one in others.items()}
    small = {name: one for name, one in others.items() if shares[name] <= MOST_OF_VERIFIER and _chat(one.header).able}
    for name in sorted(_partners(file, small), key=shares.__getitem__)[:1]:
        yield name, f"it has its tokenizer and {shares[name]:.0%} of its size"


def heads_for(file: ModelFile, others: Mapping[str, ModelFile]) -> list[str]:
    """Return the names of EAGLE-3 heads for a model in `others`."""
    return sorted(name for name, other in others.items() if is_eagle3(other.header) and _fits(other, file))


def _fits(head: ModelFile, verifier: ModelFile) -> bool:
    try:
        speculator_module(EAGLE3).check_eagle3(head, verifier)
    except ModelUnsupported:
        return False
    return True


def same_tokenizer(file: ModelFile, other: ModelFile) -> bool:
    """Return whether two models have the same tokens, up to padding at the end of one."""
    return _same(token_texts(file), token_texts(other))


def _same(tokens: Sequence[bytes], others: Sequence[bytes]) -> bool:
    shorter = min(len(tokens), len(others))
    return shorter > 0 and abs(len(tokens) - len(others)) <= PADDING and tokens[:shorter] == others[:shorter]


def _partners(file: ModelFile, others: Mapping[str, ModelFile]) -> list[str]:
    """Return the names of the whole models in `others` with the same tokenizer as a model."""
    own = token_texts(file)
    whole = {name: one for name, one in others.items() if one.path != file.path and not drafter_kind(one.header)}
    return [name for name, one in whole.items() if _same(own, token_texts(one))]


def _pair(file: ModelFile, others: Mapping[str, ModelFile]) -> Ability:
    """Return whether there are models to pair a model with: of its tokenizer, else of others."""
    drafts, verifiers = list[str](), list[str]()
    for name in sorted(_partners(file, others)):
        (drafts if others[name].header.file_size < file.header.file_size else verifiers).append(name)
    roles = {"the EAGLE-3 head": heads_for(file, others), "the draft model": drafts, "the verifier": verifiers}
    if any(roles.values()):
        found = (f"with {role} {', '.join(names)}" for role, names in roles.items() if names)
        return Ability("pair", True, "; ".join(found))
    names = [name for name, other in others.items() if other.path != file.path and _chat(other.header).able]
    if not names or not _chat(file.header).able:
        return Ability("pair", False, "there is no other model here that writes replies")
    several = "models have other tokenizers" if len(names) > 1 else "model has another tokenizer"
    reason = f"with {', '.join(sorted(names))}: the {several}, so drafts are translated, and fewer are accepted"
    return Ability("pair", True, reason)


def _head(file: ModelFile, others: Mapping[str, ModelFile]) -> Ability:
    """Return which of `others` an EAGLE-3 head can draft for."""
    name = "EAGLE-3 drafts"
    if EAGLE3 not in SPECULATORS:
        return Ability(name, False, "this edgellm does not use EAGLE-3 heads")
    layers = ", ".join(map(str, speculator_module(EAGLE3).target_layers(file.header)))
    if fitting := sorted(other for other, model in others.items() if _fits(file, model)):
        return Ability(name, True, f"as the draft model of {', '.join(fitting)}, from the inputs of layers {layers}")
    return Ability(name, False, f"no model here has the width and vocabulary for it, and layers {layers} to read")


def _importance(header: GgufHeader) -> Ability:
    layers = header.attention_layers
    if not layers:
        return Ability("importance gates", False, "it has no attention: use --gate auto or confidence")
    return Ability("importance gates", True, f"{len(layers)} of its {header.text_layers} layers have attention")


def _layers(header: GgufHeader) -> list[Ability]:
    try:
        count, points = check_cuttable(header), cut_points(header)
    except EdgeError as error:
        return [Ability(name, False, error.what) for name in ("early exit", "mesh")]
    reason = f"its {count} layers can be cut apart"
    if len(points) == 1:
        reason = f"its {count} layers differ by their number, and are too few to be cut"
    elif len(points) < count:
        reason = f"its {count} layers can be cut into stages that begin with {_named(points)}"
    mesh = Ability("mesh", len(points) > 1, reason)
    try:
        layers = mechanism("early exit").exit_layers(header)
    except EdgeError as error:
        return [Ability("early exit", False, error.what), mesh]
    return [Ability("early exit", True, f"as a draft model, behind {_named(layers)}"), mesh]


def _named(layers: Sequence[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"


def _context(header: GgufHeader) -> Ability:
    trained = trained_positions(header)
    per_token, free = header.cache_bytes_per_token, free_memory()
    if trained is None:
        return Ability("context", False, "the file does not say for how many tokens it was trained")
    weights = header.weight_bytes
    if weights > free:
        reason = f"its weights take {weights / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        return Ability("context", False, reason)
    chosen = default_context(header, trained)[0]
    cost = f"{per_token / 1e3:.1f} kB a token" if per_token else "the same memory for any length"
    fits = _longest(header, trained)
    return Ability("context", True, f"{chosen} tokens by default; trained for {trained}, {fits} fit here, at {cost}")

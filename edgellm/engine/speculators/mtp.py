"""The layer with which a model predicts further tokens (MTP, next-n; DeepSeek-V3, section 2.2).

llama.cpp computes it in a second context over the same model, from the states that the model's last norm gave.
"""

from functools import partial

from edgellm.engine import native
from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.llama_api import NativeContext, NativeSpec, open_context
from edgellm.engine.native import lib
from edgellm.engine.speculators.speculator import Speculator, SpeculatorModel, StateWindow, spec_beside, state_functions
from edgellm.engine.trial.probe import MTP

STATES_OF_LAST_ROWS = frozenset(("qwen3next", "step35"))
"""Architectures whose MTP graph gives states of rows with logits alone. Other graphs give states of all rows; asked for
rows with logits alone, llama.cpp would copy the first rows instead."""
ARCHITECTURES = frozenset(("qwen35", "qwen35moe", "qwen3next", "glm4moe", "step35", "deepseek2", "deepseek32"))
"""Architectures whose MTP layer our tests try. llama.cpp has eight more: bailingmoe3, cohere2moe, deepseek4, glm-dsa,
glm5-next, hy-v3, mimo2 and nemotron_h_moe."""
SEVERAL = frozenset(("step35",))
"""Architectures of which llama.cpp takes files with several MTP layers; the first layer is used."""
_NEEDED = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")  # llama.cpp ends the process without them


def unusable(header: GgufHeader) -> str:
    """Return why a model's MTP layer cannot be used; "" if it can."""
    count, arch = header.mtp_layers, header.architecture
    if arch not in ARCHITECTURES:
        return f"its layer that predicts further tokens (MTP) is not used: not tried with {arch}"
    if count > 1 and arch not in SEVERAL:
        return f"llama.cpp computes one MTP layer of {arch}, and the file has {count}"
    first = header.text_layers
    if missing := [name for name in _NEEDED if header.tensor(f"blk.{first}.{name}.weight") is None]:
        return f"the file lacks blk.{first}.{missing[0]} of its MTP layer"
    return "" if state_functions() is not None else "this build of llama.cpp does not export the functions for it"


class MtpLayer(Speculator):
    """The MTP layer beside one context."""

    def __init__(self, model: native.Owned, trunk: NativeContext, spec: NativeSpec, *, every: bool) -> None:
        """Open the layer of `model`. `every` as for `Speculator`: see `STATES_OF_LAST_ROWS`. Raises EngineFailed:
        llama.cpp cannot reserve the memory."""
        width = int(lib.llama_model_n_embd_out(model.pointer))
        owned = open_context(model, spec_beside(spec, mtp=True))
        super().__init__(trunk, spec, owned, states=width, inputs=width, every=every)
        self._functions.keep(trunk.owned.pointer, True, False)

    def _addresses(self) -> tuple[int | None]:
        return (self._functions.states(self._trunk.owned.pointer),)

    def _first(self, window: StateWindow) -> int:
        """Return the first position: a text's first token also has a row, with zeros as its state."""
        return window.first + 1 if window.first else 0

    def _fill(self, seq: int, start: int, n: int) -> None:
        window = self._windows[seq]
        if start:
            self._inputs[:n] = window.of(start - 1, start - 1 + n)
        else:
            self._inputs[0] = 0.0
            self._inputs[1:n] = window.of(0, n - 1)


def loaded(owned: native.Owned, architecture: str) -> SpeculatorModel:
    """Return the MTP layer of a loaded model."""
    every = architecture not in STATES_OF_LAST_ROWS
    return SpeculatorModel(MTP, "the model's MTP layer", partial(MtpLayer, owned, every=every))

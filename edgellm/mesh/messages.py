"""The messages between the coordinator and the stages of a mesh."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from edgellm.engine import Floats, Ids
from edgellm.errors import EdgeError
from edgellm.layer_range import LayerRange
from edgellm.rpc.protos.mesh_pb2 import StageLoaded
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.types import Verdict
from edgellm.storage.layer_pieces import LayerPiece

MAX_ROWS = 256
"""The most rows of a micro-batch, which may have one more: longer micro-batches are no faster, and stages wait."""

MAX_BYTES = 8 * 2**20
"""The most bytes of rows in a micro-batch, and of logits in an answer: half of a message."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The task of one stage: these `layers` of the model's `n_layers`.

    `model` is the fingerprint of the whole model in hex, and `pieces` are known pieces of that file: a device
    without the file computes with some of these very pieces, or not at all. Rows have `n_embd` numbers, ids lie below
    `n_vocab`. `sessions` replies of `context` tokens each are held at once. `half`: rows travel as 16-bit floats, not
    32. `n_params`: the whole model's parameters, 0 if unknown. `reproducible`: rows do not depend on how they were
    batched, to the bit.
    """

    model: str
    name: str
    layers: LayerRange
    n_layers: int
    n_embd: int
    n_vocab: int
    context: int
    sessions: int = 4
    half: bool = False
    pieces: tuple[LayerPiece, ...] = ()
    n_params: int = 0
    reproducible: bool = False

    @property
    def rows(self) -> int:
        """Return the most rows of a micro-batch, which surely fit a message."""
        return max(1, min(MAX_ROWS, MAX_BYTES // (4 * self.n_embd)))

    @property
    def ends(self) -> bool:
        """Return whether this is the last stage, which has the head and judges drafts."""
        return self.layers.stop == self.n_layers


class Took(NamedTuple):
    """The seconds for which a stage `held` a micro-batch with a request, and for which it has been `computing` since
    the one before."""

    held: float = 0.0
    computing: float = 0.0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Positions of a session from `start` on, on their way through the stages: as ids (n,), later as rows (n, n_embd).

    They replace everything that the session had from `start` on. `number` grows with every micro-batch of a pipeline.
    If there is a `request`, the last rows are judged: its draft's rows, and the row before them; the stage that it has
    left tells what it `took`.
    """

    session: int
    number: int
    start: int
    data: Ids | Floats
    request: VerifyRequest | None = None
    took: Took = Took()

    @property
    def outputs(self) -> int:
        return 0 if self.request is None else len(self.request.draft) + 1


@dataclass(frozen=True, slots=True)
class StageAnswer:
    """The verdict on the micro-batch with this number. `logits`, (len(draft) + 1, n_vocab), are there if they were
    requested."""

    number: int
    verdict: Verdict
    logits: Floats | None = None
    took: Took = Took()


@dataclass(frozen=True, slots=True)
class Failed:
    """A micro-batch could not be computed. The stage goes on; the session has to start again."""

    number: int
    error: EdgeError


@dataclass(frozen=True, slots=True)
class StageLost:
    """The stage has ended. `blamed`: its device is at fault; else it may be asked again."""

    error: EdgeError
    blamed: bool = True


Event: TypeAlias = StageLoaded | MicroBatch | StageAnswer | Failed | StageLost
"""A stage's output: a `MicroBatch` has the rows for the next stage."""

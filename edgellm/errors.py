"""The errors that edgellm raises.

Every message says what is wrong, with the value, and what to do next. `exit_code` is what the command line returns:
1 for an expected failure, 2 for wrong usage.
"""

import copyreg
from typing import Any

SAME_VERSION = "Run the same version of edgellm on both sides."
"""The next step when two devices do not understand each other."""


def size(count: int) -> str:
    """Format a number of bytes in a suitable unit: 0 B, 12.3 kB, 4.0 MB, 1.2 GB."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"


class EdgeError(Exception):
    """Base class of every error that edgellm raises on purpose."""

    exit_code = 1
    rpc_status = "INTERNAL"
    """The gRPC status with which this error ends the call of another device."""

    def __init__(self, what: str, next_step: str) -> None:
        """`what`: what is wrong, with the value, in one sentence. `next_step`: what to do, in one sentence."""
        super().__init__(f"{what} {next_step}")
        self.what = what
        self.next_step = next_step

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs to restore the error, as `args` are not those of `__init__`."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ProfileStopped(EdgeError):
    """A profile was interrupted; the next step says whether its prompts so far are kept for the next run."""

    exit_code = 130


class InvalidOption(EdgeError):
    """An option, a name or a combination of options is invalid."""

    exit_code = 2


class LlamaCppMissing(EdgeError, ImportError):
    """llama-cpp-python is not installed, or its library cannot be loaded."""


class InputNotText(EdgeError):
    """A prompt, a context file or piped input is not UTF-8."""


class ModelNotFound(EdgeError):
    """There is no such file, alias or cached model."""

    rpc_status = "NOT_FOUND"


class ModelCorrupt(EdgeError):
    """The file is not a GGUF file, or its header contradicts its length."""


class ModelUnsupported(EdgeError):
    """The GGUF file is valid, but llama.cpp or a mechanism of edgellm cannot use it."""


class VocabularyMismatch(EdgeError):
    """Draft model and verifier have different vocabularies. `tokenizer` is the SHA-256 in hex of the one that the
    verifier sends to devices; "" if it sends none."""

    rpc_status = "FAILED_PRECONDITION"

    def __init__(self, what: str, next_step: str, tokenizer: str = "") -> None:
        super().__init__(what, next_step)
        self.tokenizer = tokenizer


class ProfileUnusable(EdgeError):
    """The pair has no profile, or its profile is of other models or of another version."""


class StateDamaged(EdgeError):
    """A file of edgellm is a link, a pipe or a folder, or has foreign content."""

    def __init__(self, what: str, next_step: str, reason: str = "") -> None:
        """`reason`: what is wrong, without the name of the file and a full stop."""
        super().__init__(what, next_step)
        self.reason = reason


class HistoryUnusable(EdgeError):
    """The store of past conversations cannot be read or written, or is not a private file."""


class ConversationTooLong(HistoryUnusable):
    """The conversation exceeds the stored size of one conversation."""


class ConversationChanged(EdgeError):
    """The conversation was changed or removed since it was read; writing would undo the change."""


class PlanImpossible(EdgeError):
    """The devices together cannot hold the model."""


class ServiceFailed(EdgeError):
    """The system's manager of services is missing, or refuses a request."""


class PromptTooLong(EdgeError):
    """The prompt does not fit the context; raised before the first token."""

    def __init__(self, what: str, next_step: str, tokens: int = 0) -> None:
        """`tokens`: the prompt has at least so many, those of its chat template included."""
        super().__init__(what, next_step)
        self.tokens = tokens

    @classmethod
    def of(cls, tokens: int, most: int, at_least: str = "") -> "PromptTooLong":
        """Return the error of a prompt of `tokens`, or "at least " as many, where `most` fit."""
        length = f"the context length is {most + 1} with the reply"
        what = f"The prompt is too long: {at_least}{tokens} tokens > {most}, as {length}."
        return cls(what, "Shorten the prompt, its context files or the history.", tokens)


class TextRefused(EdgeError):
    """The model's tokenizer fails on a text, or takes too long."""


class ContextFull(EdgeError):
    """A decode would exceed the last position of the context."""

    rpc_status = "OUT_OF_RANGE"


class Stopped(EdgeError):
    """The computation was cancelled."""

    def __init__(self, what: str = "The reply was cancelled.", next_step: str = "Send the prompt again.") -> None:
        super().__init__(what, next_step)


class EngineFailed(EdgeError):
    """llama.cpp failed a call that should have worked."""


class PortTaken(EdgeError):
    """Another program listens on the port."""


class ServerUnreachable(EdgeError):
    """A server that this user runs does not answer, or does not end."""


class PairingRequired(EdgeError):
    """The address is not loopback, and no device is paired."""


class PairingFailed(EdgeError):
    """Pairing failed: a wrong code, an expired one, or an attacker in between. Nothing was changed."""


class NotPaired(EdgeError):
    """The other device is not paired with this one, or no longer."""


class NotPermitted(EdgeError):
    """The device is paired, but lacks this right."""


class IdentityClash(EdgeError):
    """Another device has the identity of this one, from a copy of its files."""


class TrustUnusable(EdgeError):
    """The identity of this device, or its list of paired devices, cannot be read or written."""


class ProtocolError(EdgeError):
    """The other device violated the protocol."""

    rpc_status = "INVALID_ARGUMENT"


class PeerTooOld(ProtocolError):
    """The other device has an older version of the protocol."""

    rpc_status = "FAILED_PRECONDITION"


class PeerTooNew(ProtocolError):
    """The other device has a newer version of the protocol."""

    rpc_status = "FAILED_PRECONDITION"


class VerifierUnavailable(EdgeError):
    """The verifier cannot be asked now."""


class VerifierUnreachable(VerifierUnavailable):
    """The verifier's address does not answer."""


class VerifierLost(VerifierUnavailable):
    """The connection to the verifier is lost, or it makes no progress."""


class MeshBroken(VerifierLost):
    """The remaining devices of a mesh do not hold the whole model; the next step says what they lack."""


class VerifierBusy(VerifierUnavailable):
    """The verifier accepts no further request; try again after `seconds`, as it asked."""

    def __init__(self, what: str, next_step: str, seconds: float = 1.0) -> None:
        super().__init__(what, next_step)
        self.seconds = seconds


class VerifierSlow(VerifierLost):
    """The verifier has not answered within the time limit for a verdict."""


class DeviceStuck(EdgeError):
    """A device does not read the messages of the verifier."""

    rpc_status = "RESOURCE_EXHAUSTED"


class PullFailed(EdgeError):
    """A download failed; the part that has arrived is kept."""


class DiskFull(EdgeError):
    """The disk is full; the part that has arrived is kept."""

    rpc_status = "RESOURCE_EXHAUSTED"


class LayersRefused(EdgeError):
    """A layer store refuses layers: the store is full, or the layers differ from the announced ones."""

    rpc_status = "INVALID_ARGUMENT"


class LayersCorrupt(LayersRefused):
    """The arrived layers differ from the announced ones; none were kept."""

    rpc_status = "DATA_LOSS"


class StoreFull(LayersRefused):
    """The layer store would exceed its size limit."""

    rpc_status = "RESOURCE_EXHAUSTED"


class StoreBusy(LayersRefused):
    """Another process is changing the layer store."""

    rpc_status = "ABORTED"


class LayersMissing(EdgeError):
    """Layers of a model are missing from this store, or incomplete."""

    rpc_status = "NOT_FOUND"


class DeviceLost(EdgeError):
    """The connection to a device is lost, or it makes no progress."""

    rpc_status = "DEADLINE_EXCEEDED"


class MeasureFailed(EdgeError):
    """A device or a link could not be measured."""

    rpc_status = "OUT_OF_RANGE"


class MemoryShort(EdgeError):
    """A device has too little memory for its layers."""

    rpc_status = "FAILED_PRECONDITION"

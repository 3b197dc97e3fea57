"""Everything that can go wrong, by name.

Every message says what is wrong, with the value, and what to do next. `exit_code` is what the command line returns:
1 for an expected failure, 2 for wrong usage.
"""

from __future__ import annotations


class EdgeError(Exception):
    """Base class of every error that edgellm raises on purpose."""

    exit_code = 1

    def __init__(self, what: str, next_step: str) -> None:
        """`what` is wrong (one sentence, with the value), and the `next_step` that mends it (one sentence)."""
        super().__init__(f"{what} {next_step}")
        self.what = what
        self.next_step = next_step


class InvalidOption(EdgeError):
    """An option, a name or a combination of options that cannot be meant."""

    exit_code = 2


class InputNotText(EdgeError):
    """A prompt, a context file or piped input is not UTF-8."""


class ModelNotFound(EdgeError):
    """No such file, alias or cached model."""


class ModelCorrupt(EdgeError):
    """The file is not a GGUF, or its header does not agree with its length."""


class ModelUnsupported(EdgeError):
    """A sound GGUF that llama.cpp, or a mechanism of ours, cannot use."""


class VocabularyMismatch(EdgeError):
    """Draft model and verifier do not share one vocabulary."""


class ProfileUnusable(EdgeError):
    """There is no profile of the pair, or one of other models or of another version."""


class StateDamaged(EdgeError):
    """A file of edgellm's own is a link, a pipe or a folder, or holds something else than edgellm writes there."""

    def __init__(self, what: str, next_step: str, reason: str = "") -> None:
        """`reason`: what is wrong, without the file's name and a full stop."""
        super().__init__(what, next_step)
        self.reason = reason


class HistoryUnusable(EdgeError):
    """The store of past conversations cannot be read or written, or is not a private file of its own."""


class PlanImpossible(EdgeError):
    """The devices together do not hold the model."""


class ConfigUnusable(EdgeError):
    """The file of settings, or a variable that is one, has something in it that cannot be meant."""

    exit_code = 2


class FleetUnreadable(EdgeError):
    """A file of devices that is no such file, or has something in it that cannot be meant."""

    exit_code = 2


class PromptTooLong(EdgeError):
    """The prompt does not fit the context; said before the first token."""


class TextRefused(EdgeError):
    """A text that the model's tokenizer fails on, or takes too long over."""


class ContextFull(EdgeError):
    """A decode was asked for beyond the context's last position."""


class Stopped(EdgeError):
    """Somebody wished that the computation ends, and it has."""

    def __init__(self, what: str = "The reply was stopped.", next_step: str = "Ask again for a whole one.") -> None:
        super().__init__(what, next_step)


class EngineFailed(EdgeError):
    """llama.cpp refused or failed a call that should have worked."""


class PortTaken(EdgeError):
    """Something else already listens there."""


class PairingRequired(EdgeError):
    """The address is not loopback, and nobody is paired."""


class PairingFailed(EdgeError):
    """Two devices were not paired: a wrong code, a closed window, or somebody in between. Nothing was changed."""


class NotPaired(EdgeError):
    """The other side of a link is not a device that this one trusts, or no longer."""


class NotPermitted(EdgeError):
    """The device is paired, and has not been granted this right."""


class IdentityClash(EdgeError):
    """Another device has the identity of this one: somebody has copied its files."""


class TrustUnusable(EdgeError):
    """This device's identity, or its list of paired devices, cannot be read or written."""


class ProtocolError(EdgeError):
    """The other side sent something that the contract does not allow."""


class PeerTooOld(ProtocolError):
    """The other device speaks an older version of the contract."""


class PeerTooNew(ProtocolError):
    """The other device speaks a newer version of the contract."""


class VerifierUnavailable(EdgeError):
    """The verifier cannot be asked now."""


class VerifierUnreachable(VerifierUnavailable):
    """The verifier's address does not answer."""


class VerifierLost(VerifierUnavailable):
    """The verifier was there and is gone, or no longer makes progress."""


class MeshBroken(VerifierLost):
    """The devices that are left of a mesh do not hold the model; says what would be needed."""


class VerifierBusy(VerifierUnavailable):
    """The verifier is there and has no room for another request; it has said when to ask again, in `seconds`."""

    def __init__(self, what: str, next_step: str, seconds: float = 1.0) -> None:
        super().__init__(what, next_step)
        self.seconds = seconds


class VerifierSlow(VerifierLost):
    """The verifier is there, and has not answered within the time that this device waits for one verdict."""


class DeviceStuck(EdgeError):
    """A device does not read what the verifier has for it."""


class PullFailed(EdgeError):
    """A model could not be fetched; what has arrived is kept."""


class DiskFull(EdgeError):
    """No space is left on the disk; what has arrived is kept."""


class LayersRefused(EdgeError):
    """A store of layers does not take what it is offered: no room for it, or it is not what was announced."""


class LayersCorrupt(LayersRefused):
    """What arrived is not what was announced; nothing of it was kept."""


class StoreFull(LayersRefused):
    """The store's limit leaves no room."""


class StoreBusy(LayersRefused):
    """Somebody else is changing the store."""


class LayersMissing(EdgeError):
    """Layers of a model are not in this store, or not whole."""


class DeployFailed(EdgeError):
    """Layers could not be brought to a device; what has arrived there is kept."""


class DeviceLost(EdgeError):
    """A device was there and is gone, or no longer makes progress."""


class MeasureFailed(EdgeError):
    """A device or a link could not be measured."""


class MemoryShort(EdgeError):
    """A device has no memory for what it is asked to hold."""

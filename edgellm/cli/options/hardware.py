"""The options for hardware: how models are loaded and computed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from edgellm.cli.options.records import dashed
from edgellm.errors import InvalidOption
from edgellm.flags import flag

if TYPE_CHECKING:
    from edgellm.engine.hardware import Hardware

DRAFT, VERIFIER = "draft", "verifier"
PLANNING = ("gpu_layers", "device", "tensor_split", "threads", "ctx_size", "batch_size", "cache_type", "flash_attn")
"""The options that a plan for several devices depends on."""
_SWITCH = {"on": True, "off": False}
Values = tuple[str, ...]


def _hardware(text: str, metavar: str, shown: str, refused: str = "") -> Any:
    return flag((), text, metavar, panel="Hardware", shown=shown, refused=refused)


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """The options as they were given: each holds for both models, or, as draft=VALUE or verifier=VALUE, for one."""

    gpu_layers: Values = _hardware(
        "Layers on graphics cards. This and the options below also hold for one model alone: draft=VALUE or "
        "verifier=VALUE; give an option twice for both.", "auto|all|N", "as many as fit",
    )  # fmt: skip
    device: Values = _hardware("Graphics cards to use; edgellm doctor lists them.", "NAME/NAME", "all")
    tensor_split: Values = _hardware(
        "Shares of the model for each graphics card, such as 3/1.", "N/N", "by free memory"
    )
    threads: Values = _hardware("Threads of a decode on the processor.", "N", "one per performance core")
    ctx_size: Values = _hardware("Tokens of a prompt and its reply together.", "N", "4096 to 32768, by free memory")
    batch_size: Values = _hardware("Tokens of a prompt that are computed at once.", "N", "512")
    cache_type: Values = _hardware("Type of the keys and values.", "f16|q8_0|q4_0", "f16")
    flash_attn: Values = _hardware("Flash attention.", "auto|on|off", "where it is faster")
    mlock: Values = _hardware("Keep the weights in memory.", "on|off", "off")

    @property
    def given(self) -> dict[str, Values]:
        """Return the options that were given, by their names."""
        return {one.name: values for one in fields(self) if (values := getattr(self, one.name))}

    def words(self) -> list[str]:
        """Return the options as words of a command line."""
        return [word for name, texts in self.given.items() for text in texts for word in (dashed(name), text)]

    def of(self, role: str) -> Hardware:
        """Return the hardware of the draft model or the verifier. Raise InvalidOption for a value that does not
        exist."""
        from edgellm.engine.hardware import ALL_LAYERS, Hardware

        def value(name: str, *, number: bool = False, **words: Any) -> Any:
            text = self._text(name, role)
            if text is None or text in words:
                return None if text is None else words[text]
            if not (number and text.isdigit()):
                raise _wrong(name, text, ", ".join([*words, "a whole number"]) if number else " or ".join(words))
            return int(text)

        devices, split = self._text("device", role), self._text("tensor_split", role)
        try:
            shares = tuple(float(part) for part in _parts(split))
        except ValueError:
            raise _wrong("tensor_split", split or "", "shares such as 3/1") from None
        return Hardware(
            gpu_layers=value("gpu_layers", number=True, auto=None, all=ALL_LAYERS),
            devices=() if devices == "auto" else tuple(_parts(devices)), tensor_split=shares,
            threads=value("threads", number=True, auto=None), n_ctx=value("ctx_size", number=True, auto=None),
            n_batch=value("batch_size", number=True, auto=None), cache_type=self._text("cache_type", role),
            flash_attn=value("flash_attn", auto=None, **_SWITCH), mlock=bool(value("mlock", **_SWITCH)),
        )  # fmt: skip

    def of_planned(self) -> Hardware:
        """Return the hardware of this device's part of a planned model. Raise InvalidOption for an unknown value, or
        one for a draft model, which a plan lacks."""
        for name, texts in self.given.items():
            if found := [text for text in texts if text.startswith(f"{DRAFT}=")]:
                raise InvalidOption(
                    f"{dashed(name)} {found[0]} is for a draft model, and a plan has none.",
                    "Leave it out here, and give it to edgellm mesh run.",
                )
        return self.of(VERIFIER)

    def _text(self, name: str, role: str) -> str | None:
        """Return the last value that holds for a model; None if there is none."""
        found = None
        for text in getattr(self, name):
            of, _, value = text.rpartition("=")
            if of not in ("", DRAFT, VERIFIER):
                raise _wrong(name, text, f"VALUE, {DRAFT}=VALUE or {VERIFIER}=VALUE")
            found = value.strip() if of in ("", role) else found
        return found


_EACH_HAS_MEMORY = "Tokens of a prompt and its reply together, for which each device has memory."


@dataclass(frozen=True, slots=True)
class MeshHardware(HardwareOptions):
    """The options of a command that runs a model on several devices."""

    ctx_size: Values = _hardware(_EACH_HAS_MEMORY, "N", "4096, if the model was trained for as many")


@dataclass(frozen=True, slots=True)
class PlanHardware(HardwareOptions):
    """The options on which a plan for several devices depends."""

    gpu_layers: Values = _hardware(
        "Whether graphics cards compute the layers that this device gets.", "auto|all|0", "all, if there are cards"
    )
    ctx_size: Values = _hardware(_EACH_HAS_MEMORY, "N", "4096, or as many as are planned for")
    mlock: Values = _hardware("", "VALUE", "", "does not change a plan: give it to edgellm mesh run")


@dataclass(frozen=True, slots=True)
class DeployHardware(PlanHardware):
    """The options that decide which layers a device needs."""

    batch_size: Values = _hardware(
        "", "VALUE", "", "does not change which layers a device needs: give it to edgellm mesh run"
    )


def _wrong(name: str, text: str, instead: str) -> InvalidOption:
    return InvalidOption(f"{dashed(name)} is {text!r}.", f"Give {instead}.")


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").replace(",", "/").split("/") if part.strip()]

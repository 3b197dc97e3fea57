"""A gate of your own: chunks with a digit in them are verified, others are kept as the small model wrote them.

python examples/gate.py
"""

from collections.abc import Callable

from edgellm import LLM
from edgellm.spec.protocols import Gate, GenerationState
from edgellm.spec.types import Chunk, Decision, Round

PROMPT = "My bus leaves at 7:42 and takes 25 minutes. When do I arrive?"


class Digits(Gate):
    """Verifies chunks with digits, as small models are bad at numbers."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        """`piece` returns the bytes of a token."""
        self._piece = piece
        self.corrected = 0

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        """Return whether `chunk`, which follows `state.ids`, goes to the verifier, and why."""
        text = b"".join(map(self._piece, chunk.ids.tolist()))
        digit = any(chr(byte).isdigit() for byte in text)
        return Decision(digit, "there is a digit in it" if digit else "there is no digit in it")

    def observe(self, state: GenerationState, turn: Round) -> None:
        """Count what the verifier corrected."""
        self.corrected += turn.verdict is not None and turn.verdict.accepted < len(turn.chunk)


def main() -> None:
    """Write one reply with this gate."""
    with LLM.open() as pair:
        gate = Digits(pair.piece)
        reply = pair.reply(PROMPT, max_tokens=40, gate=gate)
        print(b"".join(token.piece for token in reply).decode(errors="replace"))
        summary = reply.summary
    print(f"{summary.chunks_verified} of {summary.rounds} chunks verified, {gate.corrected} corrected")


if __name__ == "__main__":
    main()

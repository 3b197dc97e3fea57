"""What the papers say of their own runs, for the lines below our tables: their models, tasks and devices are others."""

from __future__ import annotations

LATENCY = (
    "the paper (Synera, 6.2 with Fig. 11, XSum): latency as with the draft model alone, 32-41 % below EdgeFM-LLM and"
    " 35-71 % below Hybrid"
)
COST = (
    "the paper (Synera, 6.2 with Fig. 12, XSum): cost 88 % below the cloud alone, 52 % below EdgeFM-LLM and 45 % below"
    " Hybrid"
)
FILTERS = (
    "the paper (Synera, 6.5 with Fig. 11 and 16): both filters are faster and better than either alone; its text has no"
    " values"
)
LINKS = (
    "the paper (PipeSD, Table 1, ms for each token, vanilla/HSL/EdgeLLM/PipeSD): on the laptop 194/155/153/129"
    " (HumanEval) and 193/174/169/145 (GSM8K); over all scenarios PipeSD is 1.33-2.16, 1.19-1.61 and 1.16-1.32 times as"
    " fast as these three"
)
RELAY_SHARE, RELAY_RECOVERED = 0.0107, 0.60
"""RelayLLM's tokens of the large model as a share of all, and the share of the gap between its models that it wins
back: 42.5 alone, 49.5 with it, 54.1 the large model."""
GATES = "\n".join(
    f"the paper ({paper}): {claim}"
    for paper, claim in {
        "RelayLLM, arXiv 2601.05167, Qwen3-1.7B and 8B, six sets of maths": (
            f"{RELAY_RECOVERED:.0%} of the gap with {RELAY_SHARE:.2%} of the tokens, by a small model trained to ask"
        ),
        "R2R, arXiv 2505.21600, R1-1.5B and R1-32B": (
            "11 % of the tokens differ, and 5 % matter; 2.8 times as fast as R1-32B"
        ),
        "PipeSD, arXiv 2605.13319, everything verified": "1.16 to 2.16 times as fast as other triggers",
        "ConfSpec, arXiv 2602.18447, steps of thoughts": "up to 2.24 times as fast at the large model's quality",
    }.items()
)
_MS = {
    "Qwen2.5-1.5B": {"NPU": 57.41, "+G": 47.72, "+SD": 35.04, "+G+SD": 25.35, "Ours": 15.08},
    "Qwen2.5-0.5B": {"NPU": 24.46, "+G": 23.43, "+SD": 18.75, "+G+SD": 18.45, "Ours": 7.17},
    "LLaMA3.2-3B": {"NPU": 71.71, "+G": 70.03, "+SD": 47.93, "+G+SD": 46.25, "Ours": 41.62},
}
"""CoordGen's Table 3: milliseconds for each token by model and techniques, Redmi K60 Pro, summary benchmark."""
TABLE_3 = "the paper (CoordGen, Table 3, summary, Redmi K60 Pro): speed over the NPU's plain decoding, of " + ", ".join(
    _MS
)


def speeds(techniques: str) -> str:
    """Return the speed over plain decoding with some techniques of Table 3, for each of its models."""
    return ", ".join(f"{row['NPU'] / row[techniques]:.2f}" for row in _MS.values())

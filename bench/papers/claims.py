"""What the papers say of their own runs, for the lines below our tables: their models, tasks and devices are others."""

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

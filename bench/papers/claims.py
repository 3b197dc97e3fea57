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

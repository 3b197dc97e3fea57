"""The length and the source of drafts: a bandit with a cost model."""

"""How much to draft, and from what: a bandit with a cost model."""

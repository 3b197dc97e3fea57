"""The papers' own pictures, for both pairs that this repository makes, beside what the papers say of theirs."""

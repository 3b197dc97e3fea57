"""The options of commands as records, and what makes flags of them."""

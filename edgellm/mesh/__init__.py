"""Several machines hold one model: what each can do, what the model asks of them, and the plan."""

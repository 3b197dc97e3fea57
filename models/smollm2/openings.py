"""Openings of a user's turn, which SmolLM2 continues: without them it asks about few kinds of things."""

import random

SYSTEMS = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful assistant.",
    "Answer briefly.",
)
"""System prompts; the first is the chat template's own, which stands where a user gives none."""

OPENINGS = (
    # writing
    "Write a", "Write an email", "Write a short story about", "Write a poem about", "Compose a", "Describe", "Imagine",
    "Draft a", "Create a", "Rewrite", "Edit the following paragraph", "Give me", "Help me", "Pretend",
    # questions of fact
    "What is", "What are", "Who", "When did", "Where is", "Why", "How does", "How do I", "How many", "Which",
    "Explain", "Tell me about", "Name", "List", "What does", "What was the name of", "Is it", "Can you",
    # reasoning and sums
    "A store sells", "If", "Solve", "Calculate", "John has", "Mary", "There are", "A train", "Suppose", "Think about",
    "Each", "In a class of", "Find the", "Compare",
    # code
    "Write a Python function", "Write a program", "Implement", "Fix this code", "What does this code do", "def ",
    # language and texts
    "Translate German to English:", "Translate the following sentence", "Summarize", "Summarize the following text:",
    "Extract", "Identify", "Classify", "Given the following", "Read the passage and", "Evaluate the following",
    # people who talk
    "I", "I want to", "I need", "My", "We", "Hello", "Hi", "Please", "Could you", "As a", "You are", "The", "In",
)  # fmt: skip

FOLLOW_UPS = (
    "", "", "", "", "Now", "Rewrite your previous response", "Can you", "What about", "Why", "Make it", "Explain",
    "Give", "How", "Take your previous response and",
)  # fmt: skip

OVER_A_TEXT = (
    "Summarize: {text}",
    "Summarize the following text.\n\n{text}",
    "{text}\n\nWhat is this text about?",
    "{text}\n\nTL;DR",
    "Text: {text}\n\nQuestion:",
    "Answer the question by the text.\n\n{text}\n\n",
    "Rewrite this text in simpler words: {text}",
    "List the main points of this text:\n\n{text}",
    "Give me a title for this text: {text}",
)
"""Tasks over a text that SmolLM2 has written earlier; what ends open is a question that it writes itself."""

OPEN_ENDED = ("Question:", "\n\n")


def opening(chance: random.Random) -> str:
    """Return the beginning of a user's turn; empty half of the time, where SmolLM2 writes all of it."""
    return "" if chance.random() < 0.4 else chance.choice(OPENINGS)


def system(chance: random.Random) -> str:
    """Return a system prompt: the template's own five times in six."""
    return SYSTEMS[0] if chance.random() < 5 / 6 else chance.choice(SYSTEMS[1:])

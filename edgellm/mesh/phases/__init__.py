"""Another placement of the model, which takes over between two tokens of a reply."""

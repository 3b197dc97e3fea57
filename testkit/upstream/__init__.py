"""A server of ours that speaks the dialects of stock servers, over a real model, and fails as they do."""

"""The kinds of stock servers, one module each: their requests and answers."""

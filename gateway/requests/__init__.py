"""One request's life, from its acceptance to its end."""

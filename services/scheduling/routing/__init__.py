"""Which workers a request is offered to, and in which order."""

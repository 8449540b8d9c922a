"""Which workers a request is offered to, and in which order.

Sees workers as plain data, and sends nothing.
"""

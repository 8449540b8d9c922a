"""One request's life, from its acceptance to its end.

Knows neither HTTP nor protobuf nor Redis, and none of the features that plug into it.
"""

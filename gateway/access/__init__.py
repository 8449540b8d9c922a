"""Who may ask for what: API keys, tenants and their limits.

Knows no worker, and of a request only what its key decides.
"""

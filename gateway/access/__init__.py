"""Who may ask for what: API keys, tenants and their limits."""

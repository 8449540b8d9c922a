"""The page on which people watch a gateway, and the data behind it."""

"""The page on which people watch a gateway, and the data behind it.

It reads what others have written down, and changes nothing.
"""

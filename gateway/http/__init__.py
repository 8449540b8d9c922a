"""The HTTP server below the API: connections, bodies, limits, browsers.

Knows no route, and nothing of what requests mean.
"""

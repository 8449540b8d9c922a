"""The HTTP server below the API: connections, bodies, limits, browsers."""

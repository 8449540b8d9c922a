"""The `tandem` command: starts, watches and asks clusters.

It may import every other package, and none imports it. It knows no request's life: it talks to gateways as clients do.
"""

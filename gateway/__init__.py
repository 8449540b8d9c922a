"""The gateway: clients' APIs, the life of requests, and sessions with workers.

It never loads torch, holds no pages, and imports neither worker's code nor the engine.
"""

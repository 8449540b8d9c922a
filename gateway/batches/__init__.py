"""Files, and batches of requests that run without a connection.

A row is asked like any client's request. The life of a request knows nothing of batches.
"""

"""The gRPC API, the HTTP bridge and the life of a request."""

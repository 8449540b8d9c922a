"""What clients talk to: the HTTP and gRPC APIs, from a message to a call and from an answer to messages.

Knows neither how workers are chosen nor what follows a failure.
"""

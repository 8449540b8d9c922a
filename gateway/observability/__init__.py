"""What is told of requests: metrics, traces, log lines, history.

It decides nothing, and never holds a prompt, an answer or a key.
"""

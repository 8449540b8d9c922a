"""The spelling of OpenAI's API: bodies to calls, answers to bodies and events.

Knows no connection and no worker.
"""

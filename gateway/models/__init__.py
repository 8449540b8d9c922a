"""The models that are served: catalog, tokenizers, templates, how models write calls, text of answers.

Loads no weights, and knows no worker.
"""

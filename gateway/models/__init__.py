"""The models that are served: catalog, tokenizers, templates, tools, text of answers."""

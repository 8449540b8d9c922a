"""The worker process that changes its role: a prefill worker or a decode worker, with the same weights and pages.

Above both worker packages, which know nothing of each other and nothing of it.
"""

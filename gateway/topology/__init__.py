"""What the gateway knows of workers, and its sessions with them.

Knows no request's life, and does not choose among workers.
"""

"""What the gateway knows of workers, and its sessions with them."""

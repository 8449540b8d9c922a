"""What a cluster should be, from the gateway's own policies."""

"""What every service is built from."""

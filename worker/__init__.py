"""What both kinds of workers are made of."""
